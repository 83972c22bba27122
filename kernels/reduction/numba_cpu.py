"""reduction on the CPU: pieces of what is reduced in parallel, then the pieces' results.

Loops are generated from the expression. Over rows of the matrix (`axis=cols`) a task takes `block` rows, or
pieces of them, and keeps one result in registers. Over columns (`axis=rows`) it takes `block` columns side by
side and goes down the rows, `unroll` at once; results wait in memory, which stays in the cache. What is
reduced falls into `parts`, each by itself, so that few results keep all cores busy; they are put together in
an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.expression import compiled, least_operations, variable
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, rank, store
from tunebench.kernels.common.numba_expression import PRINTER, by_libm, by_polynomials, has_two_forms
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workload import Tensor
from tunebench.workloads.operators.reduction import Reduction

LEAST_PART = 64
"""Elements that are worth a part of their own."""
BESIDE = 64
"""Columns that are worth a task of their own: fewer waste what is fetched with them."""


def _over_cols(workload: Reduction) -> bool:
    return workload.axis == "cols"


SPACE = Space(
    (
        Parameter("block", tuple(2**n for n in range(15)), "results that a task takes together"),
        Parameter("parts", tuple(2**n for n in range(11)), "pieces that what is reduced falls into"),
        Parameter("unroll", (1, 2, 4, 8), "rows that are added at once, where results are of columns"),
        Parameter("functions", ("poly", "libm"), "poly: polynomials, which vectorise; libm: calls"),
    ),
    (
        lambda parts, workload: (parts == 1) | (parts * LEAST_PART <= workload.terms),
        lambda block, workload: (
            ((block == 1) | ((block * 2 <= workload.rows) & (block <= 512)))
            if _over_cols(workload)
            else ((block >= BESIDE) & ((block == BESIDE) | (block < 2 * workload.cols)))
        ),
        lambda unroll, workload: (unroll == 1) | ((not _over_cols(workload)) & (unroll <= workload.rows)),
        lambda functions, workload: (functions == "poly") | has_two_forms(workload),
    ),
)

VALUE = """
def value(@NAMES@):
@ASSIGNMENTS@
    return @RESULT@

def finish(in_x):
@ENDING@
    return @ENDED@
"""

SUM_OF_ROW = """
def run(@NAMES@, begin, column, count):
    total = f32(0)
    for j in range(count):
        total += value(@ELEMENTS@)
    return total
"""

# That of whole numbers vectorises; whether there was a NaN is found beside it.
EXTREME_OF_ROW = """
def run(@NAMES@, begin, column, count):
    found, broken = rank_of(neutral), np.int32(0)
    for j in range(count):
        each = value(@ELEMENTS@)
        broken |= np.int32(each != each)
        found = extreme(found, rank_of(each))
    return f32(np.nan) if broken else value_of(found)
"""

OF_COLUMNS = """
def run(@NAMES@, begin, cols, row, column, count, totals, to):
@LOAD_COLUMNS@
    for j in range(count):
        total = totals[to + j]
@TAKEN@
        totals[to + j] = total
"""

OVER_COLS = """
def reduction(@NAMES@, out, rows, cols, factor):
    for task in numba.prange((rows + block - 1) // block):
        for i in range(task * block, min(rows, (task + 1) * block)):
            out[i] = write(finish(run(@ADDRESSES@, i * cols, 0, cols) * factor))
"""

PARTS_OVER_COLS = """
def reduction(@NAMES@, out, rows, cols, factor, partial):
    tasks = (rows + block - 1) // block * parts
    for task in numba.prange(tasks):
        first, part = task // parts * block, task % parts
        column = cols * part // parts
        count = cols * (part + 1) // parts - column
        for i in range(first, min(rows, first + block)):
            partial[i, part] = run(@ADDRESSES@, i * cols + column, column, count)
    for i in numba.prange(rows):
        total = partial[i, 0]
        for part in range(1, parts):
            total = join(total, partial[i, part])
        out[i] = write(finish(total * factor))
"""

OVER_ROWS = """
def reduction(@NAMES@, out, rows, cols, factor, partial):
    blocks = (cols + block - 1) // block
    for task in numba.prange(blocks * parts):
        column, part = task // parts * block, task % parts
        first, last = rows * part // parts, rows * (part + 1) // parts
        count, to = min(block, cols - column), part * cols + column
        clear(address_of(partial), to, count)
        whole = last - (last - first) % unroll
        for i in range(first, whole, unroll):
            run(@ADDRESSES@, i * cols + column, cols, i, column, count, address_of(partial), to)
        for i in range(whole, last):
            run_one(@ADDRESSES@, i * cols + column, cols, i, column, count, address_of(partial), to)
@END@
"""

END = """        end(address_of(partial), address_of(out), column, count, cols, factor)"""
END_OF_PARTS = """
    for task in numba.prange(blocks):
        column = task * block
        end(address_of(partial), address_of(out), column, min(block, cols - column), cols, factor)
"""


class NumbaCpuReduction(NumbaCpuVariant[Reduction]):
    """Serves every expression, size and type, both axes."""

    name = "numba_cpu"
    operator = Reduction
    space = SPACE

    def default(self, workload: Reduction, device: Device) -> Config:
        """Return about 64 k elements a task, and parts only where results are too few for 16 tasks."""
        over_cols, tasks = _over_cols(workload), 16
        if over_cols:
            most = max(1, 65536 // workload.cols)
            block = max(
                b for b in (2**n for n in range(10)) if b == 1 or (b * 16 <= workload.rows and b <= most)
            )
        else:
            block = max(b for b in (64, 256, 1024, 4096) if b == BESIDE or b < 2 * workload.cols)
        blocks = -(-workload.results // block)
        parts = 1
        while parts < 1024 and parts * blocks < tasks and 2 * parts * 4 * LEAST_PART <= workload.terms:
            parts *= 2
        unroll = 1 if over_cols else max(u for u in (1, 2, 4) if u <= workload.rows)
        return Config({"block": block, "parts": parts, "unroll": unroll, "functions": "poly"})

    def costs(self, workload: Reduction, table: Table, device: Device) -> Costs:
        """Count the products or the sums, whichever are more: one instruction may do one of each."""
        return Costs(
            blocks=1, full_blocks=0, threads=1, fma=least_fma(workload) * workload.rows * workload.cols
        )

    def scratch(self, workload: Reduction, config: Config) -> tuple[Tensor, ...]:
        """Return the results of parts: of rows (rows, parts), if there are any; of columns (parts, cols)."""
        parts, over_cols = config["parts"], _over_cols(workload)
        if over_cols and parts == 1:
            return ()
        shape = (workload.rows, parts) if over_cols else (parts, workload.cols)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def arguments(self, workload: Reduction, config: Config) -> tuple[Argument, ...]:
        """Pass the inputs in order, out, the shape, what sums are multiplied by, and results of parts."""
        inputs = tuple(tensor.name for tensor in workload.inputs())
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        scratch = tuple(tensor.name for tensor in self.scratch(workload, config))
        return (*inputs, "out", *sizes, Scalar("float", workload.factor), *scratch)

    def generated(self, workload: Reduction, config: Config) -> str:
        """Return what is computed of an element, the loop over elements, and the kernel around it."""
        over_cols, names = _over_cols(workload), [tensor.name for tensor in workload.inputs()]
        assignments, result = PRINTER.write(workload.tree)
        ending, ended = PRINTER.write(workload.end)
        common = {
            "ASSIGNMENTS": "\n".join(line[4:] for line in assignments),
            "RESULT": result,
            "ENDING": "\n".join(line[4:] for line in ending),
            "ENDED": ended,
        }
        single = config["parts"] == 1
        around = (OVER_COLS if single else PARTS_OVER_COLS) if over_cols else OVER_ROWS
        around = _filled(around, END=(END if single else END_OF_PARTS).strip("\n"))
        loop = _of_row(workload) if over_cols else _of_columns(workload, config["unroll"])
        pieces = (
            _filled(VALUE, NAMES=", ".join(map(variable, names)), **common),
            loop,
            _filled(around, NAMES=", ".join(map(variable, names)), ADDRESSES=_addresses(workload)),
        )
        return "".join(pieces)

    def kernel(self, workload: Reduction, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression, which takes `arguments`."""
        import numba
        import numpy as np

        text = self.generated(workload, config)
        functions = by_libm() if config["functions"] == "libm" else by_polynomials()
        join, neutral = _join(workload), _neutral(workload)
        basic = {"__name__": __name__, "np": np, "f32": np.float32, "neutral": neutral, **functions}
        exact = {
            name: _exact(compiled(_piece(text, name), name, dict(basic))) for name in ("value", "finish")
        }
        rank_of, value_of = rank()
        basic |= {"join": join, "rank_of": rank_of, "value_of": value_of, "read": load(workload.dtype)}
        basic |= {**exact, "write": store(workload.out), "extreme": min if workload.reduce == "min" else max}
        scope = {**basic, "numba": numba, "address_of": address()}
        scope |= {name: config[name] for name in ("block", "parts", "unroll")}
        scope["run"] = jitted(self.fastmath)(compiled(_piece(text, "run"), "run", dict(basic)))
        if not _over_cols(workload):
            scope["run_one"] = jitted(self.fastmath)(compiled(_of_columns(workload, 1), "run", dict(basic)))
            scope |= _around_columns(config["parts"], basic)
        return compiled(_piece(text, "reduction"), "reduction", scope)


def least_fma(workload: Reduction) -> float:
    """Return the instructions an element takes at least: one may be a product and the sum's next term."""
    least, counts = least_operations(workload)
    return max(least, counts.get("add", 0) + 1.0 if workload.is_sum else 1.0)


def _filled(text: str, **pieces: str) -> str:
    for word, piece in pieces.items():
        text = text.replace(f"@{word}@", piece)
    return text


def _piece(text: str, function: str) -> str:
    """Return one function of generated text."""
    (found,) = (piece for piece in text.split("\ndef ") if piece.startswith(f"{function}("))
    return f"def {found}"


def _addresses(workload: Reduction) -> str:
    """Return what a loop is called with: addresses; of a row's own inputs, their elements."""
    passed = {
        name: f"address_of({variable(name)})" for name in (*workload.whole_names, *workload.vector_names)
    }
    for name in workload.column_names:
        at = f"address_of({variable(name)})"
        passed[name] = f"read({at}[i])" if _over_cols(workload) else at
    return ", ".join(passed.get(tensor.name, variable(tensor.name)) for tensor in workload.inputs())


def _of_row(workload: Reduction) -> str:
    """Return the loop over elements of a row."""
    stored = {name: f"{variable(name)}_at" for name in (*workload.whole_names, *workload.vector_names)}
    elements = {name: f"read({stored[name]}[begin + j])" for name in workload.whole_names}
    elements |= {name: f"read({stored[name]}[column + j])" for name in workload.vector_names}
    names = [tensor.name for tensor in workload.inputs()]
    return _filled(
        SUM_OF_ROW if workload.is_sum else EXTREME_OF_ROW,
        NAMES=", ".join(stored.get(name, variable(name)) for name in names),
        ELEMENTS=", ".join(elements.get(name, variable(name)) for name in names),
    )


def _of_columns(workload: Reduction, unroll: int) -> str:
    """Return the loop over columns that takes in so many rows."""
    names = [tensor.name for tensor in workload.inputs()]
    stored = {name: f"{variable(name)}_at" for name in names if name not in workload.scalar_names}
    loads, taken = [], []
    for n in range(unroll):
        elements = {name: f"read({stored[name]}[begin + {n} * cols + j])" for name in workload.whole_names}
        elements |= {name: f"read({stored[name]}[column + j])" for name in workload.vector_names}
        elements |= {name: f"{variable(name)}_{n}" for name in workload.column_names}
        loads += [f"    {elements[name]} = read({stored[name]}[row + {n}])" for name in workload.column_names]
        each = ", ".join(elements.get(name, variable(name)) for name in names)
        taken.append(f"        total = join(total, value({each}))")
    return _filled(
        OF_COLUMNS,
        NAMES=", ".join(stored.get(name, variable(name)) for name in names),
        LOAD_COLUMNS="\n".join(loads),
        TAKEN="\n".join(taken),
    )


def _neutral(workload: Reduction) -> Any:
    import numpy as np

    return np.float32({"max": -np.inf, "min": np.inf}.get(workload.reduce, 0.0))


def _join(workload: Reduction) -> Callable[..., Any]:
    """Return what joins two results; a NaN stays one."""

    @inlined
    def added(a: Any, b: Any) -> Any:
        return a + b

    @inlined
    def greater(a: Any, b: Any) -> Any:
        return b if b > a or b != b else a

    @inlined
    def less(a: Any, b: Any) -> Any:
        return b if b < a or b != b else a

    return {"max": greater, "min": less}.get(workload.reduce, added)


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that becomes a part of its callers, with operations in the order that is written.

    Its errors are bounded in that order; sums over elements may be taken in any.
    """
    import numba

    made: Callable[..., Any] = numba.njit(
        fastmath={"contract", "nsz"}, error_model="numpy", forceinline=True, no_cpython_wrapper=True
    )(function)
    return made


def _around_columns(parts: int, scope: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return what empties results of columns, and what puts those of parts together."""
    neutral, join, write, finish = (scope[name] for name in ("neutral", "join", "write", "finish"))

    @jitted()
    def clear(totals: Any, to: int, count: int) -> None:
        for j in range(count):
            totals[to + j] = neutral

    @jitted()
    def end(totals: Any, out: Any, column: int, count: int, cols: int, factor: Any) -> None:
        for part in range(1, parts):
            for j in range(column, column + count):
                totals[j] = join(totals[j], totals[part * cols + j])
        for j in range(column, column + count):
            out[j] = write(finish(totals[j] * factor))

    return {"clear": clear, "end": end}


VARIANT = NumbaCpuReduction()
