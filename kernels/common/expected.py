"""Counts that kernels declare in `Execution`: sectors, passes through L1, reductions, operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.expression import Node, steps

__all__ = [
    "DECODED",
    "LANES",
    "LINE",
    "NUMBA_ACCESS",
    "NUMBA_REGISTERS",
    "NUMBA_UNROLLED",
    "PROLOGUE",
    "SECTOR",
    "STEP",
    "Exchange",
    "converted",
    "exchange",
    "expression_instructions",
    "l1_passes",
    "sector_bytes",
    "tree_exchange",
]

LANES = 32
SECTOR, LINE = 32, 128

PROLOGUE = 30
"""Instructions of a warp before its loop: arguments, indices, bounds. Counted in compiled kernels."""
STEP = 6
"""Instructions of a loop's iteration besides its work: counter, comparison, branch, addresses."""
DECODED = 6
"""Instructions that turn a flat index into the index along one axis: a product, shifts, a remainder."""

NUMBA_ACCESS = 5
"""Instructions of an access in Numba besides itself: 64-bit indices times strides, checks of their signs."""
NUMBA_REGISTERS = 32
"""Registers of a thread of a kernel without arrays of its own."""
NUMBA_UNROLLED = 4
"""Iterations whose loads are in flight together, in loops without stores: arrays may overlap."""

LONG_FUNCTIONS = {
    "exp": 2,
    "rsqrt": 2,
    "sigmoid": 6,
    "silu": 7,
    "div": 9,
    "sqrt": 9,
    "log": 12,
    "tanh": 16,
    "erf": 20,
    "gelu": 22,
    "sin": 20,
    "cos": 20,
}
"""Instructions of functions, approximately; other operations take one. Source: disassembly of libdevice."""


def converted(itemsize: int) -> float:
    """Return the instructions that convert an element to f32 or from it."""
    return 0.0 if itemsize == 4 else 1.0


def expression_instructions(tree: Node) -> float:
    """Return the instructions of an expression for an element, special functions included."""
    return float(sum(LONG_FUNCTIONS.get(step.operation, 1) for step in steps(tree)))


def l1_passes(adjacent: Any, lane_bytes: Any) -> Any:
    """Return the passes of a warp's access through L1: one for each line of each group of lanes.

    Args:
        adjacent: Lanes that are side by side in memory; the others are on other lines.
        lane_bytes: Bytes of a lane. Lanes of 8 or 16 bytes are served in groups of 16 or 8.
    """
    group = np.minimum(LANES, LINE / np.maximum(4, lane_bytes))
    return LANES / np.minimum(group, np.maximum(1, adjacent))


def sector_bytes(run_bytes: Any, pitch_bytes: int) -> Any:
    """Return the bytes of the whole sectors of a run, on average over lines.

    Args:
        run_bytes: Adjacent bytes.
        pitch_bytes: Distance of lines, which decides where in a sector runs start.
    """
    step = float(np.gcd(pitch_bytes, SECTOR)) if pitch_bytes else float(SECTOR)
    whole = np.ceil(run_bytes / SECTOR) * SECTOR
    return np.where(step == SECTOR, whole, run_bytes + SECTOR - step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Reductions over threads of a block, as columns: fields of `Execution`.

    Attributes:
        instructions: Warp instructions of a block.
        accesses: Lanes that pass through the load/store units, which also exchange values between lanes.
        waits: Waits of a warp for shared memory, or for a value of another lane, which takes as long.
        barriers: Barriers.
    """

    instructions: Any
    accesses: Any
    waits: Any
    barriers: Any


def exchange(threads: Any, block_threads: Any, times: Any) -> Exchange:
    """Return the work of reductions by shuffles, then through shared memory (reduce.cuh).

    Args:
        threads: Threads that share a result.
        block_threads: Threads of a block.
        times: Reductions, one after the other.
    """
    warps, across = block_threads / LANES, threads > LANES
    shuffles = np.log2(np.minimum(LANES, threads)) + 5.0 * across
    return Exchange(
        instructions=times * warps * (2 * shuffles + 6.0 * across),
        accesses=times * warps * (LANES * shuffles + 33.0 * across),
        waits=times * (shuffles + across),
        barriers=times * 2.0 * across,
    )


def tree_exchange(threads: Any, block_threads: Any, times: Any) -> Exchange:
    """Return the work of reductions in shared memory, with a barrier for each halving of the threads.

    Args:
        threads: Threads that share a result.
        block_threads: Threads of a block.
        times: Reductions, one after the other.
    """
    warps, halvings = block_threads / LANES, np.log2(threads)
    return Exchange(
        instructions=times * warps * (6 + 8 * halvings),
        accesses=times * block_threads * 3.0,  # half of the threads, a quarter, and so on
        waits=times * (1 + halvings),
        barriers=times * (2 + halvings),
    )
