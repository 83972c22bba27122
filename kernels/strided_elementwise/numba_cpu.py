"""strided_elementwise on the CPU: blocks of two axes in parallel, each in one pass over the whole expression.

Loops are generated from the index maps, with sizes and strides as constants. A task has `rows` indices of a
second axis and `chunk` of the last one, and fixed indices along all others. Results are contiguous along the
last axis. The second axis is the one along which transposed operands are contiguous, so that a transpose uses
whole cache lines. Without transposed operands it is the axis before the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tunebench.device import Device
from tunebench.index_map import row_major
from tunebench.kernels.common.expression import compiled, filled, function_text, variable
from tunebench.kernels.common.numba_expression import has_two_forms
from tunebench.kernels.common.numba_strided import (
    Nest,
    Part,
    addressed,
    affine,
    decoded,
    indented,
    plus,
    strided_scope,
)
from tunebench.kernels.common.strided import least_of_element, second_axis, transposed_axis
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.strided_elementwise import StridedElementwise


def _rows(workload: StridedElementwise) -> int:
    """Return the extent of the second axis; 1 if there is none."""
    second = second_axis(workload)
    return 1 if second is None else workload.extents[second]


SPACE = Space(
    (
        Parameter("chunk", (16, 32, 64, 256, 1024, 4096, 16384, 65536), "indices of the last axis in a task"),
        Parameter("rows", (1, 4, 16, 32, 64, 256, 1024), "indices of the second axis in a task"),
        Parameter("inner", ("last", "second"), "axis of the inner loop"),
        Parameter("functions", ("poly", "libm"), "poly: polynomials, which vectorise; libm: calls"),
    ),
    (
        lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.extents[-1]),
        lambda rows, workload: (rows == 1) | (rows < 2 * _rows(workload)),
        lambda inner, rows: (inner == "last") | (rows > 1),
        lambda functions, workload: (functions == "poly") | has_two_forms(workload),
    ),
)

RUN = """
def @RUN@(@PARAMETERS@out_at, out_from, rows, count):
    for i in range(rows):
        @HOISTED@
        for j in range(count):
            @LOADS@
            @ASSIGNMENTS@
            out_at[@OUT@] = write(@RESULT@)
"""

KERNEL = """
def kernel(@NAMES@, out):
    @BEGIN@
    for task in numba.prange(@TASKS@):
        @MARKED@
        first_last = task % @PIECES@ * @CHUNK@
        block_of_rows = task // @PIECES@
        first_row = block_of_rows % @BLOCKS@ * @ROWS@
        outer = block_of_rows // @BLOCKS@
        @DECODE@
        block(@PASSED@, @LOCATED@, @RANGES@, @OUT@)
    @END@
"""


class NumbaCpuStridedElementwise(NumbaCpuVariant[StridedElementwise]):
    """Variant for every expression, layout and type."""

    name = "numba_cpu"
    operator = StridedElementwise
    space = SPACE
    # Sums keep the order of the expression, in which their errors are bounded.
    fastmath = frozenset({"contract", "nsz"})

    def default(self, workload: StridedElementwise, device: Device) -> Config:
        """Return tiles of a transpose, or whole lines and about 64 k elements per task."""
        last, rows = workload.extents[-1], _rows(workload)
        if transposed_axis(workload, len(workload.extents) - 1) is not None:
            chunk, most = _widest(last, (16, 32, 64)), 64
        else:
            chunk = _widest(last, (16, 32, 64, 256, 1024, 4096, 16384))
            most = max(1, min(65536 // min(last, chunk), workload.elements // min(last, chunk) // 16))
        block = max(b for b in (1, 4, 16, 32, 64, 256, 1024) if b == 1 or (b <= most and b < 2 * rows))
        return Config({"chunk": chunk, "rows": block, "inner": "last", "functions": "poly"})

    def costs(self, workload: StridedElementwise, table: Table, device: Device) -> Costs:
        """Count the products or the sums, whichever are more; one instruction may compute one of each."""
        fma = least_of_element(workload, may_be_0=False)[0] * workload.elements
        return Costs(blocks=1, full_blocks=0, threads=1, fma=fma)

    def generated(self, workload: StridedElementwise, config: Config) -> str:
        """Return the loops over blocks and the kernel that calls them."""
        extents = workload.extents
        last, second, steps = len(extents) - 1, second_axis(workload), row_major(extents)
        nest = _nest(workload, config)
        text = nest.text(
            f"{{run}}({{at}}out_at, {nest.place('out_from', steps)}, rows, count)", state=", out_at, out_from"
        )
        others = [axis for axis in range(last) if axis != second]
        decode, index = decoded(others, extents, "outer")
        pieces, blocks = -(-extents[last] // config["chunk"]), -(-_rows(workload) // config["rows"])
        of_last = f"first_last, min(first_last + {config['chunk']}, {extents[last]})"
        of_rows = f"first_row, min(first_row + {config['rows']}, {_rows(workload)})"
        tasks = pieces * blocks * math.prod(extents[axis] for axis in others)
        kernel = filled(
            KERNEL,
            NAMES=", ".join(map(variable, workload.input_names)),
            TASKS=str(tasks),
            PIECES=str(pieces),
            CHUNK=str(config["chunk"]),
            BLOCKS=str(blocks),
            ROWS=str(config["rows"]),
            PASSED=nest.passed,
            LOCATED=nest.located(index),
            RANGES=f"{of_rows}, {of_last}" if config["inner"] == "last" else f"{of_last}, {of_rows}",
            OUT=f"{addressed('out', workload.dtype)}, {affine(steps, index, 0)}",
        )
        return text + indented(kernel, BEGIN=nest.begin, MARKED=nest.marked, DECODE=decode, END=nest.end)

    def kernel(self, workload: StridedElementwise, config: Config) -> Callable[..., None]:
        """Return the kernel of this workload, which takes the operands in order, then out."""
        text = self.generated(workload, config)
        scope = strided_scope(workload, config["functions"])
        _nest(workload, config).compile(text, scope, self.fastmath)
        return compiled(function_text(text, "kernel"), "kernel", scope)


def _nest(workload: StridedElementwise, config: Config) -> Nest:
    """Return the loops over the last axis and the second one."""
    lane, second = len(workload.extents) - 1, second_axis(workload)
    if config["inner"] == "second" and second is not None:
        lane, second = second, lane
    steps = row_major(workload.extents)
    place = plus("out_from", (0 if second is None else steps[second], "i"), (steps[lane], "j"))

    def write(part: Part) -> str:
        assignments, result = part.expression()
        text = filled(RUN, PARAMETERS=part.parameters, OUT=place, RESULT=result)
        hoisted, loads = (part.loads(hoisted=hoisted) for hoisted in (True, False))
        return indented(text, HOISTED=hoisted, LOADS=loads, ASSIGNMENTS=assignments)

    return Nest(workload, lane, second, write)


def _widest(extent: int, choices: tuple[int, ...]) -> int:
    """Return the largest choice below twice an extent, or the smallest."""
    return max(c for c in choices if c == choices[0] or c < 2 * extent)


VARIANT = NumbaCpuStridedElementwise()
