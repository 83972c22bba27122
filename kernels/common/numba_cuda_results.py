"""Numba-CUDA kernels that reduce rows or columns: threads of a block share each of its results.

Variants derive from `NumbaCudaResults`, and define the kernel. No result is split among blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workload import Workload

__all__ = ["NumbaCudaResults", "result_space"]

R = TypeVar("R", bound=Workload)


def result_space(reduces_rows: Callable[[Any], bool], result: str) -> Space:
    """Return the space of kernels that compute one result for each row or column.

    Args:
        reduces_rows: Whether a workload has one result for each row; otherwise for each column.
        result: Noun for a result in the descriptions, such as ``column``.
    """

    def extents(workload: Any) -> tuple[int, int]:
        """Return the elements of a result and the number of results."""
        rows, cols = workload.rows, workload.cols
        return (cols, rows) if reduces_rows(workload) else (rows, cols)

    def threads_have_elements(threads: Any, others: Any, workload: Any) -> Any:
        """Each thread should have an element, and each result of a block should exist."""
        elements, results = extents(workload)
        least = (threads * others == 64) & (others <= 2)
        return least | ((threads < 2 * elements) & (others < 2 * results))

    def sectors_are_full(threads: Any, others: Any, workload: Any) -> Any:
        """Threads should read two sectors of 32 bytes of a row, unless rows are shorter."""
        adjacent = threads if reduces_rows(workload) else others
        least = (threads * others == 64) & (others <= 2)
        return least | (adjacent * itemsize(workload.dtype) >= 64) | (adjacent >= workload.cols)

    return Space(
        (
            Parameter("threads", tuple(2**n for n in range(11)), f"threads that share a {result}"),
            Parameter("others", tuple(2**n for n in range(9)), f"{result}s of a block"),
        ),
        (
            lambda threads, others: (threads * others >= 64) & (threads * others <= 1024),
            threads_have_elements,
            sectors_are_full,
        ),
    )


class NumbaCudaResults(NumbaCudaVariant[R]):
    """A variant that computes one result, or a few numbers, for each row or each column of a matrix."""

    name = "numba_cuda"

    @staticmethod
    def reduces_rows(workload: Any) -> bool:
        """Return whether there is a result for each row (override); otherwise for each column."""
        return False

    def default(self, workload: Any, device: Device) -> Config:
        """Return up to 256 threads for a row, or 32 adjacent columns with 8 threads each."""
        if self.reduces_rows(workload):
            threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
            pairs = [(t, max(1, 128 // t)) for t in (threads, threads // 2, 128, 64)]
        else:
            pairs = [(t, others) for others in (32, 64, 16, 8, 4, 2, 1) for t in (8, 16, 4, 32, 64, 2, 1)]
        choices = [Config({"threads": t, "others": others}) for t, others in [*pairs, (64, 1)]]
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: Any, config: Config) -> tuple[Tiling, ...]:
        """Return the results of a block, and the elements that its threads reduce at a time."""
        over, across = ("cols", "rows") if self.reduces_rows(workload) else ("rows", "cols")
        return (
            Tiling(dimension=across, extent=getattr(workload, across), tile=config["others"]),
            Tiling(dimension=over, extent=getattr(workload, over), tile=config["threads"]),
        )

    def result_costs(
        self,
        workload: Any,
        table: Table,
        device: Device,
        *,
        matrices: int,
        chain: bool = True,
        instructions: float = 4.0,
        stored: int = 0,
    ) -> Costs:
        """Return the costs but those of arithmetic, stores and shared memory.

        Args:
            workload: The workload.
            table: Configurations.
            device: The device, for its latencies.
            matrices: Inputs of the size of the matrix.
            chain: Whether a thread adds its elements one after the other.
            instructions: Expected instructions of an element, without accesses.
            stored: Results of the size of the matrix.
        """
        threads, others, size = table["threads"], table["others"], float(itemsize(workload.dtype))
        over_cols = self.reduces_rows(workload)
        terms, results = (workload.cols, workload.rows) if over_cols else (workload.rows, workload.cols)
        # One sector of 32 bytes at either end may have been fetched by another block.
        runs, run = (1, others * terms) if over_cols else (terms, others)
        own_bytes = runs * np.maximum(0.0, 1.0 * run * size - 64.0)
        return Costs(
            blocks=results / others,
            full_blocks=results // others,
            threads=threads * others,
            fill_bytes=matrices * own_bytes,
            accesses=matrices * 1.0 * others * terms,
            # The first load, the additions of a thread, and one exchange through shared memory.
            chain_clocks=np.where(own_bytes > 0, device.l2_latency, device.l1_latency)
            + chain * (ceil_div(terms, threads) - 1) * device.fma_latency
            + device.smem_latency,
            execution=self._execution(workload, table, matrices, instructions, stored),
        )

    def _execution(
        self, workload: Any, table: Table, matrices: int, instructions: float, stored: int
    ) -> Execution:
        """Describe a block: a thread waits for some elements at a time, or for each one if it stores results.

        Args:
            workload: The workload.
            table: Configurations.
            matrices: Inputs of the size of the matrix.
            instructions: Instructions of an element, without accesses.
            stored: Results of the size of the matrix.
        """
        threads, others, size = table["threads"], table["others"], itemsize(workload.dtype)
        over_cols = self.reduces_rows(workload)
        terms = workload.cols if over_cols else workload.rows
        each, adjacent = ceil_div(terms, threads), threads if over_cols else others
        elements, moved, block = 1.0 * each * threads * others, matrices + stored, threads * others
        pitch, runs, run = (
            workload.cols * size,
            others if over_cols else terms,
            terms if over_cols else others,
        )
        exchanged = tree_exchange(threads, block, 1)
        of_element = instructions + moved * (NUMBA_ACCESS + converted(size)) + STEP / 2
        return Execution(
            registers=NUMBA_REGISTERS,
            instructions=elements / LANES * of_element + block / LANES * PROLOGUE + exchanged.instructions,
            accesses=moved * elements + exchanged.accesses,
            passes=moved
            * elements
            / LANES
            * l1_passes(np.where(adjacent < workload.cols, adjacent, LANES), size),
            l2_bytes=moved * runs * sector_bytes(1.0 * run * size, pitch) + 32.0 * others,
            memory_waits=np.ceil(each / (1 if stored else NUMBA_UNROLLED)),
            shared_waits=exchanged.waits,
            barriers=exchanged.barriers,
        )
