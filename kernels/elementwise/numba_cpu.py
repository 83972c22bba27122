"""elementwise on the CPU: pieces of rows in parallel, each in one pass that computes the whole chain.

The loop is generated from the expression: each element is loaded once, goes through all operations in
registers, and is stored once. Without vectors and columns rows are joined to longer lines first.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels.common.expression import compiled, least_operations, lines, variable
from tunebench.kernels.common.numba_cpu import address, jitted, load, store
from tunebench.kernels.common.numba_expression import PRINTER, by_libm, by_polynomials, has_two_forms
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workloads.operators.elementwise import Elementwise

SPACE = Space(
    (
        Parameter("chunk", (64, 256, 1024, 4096, 16384, 65536), "elements of a row that a loop takes"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "rows that a thread takes together"),
        Parameter("functions", ("poly", "libm"), "poly: polynomials, which vectorise; libm: calls"),
    ),
    (
        lambda chunk, workload: (chunk == 64) | (chunk < 2 * lines(workload)[1]),
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= lines(workload)[0]),
        lambda functions, workload: (functions == "poly") | has_two_forms(workload),
    ),
)

LOOP = """
def run(@NAMES@, out, begin, column, count):
    for j in range(count):
@LOADS@
@ASSIGNMENTS@
        out[begin + j] = write(@RESULT@)
"""

KERNEL = """
def elementwise(@NAMES@, out, rows, cols):
    pieces = (cols + chunk - 1) // chunk
    tasks = (rows + row_block - 1) // row_block * pieces
    for task in numba.prange(tasks):
        block, column = task // pieces, task % pieces * chunk
        count = min(chunk, cols - column)
        for i in range(block * row_block, min(rows, (block + 1) * row_block)):
            run(@ADDRESSES@, address_of(out), i * cols + column, column, count)
"""


class NumbaCpuElementwise(NumbaCpuVariant[Elementwise]):
    """Serves every expression, size and type."""

    name = "numba_cpu"
    operator = Elementwise
    space = SPACE
    # Sums stay in the order that is written: their errors are bounded in it.
    fastmath = frozenset({"contract", "nsz"})

    def default(self, workload: Elementwise, device: Device) -> Config:
        """Return whole lines, and about 64 k elements a task where that leaves enough tasks."""
        rows, cols = lines(workload)
        chunk = max(c for c in (64, 256, 1024, 4096) if c == 64 or c < 2 * cols)
        most = max(1, 65536 // min(cols, chunk))
        row_block = max(
            b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if b == 1 or (b * 16 <= rows and b <= most)
        )
        return Config({"chunk": chunk, "row_block": row_block, "functions": "poly"})

    def costs(self, workload: Elementwise, table: Table, device: Device) -> Costs:
        """Count the products or the sums, whichever are more: one instruction may do one of each."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=least_operations(workload)[0] * elements)

    def arguments(self, workload: Elementwise, config: Config) -> tuple[Argument, ...]:
        """Pass the inputs in order, out, and the shape of joined rows."""
        rows, cols = lines(workload)
        inputs = tuple(tensor.name for tensor in workload.inputs())
        return (*inputs, "out", Scalar("int", rows), Scalar("int", cols))

    def generated(self, workload: Elementwise, config: Config) -> str:
        """Return the loop over elements and the kernel around it."""
        assignments, result = PRINTER.write(workload.tree)
        inputs, whole = [tensor.name for tensor in workload.inputs()], workload.whole_names
        read_line = "read" if workload.vector_dtype == workload.dtype else f"read_{workload.vector_dtype}"
        loads = [f"        {variable(name)} = read({variable(name)}_at[begin + j])" for name in whole]
        loads += [
            f"        {variable(name)} = {read_line}({variable(name)}_at[column + j])"
            for name in workload.vector_names
        ]
        stored = {name: f"{variable(name)}_at" for name in (*whole, *workload.vector_names)}
        # What a row has one of is read where its loop is called.
        passed = {name: f"address_of({at})" for name, at in stored.items()}
        passed |= {name: f"read(address_of({variable(name)})[i])" for name in workload.column_names}
        pieces = {
            "LOADS": "\n".join(loads),
            "ASSIGNMENTS": "\n".join(assignments),
            "RESULT": result,
            "ADDRESSES": ", ".join(passed.get(name, variable(name)) for name in inputs),
            "NAMES": ", ".join(stored.get(name, variable(name)) for name in inputs),
        }
        text = LOOP + KERNEL
        for word, piece in pieces.items():
            text = text.replace(f"@{word}@", piece)
        return text

    def kernel(self, workload: Elementwise, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression, which takes `arguments`."""
        import numba
        import numpy as np

        loop, around = self.generated(workload, config).split("\ndef elementwise")
        functions = by_libm() if config["functions"] == "libm" else by_polynomials()
        scope = {"__name__": __name__, "np": np, "f32": np.float32, **functions}
        scope |= {"read": load(workload.dtype), "write": store(workload.out)}
        scope[f"read_{workload.vector_dtype}"] = load(workload.vector_dtype)
        run = jitted(self.fastmath)(compiled(loop, "run", scope))
        scope = {"__name__": __name__, "numba": numba, "address_of": address(), "run": run}
        scope |= {"chunk": config["chunk"], "row_block": config["row_block"], "read": load(workload.dtype)}
        return compiled(f"def elementwise{around}", "elementwise", scope)


VARIANT = NumbaCpuElementwise()
