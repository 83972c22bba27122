"""Forward attention in CUDA C++ on general-purpose cores: any type, multiplied and summed in f32.

A block has `bm` rows and iterates over tiles of `bn` keys, all in shared memory as f32. `lanes` threads share
`tm` rows: each has every `lanes`-th key of the scores, and every `lanes`-th group of four columns of the
results. Exponentials are exchanged through shared memory. Keys may be split among `split` blocks, whose
results a second kernel merges. With `pack_heads`, heads that share keys are rows of one tile.

The variant supports every alignment, head_dim up to 256, and architectures before sm_80.

Source: Dao, "FlashAttention-2", 2023, algorithm 1.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_forward as _forward
from tunebench.kernels.attention import _attention_scores as _scores
from tunebench.kernels.attention._attention import padded
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import alignment, constants
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

OTHER_REGISTERS = 40
"""Registers of a thread in addition to scores, results and operands."""


def _threads(bm: Any, tm: Any, lanes: Any) -> Any:
    return bm // tm * lanes


def _result_dim(workload: Attention, lanes: Any) -> Any:
    """Return the columns of v in shared memory: the same number of groups of four for each lane."""
    return ceil_div(workload.head_dim, 4 * lanes) * 4 * lanes


def _smem_bytes(workload: Attention, bm: Any, bn: Any, lanes: Any) -> Any:
    """Return the shared memory of a block: q, k, exponentials and v as f32; lines of v are not padded."""
    pitch = padded(workload, 4) + 4
    return 4 * ((bm + bn) * pitch + bm * (bn + 4) + bn * _result_dim(workload, lanes))


def threads_are_reasonable(bm: Any, bn: Any, tm: Any, lanes: Any) -> Any:
    """A block must have 32 to 512 threads, each with some scores of its rows."""
    threads = _threads(bm, tm, lanes)
    whole = (bm % tm == 0) & (bn % lanes == 0) & (bn >= lanes)
    return whole & (threads >= 32) & (threads <= 512) & (bn // lanes <= 8)


def registers_suffice(bm: Any, bn: Any, tm: Any, lanes: Any, workload: Attention) -> Any:
    """Scores, results and operands of a thread must stay in registers."""
    columns = _result_dim(workload, lanes) // lanes
    keys = bn // lanes
    needed = tm * (keys + columns) + 4 * (tm + np.maximum(keys, columns // 4)) + OTHER_REGISTERS
    return needed <= np.minimum(255, 65536 // _threads(bm, tm, lanes))


SPACE = Space(
    (
        Parameter("bm", (4, 8, 16, 32, 64, 128), "rows of a block: queries, or queries of several heads"),
        Parameter("bn", (8, 16, 32, 64, 128), "keys of a tile"),
        Parameter("tm", (1, 2, 4, 8), "rows of a thread"),
        Parameter("lanes", (8, 16, 32), "threads that share rows"),
        *_forward.PARAMETERS,
    ),
    (
        threads_are_reasonable,
        registers_suffice,
        lambda bm, bn, lanes, workload, device: (
            _smem_bytes(workload, bm, bn, lanes) <= device.smem_per_block_bytes
        ),
        lambda bm, bn, pack_heads, workload: _forward.tiles_fit(workload, bm, bn, pack_heads, (4, 8)),
        *_forward.CONSTRAINTS,
    ),
)

USUAL = (
    # bm, bn, tm, lanes; largest first
    (64, 64, 4, 16),
    (64, 32, 4, 16),
    (32, 32, 4, 16),
    (32, 16, 4, 16),
    (16, 32, 2, 16),
    (16, 16, 2, 16),
    (16, 16, 4, 16),
    (8, 64, 1, 32),
    (8, 32, 1, 16),
    (4, 64, 1, 32),
    (4, 32, 1, 16),
    (4, 16, 1, 16),
    (4, 8, 1, 8),
)
"""Tiles for few and for many rows."""

SOURCE = """
// Copies LINES lines of HEAD_DIM elements as f32, with zeros up to WIDTH and in missing lines.
template <int LINES, int HEAD_DIM, int WIDTH, int PITCH, int VEC, int THREADS, class T, class LineAt>
__device__ __forceinline__ void copy_lines(float* shared, int existing, const LineAt& line_at) {
  constexpr int PER_LINE = WIDTH / VEC;
  for (int index = int(threadIdx.x); index < LINES * PER_LINE; index += THREADS) {
    const int line = index / PER_LINE, at = index % PER_LINE * VEC;
    Vec<T, VEC> values = {};
    if (line < existing && at < HEAD_DIM) values = load_vec<VEC>(line_at(line) + at);
#pragma unroll
    for (int i = 0; i < VEC; ++i) shared[line * PITCH + at + i] = to_float(values.at[i]);
  }
}

// o = softmax(q k^T) v and the logarithm of the softmax's sums, or parts of them for attention_combine. C
// holds the constants of workload and configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
attention_simt(const typename C::In* __restrict__ q, const typename C::In* __restrict__ k,
               const typename C::In* __restrict__ v, typename C::In* __restrict__ o, float* __restrict__ lse,
               float* __restrict__ partial, float* __restrict__ partial_lse, int group, int seq_q, int seq_k,
               float @UNIT@, int row_tiles, int parts, i64 all_rows@PARAMETERS@) {@BIASES@
  using In = typename C::In;
  constexpr int TN = C::BN / C::LANES, GROUPS = C::RESULT_DIM / C::LANES / 4, PITCH = C::SCORE_DIM + 4;
  const int lane = int(threadIdx.x) % C::LANES, my_row = int(threadIdx.x) / C::LANES * C::TM;

  // Blocks with the most keys come first: with a causal mask, those of the last rows.
  const u32 tile = blockIdx.x / u32(parts), part = blockIdx.x % u32(parts);
  const int head = int(tile / u32(row_tiles)), row = (row_tiles - 1 - int(tile % u32(row_tiles))) * C::BM;
  const QueryRows<C::PACK_HEADS> rows(head, seq_q, group);
  const int last_row = min(row + C::BM, rows.count) - 1;
  const KeyTiles tiles = key_tiles<C::BN, C::CAUSAL>(rows.query(row), rows.query(last_row), seq_q, seq_k,
                                                     int(part), parts);
  const i64 keys_of_head = i64(C::PACK_HEADS ? head : head / group) * seq_k * C::HEAD_DIM;

  float* const rows_of_q = reinterpret_cast<float*>(dynamic_shared());
  float* const tile_k = rows_of_q + C::BM * PITCH;
  float* const tile_p = tile_k + C::BN * PITCH;
  float* const tile_v = tile_p + C::BM * (C::BN + 4);
  copy_lines<C::BM, C::HEAD_DIM, C::SCORE_DIM, PITCH, C::VEC, C::THREADS, In>(
      rows_of_q, last_row + 1 - row, [&](int line) { return q + rows.at(row + line) * C::HEAD_DIM; });

  int sees[C::TM];
  RowState states[C::TM];
  float results[C::TM][GROUPS][4] = {};
#pragma unroll
  for (int m = 0; m < C::TM; ++m)
    sees[m] = keys_seen<C::CAUSAL>(rows.query(min(row + my_row + m, last_row)), seq_q, seq_k);
@LINES@
@STARTS@
#pragma unroll 1
  for (int i = tiles.begin; i < tiles.end; ++i) {
    const int first = i * C::BN, left = seq_k - first;
    const auto line_of = [&](const In* source) {
      const In* const corner = source + keys_of_head + i64(first) * C::HEAD_DIM;
      return [corner](int line) { return corner + line * C::HEAD_DIM; };
    };
    __syncthreads();  // before the tiles are overwritten
    copy_lines<C::BN, C::HEAD_DIM, C::SCORE_DIM, PITCH, C::VEC, C::THREADS, In>(tile_k, left, line_of(k));
    copy_lines<C::BN, C::HEAD_DIM, C::RESULT_DIM, C::RESULT_DIM, C::VEC, C::THREADS, In>(tile_v, left,
                                                                                         line_of(v));
    __syncthreads();

    float scores[C::TM][TN] = {};
#pragma unroll 4
    for (int d = 0; d < C::SCORE_DIM; d += 4) {
      Vec<float, 4> of_q[C::TM], of_k[TN];
#pragma unroll
      for (int m = 0; m < C::TM; ++m) of_q[m] = load_vec<4>(rows_of_q + (my_row + m) * PITCH + d);
#pragma unroll
      for (int n = 0; n < TN; ++n) of_k[n] = load_vec<4>(tile_k + (lane + n * C::LANES) * PITCH + d);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int m = 0; m < C::TM; ++m)
#pragma unroll
          for (int n = 0; n < TN; ++n)
            scores[m][n] = multiply_add(of_q[m].at[e], of_k[n].at[e], scores[m][n]);
    }
#pragma unroll
    for (int m = 0; m < C::TM; ++m) {
@ADD_BIASES@
@HIDE_AHEAD@
      float top = states[m].top;
#pragma unroll
      for (int n = 0; n < TN; ++n) {
        if (first + lane + n * C::LANES >= sees[m]) scores[m][n] = no_key();
        top = fmaxf(top, scores[m][n]);
      }
      top = warp_reduce_max<C::LANES>(top);
      const float factor = fast_exp2((states[m].top - top) * unit);
      float total = f32_op(states[m].total * factor);
#pragma unroll
      for (int n = 0; n < TN; ++n) {
        const float p = fast_exp2(multiply_add(scores[m][n], unit, -top * unit));
        total = f32_op(total + p);
        tile_p[(my_row + m) * (C::BN + 4) + lane + n * C::LANES] = p;
      }
      states[m].top = top, states[m].total = total;
#pragma unroll
      for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) results[m][j][e] = f32_op(results[m][j][e] * factor);
    }
    __syncwarp();  // threads that share rows are in one warp
#pragma unroll 2
    for (int key = 0; key < C::BN; key += 4) {
      Vec<float, 4> of_p[C::TM];
#pragma unroll
      for (int m = 0; m < C::TM; ++m) of_p[m] = load_vec<4>(tile_p + (my_row + m) * (C::BN + 4) + key);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
          const float* const four = tile_v + (key + e) * C::RESULT_DIM + (lane + j * C::LANES) * 4;
          const Vec<float, 4> of_v = load_vec<4>(four);
#pragma unroll
          for (int m = 0; m < C::TM; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c)
              results[m][j][c] = multiply_add(of_p[m].at[e], of_v.at[c], results[m][j][c]);
        }
    }
    __syncwarp();
  }

#pragma unroll
  for (int m = 0; m < C::TM; ++m) {
    states[m].total = warp_reduce_sum<C::LANES>(states[m].total);
@SETTLE@
    if (row + my_row + m > last_row) continue;
    const i64 place = rows.at(row + my_row + m), in_part = i64(part) * all_rows + place;
    const float factor = states[m].inverse(), log2_sum = states[m].log2_sum(unit);
    if (lane == 0 && C::IN_PARTS) partial_lse[in_part] = log2_sum;
    if (lane == 0 && !C::IN_PARTS) lse[place] = log2_sum * LN_2;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = (lane + j * C::LANES) * 4 + c;
        if (column >= C::HEAD_DIM) continue;
        if constexpr (C::IN_PARTS)
          partial[in_part * C::HEAD_DIM + column] = results[m][j][c] * factor;
        else
          o[place * C::HEAD_DIM + column] = from_float<In>(results[m][j][c] * factor);
      }
  }
}
"""


BIAS = {
    "UNIT": "unit_of_scores",
    "LINES": """
  constexpr float unit = 1.0f;  // scores with a bias are exponents of 2
  const In* lines[C::TM];       // of biases
#pragma unroll
  for (int m = 0; m < C::TM; ++m) lines[m] = biases.row(rows.at(min(row + my_row + m, last_row)), seq_q);""",
    "ADD_BIASES": """
#pragma unroll
      for (int n = 0; n < TN; ++n) {
        const int key = first + lane + n * C::LANES;
        if (key < seq_k) scores[m][n] = add_bias(scores[m][n], unit_of_scores, lines[m][key]);
      }""",
    "SETTLE": """
    // Without any key the result is 0, and the logarithm finite.
    if (states[m].total == 0.0f) states[m].total = 1.0f;""",
}
"""Text of @WORDS@ in the kernel for workloads with a bias."""

WINDOW = {
    "STARTS": """
  int starts[C::TM];
#pragma unroll
  for (int m = 0; m < C::TM; ++m)
    starts[m] = first_key(rows.query(min(row + my_row + m, last_row)), seq_q, seq_k);""",
    "HIDE_AHEAD": """
#pragma unroll
      for (int n = 0; n < TN; ++n)
        if (first + lane + n * C::LANES < starts[m]) scores[m][n] = no_key();""",
}
"""Text of @WORDS@ in the kernel for masks with a window or ``align=first``."""


class CudaSimtAttention(CudaVariant[Attention]):
    """Forward variant for every type, with head_dim up to 256."""

    name = "cuda_simt"
    operator = Attention
    direction = "forward"
    space = SPACE

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why the variant does not support a workload, or None."""
        fits = any(_forward.tiles_fit(workload, bm, bn, 0, (4, 8)) for bm, bn, *_ in USUAL)
        reason = _forward.refusal(workload, self.key, fits)
        if reason is None and workload.head_dim > 256:
            reason = f"{self.key} supports head_dim up to 256, not {workload.head_dim}"
        return reason

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the largest usual tile that gives each SM a block, or else the smallest with split keys."""
        tiles = [dict(zip(("bm", "bn", "tm", "lanes"), tile, strict=True)) for tile in USUAL]
        usual = _forward.usual(workload, device, tiles)
        return self.space.first_valid(usual, workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of rows and keys, and the accesses of head_dim."""
        return _forward.tiles(workload, config["bm"], config["bn"], config["pack_heads"], 4)

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count whole tiles: elements beyond the edge, and masked elements of a tile, are computed too."""
        bm, bn, tm, lanes = (table[name].astype(np.float64) for name in ("bm", "bn", "tm", "lanes"))
        share = _forward.shares(
            workload, **{name: table[name] for name in ("bm", "bn", "pack_heads", "split")}
        )
        score_dim, result_dim = padded(workload, 4), _result_dim(workload, lanes)
        threads, scores = _threads(bm, tm, lanes), share.tiles * bm * bn
        # Four columns of tm rows and of a thread's keys; four keys of tm rows, and its columns of v for each.
        wide = (tm + bn / lanes) * score_dim / 4 + bn / 4 * (tm + result_dim / lanes)
        accesses = share.tiles * threads * (wide + tm * bn / lanes)
        return Costs(
            blocks=share.blocks,
            full_blocks=share.full_blocks,
            threads=threads,
            smem_bytes=_smem_bytes(workload, bm, bn, lanes),
            registers=tm * (bn + result_dim) / lanes + 16,
            # Products, the argument of an exponential, its sum, and the scaling of earlier results.
            fma=scores * (score_dim + result_dim + 2) + share.tiles * bm * result_dim,
            sfu=scores,
            # A wide access of a warp reads at least 128 different bytes.
            smem_traffic_bytes=128 * accesses / 32,
            accesses=accesses,
            # A result adds keys sequentially, after the first scores.
            chain_clocks=first_product(device) + device.fma_latency * share.tiles * bn,
            serial_launches=1 + (table["split"] > 1),
            execution=self._execution(workload, table, share),
        )

    def _execution(self, workload: Attention, table: Table, share: _forward.ForwardWork) -> Execution:
        """Describe a block: for each tile copies, scores, exponentials through shared memory, and sums."""
        bm, bn, tm, lanes, split = (
            table[name].astype(np.float64) for name in ("bm", "bn", "tm", "lanes", "split")
        )
        score_dim, result_dim, size = (
            padded(workload, 4),
            _result_dim(workload, lanes),
            itemsize(workload.dtype),
        )
        threads, width = _threads(bm, tm, lanes), min(alignment(workload.head_dim, workload.dtype), 4)
        warps, keys, columns = threads / 32, bn / lanes, result_dim / lanes
        # Loads of four words: of q and p, which lanes of a row share, and of k and v, which differ by lane.
        shared_loads = tm * score_dim / 4 + tm * bn / 4
        own_loads = keys * score_dim / 4 + bn * columns / 4
        stored = tm * keys
        copied = bn * (score_dim + result_dim)
        loaded = copied / width
        products = tm * keys * score_dim + tm * bn * columns
        of_block = share.tiles * threads
        return Execution(
            registers=tm * (keys + columns) + 4 * (tm + np.maximum(keys, columns / 4)) + OTHER_REGISTERS,
            instructions=share.tiles * warps * products
            + _forward.softmax_instructions(workload, share, bm, bn, result_dim, warps)
            + share.tiles * loaded / 32 * 8,
            accesses=of_block * (shared_loads + own_loads + stored + tm * np.log2(lanes))
            + share.tiles * (loaded + copied),
            passes=share.tiles
            * (warps * (shared_loads + own_loads * lanes / 8 + stored) + (loaded + copied) / 32),
            l2_bytes=(2 * share.keys + share.rows) * workload.head_dim * size
            + _forward.store_bytes(workload, share, bm, split),
            # Tiles are copied between barriers, four loads of a thread at a time.
            memory_waits=share.tiles * np.ceil(loaded / threads / 4) + _forward.merge_waits(split),
            shared_waits=share.tiles * (score_dim / 16 + bn / 8 + np.log2(lanes)),
            barriers=2 * share.tiles,
            code_bytes=16 * (16 * tm * keys + 8 * tm * columns),
        )

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernel for a head_dim, type and configuration; other sizes are arguments."""
        choices: dict[str, str | bool | int] = {
            name.upper(): config[name] for name in ("bm", "bn", "tm", "lanes")
        }
        choices |= {
            **_forward.workload_constants(workload, config),
            "SCORE_DIM": padded(workload, 4),
            "RESULT_DIM": int(_result_dim(workload, config["lanes"])),
            "VEC": min(alignment(workload.head_dim, workload.dtype), 16 // itemsize("f32")),
            "THREADS": int(_threads(config["bm"], config["tm"], config["lanes"])),
        }
        kernel = _scores.with_scores(SOURCE, workload, BIAS, WINDOW, UNIT="unit")
        preamble = helpers("types", "gemm", "reduce") + _forward.headers(workload)
        return preamble + constants("Choice", **choices) + kernel

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return the attention kernel, and the kernel that merges parts if keys are split."""
        threads = int(_threads(config["bm"], config["tm"], config["lanes"]))
        smem = int(_smem_bytes(workload, config["bm"], config["bn"], config["lanes"]))
        return _forward.launches(workload, config, "attention_simt<Choice>", threads, smem)

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the results of parts, if keys are split."""
        return _forward.scratch(workload, config["split"])

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        key_tiles = 2 * min(config["split"], 8) + 1
        return _forward.shrink(workload, config["bm"], config["bn"], config["pack_heads"], key_tiles)


VARIANT = CudaSimtAttention()
