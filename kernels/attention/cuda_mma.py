"""Forward attention in CUDA C++ on tensor cores by mma.sync (from sm_80): f16 and bf16, summed in f32.

A block has `bm` rows of one head and iterates over tiles of `bn` keys. cp.async copies tiles of k and v,
alternately, into a ring of `stages` buffers. A warp multiplies its rows of q by a tile of k, and updates the
maximum score and the sum of exponentials of each row. It multiplies the exponentials by the tile of v; the
registers that held results of the first product hold operands of the second. With a causal mask, tiles that
no row of the block attends to are skipped, and only tiles at the edges of the mask are masked. Biases are
loaded from global memory into the registers that hold the scores.

With few queries (decoding), parallelism comes from the keys: `key_warps` warps of a block process a part of
each tile and merge at the end; `split` blocks process some of the tiles each, and a second kernel merges
their results. With `pack_heads`, heads that share keys (grouped queries) are rows of one tile.

Limits: lines are copied in units of 16 bytes, so that head_dim must be a multiple of 8.

Source: Dao, "FlashAttention-2", 2023; Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context
inference", 2023. PTX ISA, "mma.m16n8k16", "ldmatrix", "cp.async".
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_forward as _forward
from tunebench.kernels.attention import _attention_scores as _scores
from tunebench.kernels.attention._attention import mma_refusal, padded
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.common.mma_tile import reached_flop_per_clock
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

MOST_REGISTERS = 255
"""Most registers of a thread."""

OTHER_REGISTERS = 48
"""Registers of a thread in addition to scores, results and rows of q: fragments, addresses, sums."""


def _pitch(workload: Attention) -> int:
    """Return the distance of lines in shared memory, in elements (see `PaddedLines`)."""
    return padded(workload) + 8


def _threads(row_warps: Any, key_warps: Any) -> Any:
    return 32 * row_warps * key_warps


def _smem_bytes(
    workload: Attention, bm: Any, bn: Any, row_warps: Any, key_warps: Any, stages: Any, hold_q: Any
) -> Any:
    """Return the shared memory of a block, in bytes.

    It holds q and the ring; the ring replaces a q that is kept in registers. At the end, warps of different
    keys exchange results in place of the ring.
    """
    line_bytes = itemsize(workload.dtype) * _pitch(workload)
    tiles = np.where(hold_q == 1, np.maximum(stages * bn, bm), stages * bn + bm)
    exchange = 4 * (key_warps - 1) * row_warps * 32 * (bm // row_warps // 16) * (padded(workload) // 2 + 4)
    return np.maximum(line_bytes * tiles, np.where(key_warps > 1, line_bytes * bm + exchange, 0))


def _registers(workload: Attention, bm: Any, bn: Any, row_warps: Any, key_warps: Any, hold_q: Any) -> Any:
    """Return the registers for results, scores and, if they are held, rows of q."""
    dim, height = padded(workload), bm // row_warps
    return height * (dim + bn // key_warps) // 32 + hold_q * height * dim // 64


def warps_cover_the_tile(bm: Any, bn: Any, row_warps: Any, key_warps: Any) -> Any:
    """A warp must have 16 or 32 rows and at least 16 keys; several warps share keys only if rows are few."""
    height = bm // row_warps
    rows = (height * row_warps == bm) & ((height == 16) | (height == 32))
    return rows & (bn // key_warps >= 16) & (row_warps * key_warps <= 8) & ((key_warps == 1) | (bm <= 32))


def registers_suffice(
    bm: Any, bn: Any, row_warps: Any, key_warps: Any, hold_q: Any, min_blocks: Any, workload: Attention
) -> Any:
    """Scores and results must stay in registers, and `min_blocks` must limit the compiler's choice."""
    needed = _registers(workload, bm, bn, row_warps, key_warps, hold_q) + OTHER_REGISTERS
    together = min_blocks * _threads(row_warps, key_warps)
    return (needed <= MOST_REGISTERS) & (needed * together <= 65536) & ((min_blocks == 1) | (together > 256))


def shared_memory_fits(
    bm: Any,
    bn: Any,
    row_warps: Any,
    key_warps: Any,
    stages: Any,
    hold_q: Any,
    min_blocks: Any,
    workload: Attention,
    device: Device,
) -> Any:
    """`min_blocks` blocks must fit in the shared memory of an SM."""
    smem = _smem_bytes(workload, bm, bn, row_warps, key_warps, stages, hold_q)
    together = min_blocks * (smem + device.smem_reserved_bytes)
    return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of a block: queries, or queries of several heads"),
        Parameter("bn", (16, 32, 64, 128), "keys of a tile"),
        Parameter("row_warps", (1, 2, 4, 8), "warps of a block along its rows"),
        Parameter("key_warps", (1, 2, 4), "warps that share the keys of a tile"),
        Parameter(
            "stages", (2, 3, 4, 6), "tiles of k or v in shared memory: one is multiplied, others are copied"
        ),
        Parameter("hold_q", (0, 1), "1: q stays in registers; 0: it is read again for each tile of keys"),
        *_forward.PARAMETERS,
        Parameter("min_blocks", (1, 2, 3), "blocks per SM that registers must allow"),
    ),
    (
        warps_cover_the_tile,
        registers_suffice,
        shared_memory_fits,
        lambda bm, bn, pack_heads, workload: _forward.tiles_fit(workload, bm, bn, pack_heads, (16, 16)),
        *_forward.CONSTRAINTS,
        lambda bn, stages, workload: (stages == 2) | (stages <= 2 * ceil_div(workload.seq_k, bn)),
    ),
)

USUAL = (
    # bm, bn, row_warps, key_warps, stages, hold_q; largest first
    (128, 64, 4, 1, 2, 1),
    (128, 64, 4, 1, 2, 0),
    (128, 32, 4, 1, 4, 0),
    (64, 64, 4, 1, 2, 1),
    (64, 64, 4, 1, 2, 0),
    (64, 32, 4, 1, 2, 0),
    (32, 64, 2, 2, 4, 0),
    (32, 32, 2, 1, 2, 0),
    (16, 64, 1, 4, 4, 0),
    (16, 64, 1, 4, 2, 0),
    (16, 32, 1, 2, 2, 0),
    (16, 16, 1, 1, 2, 0),
)
"""Tiles of shipped libraries, and tiles for few queries."""

SPARE_REGISTERS = 24
"""Registers that defaults leave unused, so that nothing spills on any architecture."""

SOURCE = """
// o = softmax(q k^T) v and the logarithm of the softmax's sums, or parts of them for attention_combine. C
// holds the constants of workload and configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
attention_mma(const typename C::In* __restrict__ q, const typename C::In* __restrict__ k,
              const typename C::In* __restrict__ v, typename C::In* __restrict__ o, float* __restrict__ lse,
              float* __restrict__ partial, float* __restrict__ partial_lse, int group, int seq_q, int seq_k,
              float @UNIT@, int row_tiles, int parts, i64 all_rows@PARAMETERS@) {@BIASES@
  using In = typename C::In;
  using TileQ = LineTile<In, C::BM, C::HEAD_DIM, true>;
  using TileK = LineTile<In, C::BN, C::HEAD_DIM, true>;
  using TileV = LineTile<In, C::BN, C::HEAD_DIM, false>;
  constexpr int IN_M = C::BM / C::ROW_WARPS / 16, KEYS = C::BN / C::KEY_WARPS, DIM = TileQ::DIM;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int warp_row = warp % C::ROW_WARPS * 16 * IN_M, warp_key = warp / C::ROW_WARPS * KEYS;

  // Blocks with the most keys come first: with a causal mask, those of the last rows.
  const u32 tile = blockIdx.x / u32(parts), part = blockIdx.x % u32(parts);
  const int head = int(tile / u32(row_tiles)), row = (row_tiles - 1 - int(tile % u32(row_tiles))) * C::BM;
  const QueryRows<C::PACK_HEADS> rows(head, seq_q, group);
  const int last_row = min(row + C::BM, rows.count) - 1;
  const KeyTiles tiles = key_tiles<C::BN, C::CAUSAL>(rows.query(row), rows.query(last_row), seq_q, seq_k,
                                                     int(part), parts);
  const i64 keys_of_head = i64(C::PACK_HEADS ? head : head / group) * seq_k * C::HEAD_DIM;
  const In* const k_head = k + keys_of_head;
  const In* const v_head = v + keys_of_head;

  In* const shared = reinterpret_cast<In*>(dynamic_shared());
  In* const ring = C::HOLD_Q ? shared : shared + TileQ::ELEMENTS;
  TileQ::template copy<C::THREADS>(
      shared, [&](int line) { return q + rows.at(min(row + line, last_row)) * C::HEAD_DIM; },
      [&](int line) { return row + line <= last_row; });
  cp_async_commit();

  u32 held[C::HOLD_Q ? DIM / 16 : 1][IN_M][4];
  if constexpr (C::HOLD_Q) {
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step)
#pragma unroll
      for (int i = 0; i < IN_M; ++i)
        load_fragment<TileQ, false>(held[step][i], shared, warp_row + 16 * i, 16 * step);
    __syncthreads();  // before the ring overwrites q
  }
  const auto fragments_of_q = [&](u32(&registers)[IN_M][4], int step) {
#pragma unroll
    for (int i = 0; i < IN_M; ++i) {
      if constexpr (C::HOLD_Q) {
#pragma unroll
        for (int r = 0; r < 4; ++r) registers[i][r] = held[step][i][r];
      } else {
        load_fragment<TileQ, false>(registers[i], shared, warp_row + 16 * i, 16 * step);
      }
    }
  };

  // The ring: number 2 i is tile i of k, 2 i + 1 tile i of v. Empty groups of copies are committed too, since
  // waits count groups.
  int to_copy = 2 * tiles.begin, filled = 0, read = 0;
  const auto copy_next = [&] {
    if (to_copy < 2 * tiles.end) {
      const int first = to_copy / 2 * C::BN, left = seq_k - first;
      const In* const source = (to_copy % 2 ? v_head : k_head) + i64(first) * C::HEAD_DIM;
      TileK::template copy<C::THREADS>(
          ring + filled * TileK::ELEMENTS,
          [&](int line) { return source + line * C::HEAD_DIM; },
          [&](int line) { return line < left; });
    }
    ++to_copy;
    filled = filled + 1 == C::STAGES ? 0 : filled + 1;
    cp_async_commit();
  };
  // The next tile in the ring, when it is complete and all threads have read the buffer that is filled now.
  const auto next_tile = [&] {
    cp_async_wait<C::STAGES - 2>();
    __syncthreads();
    copy_next();
    const In* const found = ring + read * TileK::ELEMENTS;
    read = read + 1 == C::STAGES ? 0 : read + 1;
    return found;
  };
#pragma unroll
  for (int i = 0; i < C::STAGES - 1; ++i) copy_next();

  int sees[IN_M][2];
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_thread = min(row + warp_row + 16 * i + 8 * half + lane / 4, last_row);
      sees[i][half] = keys_seen<C::CAUSAL>(rows.query(of_thread), seq_q, seq_k);
    }
@LINES@
@STARTS@
  RowState states[IN_M][2];
  float results[IN_M][DIM / 8][4] = {};
#pragma unroll 1
  for (int i = tiles.begin; i < tiles.end; ++i) {
    float scores[IN_M][KEYS / 8][4] = {};
    const In* const tile_k = next_tile();
    multiply_scores<TileK, IN_M, KEYS>(scores, fragments_of_q, tile_k, warp_key);
@ADD_BIASES@
@HIDE_AHEAD@
    if (i >= tiles.whole) {
      int seen[IN_M][2];
#pragma unroll
      for (int m = 0; m < 2 * IN_M; ++m) seen[m / 2][m % 2] = sees[m / 2][m % 2] - i * C::BN - warp_key;
      hide_scores<IN_M, KEYS>(scores, seen);
    }
    float factors[IN_M][2];
    exponentiate<IN_M, KEYS>(scores, states, factors, unit);
    rescale<IN_M, DIM>(results, factors);
    const In* const tile_v = next_tile();
    multiply_values<TileV, IN_M, KEYS>(results, scores, tile_v, warp_key);
  }
  cp_async_wait<0>();
  __syncthreads();  // before results are merged and staged in place of the buffers
  if constexpr (C::KEY_WARPS > 1) {
    float* const exchange = reinterpret_cast<float*>(shared + TileQ::ELEMENTS);
    merge_keys<C::ROW_WARPS, C::KEY_WARPS, DIM>(results, states, exchange, unit);
    if (warp >= C::ROW_WARPS) return;
  }

  gather_sums(states);
@SETTLE@
  if constexpr (C::IN_PARTS) {
    const i64 first = i64(part) * all_rows;
    store_part<TileQ>(results, states, rows, row + warp_row, last_row, partial + first * C::HEAD_DIM,
                                  partial_lse + first, unit);
  } else {
    store_rows<TileQ>(results, states, rows, row + warp_row, last_row, shared, warp_row, o, lse, unit);
  }
}
"""


BIAS = {
    "UNIT": "unit_of_scores",
    "LINES": """
  constexpr float unit = 1.0f;  // scores with a bias are exponents of 2
  const In* lines[IN_M][2];     // of biases
#pragma unroll
  for (int m = 0; m < 2 * IN_M; ++m) {
    const int of_thread = min(row + warp_row + 8 * m + lane / 4, last_row);
    lines[m / 2][m % 2] = biases.row(rows.at(of_thread), seq_q);
  }""",
    "ADD_BIASES": """
    add_biases<C::BIAS_VEC, IN_M, KEYS>(scores, lines, i * C::BN + warp_key, seq_k, unit_of_scores);""",
    "SETTLE": "  settle_hidden_rows(states);",
}
"""Text of @WORDS@ in the kernel for workloads with a bias."""

WINDOW = {
    "STARTS": """
  int starts[IN_M][2];
#pragma unroll
  for (int m = 0; m < 2 * IN_M; ++m) {
    const int of_thread = min(row + warp_row + 8 * m + lane / 4, last_row);
    starts[m / 2][m % 2] = first_key(rows.query(of_thread), seq_q, seq_k);
  }""",
    "HIDE_AHEAD": """
    if (i < tiles.ahead) hide_ahead<IN_M, KEYS>(scores, starts, i * C::BN + warp_key);""",
}
"""Text of @WORDS@ in the kernel for masks with a window or ``align=first``."""


class CudaMmaAttention(CudaVariant[Attention]):
    """Forward variant for f16 and bf16, from sm_80."""

    name = "cuda_mma"
    operator = Attention
    direction = "forward"
    space = SPACE
    minimum_cc = (8, 0)

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why a workload cannot use tensor cores or cp.async, or None."""
        fits = any(_forward.tiles_fit(workload, bm, bn, 0, (16, 16)) for bm, bn, *_ in USUAL)
        return _forward.refusal(workload, self.key, fits) or mma_refusal(workload, self.key, 256)

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the largest usual tile that gives each SM a block, or else the smallest with split keys."""
        names = ("bm", "bn", "row_warps", "key_warps", "stages", "hold_q")
        tiles = [
            {
                **dict(zip(names, tile, strict=True)),
                "stages": min(tile[4], 2 * int(ceil_div(workload.seq_k, tile[1]))),
                "min_blocks": 1,
            }
            for tile in USUAL
            if _leaves_registers(workload, *tile)
        ]
        usual = _forward.usual(workload, device, tiles)
        return self.space.first_valid(usual, workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of rows and keys, and of head_dim padded for products."""
        return _forward.tiles(workload, config["bm"], config["bn"], config["pack_heads"], 16)

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count whole tiles: elements beyond the edge, and masked elements of a tile, are computed too.

        The merge of parts is not counted.
        """
        names = ("bm", "bn", "row_warps", "key_warps", "stages", "hold_q")
        bm, bn, row_warps, key_warps, stages, hold_q = (table[name].astype(np.float64) for name in names)
        divided = {name: table[name] for name in ("bm", "bn", "pack_heads", "split")}
        share, dim, size = _forward.shares(workload, **divided), padded(workload), itemsize(workload.dtype)
        scores = share.tiles * bm * bn
        products = 2 * scores * dim / 2048  # products of 16 x 8 x 16
        # A warp reads k and v of its keys for all of its rows; it reads q once per tile, or only once.
        lines = share.tiles * bn * row_warps * 2 + bm * key_warps * np.where(hold_q == 1, 1, share.tiles)
        fragments = lines * dim / 256
        # An exponential, its argument, its sum, and the scaling of earlier results.
        fma = 2 * scores + share.tiles * bm * dim * key_warps
        paired = 64 if device.compute_capability >= (10, 0) else 32
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=_threads(row_warps, key_warps),
            smem_bytes=_smem_bytes(workload, bm, bn, row_warps, key_warps, stages, hold_q),
            registers=np.minimum(
                bm / row_warps * (dim + bn / key_warps) / 32 + 16,
                65536 // (_threads(row_warps, key_warps) * table["min_blocks"]),
            ),
            fma=fma,
            mma_flop=4 * scores * dim,
            mma_dtype=workload.dtype,
            sfu=scores,
            smem_traffic_bytes=512 * fragments + (share.tiles * bn * 2 + bm) * dim * size,
            fill_bytes=(2 * share.keys + share.rows) * workload.head_dim * size,
            instructions=products + fragments + scores / 32 + fma / paired,
            # Each 16 keys are one product, which waits for the previous one of the same row.
            chain_clocks=first_product(device)
            + device.mma_latency * share.tiles * np.minimum(bn / key_warps, 2 * dim) / 16,
            serial_launches=1 + (table["split"] > 1),
            execution=self._execution(workload, table, device, share, products + fragments),
        )

    def _execution(
        self, workload: Attention, table: Table, device: Device, share: _forward.ForwardWork, multiplying: Any
    ) -> Execution:
        """Describe a block: a warp multiplies, computes exponentials, and multiplies again, for each tile.

        Args:
            workload: The workload.
            table: Configurations.
            device: The device, for its rates.
            share: Work of the block.
            multiplying: Instructions of products and their fragments.
        """
        names = ("bm", "bn", "row_warps", "key_warps", "stages", "hold_q", "split")
        bm, bn, row_warps, key_warps, stages, hold_q, split = (table[name] for name in names)
        dim, size, warps = padded(workload), itemsize(workload.dtype), row_warps * key_warps
        height, keys = bm / row_warps, bn / key_warps
        needed = _registers(workload, bm, bn, row_warps, key_warps, hold_q) + OTHER_REGISTERS
        product_clocks = (
            4 * height * keys * dim * device.partitions / reached_flop_per_clock(workload.dtype, device)
        )
        between_clocks = _forward.softmax_clocks(height * keys / 32, height * dim / 32, device)
        copies = (2 * share.tiles * bn + bm) * dim * size / 16
        merged = np.where(key_warps > 1, warps * 32.0 * height * dim / 128, 0)
        return Execution(
            registers=needed,
            instructions=multiplying
            + _forward.softmax_instructions(workload, share, bm, bn, dim * key_warps, warps)
            + 2 * share.tiles * 10.0 * warps,  # of the ring
            accesses=copies + merged,
            l2_bytes=(2 * share.keys + share.rows) * workload.head_dim * size
            + _forward.store_bytes(workload, share, bm, split),
            # The rows of q, and the merge of parts.
            memory_waits=1 + _forward.merge_waits(split),
            # Tiles of k and v are copied while those before them in the ring are multiplied.
            prefetched_waits=2 * share.tiles / (stages - 1),
            # The first fragments of both products, and the results of other warps.
            shared_waits=2 * share.tiles + np.where(key_warps > 1, key_warps, 0),
            barriers=2 * share.tiles + 2 + (key_warps > 1),
            tensor_clocks=share.tiles * product_clocks * warps / device.partitions,
            warp_clocks=share.tiles * (product_clocks + between_clocks),
        )

    def claims(self, workload: Attention, config: Config) -> tuple[str, ...]:
        """Return tensor cores, asynchronous copies, ldmatrix, and the special-function unit."""
        return ("HMMA", "LDGSTS", "LDSM", "MUFU")

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernel for a head_dim, type and configuration; other sizes are arguments."""
        names = ("bm", "bn", "row_warps", "key_warps", "stages", "min_blocks")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        choices |= {
            **_forward.workload_constants(workload, config),
            "THREADS": int(_threads(config["row_warps"], config["key_warps"])),
            "HOLD_Q": bool(config["hold_q"]),
        }
        shared = ("types", "ptx", "gemm", "gemm_mma", "reduce", "attention_operand")
        fragments = ["attention_fragment", "attention_mma"]
        if workload.has_bias or not workload.has_simple_mask:
            fragments.append("attention_fragment_bias")
        kernel = _scores.with_scores(SOURCE, workload, BIAS, WINDOW, UNIT="unit")
        preamble = helpers(*shared) + _forward.headers(workload) + helpers(*fragments)
        return preamble + constants("Choice", **choices) + kernel

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return the attention kernel, and the kernel that merges parts if keys are split."""
        names = ("bm", "bn", "row_warps", "key_warps", "stages", "hold_q")
        smem = int(_smem_bytes(workload, *(config[name] for name in names)))
        threads = int(_threads(config["row_warps"], config["key_warps"]))
        return _forward.launches(workload, config, "attention_mma<Choice>", threads, smem)

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the results of parts, if keys are split."""
        return _forward.scratch(workload, config["split"])

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        key_tiles = max(2, config["stages"] // 2) * min(config["split"], 8) + 1
        return _forward.shrink(workload, config["bm"], config["bn"], config["pack_heads"], key_tiles)


def _leaves_registers(
    workload: Attention, bm: int, bn: int, row_warps: int, key_warps: int, stages: int, hold_q: int
) -> bool:
    """Return whether a thread has more registers than it certainly needs."""
    needed = _registers(workload, bm, bn, row_warps, key_warps, hold_q) + OTHER_REGISTERS
    return bool(needed + SPARE_REGISTERS <= MOST_REGISTERS)


VARIANT = CudaMmaAttention()
