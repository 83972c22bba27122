"""Forward attention in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, summed in f32.

Blocks are persistent, one on each SM, and process tiles of rows (queries of one head) one after the other.
One warpgroup issues bulk tensor copies (TMA) of the rows of q, and of tiles of `bn` keys of k and v into a
ring of `stages` buffers. One to three others have 64 rows each and multiply from there: scores from shared
memory, results with exponentials in registers. The scores of the next tile are multiplied together with the
results of the current tile, so that exponentials of one tile overlap with products of the previous tile. With
`pingpong`, warpgroups issue their products alternately, so that exponentials of one overlap with products of
another.

With a causal mask, key tiles that no row attends to are skipped, the longest row tiles come first, and only
key tiles at the diagonal are masked. `group_heads` heads run at the same time, so that their keys share L2.

Limits: TMA reads lines that start at multiples of 16 bytes, so that head_dim must be a multiple of 8. It is
padded with zeros to a multiple of 64. Scores have no bias, and no window.

Source: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3", 2024, algorithms 1 and 2; PTX
ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg".
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_forward as _forward
from tunebench.kernels.attention import _attention_wgmma as _wgmma
from tunebench.kernels.attention._attention import mma_refusal, padded, unmodified_refusal
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.common.wgmma_tile import launched_registers, threads
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.attention import Attention

GROUPS = (1, 4, 16, 64)

OTHER_REGISTERS = 32
"""Registers of a multiplying thread in addition to scores, their exponentials, and results."""


def _smem_bytes(workload: Attention, bn: Any, stages: Any, consumers: Any) -> Any:
    """Return the shared memory of a block: rows of q, the ring, and the common parts of Hopper kernels."""
    barriers = 2 * stages + consumers + 2
    return _wgmma.smem_bytes(workload, 64 * consumers + stages * bn, barriers, consumers)


def registers_suffice(bn: Any, consumers: Any, workload: Attention) -> Any:
    """Scores, exponentials and results must stay in registers, sums of a wgmma in those of the launch."""
    needed = _wgmma.dim(workload) // 2 + bn // 2 + bn // 4 + OTHER_REGISTERS
    return _wgmma.registers_suffice(workload, bn, consumers, needed)


def shared_memory_fits(bn: Any, stages: Any, consumers: Any, workload: Attention, device: Device) -> Any:
    """The rows, the ring and the staged results must fit in the shared memory of a block."""
    return _smem_bytes(workload, bn, stages, consumers) <= device.smem_per_block_bytes


def fits(bn: Any, consumers: Any, workload: Attention) -> Any:
    """No tile is twice as large as the workload if a smaller one exists; the tiles fit in one grid."""
    return _forward.tiles_fit(workload, 64 * consumers, bn, 0, (64, 64))


SPACE = Space(
    (
        Parameter("bn", (64, 128, 192), "keys of a tile"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply, 64 rows each"),
        Parameter("stages", (2, 3, 4, 5, 6, 8), "tiles of k or v in the ring"),
        Parameter("pingpong", (0, 1), "1: warpgroups issue their products alternately"),
        Parameter("group_heads", GROUPS, "heads that run at the same time, row tile by row tile"),
    ),
    (
        fits,
        registers_suffice,
        shared_memory_fits,
        lambda consumers, pingpong: (pingpong == 0) | (consumers > 1),
        lambda bn, stages, workload: (stages == 2) | (stages <= 4 * ceil_div(workload.seq_k, bn)),
        lambda group_heads, workload: (group_heads == 1) | (group_heads <= workload.batch * workload.heads),
    ),
)

USUAL = (
    # bn, consumers, stages; largest first
    (128, 3, 6),
    (128, 2, 4),
    (64, 3, 4),
    (64, 2, 4),
    (64, 2, 2),
    (128, 1, 4),
    (64, 1, 4),
    (64, 1, 2),
)
"""Tiles of shipped libraries, and smaller ones."""

SOURCE = """
// A tile of rows: its head, rows and key tiles.
struct RowTile {
  int head, row;
  KeyTiles keys;
};

// Row tiles by number: `group_heads` heads at a time, last rows first.
template <class C>
struct RowTiles {
  int heads, row_tiles, group_heads, seq_q, seq_k;

  __device__ __forceinline__ u32 count() const { return u32(heads) * u32(row_tiles); }
  __device__ __forceinline__ RowTile at(u32 index) const {
    const u32 per_group = u32(group_heads) * u32(row_tiles), first = index / per_group * u32(group_heads);
    const u32 together = min(u32(group_heads), u32(heads) - first), within = index % per_group;
    const int row = (row_tiles - 1 - int(within / together)) * C::BM, last = min(row + C::BM, seq_q) - 1;
    return {int(first + within % together), row, key_tiles<C::BN, C::CAUSAL>(row, last, seq_q, seq_k, 0, 1)};
  }
};

// Addresses of the barriers: of the ring, of turns, and of the rows of q, full and empty.
template <class C>
struct Barriers {
  u32 ring;
  __device__ __forceinline__ u32 turns() const { return ring + 16 * C::STAGES; }
  __device__ __forceinline__ u32 q_full() const { return turns() + 8 * C::CONSUMERS; }
  __device__ __forceinline__ u32 q_empty() const { return q_full() + 8; }
};

// Copies the rows of q and the tiles of k and v of all row tiles, in the order in which they are
// multiplied: each tile of k precedes the previous tile of v. Called by one thread.
template <class C>
__device__ __forceinline__ void produce(const TensorMap& q_map, const TensorMap& k_map,
                                        const TensorMap& v_map, u32 rows_at, u32 tiles_at,
                                        const Barriers<C>& barriers, const RowTiles<C>& tiles, int group) {
  Ring<C::STAGES> place = {barriers.ring};
  u32 q_parity = 0;
  prefetch_tensor_map(q_map);
  prefetch_tensor_map(k_map);
  prefetch_tensor_map(v_map);
  for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
    const RowTile tile = tiles.at(index);
    const int head = tile.head / group;
    mbarrier_wait(barriers.q_empty(), q_parity ^ 1);
    q_parity ^= 1;
    mbarrier_arrive_expect_tx(barriers.q_full(), C::TileQ::BYTES);
    C::TileQ::copy(rows_at, q_map, tile.row, 0, tile.head, barriers.q_full(), 0, 0);
#pragma unroll 1
    for (int i = 0; i <= tile.keys.end; ++i) {
      if (i < tile.keys.end) {
        mbarrier_wait(place.empty(), place.parity ^ 1);
        mbarrier_arrive_expect_tx(place.full(), C::TileK::BYTES);
        const u32 target = tiles_at + place.stage * C::TileK::BYTES;
        C::TileK::copy(target, k_map, i * C::BN, 0, head, place.full(), 0, 0);
        place.advance();
      }
      if (i > 0) {
        mbarrier_wait(place.empty(), place.parity ^ 1);
        mbarrier_arrive_expect_tx(place.full(), C::TileV::BYTES);
        const u32 target = tiles_at + place.stage * C::TileV::BYTES;
        C::TileV::copy(target, v_map, 0, (i - 1) * C::BN, head, place.full(), 0, 0);
        place.advance();
      }
    }
  }
}

// Rows of a multiplying thread.
struct MyRows {
  int sees[1][2];  // keys that its rows attend to
  RowState states[1][2];
};

// Turns the scores of a tile of keys into exponentials.
template <class C>
__device__ __forceinline__ void exponentiate_tile(float (&scores)[1][C::BN / 8][4], float (&factors)[1][2],
                                                  MyRows& mine, const RowTile& tile, int i, float unit) {
  if (i >= tile.keys.whole) {
    const int seen[1][2] = {{mine.sees[0][0] - i * C::BN, mine.sees[0][1] - i * C::BN}};
    hide_scores<1, C::BN>(scores, seen);
  }
  exponentiate<1, C::BN>(scores, mine.states, factors, unit);
}

// Computes 64 rows of a tile.
template <class C, class Turns>
__device__ __forceinline__ void attend(float (&results)[1][C::DIM / 8][4], MyRows& mine, const RowTile& tile,
                                       u32 rows_at, int first_row, u32 tiles_at, Ring<C::STAGES>& place,
                                       Turns& turn, u32 q_empty, float unit) {
  float scores[1][C::BN / 8][4], factors[1][2];
  u32 p[C::BN / 16][4];
  const auto tile_here = [&] {
    mbarrier_wait(place.full(), place.parity);
    return tiles_at + place.stage * C::TileK::BYTES;
  };
  turn.take();
  const u32 first = tile_here();
  wgmma_fence();
  issue_scores<C, typename C::TileQ, typename C::TileK>(scores[0], rows_at, first_row, first);
  turn.pass();
  wgmma_wait<0>();
  settle(scores[0]);
  release<1>(place.empty());
  place.advance();
  if (tile.keys.end == 1) release<1>(q_empty);
  exponentiate_tile<C>(scores, factors, mine, tile, 0, unit);
  round_scores<C>(p, scores[0]);
#pragma unroll 1
  for (int i = 1; i < tile.keys.end; ++i) {
    turn.take();
    const u32 of_k = tile_here(), stage_of_k = place.stage;
    wgmma_fence();
    issue_scores<C, typename C::TileQ, typename C::TileK>(scores[0], rows_at, first_row, of_k);
    place.advance();
    issue_sums<C, typename C::TileV>(results[0], p, tile_here());
    turn.pass();
    wgmma_wait<1>();
    settle(scores[0]);
    release<1>(place.empty_of(stage_of_k));
    if (i == tile.keys.end - 1) release<1>(q_empty);
    exponentiate_tile<C>(scores, factors, mine, tile, i, unit);
    computed_by_now(mine.states[0][0].total + mine.states[0][1].total);  // while products are in flight
    wgmma_wait<0>();
    settle(results[0]);
    settle(scores[0]);  // rounded only now, since the operand was in use
    release<1>(place.empty());
    place.advance();
    rescale<1, C::DIM>(results, factors);
    round_scores<C>(p, scores[0]);
  }
  turn.take();
  const u32 last = tile_here();
  wgmma_fence();
  issue_sums<C, typename C::TileV>(results[0], p, last);
  turn.pass();
  wgmma_wait<0>();
  settle(results[0]);
  release<1>(place.empty());
  place.advance();
}

// Computes this warpgroup's rows of each tile and stores them.
template <class C>
__device__ __forceinline__ void consume(typename C::In* __restrict__ o, float* __restrict__ lse, u32 rows_at,
                                        u32 tiles_at, u8* staging, const Barriers<C>& barriers,
                                        const RowTiles<C>& tiles, int consumer, float unit) {
  using In = typename C::In;
  const int lane = int(threadIdx.x) % 32, in_group = int(threadIdx.x) % 128 / 32 * 16 + lane / 4;
  constexpr int FLOATS_A_WARP = STAGING_FLOATS<WarpOfGroup<0, STRIP>>;
  float* const gathered = reinterpret_cast<float*>(staging) + int(threadIdx.x) / 32 * FLOATS_A_WARP;
  Ring<C::STAGES> place = {barriers.ring};
  Turn<C::PINGPONG ? C::CONSUMERS : 1> turn(barriers.turns(), C::PINGPONG ? consumer : 0);
  u32 q_parity = 0;
#pragma unroll 1
  for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
    const RowTile tile = tiles.at(index);
    const int row = tile.row + 64 * consumer, left = tiles.seq_q - row;
    MyRows mine;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(row + in_group + 8 * half, tiles.seq_q - 1);
      mine.sees[0][half] = keys_seen<C::CAUSAL>(query, tiles.seq_q, tiles.seq_k);
    }
    float results[1][C::DIM / 8][4] = {};
    mbarrier_wait(barriers.q_full(), q_parity);
    q_parity ^= 1;
    attend<C>(results, mine, tile, rows_at, 64 * consumer, tiles_at, place, turn, barriers.q_empty(), unit);

    gather_sums(mine.states);
    const float inverse[1][2] = {{mine.states[0][0].inverse(), mine.states[0][1].inverse()}};
    rescale<1, C::DIM>(results, inverse);
    const i64 first = i64(tile.head) * tiles.seq_q + row;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (lane % 4 == 0 && in_group + 8 * half < left)
        lse[first + in_group + 8 * half] = mine.states[0][half].log2_sum(unit) * LN_2;
    if (left <= 0) continue;
    const Finish<In, Identity, false> finish = {nullptr, C::HEAD_DIM};
    const Target<In> target = {o + first * C::HEAD_DIM, C::HEAD_DIM, left, C::HEAD_DIM};
    store_strips<C::DIM, 8>(results, gathered, target, finish);
  }
}

// o = softmax(q k^T) v and the logarithm of the softmax's sums. C holds the constants of workload and
// configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
attention_wgmma(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                const __grid_constant__ TensorMap v_map, typename C::In* __restrict__ o,
                float* __restrict__ lse, int group, int seq_q, int seq_k, float unit, int heads,
                int row_tiles, int group_heads) {
  u8* const rows = swizzled_shared();
  u8* const ring = rows + C::TileQ::BYTES;
  u8* const staging = ring + C::STAGES * C::TileK::BYTES;
  const u32 rows_at = shared_address(rows), tiles_at = shared_address(ring);
  const Barriers<C> barriers = {shared_address(staging + C::STAGING_BYTES)};
  if (threadIdx.x == 0) {
    mbarrier_init(barriers.q_full(), 1);
    mbarrier_init(barriers.q_empty(), 4 * C::CONSUMERS);
    prepare_barriers<C::STAGES, C::CONSUMERS>(barriers.ring, 4 * C::CONSUMERS);  // every warp releases
  }
  __syncthreads();
  const RowTiles<C> tiles = {heads, row_tiles, group_heads, seq_q, seq_k};
  // The shuffle makes the value uniform over the warp for the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup == C::CONSUMERS) {
    if constexpr (C::CONSUMER_REGISTERS > 0) give_registers<C::PRODUCER_REGISTERS>();
    if (threadIdx.x == 128 * C::CONSUMERS)
      produce<C>(q_map, k_map, v_map, rows_at, tiles_at, barriers, tiles, group);
    __syncwarp();
  } else {
    if constexpr (C::CONSUMER_REGISTERS > 0) take_registers<C::CONSUMER_REGISTERS>();
    consume<C>(o, lse, rows_at, tiles_at, staging, barriers, tiles, warpgroup, unit);
  }
}
"""


class CudaWgmmaAttention(_wgmma.CudaWgmma):
    """Forward variant for f16 and bf16 on Hopper."""

    name = "cuda_wgmma"
    direction = "forward"
    space = SPACE

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why a workload cannot use wgmma or TMA, or None."""
        fitting = fits(64, 2, workload) or fits(64, 1, workload)
        refused = unmodified_refusal(workload, self.key) or mma_refusal(workload, self.key, 256)
        return refused or _forward.refusal(workload, self.key, fitting)

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the usual tile with the least work for the busiest SM."""

        def work(tile: tuple[int, int, int]) -> float:
            bn, consumers, _ = tile
            busy = _wgmma.time_of_busiest(_forward.blocks(workload, 64 * consumers, 0), consumers, device)
            return busy * (1 + 16 / bn)  # wide tiles need fewer rescalings

        group = max(g for g in (1, 4) if g == 1 or g <= workload.batch * workload.heads)
        ordered = (
            Config(
                {
                    "bn": bn,
                    "consumers": consumers,
                    "stages": min(stages, 2 * int(ceil_div(workload.seq_k, bn))),
                    "pingpong": int(consumers > 1),
                    "group_heads": group if workload.causal else 1,
                }
            )
            for bn, consumers, stages in sorted(USUAL, key=work)
        )
        return self.space.first_valid(ordered, workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of rows and keys; head_dim is padded to 16 for scores, and to 64 for results."""
        return _forward.tiles(workload, 64 * config["consumers"], config["bn"], 0, 16)

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count row tiles as blocks, since SMs share tiles. Elements beyond the edge are multiplied as zeros.

        With a causal mask, only one tile is certain to be the longest.
        """
        names = ("bn", "stages", "consumers")
        bn, stages, consumers = (table[name].astype(np.float64) for name in names)
        share = _forward.shares(workload, bm=64 * table["consumers"], bn=table["bn"])
        dim, narrow = _wgmma.dim(workload), padded(workload)
        size, scores = itemsize(workload.dtype), share.tiles * 64 * consumers * bn
        fma = 2 * scores + share.tiles * 64 * consumers * dim
        return Costs(
            blocks=share.blocks,
            full_blocks=1 if workload.causal else share.full_blocks,
            threads=threads(consumers),
            smem_bytes=_smem_bytes(workload, bn, stages, consumers),
            fma=fma,
            mma_flop=2 * scores * (narrow + dim),
            mma_dtype=workload.dtype,
            sfu=scores,
            # Written once, and read at least once by each warpgroup.
            smem_traffic_bytes=size * dim * (share.tiles * bn * 2 + 64 * consumers),
            fill_bytes=(2 * share.keys + share.rows) * workload.head_dim * size,
            # Four warps issue each product of 64 rows.
            instructions=4 * consumers * share.tiles * (narrow + bn) / 16 + (scores + fma) / 32,
            # A warpgroup adds 16 keys to its results by one product of 64 x dim: dim / 2 clocks of all tensor
            # cores of its SM. The next product adds to the same sums.
            chain_clocks=np.where(share.blocks <= device.sm_count, device.l2_latency, 0.0)
            + share.tiles * bn / 16 * dim / 2,
            execution=self._execution(workload, table, device, share),
        )

    def _execution(
        self, workload: Attention, table: Table, device: Device, share: _forward.ForwardWork
    ) -> Execution:
        """Describe a row tile: exponentials follow the scores of the next tile, beside the sum of this one.

        Args:
            workload: The workload.
            table: Configurations.
            device: The device, for its rates.
            share: Work of the block.
        """
        bn, stages, consumers, pingpong = (
            table[name].astype(np.float64) for name in ("bn", "stages", "consumers", "pingpong")
        )
        dim, narrow, size = _wgmma.dim(workload), padded(workload), itemsize(workload.dtype)
        rate, bm, warps = device.mma_flop_per_clock[workload.dtype], 64 * consumers, 4 * consumers
        scores_clocks, sums_clocks = 2 * 64 * bn * narrow / rate, 2 * 64 * bn * dim / rate
        between_clocks = _forward.softmax_clocks(bn / 2, dim / 2, device)
        # Without turns, a warpgroup finds products of another before its own as often as another multiplies.
        # Half of them is left on average.
        queue = (scores_clocks + sums_clocks) * (consumers - 1) / consumers / 2
        of_tile = scores_clocks + np.maximum(sums_clocks, between_clocks) + queue * (1 - pingpong)
        instructions = _forward.softmax_instructions(workload, share, bm, bn, dim, warps)
        # An instruction reads 64 rows of q, and its columns of k or v; probabilities are in registers.
        of_scores, of_sums = narrow / 16 * (16 + bn / 4), bn / 16 * dim / 4
        copied = 2 * bn * dim * size / 128
        return Execution(
            registers=launched_registers(consumers, 1),
            instructions=instructions + warps * share.tiles * (narrow + bn) / 16,
            passes=share.tiles * (consumers * (of_scores + of_sums) + copied) + 3 * bm * dim * size / 128,
            l2_bytes=(2 * share.keys + share.rows) * workload.head_dim * size
            + _forward.store_bytes(workload, share, bm, 1),
            # The next rows of q are copied while results are stored.
            prefetched_waits=2 * share.tiles / stages,
            # Waits for copies, for products and, with pingpong, for the turn.
            barriers=(2 + 2 * pingpong) * share.tiles,
            warp_clocks=share.tiles * of_tile + sums_clocks,
            memory_bytes=workload.traffic().total_bytes + _read_again(workload, table, device, share),
            first_waits=1 / np.ceil(np.maximum(1.0, share.blocks / device.sm_count)),
        )

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernel for a head_dim, type and configuration; other sizes are arguments."""
        choices: dict[str, str | bool | int] = {
            "In": ctype(workload.dtype),
            "HEAD_DIM": workload.head_dim,
            **_wgmma.choices(workload, config),
            "PINGPONG": bool(config["pingpong"]),
            "CAUSAL": workload.causal,
            "TileQ": "PanelTile<In, BM, DIM, true, 1>",
            "TileK": "PanelTile<In, BN, DIM, true, 1>",
            "TileV": "PanelTile<In, DIM, BN, false, 1>",
        }
        preamble = helpers(*_wgmma.HELPERS) + _forward.headers(workload) + helpers("attention_fragment")
        return preamble + constants("Choice", **choices) + SOURCE

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return one launch of persistent blocks."""
        consumers, heads = config["consumers"], workload.batch * workload.heads
        row_tiles = int(ceil_div(workload.seq_q, 64 * consumers))
        maps = (
            _wgmma.tensor_map(workload, "q", 64 * consumers),
            _wgmma.tensor_map(workload, "k", config["bn"]),
            _wgmma.tensor_map(workload, "v", config["bn"]),
        )
        sizes = (Scalar("int", heads), Scalar("int", row_tiles), Scalar("int", config["group_heads"]))
        return (
            Launch(
                entry="attention_wgmma<Choice>",
                grid=(heads * row_tiles, 1, 1),
                block=(threads(consumers), 1, 1),
                arguments=(*maps, "o", "lse", *_forward.scalars(workload), *sizes),
                smem_bytes=int(_smem_bytes(workload, config["bn"], config["stages"], consumers)),
                blocks_per_sm=1,
            ),
        )

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        key_tiles = config["stages"] // 2 + 1
        return _forward.shrink(workload, 64 * config["consumers"], config["bn"], 0, key_tiles)


def _read_again(workload: Attention, table: Table, device: Device, share: _forward.ForwardWork) -> Any:
    """Return the bytes of keys that blocks read again from memory: L2 may not hold those of all heads.

    Row tiles of a head that run at the same time read its keys together.
    """
    heads, size = workload.batch * workload.heads, itemsize(workload.dtype)
    row_tiles = ceil_div(workload.seq_q, 64 * table["consumers"])
    together = np.minimum(device.sm_count, heads * row_tiles)
    active = np.minimum(heads, np.maximum(table["group_heads"], ceil_div(together, row_tiles)))
    active_keys = ceil_div(active, workload.group)  # heads of keys
    active_bytes = active_keys * (2.0 * workload.seq_k * workload.head_dim * size)
    lost = np.maximum(0.0, 1.0 - device.l2_bytes / active_bytes)
    again = np.maximum(0.0, 1.0 - together / (row_tiles * active))
    of_block = 2 * share.keys * workload.head_dim * size * active_keys / together
    return share.blocks * of_block * again * lost


VARIANT = CudaWgmmaAttention()
