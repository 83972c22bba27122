"""Row kernels in Numba-CUDA: the threads along x of a block share a row and reduce through shared memory.

Variants derive from `NumbaCudaRows`, and define the kernel and the cost of an element. `block_reduction` is
the tree reduction of all Numba-CUDA kernels.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.expected import (
    LANES,
    NUMBA_ACCESS,
    NUMBA_REGISTERS,
    NUMBA_UNROLLED,
    PROLOGUE,
    STEP,
    converted,
    l1_passes,
    sector_bytes,
    tree_exchange,
)
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Argument, Costs, Execution, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workload import Workload

__all__ = [
    "NumbaCudaRows",
    "block_reduction",
    "device_function",
    "passes_space",
    "row_costs",
    "row_reduction",
]

R = TypeVar("R", bound=Workload)

PARAMETERS = (
    Parameter("threads", (8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
    Parameter("rows", (1, 2, 4, 8, 16), "rows of a block"),
)
CONSTRAINTS: tuple[Constraint, ...] = (
    lambda threads, rows: (threads * rows >= 32) & (threads * rows <= 1024),
    # Threads without an element are useless.
    lambda threads, workload: (threads == 8) | (threads < 2 * workload.cols),
)


def passes_space(statistics: str) -> Space:
    """Return the search space of kernels that compute two statistics of a row, together or in turn.

    Args:
        statistics: Their names, for the help of the parameter.
    """
    passes = Parameter("passes", (2, 3), f"2: {statistics} together; 3: one after the other")
    return Space((*PARAMETERS, passes), CONSTRAINTS)


class NumbaCudaRows(NumbaCudaVariant[R]):
    """A variant for matrices (rows, cols) of f32 and f16, whose blocks have several rows.

    Attributes:
        more: Default values of parameters that `PARAMETERS` does not contain.
    """

    space = Space(PARAMETERS, CONSTRAINTS)
    direction = "forward"
    more: ClassVar[dict[str, Any]] = {}

    def limits(self, workload: Any, device: Device) -> str | None:
        """Refuse bf16, whose conversions only a driver can link."""
        return f"{self.key} does not support bf16" if workload.dtype == "bf16" else None

    def default(self, workload: Any, device: Device) -> Config:
        """Return up to 256 threads for a row, and blocks of at least 128."""
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
        while threads > 8 and threads >= 2 * workload.cols:
            threads //= 2
        return Config({"threads": threads, "rows": max(1, 128 // threads), **self.more})

    def tiles(self, workload: Any, config: Config) -> tuple[Tiling, ...]:
        """Return the rows of a block, and the elements of an access by all threads of a row."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
        )

    def launch(self, workload: Any, config: Config, *arguments: Argument) -> tuple[Launch, ...]:
        """Return the launch of one block for every `rows` rows."""
        grid = (ceil_div(workload.rows, config["rows"]), 1, 1)
        return (Launch(grid=grid, block=(config["threads"], config["rows"], 1), arguments=arguments),)

    def emulation_workload(self, workload: Any, config: Config) -> Any:
        """Return a full and a partial block; rows have up to three elements per thread and one more."""
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
    reads: Any = 2,
    instructions: float | None = None,
    weights: int = 0,
    outputs: int = 1,
) -> Costs:
    """Return the costs of a row kernel, without exponentials and roots.

    Args:
        workload: The workload.
        table: Configurations.
        device: The device, for its latencies.
        row_tensors: Inputs whose elements are each read by one block only.
        fma: Multiply-adds of an element.
        accesses: Loads and stores of an element.
        sums: Reductions in which a thread adds its elements sequentially.
        reductions: Sequential reductions over a row.
        reads: Times that the inputs are read: once for each statistic, and once for results of their size.
        instructions: Expected instructions of an element; None for twice its multiply-adds.
        weights: Vectors of the length of a row that results need.
        outputs: Results of the size of the matrix.
    """
    rows, threads = table["rows"], table["threads"]
    elements = rows * float(workload.cols)
    # Another row may have brought a short row to L1.
    far = workload.cols * itemsize(workload.dtype) > 64
    return Costs(
        blocks=workload.rows / rows,
        full_blocks=workload.rows // rows,
        threads=threads * rows,
        smem_bytes=4.0 * rows * threads,
        fma=fma * elements,
        fill_bytes=row_tensors * np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0),
        accesses=accesses * elements,
        # A row comes from L2, since no other block reads it. Then a thread adds its elements sequentially,
        # and the threads exchange their sums.
        chain_clocks=(device.l2_latency if far else device.l1_latency)
        + sums * (ceil_div(workload.cols, threads) - 1) * device.fma_latency
        + reductions * device.smem_latency,
        execution=_execution(
            workload,
            table,
            row_tensors=row_tensors,
            of_element=2 * fma if instructions is None else instructions,
            reductions=reductions,
            reads=reads,
            weights=weights,
            outputs=outputs,
        ),
    )


def _execution(
    workload: Any,
    table: Table,
    *,
    row_tensors: int,
    of_element: float,
    reductions: int,
    reads: Any,
    weights: int,
    outputs: int,
) -> Execution:
    """Describe a block: a thread waits for some elements at a time, and for each one between stores."""
    rows, threads, size = table["rows"], table["threads"], itemsize(workload.dtype)
    each = ceil_div(workload.cols, threads)
    lanes = np.minimum(LANES, threads)
    elements = 1.0 * rows * ceil_div(workload.cols, lanes) * lanes
    moved = row_tensors * reads + outputs + weights
    exchanged = tree_exchange(threads, rows * threads, reductions)
    read_bytes, run = sector_bytes(workload.cols * size, workload.cols * size), lanes * size
    stored = workload.cols / lanes * sector_bytes(run, workload.cols * size)
    summing = np.ceil(each / NUMBA_UNROLLED)
    return Execution(
        registers=NUMBA_REGISTERS,
        instructions=elements
        / LANES
        * (of_element + moved * (NUMBA_ACCESS + converted(size)) + reads * STEP / 2)
        + rows * threads / LANES * PROLOGUE
        + exchanged.instructions,
        accesses=moved * elements + exchanged.accesses,
        passes=moved * elements / LANES * l1_passes(np.where(threads < workload.cols, threads, LANES), size),
        l2_bytes=rows * (row_tensors * reads * read_bytes + outputs * stored),
        memory_waits=summing,
        # Read again, from L1 or L2.
        l2_waits=np.maximum(0, reads - 1 - (outputs > 0)) * summing + (outputs > 0) * each,
        shared_waits=exchanged.waits,
        barriers=exchanged.barriers,
    )


# -- reductions in shared memory -----------------------------------------------------------------------------

cuda: Any = None  # `device_function` replaces it by the module `numba.cuda`


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that kernels call.

    It is inlined before types are inferred, since the compilation of a separate device function asks the
    driver for the architecture. `cuda` is a global of the function: the simulator replaces globals only.
    """
    from numba import cuda

    scope = {**function.__globals__, "cuda": cuda}
    copied = types.FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)
    made: Callable[..., Any] = cuda.jit(device=True, inline="always")(copied)
    return made


def block_reduction(threads: int, join: Callable[..., None]) -> Callable[..., None]:
    """Return the device function `(met, line, t)` that reduces the values of `threads` threads.

    The thread with index 0 holds the result. All threads of the block must call the function, because it
    contains barriers: the first precedes all reads, the last follows all writes.

    Args:
        threads: Threads that share a result, a power of two.
        join: Device function `(met, line, t, other)` that adds the value of thread `other` to that of `t`;
            `met` is the shared array.
    """

    @device_function
    def reduce(met: Any, line: int, t: int) -> None:
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                join(met, line, t, t + half)
            cuda.syncthreads()
            half //= 2

    return reduce


def row_reduction(threads: int, operation: str = "sum") -> Callable[..., Any]:
    """Return the device function `(met, line, t, value)` for the sum or the maximum of a row's values.

    `met` is a shared array (rows, threads). A kernel must call `cuda.syncthreads()` before it uses the array
    again.

    Args:
        threads: Threads that share a row, a power of two.
        operation: ``sum`` or ``max``.
    """

    @device_function
    def add(met: Any, line: int, t: int, other: int) -> None:
        met[line, t] += met[line, other]

    @device_function
    def greater(met: Any, line: int, t: int, other: int) -> None:
        met[line, t] = max(met[line, t], met[line, other])

    reduce = block_reduction(threads, greater if operation == "max" else add)

    @device_function
    def total(met: Any, line: int, t: int, value: Any) -> Any:
        met[line, t] = value
        reduce(met, line, t)
        return met[line, 0]

    return total
