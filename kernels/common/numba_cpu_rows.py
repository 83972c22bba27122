"""Row kernels of Numba on the CPU: threads share blocks of rows, and loops go over chunks or pieces of a row.

`row_kernel` calls a function once for each row, with a buffer of a row's length that stays in the cache.
`piece_kernel` calls one for each piece of each row, so that few long rows keep all threads busy. The parallel
loop is generated, since Numba compiles no variable number of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from tunebench.device import Device
from tunebench.kernels.common.expression import compiled, filled
from tunebench.kernels.common.numba_cpu import address
from tunebench.space import Constraint, Parameter, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workload import Workload

__all__ = [
    "CHUNK",
    "CONSTRAINTS",
    "EXP",
    "FASTMATH",
    "PIECES",
    "ROW_BLOCK",
    "NumbaCpuRows",
    "default_chunk",
    "default_row_block",
    "piece_kernel",
    "row_kernel",
]

R = TypeVar("R", bound=Workload)

CHUNK = Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements that a loop processes")
ROW_BLOCK = Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows of a task")
EXP = Parameter("exp", ("libm", "poly"), "exponential: vectorised polynomial, or one libm call an element")
CONSTRAINTS: tuple[Constraint, ...] = (
    lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
    lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
)
FASTMATH = frozenset({"reassoc", "contract", "arcp", "nsz", "afn"})
"""LLVM fast-math flags of row kernels; NaN and infinities keep their meaning."""


class NumbaCpuRows(NumbaCpuVariant[R]):
    """A variant for matrices (rows, cols), with the fast-math flags of row kernels.

    Attributes:
        fma: Multiply-adds of an element.
    """

    fastmath = FASTMATH
    fma: ClassVar[float]

    def costs(self, workload: Any, table: Table, device: Device) -> Costs:
        """Count the multiply-adds of the elements."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=self.fma * workload.rows * workload.cols)


class _Matrix(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...


def default_chunk(workload: _Matrix) -> int:
    """Return up to 256 elements: 1 KiB in f32, which stays in the first cache."""
    return max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)


def default_row_block(workload: _Matrix, most: int) -> int:
    """Return the largest power of two, up to `most`, that leaves two tasks or more.

    Args:
        workload: The workload.
        most: Most rows of a task.
    """
    return max(b for b in (1, 2, 4, 8, 16, 32, 64) if b == 1 or (b <= most and b * 2 <= workload.rows))


ROWS = """
def kernel(@PARAMETERS@):
    rows, cols = @FIRST@.shape
    for task in numba.prange((rows + row_block - 1) // row_block):
        buffer = np.empty(cols, np.float32)
        for i in range(task * row_block, min(rows, (task + 1) * row_block)):
            row((@ARGUMENTS@), i, cols, address_of(buffer))
"""

PIECES = """
def kernel(@PARAMETERS@):
    @SHAPE@
    pieces = (cols + piece - 1) // piece
    for task in numba.prange((rows + row_block - 1) // row_block * pieces):
        block, column = task // pieces, task % pieces * piece
        count = min(piece, cols - column)
        for i in range(block * row_block, min(rows, (block + 1) * row_block)):
            run((@ARGUMENTS@), i, i * cols + column, column, count)
"""
"""Template of `piece_kernel`; ``SHAPE`` assigns ``rows`` and ``cols`` unless they are parameters."""


def row_kernel(
    parameters: Sequence[str], row: Callable[..., None], row_block: int, numbers: Sequence[str] = ()
) -> Callable[..., None]:
    """Return the kernel that calls `row` for each row, with rows shared among threads.

    Args:
        parameters: Parameters of the kernel; the first is a matrix.
        row: Jitted function `(arguments, i, cols, buffer)` for row `i`. `arguments` holds the addresses of
            arrays and the numbers, in order; `buffer` has room for `cols` f32.
        row_block: Rows of a task.
        numbers: Parameters that are numbers.
    """
    return _kernel(ROWS, parameters, numbers, {"row": row, "row_block": row_block})


def piece_kernel(
    parameters: Sequence[str], run: Callable[..., None], row_block: int, piece: int
) -> Callable[..., None]:
    """Return the kernel that calls `run` for each piece of each row, with pieces shared among threads.

    Args:
        parameters: Parameters of the kernel, all arrays; the first is a matrix.
        run: Jitted function `(arguments, i, begin, column, count)` for the `count` elements of row `i` from
            `column`, at the flat index `begin`. `arguments` holds the addresses of arrays, in order.
        row_block: Rows of a task.
        piece: Most elements of a piece.
    """
    scope = {"run": run, "row_block": row_block, "piece": piece}
    return _kernel(filled(PIECES, SHAPE="rows, cols = @FIRST@.shape"), parameters, (), scope)


def _kernel(
    template: str, parameters: Sequence[str], numbers: Sequence[str], scope: dict[str, Any]
) -> Callable[..., None]:
    import numba
    import numpy as np

    passed = [name if name in numbers else f"address_of({name})" for name in parameters]
    source = filled(
        template, PARAMETERS=", ".join(parameters), FIRST=parameters[0], ARGUMENTS=", ".join(passed)
    )
    common = {"__name__": __name__, "numba": numba, "np": np, "address_of": address()}
    return compiled(source, "kernel", common | scope)
