"""Attention gradients in CUDA C++ on tensor cores by mma.sync (from sm_80): f16 and bf16, summed in f32.

A first kernel sums do * o over the row of each query. Then a block owns a tile of keys, `rows` for each of
its `warps`, and iterates over the queries that attend to them, of all heads that share the keys, `step` at a
time. It recomputes scores and probabilities from lse, transposed, for `part` queries at a time, so that the
result of one product is an operand of the next without leaving registers; dk and dv are summed there.
cp.async copies tiles into `stages` buffers of shared memory, in which 16-byte chunks of a line are permuted
(or lines are padded by 16 bytes), so that ldmatrix reads them without bank conflicts, transposed where
necessary.

dq is a sum over keys. With dq=second_pass another kernel, whose blocks own queries, recomputes the scores:
7 products instead of 5, and reproducible results. With dq=atomic, warps of a block exchange ds through shared
memory and add their part of dq to f32 sums in global memory, in any order; a last kernel rounds the sums. If
the sums of dk and dv do not fit in registers together, from head_dim 136, each has a separate pass.

Limits: head_dim is a multiple of 8, so that lines consist of 16-byte chunks, and at most 256.

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023,
algorithm 2; PTX ISA, "Warp-level matrix instructions" and "cp.async".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.attention import _attention_backward as backward
from tunebench.kernels.attention import _attention_forward as _forward
from tunebench.kernels.attention import _attention_scores as _scores
from tunebench.kernels.attention._attention import mma_refusal, padded
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.common.mma_tile import reached_flop_per_clock
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

MAX_HEAD_DIM = 256
TOGETHER = 128
"""Longest line for which a warp keeps 16 rows of dk and of dv in registers."""
HELD = 176
"""Most sums, of gradients and scores, that a thread keeps without spilling."""


def _apart(workload: Attention) -> bool:
    """Return whether dk and dv have separate passes."""
    return padded(workload) > TOGETHER


def _pitch(workload: Attention) -> int:
    """Return the distance of lines in shared memory, in elements."""
    chunks = padded(workload) // 8
    return 8 * (chunks + (chunks & (chunks - 1) != 0))


def _smem_bytes(workload: Attention, tile: Any, step: Any, stages: Any, adds_dq: Any) -> Any:
    """Return the shared memory of a block: its rows, buffers with the queries' terms, and ds if needed."""
    lines = 2 * _pitch(workload) * (2 * tile + 2 * stages * step)
    return lines + 8 * stages * step + 2 * tile * step * adds_dq


def shared_memory_fits(
    warps: Any, rows: Any, dq: Any, dq_rows: Any, step: Any, stages: Any, workload: Attention, device: Device
) -> Any:
    """The tiles of either pass must fit in the shared memory of a block."""
    atomic = dq == "atomic"
    keys = _smem_bytes(workload, warps * rows, step, stages, atomic)
    queries = _smem_bytes(workload, warps * dq_rows, step, stages, False)
    return np.maximum(keys, np.where(atomic, 0, queries)) <= device.smem_per_block_bytes


def sums_fit(rows: Any, dq_rows: Any, part: Any, workload: Attention) -> Any:
    """Sums of a warp's rows, and scores and their gradients, must fit in registers."""
    gradients = 1 if _apart(workload) else 2
    keys = rows * padded(workload) // 32 * gradients + rows * part // 16
    queries = dq_rows * padded(workload) // 32 + dq_rows * part // 16
    return (keys <= HELD) & (queries <= HELD)


def tiles_are_useful(warps: Any, rows: Any, step: Any, workload: Attention) -> Any:
    """Tiles must not be twice as large as the sequence if smaller tiles exist."""
    of_keys = (warps * rows <= 64) | (warps * rows < 2 * workload.seq_k)
    return of_keys & backward.is_useful(workload, step, 16)


def dq_is_useful(warps: Any, dq: Any, dq_rows: Any, step: Any, workload: Attention) -> Any:
    """A second pass needs useful tiles; atomic sums need a part of dq for each warp, in whole operands."""
    by_query = np.minimum(warps, step // 16)
    shared = padded(workload) % (16 * (warps // by_query)) == 0
    of_use = (dq_rows == 16) | (warps * dq_rows < 2 * workload.seq_q)
    return np.where(dq == "atomic", shared & (dq_rows == 16), of_use)


SPACE = Space(
    (
        Parameter("warps", (4, 8), "warps of a block"),
        Parameter("rows", (16, 32), "keys of a warp, for dk and dv"),
        Parameter("step", (16, 32, 64, 128), "rows of the other side in one buffer"),
        Parameter("part", (16, 32), "rows of these whose scores a warp has in registers at a time"),
        Parameter("stages", (1, 2, 3), "buffers: one is multiplied while the others are copied"),
        Parameter("dq", ("atomic", "second_pass"), "dq: atomic sums by blocks of keys, or a second kernel"),
        Parameter("dq_rows", (16, 32), "queries of a warp in that kernel"),
        backward.TOGETHER,
    ),
    (
        tiles_are_useful,
        sums_fit,
        shared_memory_fits,
        dq_is_useful,
        lambda step, part: part <= step,
        backward.lengths_differ,
    ),
)

USUAL = (
    # warps, rows, step, stages, dq_rows; largest first
    (4, 32, 64, 2, 32),
    (8, 16, 64, 2, 32),
    (8, 16, 32, 2, 16),
    (4, 16, 64, 2, 16),
    (4, 16, 32, 2, 16),
    (4, 16, 32, 1, 16),
    (4, 16, 16, 1, 16),
)
"""Tiles that fill the registers and shared memory of some device."""

OTHER_REGISTERS = 56
"""Registers of a thread in addition to sums and scores: fragments, terms of queries, addresses."""
OF_SCORE = 8.0
"""Instructions of a score: argument, power, difference, product, mask, term, and conversion of two values."""

SOURCE = """
// Rows of the other side in an iteration.
struct Step {
  int head, first, buffer;
};

// One side's gradients from a tile of its rows: dk and dv of keys (or one of them), or dq of queries. A warp
// has 16 R of the rows X (k, or q) and Y (v, or do), and reads rows U (q, or k) and W (do, or v) of the other
// side STEP at a time: S = X U^T, P = exp(scale S - lse), dP = Y W^T, dS = P * (dP - D). It sums P W (dv)
// and dS U (dk, or dq). C holds the constants of workload and configuration.
template <class C, bool OF_QUERIES, bool SUMS_P, bool SUMS_DS>
__global__ void __launch_bounds__(C::THREADS, 1)
attention_gradients(const typename C::In* __restrict__ q, const typename C::In* __restrict__ k,
                    const typename C::In* __restrict__ v, const typename C::In* __restrict__ dout,
                    const float* __restrict__ terms, typename C::In* __restrict__ of_p,
                    typename C::In* __restrict__ of_ds, int group, int seq_q, int seq_k, float scale,
                    float* __restrict__ dq_sums@PARAMETERS@) {@BIASES@
  using In = typename C::In;
  constexpr int R = (OF_QUERIES ? C::DQ_ROWS : C::ROWS) / 16, BLOCK = 16 * R * C::WARPS;
  constexpr int WIDTH = C::HEAD_DIM, LENGTH = C::DEPTH, STEP = C::STEP, PART = C::PART, N = PART / 8;
  constexpr int LINE = Lines<In, LENGTH>::PITCH;
  constexpr bool ADDS_DQ = C::ADDS_DQ && !OF_QUERIES && SUMS_DS;
  In* const x = reinterpret_cast<In*>(dynamic_shared());
  In* const y = x + BLOCK * LINE;
  In* const buffers = y + BLOCK * LINE;  // U and W, STAGES of each
  float* const buffered_terms = reinterpret_cast<float*>(buffers + 2 * C::STAGES * STEP * LINE);
  In* const all_ds = reinterpret_cast<In*>(buffered_terms + 2 * C::STAGES * STEP);  // for atomic sums of dq

  const int rows = OF_QUERIES ? seq_q : seq_k, others = OF_QUERIES ? seq_k : seq_q;
  const RowTile tile = row_tile_of_block<C::BY_HEAD, OF_QUERIES && C::CAUSAL>(rows, BLOCK);
  const Sight<C::CAUSAL> sees = {seq_q, seq_k@ROWS@};
  const Range range = OF_QUERIES ? sees.keys_of(tile.first, BLOCK, STEP) : sees.queries_of(tile.first, STEP);
  const int steps = (OF_QUERIES ? 1 : group) * range.count;  // keys iterate over each head of their group
  const i64 corner = (i64(tile.head) * rows + tile.first) * WIDTH;
  copy_lines<In, BLOCK, LENGTH, WIDTH, C::THREADS>(x, (OF_QUERIES ? q : k) + corner, rows - tile.first);
  if constexpr (SUMS_DS)
    copy_lines<In, BLOCK, LENGTH, WIDTH, C::THREADS>(y, (OF_QUERIES ? dout : v) + corner, rows - tile.first);

  // Rows and buffer of an iteration: heads one after the other, with the range of each.
  const int start = range.first * STEP, end = start + range.count * STEP;
  const auto first_step = [&] { return Step{OF_QUERIES ? tile.head / group : tile.head * group, start, 0}; };
  const auto move_on = [&](Step& step) {
    step.first += STEP;
    if (step.first >= end) step.first = start, ++step.head;
    step.buffer = step.buffer + 1 == C::STAGES ? 0 : step.buffer + 1;
  };
  Step copied = first_step(), here = first_step();
  int to_copy = steps;
  const auto copy_next = [&] {
    if (to_copy > 0) {
      const i64 row = i64(copied.head) * others + copied.first;
      const int room = others - copied.first, query = threadIdx.x;
      In* const u = buffers + copied.buffer * 2 * STEP * LINE;
      copy_lines<In, STEP, LENGTH, WIDTH, C::THREADS>(u, (OF_QUERIES ? k : q) + row * WIDTH, room);
      copy_lines<In, STEP, LENGTH, WIDTH, C::THREADS>(u + STEP * LINE, (OF_QUERIES ? v : dout) + row * WIDTH,
                                                      room);
      // A query beyond the last has zero terms and P = 1, but P and dS are multiplied by zero.
      if (!OF_QUERIES && query < STEP)
        cp_async_ca<8>(buffered_terms + (copied.buffer * STEP + query) * 2,
                       terms + (query < room ? 2 * (row + query) : 0), query < room ? 8 : 0);
      move_on(copied);
      --to_copy;
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < C::STAGES - 1; ++stage) copy_next();

  const int lane = int(threadIdx.x) % 32, own = int(threadIdx.x) / 32 * 16 * R;  // first line of this warp
  Vec<float, 2> own_terms[R][2] = {};
  if constexpr (OF_QUERIES) {
#pragma unroll
    for (int i = 0; i < 2 * R; ++i) {
      const int row = tile.first + own + 8 * i + lane / 4;
      if (row < rows) own_terms[i / 2][i % 2] = load_vec<2>(terms + 2 * (i64(tile.head) * rows + row));
    }
  }
  const float exponent = scale * LOG2_E;
  float sums_p[R][LENGTH / 8][4] = {}, sums_ds[R][LENGTH / 8][4] = {};
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    if constexpr (C::STAGES == 1) {
      __syncthreads();  // before the only buffer is overwritten
      copy_next();
      cp_async_wait<0>();
      __syncthreads();
    } else {
      cp_async_wait<C::STAGES - 2>();
      __syncthreads();  // the copies are complete, and the buffer that is filled next has been read
      copy_next();
    }
    const In* const u = buffers + here.buffer * 2 * STEP * LINE;
    const In* const w = u + STEP * LINE;
@BIAS_OF_HEAD@
    const bool all_seen =
        OF_QUERIES ? sees.all(tile.first, here.first, STEP) : sees.all(here.first, tile.first, BLOCK);
#pragma unroll 1
    for (int part = 0; part < STEP; part += PART) {
      float p[R][N][4] = {}, ds[R][N][4] = {};
      multiply_lines<LENGTH>(p, x, own, u, part);
      if constexpr (SUMS_DS) multiply_lines<LENGTH>(ds, y, own, w, part);
      // The terms for element e of operand n in rows r, by its row or column.
      Vec<float, 4> column_terms[N];
      if constexpr (!OF_QUERIES) {
        const float* const of_lane = buffered_terms + (here.buffer * STEP + part + lane % 4 * 2) * 2;
#pragma unroll
        for (int n = 0; n < N; ++n) column_terms[n] = load_vec<4>(of_lane + 16 * n);
      }
      const auto term = [&](int r, int n, int e, int which) {
        return OF_QUERIES ? own_terms[r][e / 2].at[which] : column_terms[n].at[e % 2 * 2 + which];
      };
@ADD_BIAS@
      each_element<R, N>([&](int r, int n, int e) {
        p[r][n][e] = fast_exp2(multiply_add(p[r][n][e], exponent, @TERM@));
      });
      if (!all_seen)
        each_element<R, N>([&](int r, int n, int e) {
          const int row = tile.first + own + 16 * r + e / 2 * 8 + lane / 4;
          const int other = here.first + part + 8 * n + lane % 4 * 2 + e % 2;
          if (!(OF_QUERIES ? sees(row, other) : sees(other, row))) p[r][n][e] = 0.0f;
        });
      if constexpr (SUMS_P) multiply_rounded<LENGTH>(sums_p, p, w, part);
      if constexpr (SUMS_DS) {
        each_element<R, N>([&](int r, int n, int e) {
          ds[r][n][e] = f32_op(p[r][n][e] * f32_op(ds[r][n][e] - term(r, n, e, 1)));
        });
        multiply_rounded<LENGTH>(sums_ds, ds, u, part);
        if constexpr (ADDS_DQ) store_rounded<Lines<In, STEP>>(all_ds, own, part, ds, 1.0f);
      }
    }
    if constexpr (ADDS_DQ) {
      __syncthreads();  // dS of all keys is complete
      float* const of_step = dq_sums + (i64(here.head) * seq_q + here.first) * WIDTH;
      add_to_queries<LENGTH, WIDTH, BLOCK, STEP, C::WARPS>(of_step, seq_q - here.first, all_ds, x);
    }
    move_on(here);
  }
  cp_async_wait<0>();
  __syncthreads();  // the tiles are no longer in use
  const i64 target = corner + own * WIDTH;
  const int room = rows - tile.first - own;
  if constexpr (SUMS_P) store_rows<LENGTH, WIDTH>(of_p + target, room, x, own, sums_p, 1.0f);
  if constexpr (SUMS_DS) store_rows<LENGTH, WIDTH>(of_ds + target, room, x, own, sums_ds, scale);
}
"""


BIAS = {
    "TERM": "biased_term(r, n, e)",
    "BIAS_OF_HEAD": """
    const In* const of_head = biases.head(OF_QUERIES ? tile.head : here.head);""",
    "ADD_BIAS": """
      const auto biased_term = [&](int r, int n, int e) {
        const int row = tile.first + own + 16 * r + e / 2 * 8 + lane / 4;
        const int other = here.first + part + 8 * n + lane % 4 * 2 + e % 2;
        const int query = OF_QUERIES ? row : other, key = OF_QUERIES ? other : row;
        if (query >= seq_q || key >= seq_k) return term(r, n, e, 0);
        return add_bias_to_term(term(r, n, e, 0), of_head[query * biases.of_query + key]);
      };""",
}
"""Text of @WORDS@ in the kernel for workloads with a bias."""

WINDOW = {"ROWS": ", BLOCK"}
"""Text of @WORDS@ in the kernel for masks with a window or ``align=first``."""


def _usual(workload: Attention, dq: str) -> Iterator[Config]:
    """Yield the usual tiles; with long lines, registers only allow short steps."""
    for tile in USUAL:
        values = dict(zip(("warps", "rows", "step", "stages", "dq_rows"), tile, strict=True))
        if dq == "atomic":
            values["dq_rows"] = 16
        if values["step"] <= 32 or not _apart(workload):
            yield Config({**values, "part": 16, "dq": dq, "together": "head"})


def _blocks(workload: Attention, config: Config) -> int:
    return int(backward.blocks(workload, "keys", config["warps"] * config["rows"]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A kernel over the scores: the side that blocks own, the gradients that they sum, and the table rows."""

    side: backward.Side
    sums_p: bool
    sums_ds: bool
    adds_dq: Any = False
    made: Any = True

    def work(self, workload: Attention, table: Table) -> backward.PassWork:
        """Count whole tiles; for copies, only existing rows."""
        names = ("warps", "rows" if self.side == "keys" else "dq_rows", "step", "part")
        warps, rows, step, part = (table[name].astype(np.float64) for name in names)
        tile, depth, scores = warps * rows, float(padded(workload)), 1 + self.sums_ds
        loops = backward.loop_counts(workload, self.side, table["warps"] * table[names[1]], table["step"])
        products = scores + self.sums_p + self.sums_ds + self.adds_dq
        flop = 2 * tile * step * depth * products
        fragments = self._fragments(workload, warps, rows, step, part)
        copied = 4.0 * depth * step + 2 * tile * step * self.adds_dq
        # For operands of 8 queries, a warp reads 64 bytes of terms in one pass.
        copied = copied + (128 * warps * step / 8 if self.side == "keys" else 0)
        of_step = {
            "mma_flop": flop,
            "sfu": tile * step,
            "fma": tile * step * (1 + 2 * self.sums_ds),
            "smem_traffic_bytes": 512 * fragments + copied,
            "instructions": flop / 4096 + fragments + tile * step / 32,
        }
        line_bytes = 2.0 * workload.head_dim
        row_bytes = scores * line_bytes
        of_block = {
            "smem_traffic_bytes": 2 * scores * tile * depth,
            "fill_bytes": row_bytes * loops.rows + 2 * line_bytes * loops.lines,
        }
        all_rows = backward.heads_of(workload, self.side) * backward.rows_of(workload, self.side)
        of_all = {"fill_bytes": row_bytes * all_rows + 2 * line_bytes * loops.all_lines}
        of_all["smem_traffic_bytes"] = loops.blocks * of_block["smem_traffic_bytes"]
        figures = (
            {name: self.made * value for name, value in figures_of.items()}
            for figures_of in (of_step, of_block, of_all)
        )
        return backward.PassWork(loops, *figures)

    def _fragments(self, workload: Attention, warps: Any, rows: Any, step: Any, part: Any) -> Any:
        """Return the fragments of 512 bytes that a block reads in an iteration."""
        deep = padded(workload) / 16
        fragments = (1 + self.sums_ds) * warps * step / part * deep * (rows + part) / 16
        fragments = fragments + (self.sums_p + self.sums_ds) * warps * step / 16 * deep
        by_query = np.minimum(warps, step / 16)
        by_column = warps / by_query
        columns = deep / by_column  # in units of 16 columns; a warp processes two at a time if it can
        repeats = columns / np.where(columns % 2 == 0, 2, 1)
        return fragments + self.adds_dq * warps * warps * rows / 16 * (
            step / by_query / 16 * repeats + columns
        )


class CudaMmaAttentionBackward(CudaVariant[Attention]):
    """Backward variant for f16 and bf16 from sm_80: causal or not, with grouped queries, any lengths."""

    name = "cuda_mma_backward"
    operator = Attention
    direction = "backward"
    space = SPACE
    minimum_cc = (8, 0)

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why a workload cannot use tensor cores or 16-byte copies, or None."""
        refused = mma_refusal(workload, self.key, MAX_HEAD_DIM)
        return refused or backward.refusal(workload, self.key, 64)

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the largest usual tile that gives each SM a block, with the dq method of libraries."""
        usual = [config for dq in ("atomic", "second_pass") for config in _usual(workload, dq)]
        full = [config for config in usual if _blocks(workload, config) >= device.sm_count]
        small = [config for config in reversed(usual) if config["step"] >= 32 or workload.seq_q <= 16]
        return self.space.first_valid((*full, *small, *usual), workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of both sequences for blocks of keys, and the tile of head_dim in instructions."""
        keys = config["warps"] * config["rows"]
        return backward.tiles(workload, keys, config["step"], padded(workload))

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count whole tiles; tiles that are masked completely are skipped.

        The kernels before and after the passes are not counted.
        """
        atomic = table["dq"] == "atomic"
        warps, rows, step = (table[name].astype(np.float64) for name in ("warps", "rows", "step"))
        apart = _apart(workload)
        of_keys = _Pass(side="keys", sums_p=not apart, sums_ds=True, adds_dq=atomic)
        of_queries = _Pass(side="queries", sums_p=False, sums_ds=True, made=~atomic)
        passes = [of_keys, *([_Pass(side="keys", sums_p=True, sums_ds=False)] if apart else []), of_queries]
        works = [backward_pass.work(workload, table) for backward_pass in passes]
        loops = works[0].met
        sums = rows * padded(workload) / 32 * (1 if apart else 2)
        return backward.as_costs(
            tuple(works),
            "mma_flop",
            ("mma_flop", "sfu", "fma", "smem_traffic_bytes", "fill_bytes", "instructions"),
            threads=32 * warps,
            smem_bytes=_smem_bytes(workload, warps * rows, step, table["stages"], atomic),
            registers=sums + 16,
            mma_dtype=workload.dtype,
            # A sum of dk or dv takes one product for 16 queries; the next product waits for it.
            chain_clocks=first_product(device) + loops.most * step / 16 * device.mma_latency,
            serial_launches=3 + apart,
            execution=self._execution(workload, table, device, works[0]),
        )

    def _execution(
        self, workload: Attention, table: Table, device: Device, work: backward.PassWork
    ) -> Execution:
        """Describe a block of the first pass; the others take as long for their products.

        Args:
            workload: The workload.
            table: Configurations.
            device: The device, for its rates.
            work: Costs of the first pass.
        """
        warps, rows, step, part, stages = (
            table[name].astype(np.float64) for name in ("warps", "rows", "step", "part", "stages")
        )
        depth, steps, atomic = padded(workload), work.met.most, table["dq"] == "atomic"
        tile, gradients = warps * rows, 1 if _apart(workload) else 2
        of_warp = work.of_busiest("mma_flop") / warps
        product_clocks = of_warp * device.partitions / reached_flop_per_clock(workload.dtype, device)
        # Probabilities, then gradients of scores: three more operations of a score.
        between = _forward.softmax_clocks(rows * step / 32, 3 * rows * step / 32, device)
        # Each lane adds 4 bytes to dq; those of a warp are in eight rows.
        added = np.where(atomic, steps * step * workload.head_dim, 0.0)
        copies = (2 * steps * step + 2 * tile) * depth / 8
        one_buffer = stages == 1
        return Execution(
            registers=rows * depth / 32 * gradients + rows * part / 16 + OTHER_REGISTERS,
            instructions=work.of_busiest("instructions")
            + steps * tile * step / 32 * OF_SCORE
            + steps * warps * (40 + 20 * step / part),
            accesses=copies + added,
            passes=work.of_busiest("smem_traffic_bytes") / 128 + added / 32 * 8,
            l2_bytes=work.of_busiest("fill_bytes") + 2 * tile * workload.head_dim * 2 + added / 32 * 8 * 32,
            # The rows of the block, the kernels before and after, and with one buffer each step.
            memory_waits=3 + np.where(one_buffer, steps, 0),
            prefetched_waits=np.where(one_buffer, 0, steps / np.maximum(1, stages - 1)),
            shared_waits=steps * (2 * step / part + 2),
            barriers=steps * (1 + one_buffer + atomic),
            tensor_clocks=product_clocks * warps / device.partitions,
            warp_clocks=product_clocks + steps * between,
        )

    def claims(self, workload: Attention, config: Config) -> tuple[str, ...]:
        """Return tensor cores, asynchronous copies, and ldmatrix."""
        return ("HMMA", "LDGSTS", "LDSM")

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernels for a head_dim, type and configuration; other sizes are arguments."""
        parameters = ("warps", "rows", "dq_rows", "step", "part", "stages")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in parameters}
        choices |= {"THREADS": 32 * config["warps"], "DEPTH": padded(workload)}
        choices |= {"ADDS_DQ": config["dq"] == "atomic", "SUM_COLUMNS": workload.head_dim}
        choices |= {"BY_HEAD": config["together"] == "head"}
        choice = constants("Choice", **backward.workload_constants(workload), **choices)
        shared = ("types", "ptx", "reduce", "gemm", "gemm_mma", "attention_operand")
        kernel = _scores.with_scores(SOURCE, workload, BIAS, WINDOW, TERM="term(r, n, e, 0)")
        preamble = helpers(*shared) + backward.headers(workload)
        return preamble + helpers("attention_backward_mma") + choice + kernel

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return the kernel for the terms of queries, the passes over the scores, and the rounding of dq."""
        atomic = config["dq"] == "atomic"
        of_keys = [(True, False), (False, True)] if _apart(workload) else [(True, True)]
        passes = [self._pass(workload, config, "keys", *sums) for sums in of_keys]
        last = self._round(workload) if atomic else self._pass(workload, config, "queries", False, True)
        return (backward.terms_launch(workload, "dq_sums" if atomic else "terms"), *passes, last)

    def _pass(
        self, workload: Attention, config: Config, side: backward.Side, sums_p: bool, sums_ds: bool
    ) -> Launch:
        """Return one pass over the scores; an output that it does not write repeats another argument."""
        adds = config["dq"] == "atomic" and side == "keys"
        tile = config["warps"] * config["rows" if side == "keys" else "dq_rows"]
        return backward.pass_launch(
            workload,
            side,
            tile=tile,
            threads=32 * config["warps"],
            smem_bytes=int(_smem_bytes(workload, tile, config["step"], config["stages"], adds)),
            flags=(sums_p, sums_ds),
            more=("dq_sums" if adds else "terms",),
        )

    def _round(self, workload: Attention) -> Launch:
        vectors = workload.batch * workload.heads * workload.seq_q * workload.head_dim // 8
        return Launch(
            entry="attention_round<Choice>",
            grid=(ceil_div(vectors, backward.TERMS_THREADS), 1, 1),
            block=(backward.TERMS_THREADS, 1, 1),
            arguments=("dq_sums", "dq", Scalar("long long", vectors), Scalar("float", workload.scale)),
        )

    def is_reproducible(self, workload: Attention, config: Config) -> bool:
        """Return whether no sums are atomic."""
        return bool(config["dq"] != "atomic")

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the terms of queries, and for the sums of dq if they are atomic."""
        terms = backward.terms_scratch(workload)
        if config["dq"] != "atomic":
            return (terms,)
        shape = (workload.batch, workload.heads, workload.seq_q, workload.head_dim)
        return (terms, Tensor(name="dq_sums", shape=shape, dtype="f32"))

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        keys, queries = config["warps"] * config["rows"], config["warps"] * config["dq_rows"]
        tile_q = queries if config["dq"] == "second_pass" else config["step"]
        return backward.shrink(workload, max(tile_q, config["step"] * config["stages"] // 2), keys)


VARIANT = CudaMmaAttentionBackward()
