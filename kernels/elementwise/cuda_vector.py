"""Elementwise in CUDA C++: a thread owns columns and iterates over rows, a vector of each at a time.

The kernel is generated from the expression: each distinct operation once, in f32 and in registers. A block
has `col_threads` threads along a row and `row_threads` down the rows. A thread loads its columns of the
vectors once, loads `unroll` rows of all other inputs before it computes, and stores one vector per row.
Blocks compute one tile each (`blocks_per_sm=0`), or are persistent and compute several, so that vectors are
loaded once for many rows. Without vectors and columns, rows are first joined to longer lines.

Source: NVIDIA, "CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops", and "CUDA Pro Tip: Increase
Performance with Vectorized Memory Access".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.cuda_expression import (
    claimed,
    column_loads,
    filled,
    function,
    special,
    threads_along,
)
from tunebench.kernels.common.expected import (
    LANES,
    PROLOGUE,
    STEP,
    converted,
    expression_instructions,
    l1_passes,
    sector_bytes,
)
from tunebench.kernels.common.expression import least_operations, lines
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.elementwise import Elementwise

OTHER_REGISTERS = 40
"""Registers of a thread in addition to loaded vectors: addresses, loop state and temporaries of functions."""
LOOP_REGISTERS = 16
"""Those that short expressions need."""
SIDE_BY_SIDE = 64
"""Least bytes of a row that the threads of a block cover."""
MOST_COLUMN_BLOCKS = 65535
"""Largest extent of a grid along y."""


def persistent_blocks_differ(
    col_threads: Any,
    row_threads: Any,
    vector: Any,
    unroll: Any,
    blocks_per_sm: Any,
    workload: Any,
    device: Device,
) -> Any:
    """Some persistent block must have several tiles, and fewer blocks per SM must be another launch."""
    rows, cols = lines(workload)
    across = ceil_div(cols, col_threads * vector)
    height, lower = _height(blocks_per_sm, across), _height(blocks_per_sm // 2, across)
    several = height * device.sm_count < ceil_div(rows, row_threads * unroll)
    return (blocks_per_sm == 0) | (several & ((blocks_per_sm == 1) | (height > lower)))


def _height(blocks_per_sm: Any, across: Any) -> Any:
    """Return the persistent blocks of an SM down the rows; a launch has whole columns of blocks.

    Args:
        blocks_per_sm: Persistent blocks of an SM.
        across: Tiles along a row.
    """
    return np.maximum(1, blocks_per_sm // across)


SPACE = Space(
    (
        Parameter("col_threads", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads along a row"),
        Parameter("row_threads", (1, 2, 4, 8, 16, 32, 64, 128), "threads down the rows"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4, 8), "rows that a thread has in flight"),
        Parameter(
            "blocks_per_sm", (0, 1, 2, 4, 8), "persistent blocks of an SM; 0: each block computes one tile"
        ),
    ),
    (
        lambda col_threads, row_threads: (
            (col_threads * row_threads >= 64) & (col_threads * row_threads <= 1024)
        ),
        # Every row must start at a multiple of an access.
        lambda vector, workload: (
            (lines(workload)[1] % vector == 0)
            & (vector * max(itemsize(workload.dtype), itemsize(workload.out)) <= 16)
        ),
        # Threads without an element are useless.
        lambda col_threads, vector, workload: (
            (col_threads == 1) | (col_threads * vector < 2 * lines(workload)[1])
        ),
        # Less than two adjacent sectors waste fetched bytes, unless rows are that short.
        lambda col_threads, vector, workload: (
            (col_threads * vector * itemsize(workload.dtype) >= SIDE_BY_SIDE)
            | (col_threads * vector >= lines(workload)[1])
        ),
        lambda col_threads, row_threads, unroll, workload: (
            ((col_threads * row_threads == 64) & (unroll == 1))
            | (row_threads * unroll < 2 * lines(workload)[0])
        ),
        lambda col_threads, vector, workload: (
            ceil_div(lines(workload)[1], col_threads * vector) <= MOST_COLUMN_BLOCKS
        ),
        lambda col_threads, row_threads, vector, unroll, workload, device: (
            _held(workload, vector, unroll) + OTHER_REGISTERS
            <= np.minimum(255, device.registers_per_sm // (col_threads * row_threads))
        ),
        lambda col_threads, row_threads, blocks_per_sm, device: (
            col_threads * row_threads * blocks_per_sm <= device.threads_per_sm
        ),
        persistent_blocks_differ,
    ),
)

# Words between @ are replaced by text that depends on the expression.
KERNEL = r"""
template <class In, class Out, int COL_THREADS, int ROW_THREADS, int V, int N>
__global__ void __launch_bounds__(COL_THREADS * ROW_THREADS)
    elementwise(@PARAMETERS@, Out* __restrict__ out, int rows, int cols) {
  const u32 column = (blockIdx.y * COL_THREADS + threadIdx.x % COL_THREADS) * V;
  if (column >= u32(cols)) return;
@LOAD_VECTORS@
  constexpr i64 TILE = ROW_THREADS * N;
  for (i64 first = blockIdx.x * TILE + threadIdx.x / COL_THREADS; first < rows; first += gridDim.x * TILE) {
    const In* const whole[] = {@WHOLE@};
    constexpr int WHOLE = sizeof(whole) / sizeof(whole[0]);
    Vec<In, V> held[N][WHOLE];@EACH@
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const i64 row = first + n * ROW_THREADS;
#pragma unroll
      for (int w = 0; w < WHOLE; ++w)
        if (row < rows) held[n][w] = load_vec<V>(whole[w] + row * cols + column);@LOAD_EACH@
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const i64 row = first + n * ROW_THREADS;
      if (row >= rows) continue;
      Vec<Out, V> result;
#pragma unroll
      for (int i = 0; i < V; ++i) result.at[i] = from_float<Out>(chain(@ARGUMENTS@));
      store_vec(out + row * cols + column, result);
    }
  }
}
"""


class CudaVectorElementwise(CudaVariant[Elementwise]):
    """Variant for every expression, size and type."""

    name = "cuda_vector"
    operator = Elementwise
    space = SPACE

    def default(self, workload: Elementwise, device: Device) -> Config:
        """Return the widest accesses, blocks of up to 256 threads, and 4 of their rows in flight."""
        rows, cols = lines(workload)
        widest = 16 // max(itemsize(workload.dtype), itemsize(workload.out))
        vector = max(v for v in (1, 2, 4, 8) if v <= widest and cols % v == 0)
        col_threads = threads_along(cols // vector)
        row_threads = max(64 // col_threads, 1)
        while row_threads * col_threads < 256 and row_threads < 128 and 2 * row_threads <= rows:
            row_threads *= 2
        common = {"col_threads": col_threads, "row_threads": row_threads, "vector": vector}
        choices = (Config({**common, "unroll": n, "blocks_per_sm": 0}) for n in (4, 2, 1))
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: Elementwise, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of rows and columns, of joined rows if there are no vectors."""
        rows, cols = lines(workload)
        joined = workload.rows // rows
        return (
            Tiling(
                dimension="rows" if joined == 1 else f"rows/{joined}",
                extent=rows,
                tile=config["row_threads"] * config["unroll"],
            ),
            Tiling(
                dimension="cols" if joined == 1 else f"cols*{joined}",
                extent=cols,
                tile=config["col_threads"] * config["vector"],
            ),
        )

    def costs(self, workload: Elementwise, table: Table, device: Device) -> Costs:
        """Count a tile as a block: operations, loads and stores, and bytes that no other block reads."""
        rows, cols = lines(workload)
        tile_rows, tile_cols = table["row_threads"] * table["unroll"], table["col_threads"] * table["vector"]
        elements, whole = tile_rows * tile_cols * 1.0, len(workload.whole_names)
        operations, functions = least_operations(workload)
        # One sector at either end of each row may be shared with another tile.
        row_bytes = np.maximum(0.0, tile_cols * float(itemsize(workload.dtype)) - 64.0)
        far = np.where(row_bytes > 0, device.l2_latency, device.l1_latency)
        return Costs(
            blocks=rows * cols / elements,
            full_blocks=(rows // tile_rows) * (cols // tile_cols),
            threads=table["col_threads"] * table["row_threads"],
            fma=operations * elements,
            sfu=special(functions) * elements,
            fill_bytes=whole * tile_rows * row_bytes,
            accesses=(whole + 1) * elements / table["vector"],
            # A persistent block may load a tile while it computes the previous one.
            chain_clocks=np.where(table["blocks_per_sm"] == 0, far, 0.0),
            execution=_execution(workload, table, device),
        )

    def source(self, workload: Elementwise, config: Config) -> str:
        """Return the kernel of this expression."""
        text = filled(KERNEL, **column_loads(workload, row_exists="row < rows"))
        return helpers("types", "reduce", "row_block", "epilogue") + function(workload) + text

    def claims(self, workload: Elementwise, config: Config) -> tuple[str, ...]:
        """Return loads and stores, and the special-function unit if a function should use it."""
        return claimed(workload.tree)

    def launches(self, workload: Elementwise, config: Config) -> tuple[Launch, ...]:
        """Launch tiles of rows along x and of columns along y."""
        rows, cols = lines(workload)
        down, along = (tiling.count for tiling in self.tiles(workload, config))
        names = tuple(tensor.name for tensor in workload.inputs())
        shape = ", ".join(str(config[name]) for name in ("col_threads", "row_threads", "vector", "unroll"))
        staying = config["blocks_per_sm"]
        return (
            Launch(
                entry=f"elementwise<{ctype(workload.dtype)}, {ctype(workload.out)}, {shape}>",
                grid=(down, along, 1),
                block=(config["col_threads"] * config["row_threads"], 1, 1),
                arguments=(*names, "out", Scalar("int", rows), Scalar("int", cols)),
                blocks_per_sm=int(_height(staying, along)) if staying else 0,
            ),
        )

    def emulation_workload(self, workload: Elementwise, config: Config) -> Elementwise:
        """Return two full and one partial tile of rows, and one full and one partial tile of columns.

        The length of lines modulo the access width is kept. With vectors, rows are not joined. Without, lines
        may differ from those of the full workload, which makes no difference to the kernel.
        """
        rows, cols = lines(workload)
        tile_rows, tile_cols = (tiling.tile for tiling in self.tiles(workload, config))
        small_cols = cols if cols <= tile_cols else tile_cols + (cols % tile_cols or config["vector"])
        return dataclasses.replace(workload, rows=min(rows, 2 * tile_rows + 1), cols=small_cols)


def _execution(workload: Elementwise, table: Table, device: Device) -> Execution:
    """Describe a tile: all loads are in flight together. A persistent block starts once for its tiles."""
    names = ("col_threads", "row_threads", "vector", "unroll", "blocks_per_sm")
    along, down, vector, unroll, staying = (table[name] for name in names)
    rows, cols = lines(workload)
    size, out_size, threads = itemsize(workload.dtype), itemsize(workload.out), along * down
    whole, vectors, columns = (
        len(names) for names in (workload.whole_names, workload.vector_names, workload.column_names)
    )
    # Blocks of the last columns have fewer threads with work, but as many warps if threads are few.
    tiles = ceil_div(cols, along * vector)
    warps_used = np.minimum(1.0, (cols / vector) / (tiles * along))
    accessed = 1.0 * threads * unroll  # vectors of an input
    adjacent = np.where(along * vector < cols, along, LANES)
    of_element = expression_instructions(workload.tree) + converted(size) * whole + converted(out_size)
    # Persistent blocks are launched in columns of equal height.
    height = _height(staying, tiles)
    turns = np.where(staying == 0, 1, ceil_div(ceil_div(rows, down * unroll), height * device.sm_count))
    once, starts = vectors * threads, 1.0 / turns  # loads of vectors by a starting block; starts of a tile
    lanes = np.minimum(LANES, along)
    load_run, store_run = along * vector * size, lanes * vector * out_size
    return Execution(
        registers=_held(workload, vector, unroll) + LOOP_REGISTERS,
        instructions=accessed * vector / LANES * of_element
        + threads / LANES * (PROLOGUE * starts + STEP + 3 * unroll),
        accesses=(whole + 1 + columns) * accessed + once * starts,
        passes=accessed / LANES * whole * l1_passes(adjacent, vector * size)
        + accessed / LANES * l1_passes(adjacent, vector * out_size)
        + accessed / LANES * columns,
        l2_bytes=down
        * unroll
        * warps_used
        * (
            whole * sector_bytes(load_run, cols * size)
            + along / lanes * sector_bytes(store_run, cols * out_size)
        )
        + vectors * load_run * starts,
        memory_waits=1,
        first_waits=starts,
        resident_blocks=np.where(staying == 0, 0, height * tiles),
    )


def _held(workload: Elementwise, vector: Any, unroll: Any) -> Any:
    """Return the registers that a thread needs for vectors."""
    words = ceil_div(vector * itemsize(workload.dtype), 4) * unroll * len(workload.whole_names)
    words += unroll * len(workload.column_names)
    return words + vector * (len(workload.vector_names) + 2)


VARIANT = CudaVectorElementwise()
