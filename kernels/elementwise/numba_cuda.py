"""Elementwise in Numba-CUDA: a thread owns a column and iterates over rows, with results in registers.

The kernel is generated from the expression. A thread loads scalars and vectors once. It loads `unroll` rows
of all other inputs before it computes the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.expected import (
    LANES,
    NUMBA_ACCESS,
    NUMBA_REGISTERS,
    PROLOGUE,
    STEP,
    converted,
    expression_instructions,
    l1_passes,
    sector_bytes,
)
from tunebench.kernels.common.expression import compiled, filled, least_operations, variable
from tunebench.kernels.common.numba_expression import NUMBA_CUDA_PRINTER as PRINTER
from tunebench.kernels.common.numba_expression import cuda_array, cuda_load, cuda_parameters
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators.elementwise import Elementwise

SPACE = Space(
    (
        Parameter("col_threads", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "threads along a row"),
        Parameter("row_threads", (1, 2, 4, 8, 16, 32, 64), "threads down the rows"),
        Parameter("unroll", (1, 2, 4, 8), "rows that a thread has in flight"),
        Parameter("turns", (1, 4, 16), "tiles that a block computes in turn"),
    ),
    (
        lambda col_threads, row_threads: (
            (col_threads * row_threads >= 64) & (col_threads * row_threads <= 512)
        ),
        lambda col_threads, workload: (col_threads == 1) | (col_threads < 2 * workload.cols),
        # Less than two adjacent sectors waste fetched bytes, unless rows are that short.
        lambda col_threads, workload: (
            (col_threads * itemsize(workload.dtype) >= 64) | (col_threads >= workload.cols)
        ),
        lambda col_threads, row_threads, unroll, turns, workload: (
            ((col_threads * row_threads == 64) & (unroll * turns == 1))
            | (row_threads * unroll * turns < 2 * workload.rows)
        ),
        # The largest extent of a grid along y.
        lambda col_threads, workload: ceil_div(workload.cols, col_threads) <= 65535,
    ),
)

KERNEL = """
def elementwise(@NAMES@, out):
    j = cuda.blockIdx.y * col_threads + cuda.threadIdx.x
    if j >= out.shape[1]:
        return
    rows = out.shape[0]
@LOAD_VECTORS@
    first = cuda.blockIdx.x * (turns * unroll * row_threads) + cuda.threadIdx.y
    for turn in range(turns):
@LOADS@
@COMPUTE@
        first += unroll * row_threads
"""


class NumbaCudaElementwise(NumbaCudaVariant[Elementwise]):
    """Variant for every expression and size of f32 and f16."""

    name = "numba_cuda"
    operator = Elementwise
    space = SPACE

    def limits(self, workload: Elementwise, device: Device) -> str | None:
        """Refuse bf16, whose conversions only a driver can link."""
        types = (workload.dtype, workload.vector_dtype, workload.out)
        return f"{self.key} does not support bf16" if "bf16" in types else None

    def default(self, workload: Elementwise, device: Device) -> Config:
        """Return blocks of up to 256 threads, with a warp or more along a row."""
        useful = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        col_threads = max(t for t in useful if t == 1 or t < 2 * workload.cols)
        row_threads = max(1, 64 // col_threads)
        while row_threads * col_threads < 256 and row_threads < 64 and 2 * row_threads <= workload.rows:
            row_threads *= 2
        common = {"col_threads": col_threads, "row_threads": row_threads, "turns": 1}
        choices = (Config({**common, "unroll": n}) for n in (4, 2, 1))
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: Elementwise, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of rows and columns."""
        tile_rows = config["row_threads"] * config["unroll"] * config["turns"]
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=tile_rows),
            Tiling(dimension="cols", extent=workload.cols, tile=config["col_threads"]),
        )

    def costs(self, workload: Elementwise, table: Table, device: Device) -> Costs:
        """Count operations, and bytes that no other block reads; functions are not counted."""
        tile_rows, tile_cols = (
            table["row_threads"] * table["unroll"] * table["turns"],
            table["col_threads"],
        )
        elements, whole = tile_rows * tile_cols * 1.0, len(workload.whole_names)
        row_bytes = np.maximum(0.0, tile_cols * float(itemsize(workload.dtype)) - 64.0)
        return Costs(
            blocks=workload.rows * workload.cols / elements,
            full_blocks=(workload.rows // tile_rows) * (workload.cols // tile_cols),
            threads=table["col_threads"] * table["row_threads"],
            fma=least_operations(workload)[0] * elements,
            fill_bytes=whole * tile_rows * row_bytes,
            accesses=(whole + 1) * elements,
            chain_clocks=np.where(row_bytes > 0, device.l2_latency, device.l1_latency),
            execution=_execution(workload, table),
        )

    def generated(self, workload: Elementwise, config: Config) -> str:
        """Return the kernel of this expression, with its rows in flight unrolled."""
        assignments, result = PRINTER.write(workload.tree)
        stored = (*workload.whole_names, *workload.column_names)
        loads, compute = [], []
        for n in range(config["unroll"]):
            loads += [f"        i{n} = first + {n} * row_threads", f"        if i{n} < rows:"]
            compute.append(f"        if i{n} < rows:")
            for w, name in enumerate(stored):
                place = f"i{n}" if name in workload.column_names else f"i{n}, j"
                loads.append(f"            held_{w}_{n} = {cuda_array(name)}[{place}]")
                compute.append(f"            {variable(name)} = f32(held_{w}_{n})")
            compute += [f"            {line}" for line in (*assignments, f"out[i{n}, j] = {result}")]
        return filled(
            KERNEL,
            NAMES=cuda_parameters(workload),
            LOAD_VECTORS="\n".join(f"    {cuda_load(name, 'j')}" for name in workload.vector_names),
            LOADS="\n".join(loads),
            COMPUTE="\n".join(compute),
        )

    def kernel(self, workload: Elementwise, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression; it takes the inputs in order, then out."""
        import math

        import numpy as np
        from numba import cuda

        scope: dict[str, Any] = {"__name__": __name__, "cuda": cuda, "math": math, "f32": np.float32}
        scope |= {name: config[name] for name in self.space.names}
        return compiled(self.generated(workload, config), "elementwise", scope)

    def launches(self, workload: Elementwise, config: Config) -> tuple[Launch, ...]:
        """Launch tiles of rows along x and of columns along y."""
        down, along = (tiling.count for tiling in self.tiles(workload, config))
        return (
            Launch(
                grid=(down, along, 1),
                block=(config["col_threads"], config["row_threads"], 1),
                arguments=(*(tensor.name for tensor in workload.inputs()), "out"),
            ),
        )

    def emulation_workload(self, workload: Elementwise, config: Config) -> Elementwise:
        """Return one full and one partial tile in both directions, if the workload is that large."""
        rows, cols = (tiling.tile + 1 for tiling in self.tiles(workload, config))
        return dataclasses.replace(workload, rows=min(workload.rows, rows), cols=min(workload.cols, cols))


def _execution(workload: Elementwise, table: Table) -> Execution:
    """Describe a block: a thread waits for `unroll` rows at a time."""
    along, down, unroll, turns = (table[name] for name in ("col_threads", "row_threads", "unroll", "turns"))
    size, out_size = itemsize(workload.dtype), itemsize(workload.out)
    whole, columns = len(workload.whole_names), len(workload.column_names)
    threads, rows = along * down, down * unroll * turns
    elements, lanes = 1.0 * along * rows, np.minimum(LANES, along)
    adjacent = np.where(along < workload.cols, along, LANES)
    of_element = expression_instructions(workload.tree) + converted(size) * whole + converted(out_size)
    of_element = of_element + (whole + 1 + columns) * NUMBA_ACCESS
    stored = along / lanes * sector_bytes(lanes * out_size, workload.cols * out_size)
    return Execution(
        registers=NUMBA_REGISTERS + unroll * whole,
        instructions=elements / LANES * of_element + threads / LANES * (PROLOGUE + STEP * turns),
        accesses=(whole + 1 + columns) * elements,
        passes=elements
        / LANES
        * (whole * l1_passes(adjacent, size) + l1_passes(adjacent, out_size) + columns),
        l2_bytes=rows * (whole * sector_bytes(along * size, workload.cols * size) + stored),
        memory_waits=turns,
    )


VARIANT = NumbaCudaElementwise()
