"""Reduction of the columns of each row in CUDA C++ (`axis=cols`): threads share a row and reduce by shuffles.

The kernel is generated from the expression. A thread processes every `row_threads`-th vector of its row, with
`unroll` in flight and one result for each of those. If at most a warp shares a row, several rows share a
block. Few rows are split: `split` blocks share a row and store their results in scratch memory, and a second
launch joins them in a fixed order. If rows do not all start at a multiple of an access, they have edges,
whose elements the first of these blocks accesses one by one (row_edges.cuh).

Source: Harris, "Optimizing Parallel Reduction in CUDA", 2007; Luitjens, "Faster Parallel Reductions on
Kepler", NVIDIA, 2014.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda_expression import parameters
from tunebench.kernels.common.expected import (
    PROLOGUE,
    STEP,
    converted,
    exchange,
    expression_instructions,
    l1_passes,
    sector_bytes,
)
from tunebench.kernels.common.expression import filled, operands, variable
from tunebench.kernels.common.reduction import (
    END_ROWS,
    LOOP_REGISTERS,
    MOST_BLOCKS,
    ROWS_AT_END,
    SMALL,
    SPLITS,
    CudaReduction,
    fit,
    fma_of_element,
    sfu_of_element,
    source,
)
from tunebench.kernels.common.row_block import (
    EDGE_PROLOGUE,
    edge_elements,
    kernels_for_rows,
    least_vectors,
    lines_of_access,
    shifted_instructions,
    widest_vector,
    widest_with_edges,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Tiling, ceil_div
from tunebench.workloads.operators.reduction import Reduction

WARP = 32
"""Vectors that a warp accesses at once; parts of a row start at multiples of them."""


def _lines(workload: Reduction, vector: Any) -> Any:
    """Return the least warp accesses of a row, the last one possibly partial; for numbers or columns."""
    return ceil_div(least_vectors(workload, vector), WARP)


SPACE = Space(
    (
        Parameter("row_threads", (4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
        Parameter("rows", (1, 2, 4, 8, 16, 32), "rows of a block"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4, 8), "vectors of a row that a thread has in flight"),
        Parameter("split", SPLITS, "blocks that share a row"),
    ),
    (
        lambda row_threads, rows: (row_threads <= 32) | (rows == 1),
        lambda row_threads, rows: (row_threads * rows >= 32) & (row_threads * rows <= 1024),
        # Every row must start at a multiple of an access, or have a vector wherever it starts.
        lambda vector, workload: (
            ((workload.cols % vector == 0) | (_may_have_edges(workload) & (workload.cols >= 2 * vector)))
            & (vector * itemsize(workload.dtype) <= 16)
        ),
        # Threads without a vector are useless.
        lambda row_threads, vector, workload: (row_threads == 4) | (row_threads * vector < 2 * workload.cols),
        lambda row_threads, vector, unroll, split, workload: (
            (unroll * split == 1) | (1.0 * row_threads * vector * unroll * split < 2 * workload.cols)
        ),
        lambda row_threads, rows, vector, unroll, workload, device: fit(
            workload,
            row_threads * rows,
            vector * unroll * (len(workload.whole_names) + len(workload.vector_names)),
            unroll + SHIFT_REGISTERS * ((workload.cols % vector != 0) & (len(workload.vector_names) > 0)),
            device,
        ),
        # Parts have separate blocks and at least one warp access; more would add no speed.
        lambda rows, row_threads, split: (split == 1) | ((rows == 1) & (row_threads >= 64)),
        lambda vector, split, workload: (split == 1) | (_lines(workload, vector) >= split),
        lambda split, workload, device: (
            (split == 1) | (workload.rows * (split // 2) < MOST_BLOCKS * device.sm_count)
        ),
    ),
)

# Words between @ are replaced by text that depends on the expression.
KERNELS = r"""
template <class Op, class In, class Left, bool WHOLE_ROW, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS)
    reduce_rows(@PARAMETERS@, Left* __restrict__ left, float factor, int rows, int cols) {
  const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS;
  const u32 thread = threadIdx.x % ROW_THREADS;
  // Parts start at multiples of a warp access. A row beyond the end has no vectors; its
  // threads still take part in reductions.
  const u64 vectors = cols / V, lines = ceil_div<u64>(vectors, 32);  // aligned
  const Edges<ROW_THREADS, V> edges(int(thread), row * cols, cols, row < rows && blockIdx.y == 0);  // edges
  const size_t start = edges.start(row * cols);  // edges
  const u64 vectors = edges.vectors, lines = ceil_div<u64>(vectors, 32);  // edges
  const u32 begin = u32(lines * blockIdx.y / gridDim.y * 32);
  const u32 end = row < rows ? u32(min(lines * (blockIdx.y + 1) / gridDim.y * 32, vectors)) : 0;
@LOAD_EACH@
  const Op op;
  float totals[N];
#pragma unroll
  for (int n = 0; n < N; ++n) totals[n] = Op::neutral();
  edges.each_edge([&](int element, int) { totals[0] = op(totals[0], chain(@SINGLE@)); });  // edges
  for (u32 first = begin + thread; first < end; first += ROW_THREADS * N) {
    const In* const stored[] = {@STORED@};
    constexpr int STORED = sizeof(stored) / sizeof(stored[0]);
    Vec<In, V> held[N][STORED];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const u32 vector = first + n * ROW_THREADS;
#pragma unroll
      for (int s = 0; s < STORED; ++s)
        if (vector < end) held[n][s] = load_vec<V>(stored[s] + size_t(vector) * V);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (first + n * ROW_THREADS >= end) continue;
      const int at = edges.before + int(first + n * ROW_THREADS) * V;  // edges
      @LOAD_WEIGHTS@  // edges
      float values[V];
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = chain(@ARGUMENTS@);
#pragma unroll
      for (int i = 1; i < V; ++i) values[0] = op(values[0], values[i]);
      totals[n] = op(totals[n], values[0]);
    }
  }
#pragma unroll
  for (int n = 1; n < N; ++n) totals[0] = op(totals[0], totals[n]);
  const float total = reduce_row<ROW_THREADS>(totals[0], op);
  if (thread != 0 || row >= rows) return;
  if constexpr (WHOLE_ROW) {
    left[row] = from_float<Left>(finish(total * factor));
  } else {
    left[row * gridDim.y + blockIdx.y] = total;
  }
}
"""


SHIFT_REGISTERS = 16
"""Registers that shift the vectors of rows with edges: the words of two accesses, and their addresses."""


def _may_have_edges(workload: Reduction) -> bool:
    """Return whether rows may have edges: an operand has rows."""
    return len(workload.whole_names) > 0


class CudaRowReduction(CudaReduction):
    """Variant for every expression, size and type that reduces the columns of each row."""

    name = "cuda_row"
    space = SPACE
    axis = "cols"
    kernels = "rows"
    shape = ("row_threads", "rows", "vector", "unroll")
    at_end = (ROWS_AT_END, WARP)

    def default(self, workload: Reduction, device: Device) -> Config:
        """Return wide accesses, about 16 elements per thread, and two blocks per SM if rows allow it."""
        vector = widest_with_edges(workload) if _may_have_edges(workload) else widest_vector(workload)
        row_threads = next((t for t in (4, 8, 16, 32, 64, 128) if workload.cols <= 16 * t), 256)
        while row_threads > 4 and row_threads * vector >= 2 * workload.cols:
            row_threads //= 2
        rows = max(1, 128 // row_threads) if row_threads <= 32 else 1
        split = max(s for s in SPLITS if s == 1 or s * workload.rows <= 2 * device.sm_count)
        common = {"row_threads": row_threads, "rows": rows, "vector": vector}
        splits = (s for s in reversed(SPLITS) if s <= split)
        choices = (Config({**common, "unroll": n, "split": s}) for s in splits for n in (4, 2, 1))
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: Reduction, config: Config) -> tuple[Tiling, ...]:
        """Return the rows of a block, and its part of a row or one access by all threads of a row."""
        part = config["row_threads"] * config["vector"]
        if config["split"] > 1:
            lines = ceil_div(workload.cols // config["vector"], WARP)
            part = ceil_div(lines, config["split"]) * WARP * config["vector"]
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=int(part)),
        )

    def costs(self, workload: Reduction, table: Table, device: Device) -> Costs:
        """Count a part of a block's rows: operations, loads, and bytes that no other block reads."""
        rows = np.minimum(table["rows"], workload.rows)  # a block with room for more rows counts as full
        split, vector, threads = table["split"], table["vector"], table["row_threads"]
        part = np.where(split == 1, workload.cols, _lines(workload, vector) // split * WARP * vector)
        elements, size = 1.0 * rows * part, itemsize(workload.dtype)
        whole, exchanges = len(workload.whole_names), threads > WARP
        least = np.where(split == 1, least_vectors(workload, vector) * vector, part)
        adds = ceil_div(ceil_div(least, threads * vector), table["unroll"]) - 1.0
        return Costs(
            # Some parts have one more warp access; the last one may have less.
            blocks=workload.rows / rows * np.minimum(split, workload.cols / part),
            full_blocks=workload.rows // rows * np.where(split == 1, 1, split - 1),
            threads=threads * table["rows"],
            smem_bytes=np.where(exchanges, threads / 8.0, 0.0),
            fma=fma_of_element(workload) * elements,
            sfu=sfu_of_element(workload) * elements,
            # One sector at either end may be shared with other rows.
            fill_bytes=whole * np.maximum(0.0, elements * size - 64.0),
            accesses=(whole + len(workload.vector_names)) * elements / vector,
            # The first load, sequential additions, and the exchange between warps of a row.
            chain_clocks=np.where(part * size > 64, device.l2_latency, device.l1_latency)
            + workload.is_sum * adds * device.fma_latency
            + exchanges * device.smem_latency,
            serial_launches=np.where(split == 1, 1, 2),
            execution=self._execution(workload, table),
        )

    def _execution(self, workload: Reduction, table: Table) -> Execution:
        """Describe a block: every `unroll` vectors a thread waits, then threads join their results."""
        row_threads, rows, vector = table["row_threads"], table["rows"], table["vector"]
        unroll, split, size = table["unroll"], table["split"], itemsize(workload.dtype)
        vectors = np.where(
            split == 1, workload.cols // vector, ceil_div(_lines(workload, vector), split) * WARP
        )
        turns = ceil_div(ceil_div(vectors, row_threads), unroll)
        lanes = np.minimum(WARP, row_threads)
        accessed = rows * ceil_div(vectors, lanes) * lanes
        whole, weights = len(workload.whole_names), len(workload.vector_names)
        loads, threads = whole + weights, row_threads * rows
        of_element = expression_instructions(workload.tree) + 1 + converted(size) * loads
        exchanged, pitch = exchange(row_threads, threads, 1), workload.cols * size
        adjacent = np.where(row_threads * vector < workload.cols, row_threads, WARP)
        edged, single = workload.cols % vector != 0, rows * edge_elements(workload, vector) / split
        lines = whole * lines_of_access(edged, vector * size, adjacent) + weights * (1 + edged)
        return Execution(
            registers=ceil_div(loads * vector * unroll * size, 4) + vector + unroll + LOOP_REGISTERS,
            instructions=(accessed * vector + single) / WARP * of_element
            + accessed / WARP * weights * shifted_instructions(edged, vector * size)
            + threads / WARP * (PROLOGUE + EDGE_PROLOGUE * edged + STEP * turns * (1 + unroll / 4))
            + exchanged.instructions,
            accesses=(loads + weights * edged) * accessed + loads * single + exchanged.accesses,
            passes=accessed / WARP * lines * l1_passes(adjacent, vector * size),
            # Vectors stay in L1 for the next row.
            l2_bytes=whole * rows * sector_bytes(vectors * vector * size, pitch) + 32.0 * rows,
            # A second launch starts, and waits for the parts of a row.
            memory_waits=turns + np.where(split > 1, 2, 0),
            shared_waits=exchanged.waits,
            barriers=exchanged.barriers,
        )

    def source(self, workload: Reduction, config: Config) -> str:
        """Return the kernels of this expression."""
        edged = workload.cols % config["vector"] != 0
        whole_names, vector_names = workload.whole_names, workload.vector_names
        stored = whole_names if edged else (*whole_names, *vector_names)
        of_columns = {name: f"each_{name}" for name in workload.column_names}
        element_texts = {name: f"to_float(held[n][{s}].at[i])" for s, name in enumerate(stored)}
        # With edges, weights are loaded where they are needed.
        element_texts = {name: f"weights_{name}[i]" for name in vector_names} | element_texts | of_columns
        single_texts = {name: f"to_float({variable(name)}[start + element])" for name in whole_names}
        single_texts |= {name: f"to_float({variable(name)}[edges.before + element])" for name in vector_names}
        offset = "start" if edged else "row * cols"
        rows = [f"{variable(name)} + {offset}" for name in whole_names]
        text = filled(
            kernels_for_rows(KERNELS + END_ROWS, workload, config),
            PARAMETERS=parameters(workload),
            LOAD_EACH="\n".join(
                f"  const float each_{name} = row < rows ? to_float({variable(name)}[row]) : 0.0f;"
                for name in workload.column_names
            ),
            STORED=", ".join([*rows, *(map(variable, vector_names) if not edged else ())]),
            LOAD_WEIGHTS="\n      ".join(map(_load_weights, vector_names)),
            ARGUMENTS=operands(workload, element_texts),
            SINGLE=operands(workload, single_texts | of_columns),
        )
        return source(workload, text)

    def blocks(self, workload: Reduction, config: Config) -> int:
        """Return the number of blocks that the rows need."""
        return int(ceil_div(workload.rows, config["rows"]))

    def emulation_workload(self, workload: Reduction, config: Config) -> Reduction:
        """Return 3 blocks of rows and 3 iterations over columns, the last of each partial."""
        rows, line = min(workload.rows, 2 * config["rows"] + 1), WARP * config["vector"]
        turn = config["split"] * config["row_threads"] * config["vector"] * config["unroll"]
        # With many parts there are fewer iterations, but each part keeps some warp accesses.
        max_cols = max(2 * config["split"] + 1, SMALL // rows // line) * line
        max_cols += workload.cols % config["vector"]  # the same edges
        cols = min(workload.cols, 2 * turn + workload.cols % turn, max_cols)
        return dataclasses.replace(workload, rows=rows, cols=cols)


def _load_weights(name: str) -> str:
    """Return the statements that load the elements of a vector operand at the columns of a row's vector."""
    load = f"load_floats(Unaligned<In, V>{{{variable(name)}, at, cols}}, weights_{name});"
    return f"float weights_{name}[V];\n      {load}"


VARIANT = CudaRowReduction()
