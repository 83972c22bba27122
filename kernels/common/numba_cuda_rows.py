"""Kernels of rows in Numba-CUDA: a row has one x-line of a block, whose threads reduce through shared memory.

Variants derive from `NumbaCudaRows` and write the kernel, and what an element of a row costs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Argument, Costs, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workload import Workload

__all__ = ["CONSTRAINTS", "PARAMETERS", "NumbaCudaRows", "row_costs"]

R = TypeVar("R", bound=Workload)

PARAMETERS = (
    Parameter("threads", (8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
    Parameter("rows", (1, 2, 4, 8, 16), "rows of a block"),
)
CONSTRAINTS: tuple[Constraint, ...] = (
    lambda threads, rows: (threads * rows >= 32) & (threads * rows <= 1024),
    # Threads without an element are of no use.
    lambda threads, workload: (threads == 8) | (threads < 2 * workload.cols),
)


class NumbaCudaRows(NumbaCudaVariant[R]):
    """A variant for matrices (rows, cols) in f32 and f16, of which a block takes some rows.

    Attributes:
        backward: Whether it computes gradients; it does one or the other.
        more: Values of the default for parameters besides `PARAMETERS`.
    """

    space = Space(PARAMETERS, CONSTRAINTS)
    backward: ClassVar[bool] = False
    more: ClassVar[dict[str, Any]] = {}

    def limits(self, workload: Any, device: Device) -> str | None:
        """Refuse the other direction, and bf16, which Numba-CUDA converts by functions of a driver's."""
        if workload.is_backward != self.backward:
            return f"{self.key} does direction={'backward' if self.backward else 'forward'} only"
        return f"{self.key} does not do bf16" if workload.dtype == "bf16" else None

    def default(self, workload: Any, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
        while threads > 8 and threads >= 2 * workload.cols:
            threads //= 2
        return Config({"threads": threads, "rows": max(1, 128 // threads), **self.more})

    def tiles(self, workload: Any, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
        )

    def launch(self, workload: Any, config: Config, *arguments: Argument) -> tuple[Launch, ...]:
        """Return the launch of one block for every `rows` rows."""
        grid = (ceil_div(workload.rows, config["rows"]), 1, 1)
        return (Launch(grid=grid, block=(config["threads"], config["rows"], 1), arguments=arguments),)

    def emulation_workload(self, workload: Any, config: Config) -> Any:
        """Return one full block and a cut one, with rows of at most three elements a thread and one more."""
        rows, cols = config["rows"] + 1, 3 * config["threads"] + 1
        return dataclasses.replace(workload, rows=min(workload.rows, rows), cols=min(workload.cols, cols))


def row_costs(
    workload: Any,
    table: Table,
    device: Device,
    *,
    row_tensors: int,
    fma: float,
    accesses: Any = 0.0,
    sums: int = 1,
    reductions: int = 1,
) -> Costs:
    """Return what any such kernel must do.

    Exponentials and roots are the compiler's choice of instructions and count as none.

    Args:
        workload: The matrix.
        table: Configurations.
        device: Whose latencies hold.
        row_tensors: Inputs of which every element is read by one block alone.
        fma: Multiply-adds an element.
        accesses: Loads and stores an element.
        sums: Reductions of which a thread adds up its elements one after the other.
        reductions: Reductions over a row, one after the other.
    """
    rows, threads = table["rows"], table["threads"]
    elements = rows * float(workload.cols)
    # A short row may have come to L1 with its neighbour's.
    far = workload.cols * itemsize(workload.dtype) > 64
    return Costs(
        blocks=workload.rows / rows,
        full_blocks=workload.rows // rows,
        threads=threads * rows,
        smem_bytes=4.0 * rows * threads,
        fma=fma * elements,
        fill_bytes=row_tensors * np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0),
        accesses=accesses * elements,
        # From L2, where nobody else reads the row; a thread's sums, an element after the other; then from
        # what threads leave each other.
        chain_clocks=(device.l2_latency if far else device.l1_latency)
        + sums * (ceil_div(workload.cols, threads) - 1) * device.fma_latency
        + reductions * device.smem_latency,
    )
