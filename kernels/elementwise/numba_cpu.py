"""Elementwise on the CPU: pieces of rows in parallel, each in one pass that computes the whole expression.

The loop is generated from the expression: each element is loaded once, computed in registers, and stored
once. Without vectors and columns, rows are first joined to longer lines.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels.common.expression import (
    compiled,
    filled,
    function_text,
    least_operations,
    lines,
    operands,
    variable,
)
from tunebench.kernels.common.numba_cpu import jitted
from tunebench.kernels.common.numba_cpu_rows import PIECES
from tunebench.kernels.common.numba_expression import (
    PRINTER,
    cpu_elements,
    cpu_parameters,
    cpu_scope,
    has_two_forms,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workloads.operators.elementwise import Elementwise

SPACE = Space(
    (
        Parameter("chunk", (64, 256, 1024, 4096, 16384, 65536), "elements of a row that a loop processes"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "rows of a task"),
        Parameter("functions", ("poly", "libm"), "poly: polynomials, which vectorise; libm: calls"),
    ),
    (
        lambda chunk, workload: (chunk == 64) | (chunk < 2 * lines(workload)[1]),
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= lines(workload)[0]),
        lambda functions, workload: (functions == "poly") | has_two_forms(workload),
    ),
)

LOOP = """
def run(tensors, i, begin, column, count):
    @NAMES@, out = tensors
    for j in range(count):
@LOADS@
@ASSIGNMENTS@
        out[begin + j] = write(@RESULT@)
"""


class NumbaCpuElementwise(NumbaCpuVariant[Elementwise]):
    """Variant for every expression, size and type."""

    name = "numba_cpu"
    operator = Elementwise
    space = SPACE
    # Sums keep the order of the expression, in which their errors are bounded.
    fastmath = frozenset({"contract", "nsz"})

    def default(self, workload: Elementwise, device: Device) -> Config:
        """Return whole lines, and about 64 k elements per task where that leaves enough tasks."""
        rows, cols = lines(workload)
        chunk = max(c for c in (64, 256, 1024, 4096) if c == 64 or c < 2 * cols)
        most = max(1, 65536 // min(cols, chunk))
        row_block = max(
            b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if b == 1 or (b * 16 <= rows and b <= most)
        )
        return Config({"chunk": chunk, "row_block": row_block, "functions": "poly"})

    def costs(self, workload: Elementwise, table: Table, device: Device) -> Costs:
        """Count the products or the sums, whichever are more; one instruction may compute one of each."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=least_operations(workload)[0] * elements)

    def arguments(self, workload: Elementwise, config: Config) -> tuple[Argument, ...]:
        """Return the inputs in order, out, and the shape of joined rows."""
        rows, cols = lines(workload)
        inputs = tuple(tensor.name for tensor in workload.inputs())
        return (*inputs, "out", Scalar("int", rows), Scalar("int", cols))

    def generated(self, workload: Elementwise, config: Config) -> str:
        """Return the loop over elements and the kernel that calls it."""
        assignments, result = PRINTER.write(workload.tree)
        names, addresses = cpu_parameters(workload)
        return filled(
            LOOP + PIECES,
            LOADS="\n".join(
                f"        {variable(name)} = {element}" for name, element in cpu_elements(workload).items()
            ),
            ASSIGNMENTS="\n".join(assignments),
            RESULT=result,
            ARGUMENTS=f"{addresses}, address_of(out)",
            SHAPE="",
            NAMES=names,
            PARAMETERS=f"{operands(workload, {})}, out, rows, cols",
        )

    def kernel(self, workload: Elementwise, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression, which takes `arguments`."""
        text = self.generated(workload, config)
        scope = cpu_scope(workload, workload.out, config["functions"])
        scope |= {"piece": config["chunk"], "row_block": config["row_block"]}
        scope["run"] = jitted(self.fastmath)(compiled(function_text(text, "run"), "run", dict(scope)))
        return compiled(function_text(text, "kernel"), "kernel", scope)


VARIANT = NumbaCpuElementwise()
