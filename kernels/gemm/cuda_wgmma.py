"""gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16, bf16 and e4m3, summed in f32.

Blocks stay, as many as the device holds, and take one tile of bm x bn results after the other. In each, one
warpgroup has bulk tensor copies (TMA) bring tiles of a and b into a ring of `stages` buffers; one to three
others multiply straight from there, one group of products always under way, and store. Either all of them
multiply one tile together, each its share of the rows, or they take turns (pingpong): one stores its tile
while another multiplies. Blocks of a cluster share what they copy: of two with the same rows of a, each
copies one half of them to both.

Registers move from the copying warpgroup, which needs few, to the multiplying ones. Tiles beyond the edge are
filled with zeros by the copies and cut off where results are stored.

Limits: TMA reads lines that begin at multiples of 16 bytes, so that their lengths must be such. wgmma takes
8-bit operands only if k is contiguous in both.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; CUTLASS 3, "Efficient GEMM in
CUDA" (warp specialisation, pingpong and cooperative kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels import _gemm, _wgmma_tile
from tunebench.kernels._cuda import helpers
from tunebench.kernels._wgmma_tile import LINE_BYTES, MOST_EXTENT
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, TensorMap, Tiling, ceil_div
from tunebench.workloads.operators.gemm import Gemm


def _smem_bytes(workload: Gemm, bm: Any, bn: Any, bk: Any, consumers: Any, stages: Any, staged: Any) -> Any:
    """Return the shared memory of a block: the ring, room to gather results, barriers."""
    return _wgmma_tile.smem_bytes(workload.dtype, bm, bn, bk, consumers, stages, staged)


def fits(bm: Any, bn: Any, workload: Gemm) -> Any:
    """No tile may be twice as large as the problem if a smaller one exists; all must have a number."""
    worthwhile = ((bm < 2 * workload.m) | (bm == 64)) & ((bn < 2 * workload.n) | (bn == 64))
    return worthwhile & (_gemm.blocks(workload, 1.0 * bm, 1.0 * bn) <= _gemm.MAX_BLOCKS / 4)


def shared_memory_fits(
    bm: Any,
    bn: Any,
    bk: Any,
    consumers: Any,
    stages: Any,
    staged: Any,
    min_blocks: Any,
    workload: Gemm,
    device: Device,
) -> Any:
    """As many blocks as an SM is to hold must fit in its shared memory."""
    smem = _smem_bytes(workload, bm, bn, bk, consumers, stages, staged)
    together = min_blocks * (smem + device.smem_reserved_bytes)
    return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


def steps_are_lines(bk: Any, workload: Gemm) -> Any:
    """A step must be one line or two, and no step of two may be twice as long as k."""
    lines = bk * itemsize(workload.dtype) / LINE_BYTES
    return (lines == 1) | ((lines == 2) & (bk < 2 * workload.k))


def stages_have_tiles(bk: Any, stages: Any, workload: Gemm) -> Any:
    """The ring must not hold more than two tiles' steps."""
    return (stages == 2) | (stages <= 2 * ceil_div(workload.k, bk))


def cluster_has_tiles(bm: Any, bn: Any, cluster_m: Any, cluster_n: Any, workload: Gemm) -> Any:
    """Clusters are of one or two blocks, and there must be a tile for each."""
    both_busy = ((cluster_m == 1) | (bm < workload.m)) & ((cluster_n == 1) | (bn < workload.n))
    return (cluster_m * cluster_n <= 2) & both_busy


SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c in a tile"),
        Parameter("bn", (64, 128, 192, 256), "columns of c in a tile"),
        Parameter("bk", (64, 128, 256), "steps of k in one buffer"),
        Parameter("stages", (2, 3, 4, 5, 6, 7, 8), "buffers of the ring"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply"),
        Parameter("pingpong", (0, 1), "1: each multiplies a tile of its own while another stores"),
        Parameter("cluster_m", (1, 2), "blocks along m that share columns of b"),
        Parameter("cluster_n", (1, 2), "blocks along n that share rows of a"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 4, 8, 16), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2), "blocks on an SM"),
    ),
    (
        fits,
        _wgmma_tile.consumers_share_the_tile,
        _wgmma_tile.sums_stay_in_registers,
        steps_are_lines,
        stages_have_tiles,
        cluster_has_tiles,
        shared_memory_fits,
        lambda bm, cluster_m, group_m, workload: (group_m == 1) | (group_m * cluster_m * bm < 2 * workload.m),
    ),
)

USUAL = (
    # bm, bn, consumers; largest first
    (128, 256, 2),
    (256, 128, 2),
    (128, 192, 2),
    (128, 128, 2),
    (128, 64, 2),
    (64, 128, 1),
    (64, 64, 1),
)
"""Tiles that libraries ship."""

SOURCE = """
// Copies the tiles of a and b, stage by stage, for as long as there are any. One thread does.
template <class C>
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, u32 buffers,
                                        u32 barriers, const Tiles<C>& tiles, int k) {
  const u32 part_of_a = tiles.rank / C::CLUSTER_M, part_of_b = tiles.rank % C::CLUSTER_M;
  const u16 sharers_of_a = tiles.sharers_of_a(), sharers_of_b = tiles.sharers_of_b();
  Ring<C::STAGES> place = {barriers};
  prefetch_tensor_map(a_map);
  prefetch_tensor_map(b_map);
  for (u32 index = tiles.first; index < tiles.end; index += tiles.step) {
    const TileIndex corner = tiles.corner(index);
#pragma unroll 1
    for (int at = 0; at < k; at += C::BK) {
      // Until it is empty everywhere: what is shared goes to all blocks of the cluster.
      mbarrier_wait(place.empty(), place.parity ^ 1);
      mbarrier_arrive_expect_tx(place.full(), C::TileA::BYTES + C::TileB::BYTES);
      const u32 buffer = buffers + place.stage * (C::TileA::BYTES + C::TileB::BYTES);
      C::TileA::copy(buffer, a_map, corner.m, at, corner.batch, place.full(), part_of_a, sharers_of_a);
      C::TileB::copy(buffer + C::TileA::BYTES, b_map, corner.n, at, corner.batch, place.full(), part_of_b,
                     sharers_of_b);
      place.advance();
    }
  }
}

// Multiplies this warpgroup's share of the tiles and stores it.
template <class C>
__device__ __forceinline__ void consume(const typename C::Out* __restrict__ bias,
                                        typename C::Out* __restrict__ c, u32 buffers, u32 barriers,
                                        u8* staging, const Tiles<C>& tiles, int consumer, int m, int n,
                                        int k) {
  using Out = typename C::Out;
  constexpr int ROWS = C::PINGPONG ? C::BM : C::BM / C::CONSUMERS, TURNS = C::PINGPONG ? C::CONSUMERS : 1;
  const int first_row = C::PINGPONG ? 0 : consumer * ROWS, first_turn = C::PINGPONG ? consumer : 0;
  const u32 steps = u32(tiles_of(k, C::BK));
  constexpr int FLOATS_A_WARP = STAGING_FLOATS<WarpOfGroup<0, STRIP>>;
  float* const gathered = reinterpret_cast<float*>(staging) + int(threadIdx.x) / 32 * FLOATS_A_WARP;
  Ring<C::STAGES> place = {barriers};
  Turn<TURNS> turn(barriers + 16 * C::STAGES, first_turn);
  place.skip(first_turn * steps);
  float sums[ROWS / 64][1][C::BN / 8][4] = {};
#pragma unroll 1
  for (u32 index = tiles.first + first_turn * tiles.step; index < tiles.end; index += TURNS * tiles.step) {
    multiply<C>(sums, buffers, first_row, place, steps, turn);
    place.skip((TURNS - 1) * steps);
    const TileIndex corner = tiles.corner(index);
    const Finish<Out, typename C::Activation, C::HAS_BIAS> finish = {bias + corner.n, n - corner.n};
    Out* const product = c + corner.batch * (i64(m) * n);
#pragma unroll
    for (int i = 0; i < ROWS / 64; ++i) {
      const int row = corner.m + first_row + 64 * i;
      if (row >= m || corner.n >= n) continue;  // of a tile that only its cluster has
      const Target<Out> target = {product + i64(row) * n + corner.n, n, m - row, n - corner.n};
      if constexpr (C::STAGED)
        store_strips<C::BN, C::VEC_C>(sums[i], gathered, target, finish);
      else
        store_fragments<WarpOfGroup<0, C::BN>, C::VEC_C>(sums[i], target, finish);
    }
  }
}

// c = epilogue(op(a) op(b) + bias). C is the problem and the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const typename C::Out* __restrict__ bias, typename C::Out* __restrict__ c, int m, int n, int k,
           int batch, int group_m) {
  constexpr int CLUSTER = C::CLUSTER_M * C::CLUSTER_N;
  u8* const ring = swizzled_shared();
  u8* const staging = ring + C::STAGES * (C::TileA::BYTES + C::TileB::BYTES);
  const u32 buffers = shared_address(ring), barriers = shared_address(staging + C::STAGING_BYTES);
  if (threadIdx.x == 0) {
    // Every warp that multiplies a stage releases it, in all blocks that may have copied to it.
    prepare_barriers<C::STAGES, C::CONSUMERS>(barriers, CLUSTER * 4 * (C::PINGPONG ? 1 : C::CONSUMERS));
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }
  const Tiles<C> tiles(m, n, batch, group_m);
  // The same in all lanes, which the compiler cannot know of threadIdx.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup == C::CONSUMERS) {
    if constexpr (C::CONSUMER_REGISTERS > 0) give_registers<C::PRODUCER_REGISTERS>();
    if (threadIdx.x == 128 * C::CONSUMERS) produce<C>(a_map, b_map, buffers, barriers, tiles, k);
    __syncwarp();
  } else {
    if constexpr (C::CONSUMER_REGISTERS > 0) take_registers<C::CONSUMER_REGISTERS>();
    consume<C>(bias, c, buffers, barriers, staging, tiles, warpgroup, m, n, k);
  }
  if constexpr (CLUSTER > 1) {
    // No block may exit while another copies to it or releases a stage of it.
    cluster_arrive();
    cluster_wait();
  }
}
"""


class CudaWgmmaGemm(CudaVariant[Gemm]):
    """Serves f16, bf16 and e4m3 on Hopper."""

    name = "cuda_wgmma"
    operator = Gemm
    space = SPACE
    minimum_cc = (9, 0)
    maximum_cc = (9, 0)

    def target(self, device: Device) -> str:
        """Return Hopper's own architecture: wgmma and setmaxnreg are in no other."""
        return "sm_90a"

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return what keeps this problem from wgmma or from TMA, or None."""
        if workload.dtype not in ("f16", "bf16", "e4m3"):
            return f"{self.key} multiplies f16, bf16 and e4m3, not {workload.dtype}"
        if workload.dtype == "e4m3" and workload.trans != "nt":
            return f"{self.key} multiplies e4m3 as trans=nt alone: k must be contiguous in both a and b"
        if min(_gemm.widths(workload)[:2]) * itemsize(workload.dtype) < 16:
            return f"{self.key} copies by TMA: lines of a and b must be multiples of 16 bytes"
        if max(workload.m, workload.n, workload.k, workload.batch) > MOST_EXTENT:
            return f"{self.key} counts elements to {MOST_EXTENT} along a dimension"
        if not any(fits(bm, bn, workload) for bm, bn, _ in USUAL):
            return f"c ({workload.batch}, {workload.m}, {workload.n}) has too many tiles for {self.key}"
        return None

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return the usual tile of which the busiest SM has the least to do."""

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(_gemm.blocks(workload, bm, bn), device.sm_count)
            # Multiplying a tile costs with its area, reading it with its edges.
            return int(rounds * (bm * bn + 48 * (bm + bn)))

        ordered = sorted(self._usual(workload, device), key=work)
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: Gemm, device: Device) -> Iterator[Config]:
        """Yield the usual tiles, as deep as shared memory and k allow; in pairs if they fill the device."""
        for bm, bn, consumers in USUAL:
            bk = LINE_BYTES // itemsize(workload.dtype)
            room = device.smem_per_block_bytes - _smem_bytes(workload, bm, bn, bk, consumers, 0, 1)
            of_k = max(2, 2 * ceil_div(workload.k, bk))
            deepest = min(8, of_k, room // ((bm + bn) * LINE_BYTES + 16))
            paired = bm < workload.m and _gemm.blocks(workload, bm, bn) >= device.sm_count
            cluster_m = 2 if paired else 1
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "bk": bk,
                    "stages": int(deepest),
                    "consumers": consumers,
                    "pingpong": 0,
                    "cluster_m": cluster_m,
                    "cluster_n": 1,
                    "staged": 1,
                    "group_m": max(g for g in (1, 4, 8) if g == 1 or g * cluster_m * bm < 2 * workload.m),
                    "min_blocks": 1,
                }
            )

    def tiles(self, workload: Gemm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut m, n and k."""
        return _gemm.tiles(workload, config)

    def costs(self, workload: Gemm, table: Table, device: Device) -> Costs:
        """Count tiles as blocks: it is they that SMs share out. Beyond the edge zeros are multiplied."""
        names = ("bm", "bn", "bk", "stages", "consumers", "cluster_m", "cluster_n", "staged")
        bm, bn, bk, stages, consumers, cluster_m, cluster_n, staged = (
            table[name].astype(np.float64) for name in names
        )
        size = itemsize(workload.dtype)
        padded_k = ceil_div(workload.k, bk) * bk
        tiles = _gemm.blocks(workload, bm, bn)
        return Costs(
            blocks=tiles,
            full_blocks=tiles,
            threads=_wgmma_tile.threads(consumers),
            smem_bytes=_smem_bytes(workload, bm, bn, bk, consumers, stages, staged),
            mma_flop=2 * bm * bn * padded_k,
            mma_dtype=workload.dtype,
            # Written and read once: how often wgmma reads an operand that its warps share is not published.
            smem_traffic_bytes=2 * size * padded_k * (bm + bn),
            fill_bytes=self._fill_bytes(workload, bm, bn, bk, cluster_m, cluster_n),
            # Four warps issue each product of 64 rows, whether the tile has one consumer or all.
            instructions=4 * bm / 64 * padded_k * size / 32,
            # A warpgroup adds 32 bytes of k by one product of 64 x bn: bn / 2 clocks of all tensor cores of
            # its SM, and the next adds to the same sums. In pingpong a block has as many tiles under way as
            # consumers. A tile waits for its first copy, but that may be while the tile before is multiplied,
            # unless there is none.
            chain_clocks=np.where(tiles <= device.sm_count, device.l2_latency, 0.0)
            + padded_k * size / 32 * bn / 2 / np.where(table["pingpong"] == 1, consumers, 1),
        )

    def _fill_bytes(self, workload: Gemm, bm: Any, bn: Any, bk: Any, cluster_m: Any, cluster_n: Any) -> Any:
        """Return what the least block, at the corner of c, reads: zeros come from nowhere.

        Of what blocks of a cluster share, each reads a part; whether the rest passes the same port is not
        known.
        """
        k = workload.k

        def least(extent: Any, tile: Any, parts: Any, along_k: bool) -> Any:
            last = extent - (ceil_div(extent, tile) - 1) * tile
            if along_k:  # parts are of lines, each of k elements
                return np.maximum(0, last - (parts - 1) * tile / parts) * k
            return last * np.where(parts == 1, k, k // bk * bk / parts)

        of_a = least(workload.m, bm, cluster_n, workload.trans[0] == "n")
        of_b = least(workload.n, bn, cluster_m, workload.trans[1] == "t")
        return (of_a + of_b) * itemsize(workload.dtype)

    def claims(self, workload: Gemm, config: Config) -> tuple[str, ...]:
        """Products of warpgroups, bulk tensor copies, and registers that move where they are scarce."""
        product = "QGMMA" if workload.dtype == "e4m3" else "HGMMA"
        return (product, "UTMALDG", *(["USETMAXREG"] if _wgmma_tile.registers_move(config) else []))

    def source(self, workload: Gemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        names = ("bm", "bn", "bk", "stages", "consumers", "cluster_m", "cluster_n", "min_blocks")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        consumers = config["consumers"]
        choices |= {
            "THREADS": _wgmma_tile.threads(consumers),
            "PINGPONG": bool(config["pingpong"]),
            "STAGED": bool(config["staged"]),
            "STAGING_BYTES": _wgmma_tile.staging_bytes(consumers, config["staged"]),
            "VEC_C": _gemm.widths(workload)[2],
            **_wgmma_tile.moved_registers(config),
            "TileA": "PanelTile<In, BM, BK, A_K_CONTIGUOUS, CLUSTER_N>",
            "TileB": "PanelTile<In, BN, BK, B_K_CONTIGUOUS, CLUSTER_M>",
        }
        choice = _gemm.constants("Choice", **_gemm.problem(workload), **choices)
        shared = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma")
        return helpers(*shared) + choice + SOURCE

    def launches(self, workload: Gemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch, of a block a tile or of as many as stay."""
        cluster_m, cluster_n = config["cluster_m"], config["cluster_n"]
        clusters = _gemm.blocks(workload, config["bm"] * cluster_m, config["bn"] * cluster_n)
        names = ("bm", "bn", "bk", "consumers", "stages", "staged")
        smem = _smem_bytes(workload, *(config[name] for name in names))
        return (
            Launch(
                entry="gemm_wgmma<Choice>",
                grid=(clusters * cluster_m * cluster_n, 1, 1),
                block=(_wgmma_tile.threads(config["consumers"]), 1, 1),
                arguments=self._arguments(workload, config),
                smem_bytes=int(smem),
                cluster=cluster_m * cluster_n,
                blocks_per_sm=config["min_blocks"],
            ),
        )

    def _arguments(self, workload: Gemm, config: Config) -> tuple[Argument | TensorMap, ...]:
        a_map = _tensor_map(workload, "a", config["bm"], config["bk"], config["cluster_n"])
        b_map = _tensor_map(workload, "b", config["bn"], config["bk"], config["cluster_m"])
        _, _, *others, group_m = _gemm.arguments(workload, config["group_m"])
        return (a_map, b_map, *others, Scalar("int", workload.batch), group_m)

    def miniature(self, workload: Gemm, config: Config) -> Gemm:
        """Return a problem of few tiles with the same edges."""
        return _gemm.shrink(workload, config, config["stages"], affordable_fma=_wgmma_tile.AFFORDABLE_FMA)


def _tensor_map(workload: Gemm, name: str, extent: int, bk: int, parts: int) -> TensorMap:
    """Return how tiles of `extent` rows of op(a), or columns of op(b), by bk are copied, in `parts` parts.

    A box is one panel of `PanelTile`: lines of 128 bytes, cut across if blocks of a cluster share them.
    """
    (tensor,) = (tensor for tensor in workload.inputs() if tensor.name == name)
    batch, lines, length = tensor.shape
    along_k = workload.trans[0] == "n" if name == "a" else workload.trans[1] == "t"
    size = itemsize(tensor.dtype)
    return TensorMap(
        tensor=name,
        dtype=tensor.dtype,
        extents=(length, lines, batch),
        strides_bytes=(length * size, lines * length * size),
        box=(LINE_BYTES // size, (extent if along_k else bk) // parts, 1),
    )


VARIANT = CudaWgmmaGemm()
