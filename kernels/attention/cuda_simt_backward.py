"""Attention gradients in CUDA C++ on general-purpose cores: any type, multiplied in f32, on any GPU.

A first kernel sums do * o over the row of each query. Then blocks own tiles of `rows` keys, for dk and dv,
and in another kernel tiles of queries, for dq. They iterate over `step` rows of the other side at a time, all
in shared memory as f32. Both kernels recompute scores from lse, so that the order of all sums is fixed. p and
ds are exchanged through shared memory.

Limits: the smallest tiles, 16 rows by 16, must fit in shared memory: head_dim up to about 240 if a block has
64 KB. Terms of queries are read from global memory, through L1.

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023,
algorithm 2.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_backward as backward
from tunebench.kernels.attention import _attention_scores as _scores
from tunebench.kernels.attention._attention import padded
from tunebench.kernels.common.cuda import first_product, helpers
from tunebench.kernels.common.gemm import alignment, constants
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

ALONG = 16
"""Threads along the columns of a tile."""


def _pitch(length: Any) -> Any:
    """Return the distance of lines of `length` elements: an odd number of groups of four."""
    return np.where(length // 4 % 2 == 0, length + 4, length)


def _smem_bytes(workload: Attention, rows: Any, step: Any) -> Any:
    """Return the shared memory of a block: two tiles of either side, p and ds, all f32."""
    return 4 * ((2 * rows + 2 * step) * _pitch(padded(workload, 4)) + 2 * rows * _pitch(step))


def _sums(workload: Attention, threads: Any, rows: Any) -> Any:
    """Return the sums that a thread keeps for one gradient."""
    return rows // (threads // ALONG) * ceil_div(padded(workload, 4), 4 * ALONG) * 4


def work_is_shared(threads: Any, rows: Any, step: Any, workload: Attention) -> Any:
    """Each thread must have some rows, which its registers can hold."""
    rows_per_thread = rows // (threads // ALONG)
    return (
        (rows * ALONG >= threads)
        & (rows_per_thread * step // ALONG <= 16)
        & (_sums(workload, threads, rows) <= 64)
    )


def tiles_are_useful(rows: Any, step: Any, workload: Attention) -> Any:
    """Tiles must not be twice as long as both sequences if smaller tiles exist."""
    return backward.is_useful(workload, rows, 16) & backward.is_useful(workload, step, 16)


SPACE = Space(
    (
        Parameter("threads", (64, 128, 256), "threads of a block"),
        Parameter("rows", (16, 32, 64), "keys, or queries, of a block"),
        Parameter("step", (16, 32, 64), "rows of the other side in an iteration"),
    ),
    (
        work_is_shared,
        tiles_are_useful,
        lambda rows, step, workload, device: _smem_bytes(workload, rows, step) <= device.smem_per_block_bytes,
    ),
)

USUAL = (
    (256, 64, 64),
    (256, 64, 32),
    (256, 32, 32),
    (128, 32, 16),
    (128, 16, 32),
    (64, 16, 16),
    (256, 16, 16),
)
"""Threads, rows and step, largest first."""

SOURCE = """
// One side's gradients from a tile of its rows: dk and dv of keys, or dq of queries. Its rows are X (k, or q)
// and Y (v, or do), and it reads rows U (q, or k) and W (do, or v) of the other side STEP at a time:
// S = X U^T, P = exp(scale S - lse), dP = Y W^T, dS = P * (dP - D). It sums P W (dv) and dS U (dk, or dq).
// C holds the constants of workload and configuration.
template <class C, bool OF_QUERIES>
__global__ void __launch_bounds__(C::THREADS, 1)
attention_gradients(const typename C::In* __restrict__ q, const typename C::In* __restrict__ k,
                    const typename C::In* __restrict__ v, const typename C::In* __restrict__ dout,
                    const float* __restrict__ terms, typename C::In* __restrict__ of_p,
                    typename C::In* __restrict__ of_ds, int group, int seq_q, int seq_k, float scale@PARAMETERS@) {@BIASES@
  constexpr int ROWS = C::ROWS, STEP = C::STEP, PITCH = pitch_of(C::DEPTH), PITCH_P = pitch_of(STEP);
  constexpr int ACROSS = Threads<C>::ACROSS, ALONG = Threads<C>::ALONG, A = ROWS / ACROSS, B = STEP / ALONG;
  extern __shared__ __align__(16) float x[];
  float* const y = x + ROWS * PITCH;
  float* const u = y + ROWS * PITCH;
  float* const w = u + STEP * PITCH;
  float* const all_p = w + STEP * PITCH;
  float* const all_ds = all_p + ROWS * PITCH_P;

  const int rows = OF_QUERIES ? seq_q : seq_k, others = OF_QUERIES ? seq_k : seq_q;
  const RowTile tile = row_tile_of_block<true, OF_QUERIES && C::CAUSAL>(rows, ROWS);
  const Sight<C::CAUSAL> sees = {seq_q, seq_k@ROWS@};
  const Range range = OF_QUERIES ? sees.keys_of(tile.first, ROWS, STEP) : sees.queries_of(tile.first, STEP);
  const i64 corner = (i64(tile.head) * rows + tile.first) * C::HEAD_DIM;
  copy_widened<C, ROWS>(x, (OF_QUERIES ? q : k) + corner, rows - tile.first);
  copy_widened<C, ROWS>(y, (OF_QUERIES ? dout : v) + corner, rows - tile.first);

  Gradient<C, A> of_p_here, of_ds_here;
  const float exponent = scale * LOG2_E;
#pragma unroll 1
  for (int head = 0; head < (OF_QUERIES ? 1 : group); ++head) {  // heads that share these keys
    const i64 other_head = OF_QUERIES ? tile.head / group : i64(tile.head) * group + head;
@BIAS_OF_HEAD@
#pragma unroll 1
    for (int at = range.first * STEP; at < (range.first + range.count) * STEP; at += STEP) {
      const i64 first = other_head * others + at;
      __syncthreads();  // before the tiles are overwritten
      copy_widened<C, STEP>(u, (OF_QUERIES ? k : q) + first * C::HEAD_DIM, others - at);
      copy_widened<C, STEP>(w, (OF_QUERIES ? v : dout) + first * C::HEAD_DIM, others - at);
      __syncthreads();
      float p[A][B] = {}, ds[A][B] = {};
      multiply_rows<C>(p, x, u);
      multiply_rows<C>(ds, y, w);
#pragma unroll
      for (int a = 0; a < A; ++a)
#pragma unroll
        for (int b = 0; b < B; ++b) {
          const int row = Threads<C>::row() + a * ACROSS, column = Threads<C>::column() + b * ALONG;
          const int query = OF_QUERIES ? tile.first + row : at + column;
          const int key = OF_QUERIES ? at + column : tile.first + row;
          const i64 place = (OF_QUERIES ? i64(tile.head) : other_head) * seq_q + query;
          Vec<float, 2> term = {};
          if (query < seq_q) term = load_vec<2>(terms + 2 * place);
@ADD_BIAS@
          float value = fast_exp2(multiply_add(p[a][b], exponent, term.at[0]));
          if (!sees(query, key)) value = 0.0f;
          if constexpr (!OF_QUERIES) all_p[row * PITCH_P + column] = value;
          all_ds[row * PITCH_P + column] = f32_op(value * f32_op(ds[a][b] - term.at[1]));
        }
      __syncthreads();
      if constexpr (!OF_QUERIES) of_p_here.add(all_p, w);
      of_ds_here.add(all_ds, u);
    }
  }
  if constexpr (!OF_QUERIES) of_p_here.store(of_p + corner, rows - tile.first, 1.0f);
  of_ds_here.store(of_ds + corner, rows - tile.first, scale);
}
"""  # noqa: E501 - without a bias the line is short, and must stay one line


BIAS = {
    "BIAS_OF_HEAD": """
    const typename C::In* const of_head = biases.head(OF_QUERIES ? i64(tile.head) : other_head);""",
    "ADD_BIAS": """
          if (query < seq_q && key < seq_k)
            term.at[0] = add_bias_to_term(term.at[0], of_head[query * biases.of_query + key]);""",
}
"""Text of @WORDS@ in the kernel for workloads with a bias."""

WINDOW = {"ROWS": ", ROWS"}
"""Text of @WORDS@ in the kernel for masks with a window or ``align=first``."""


class CudaSimtAttentionBackward(CudaVariant[Attention]):
    """Backward variant for every type and length: causal or not, with grouped queries."""

    name = "cuda_simt_backward"
    operator = Attention
    direction = "backward"
    space = SPACE

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why the smallest tiles do not fit, or None."""
        if _smem_bytes(workload, 16, 16) > device.smem_per_block_bytes or workload.head_dim > 512:
            return f"{self.key} has no tiles that fit in shared memory for head_dim={workload.head_dim}"
        return backward.refusal(workload, self.key, 16)

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the largest usual tile that gives each SM a block."""
        usual = [Config(dict(zip(SPACE.names, values, strict=True))) for values in USUAL]
        full = [c for c in usual if backward.blocks(workload, "keys", c["rows"]) >= device.sm_count]
        return self.space.first_valid((*full, *reversed(usual)), workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of both sequences for blocks of keys, and groups of four columns of head_dim."""
        return backward.tiles(workload, config["rows"], config["step"], padded(workload, 4))

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count whole tiles; tiles that are masked completely are skipped.

        The kernel before the passes is not counted. Reads may hit in L1, so that no load is certain to come
        from L2.
        """
        threads, step = (table[name].astype(np.float64) for name in ("threads", "step"))
        works = tuple(self._work(workload, table, side, device) for side in ("keys", "queries"))
        return backward.as_costs(
            works,
            "fma",
            ("fma", "sfu", "smem_traffic_bytes", "accesses", "instructions"),
            threads=threads,
            smem_bytes=_smem_bytes(workload, table["rows"], table["step"]),
            registers=2 * _sums(workload, table["threads"], table["rows"]) + 16,
            # f32 is added in the order of the source, one query at a time.
            chain_clocks=first_product(device) + works[0].met.most * step * device.fma_latency,
            serial_launches=3,
            execution=self._execution(workload, table, works[0]),
        )

    def _execution(self, workload: Attention, table: Table, work: backward.PassWork) -> Execution:
        """Describe a block of keys; blocks of queries take as long for their products.

        Args:
            workload: The workload.
            table: Configurations.
            work: Costs of the blocks of keys.
        """
        threads, rows, step = (table[name].astype(np.float64) for name in SPACE.names)
        depth, size, steps = padded(workload, 4), itemsize(workload.dtype), work.met.most
        width = min(alignment(workload.head_dim, workload.dtype), 4)
        a, b, warps = rows / (threads / ALONG), step / ALONG, threads / 32
        loaded, copied = 2 * step * depth / width, 2.0 * step * depth
        scores = rows * step
        accesses = work.of_busiest("accesses") + steps * (loaded + copied + 4 * scores)
        return Execution(
            registers=2 * _sums(workload, threads, rows) + 2 * a * b + 4 * (a + b) + 40,
            instructions=work.of_busiest("fma") / 32
            + steps * (scores / 32 * 12 + loaded / 32 * 8 + warps * 60),
            accesses=accesses,
            passes=work.of_busiest("smem_traffic_bytes") / 128 + steps * (loaded + copied + 4 * scores) / 32,
            l2_bytes=(2 * work.met.lines + 4 * rows) * workload.head_dim * size,
            # Rows are copied between barriers, four loads of a thread at a time; terms come from L1.
            memory_waits=3 + steps * np.ceil(loaded / threads / 4),
            l2_waits=steps,
            shared_waits=steps * (2 * depth / 8 + 2 * step / 4),
            barriers=3 * steps,
        )

    def _work(
        self, workload: Attention, table: Table, side: backward.Side, device: Device
    ) -> backward.PassWork:
        """Count the products, and their reads of shared memory."""
        threads, rows, step = (table[name].astype(np.float64) for name in SPACE.names)
        loops = backward.loop_counts(workload, side, table["rows"], table["step"])
        depth, gradients, across = float(padded(workload, 4)), 2 if side == "keys" else 1, threads / ALONG
        a, b, warps = rows / across, step / ALONG, threads / 32
        # Groups of four that a thread reads: of its rows and columns for each score, of factors and lines for
        # each gradient.
        of_scores = 2 * depth / 4 * (a + b)
        of_factors = gradients * step / 4 * a
        of_lines = gradients * step * (depth / 4)  # for a row of threads
        multiplied = rows * step * (depth * (2 + gradients) + 3)
        # A warp has two rows of threads. Their groups of x, or p, need one pass of 128 bytes; those of u
        # differ for 16 threads.
        traffic = warps * (2 * depth / 4 * (128 * a + 256 * b) + 128 * of_factors) + 16 * of_lines * warps
        # From sm_100 one instruction can compute two multiply-adds.
        packed = 2.0 if device.compute_capability >= (10, 0) else 1.0
        return backward.PassWork(
            loops,
            {
                "fma": multiplied,
                "sfu": rows * step,
                "smem_traffic_bytes": traffic,
                "accesses": threads * (of_scores + of_factors) + across * of_lines,
                "instructions": multiplied / 32 / packed + warps * (of_scores + of_factors),
            },
        )

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernels for a head_dim, type and configuration; other sizes are arguments."""
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in SPACE.names}
        choices |= {"DEPTH": padded(workload, 4), "ADDS_DQ": False}
        choice = constants("Choice", **backward.workload_constants(workload), **choices)
        kernel = _scores.with_scores(SOURCE, workload, BIAS, WINDOW)
        preamble = helpers("types", "reduce") + backward.headers(workload)
        return preamble + helpers("attention_backward_simt") + choice + kernel

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return the kernel for the terms of queries, then for dk and dv, then for dq."""
        return (
            backward.terms_launch(workload, "terms"),
            self._pass(workload, config, "keys"),
            self._pass(workload, config, "queries"),
        )

    def _pass(self, workload: Attention, config: Config, side: backward.Side) -> Launch:
        return backward.pass_launch(
            workload,
            side,
            tile=config["rows"],
            threads=config["threads"],
            smem_bytes=int(_smem_bytes(workload, config["rows"], config["step"])),
        )

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the terms of queries."""
        return (backward.terms_scratch(workload),)

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        tile = max(config["rows"], config["step"])
        return backward.shrink(workload, tile, tile)


VARIANT = CudaSimtAttentionBackward()
