"""Reduction of the rows of each column in CUDA C++ (`axis=rows`): threads own columns and iterate over rows.

The kernel is generated from the expression. A block has `col_threads` threads along a row and `row_threads`
down the rows. A thread keeps one result for each of its `vector` columns, and loads `unroll` rows at a time.
Threads of a column exchange results through shared memory. Rows are split into `split` parts, so that few
columns keep the device busy: each part stores its results in scratch memory, and a second launch joins them
in a fixed order.

Source: NVIDIA, "CUDA Pro Tip: Increase Performance with Vectorized Memory Access"; Harris, "Optimizing
Parallel Reduction in CUDA", 2007.
"""

from __future__ import annotations

import dataclasses

from tunebench.device import Device
from tunebench.kernels.common import column_block
from tunebench.kernels.common.column_block import ColumnWork, column_costs
from tunebench.kernels.common.cuda_expression import column_loads, filled
from tunebench.kernels.common.expected import expression_instructions
from tunebench.kernels.common.reduction import CudaReduction, fit, fma_of_element, sfu_of_element, source
from tunebench.space import Config, Space, Table
from tunebench.variant import Costs, Tiling
from tunebench.workloads.operators.reduction import Reduction

COLUMNS_AT_END, PARTS_AT_END = 32, 8
"""Threads along and down in the launch that joins parts."""


SPACE = Space(
    column_block.PARAMETERS,
    (
        *column_block.CONSTRAINTS,
        lambda col_threads, row_threads, vector, unroll, workload, device: fit(
            workload,
            col_threads * row_threads,
            vector * unroll * len(workload.whole_names),
            vector * (len(workload.vector_names) + 2) + unroll * len(workload.column_names),
            device,
        ),
    ),
)

# Words between @ are replaced by text that depends on the expression.
KERNELS = r"""
template <class Op, class In, class Left, bool ALL_ROWS, int COL_THREADS, int ROW_THREADS, int V, int N>
__global__ void __launch_bounds__(COL_THREADS * ROW_THREADS)
    reduce_columns(@PARAMETERS@, Left* __restrict__ left, float factor, int rows, int cols) {
  const u32 base = blockIdx.x * COL_THREADS, column = (base + threadIdx.x % COL_THREADS) * V;
  // Columns beyond the end have no rows; their threads still reach the barrier.
  const i64 begin = i64(rows) * blockIdx.y / gridDim.y;
  const i64 end = column < u32(cols) ? i64(rows) * (blockIdx.y + 1) / gridDim.y : 0;
@LOAD_VECTORS@
  const Op op;
  float totals[V];
#pragma unroll
  for (int i = 0; i < V; ++i) totals[i] = Op::neutral();
  for (i64 first = begin + threadIdx.x / COL_THREADS; first < end; first += ROW_THREADS * N) {
    const In* const whole[] = {@WHOLE@};
    constexpr int WHOLE = sizeof(whole) / sizeof(whole[0]);
    Vec<In, V> held[N][WHOLE];@EACH@
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const i64 row = first + n * ROW_THREADS;
#pragma unroll
      for (int w = 0; w < WHOLE; ++w)
        if (row < end) held[n][w] = load_vec<V>(whole[w] + row * cols + column);@LOAD_EACH@
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (first + n * ROW_THREADS >= end) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) totals[i] = op(totals[i], chain(@ARGUMENTS@));
    }
  }

  const auto put = [&](u32 at, float total) {
    if (at >= u32(cols)) return;
    if constexpr (ALL_ROWS) {
      left[at] = from_float<Left>(finish(total * factor));
    } else {
      left[size_t(blockIdx.y) * cols + at] = total;
    }
  };
  if constexpr (ROW_THREADS > 1) {
    // Element i of all threads of a row is contiguous, so that the lanes of a warp use different banks.
    __shared__ float met[ROW_THREADS][V][COL_THREADS];
#pragma unroll
    for (int i = 0; i < V; ++i) met[threadIdx.x / COL_THREADS][i][threadIdx.x % COL_THREADS] = totals[i];
    __syncthreads();
    for (int c = threadIdx.x; c < V * COL_THREADS; c += COL_THREADS * ROW_THREADS) {
      const int i = c / COL_THREADS, thread = c % COL_THREADS;
      float total = met[0][i][thread];
#pragma unroll
      for (int r = 1; r < ROW_THREADS; ++r) total = op(total, met[r][i][thread]);
      put((base + thread) * V + i, total);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) put(column + i, totals[i]);
  }
}

// `partial` has (parts, cols); 8 threads share the parts of a column.
template <class Op, class Out>
__global__ void __launch_bounds__(256)
    end_columns(const float* __restrict__ partial, Out* __restrict__ out, float factor, int cols, int parts) {
  __shared__ float met[8][32];
  const u32 column = blockIdx.x * 32 + threadIdx.x % 32;
  const int down = threadIdx.x / 32;
  const Op op;
  float total = Op::neutral();
  if (column < u32(cols))
    for (int part = down; part < parts; part += 8) total = op(total, partial[size_t(part) * cols + column]);
  met[down][threadIdx.x % 32] = total;
  __syncthreads();
  if (down != 0 || column >= u32(cols)) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) total = op(total, met[r][threadIdx.x]);
  out[column] = from_float<Out>(finish(total * factor));
}
"""


class CudaColumnReduction(CudaReduction):
    """Variant for every expression, size and type that reduces the rows of each column."""

    name = "cuda_column"
    space = SPACE
    axis = "rows"
    kernels = "columns"
    shape = ("col_threads", "row_threads", "vector", "unroll")
    at_end = (COLUMNS_AT_END, PARTS_AT_END)

    def default(self, workload: Reduction, device: Device) -> Config:
        """Return wide accesses, up to a warp along a row, 256 threads, and two blocks per SM if possible."""
        return column_block.default_config(self.space, workload, device)

    def tiles(self, workload: Reduction, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of columns and of rows."""
        return column_block.tiles(workload, config)

    def costs(self, workload: Reduction, table: Table, device: Device) -> Costs:
        """Count the operations and loads of an element of the expression."""
        whole = len(workload.whole_names)
        fma, sfu = fma_of_element(workload), sfu_of_element(workload)
        work = ColumnWork(
            read=whole,
            moved=whole,
            fma=fma,
            sfu=sfu,
            is_sum=workload.is_sum,
            instructions=1 + expression_instructions(workload.tree),
        )
        return column_costs(workload, table, device, work)

    def source(self, workload: Reduction, config: Config) -> str:
        """Return the kernels of this expression."""
        loads = column_loads(workload, "row < end", column_exists="if (column < u32(cols)) ")
        return source(workload, filled(KERNELS, **loads))

    def blocks(self, workload: Reduction, config: Config) -> int:
        """Return the number of blocks along a row."""
        return int(column_block.along(workload, config["col_threads"], config["vector"]))

    def emulation_workload(self, workload: Reduction, config: Config) -> Reduction:
        """Return 2 tiles of columns and 3 iterations over rows, the last of each partial."""
        rows, cols = column_block.small(workload, config)
        return dataclasses.replace(workload, rows=rows, cols=cols)


VARIANT = CudaColumnReduction()
