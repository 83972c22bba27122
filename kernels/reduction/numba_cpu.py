"""Reduction on the CPU: parts of the reduced axis in parallel, then a join of their results.

Loops are generated from the expression. With `axis=cols` a task has `block` rows, or parts of them, and keeps
one result in registers. With `axis=rows` it has `block` adjacent columns and adds `unroll` rows at a time;
results are in memory that stays in the cache. The reduced axis is split into `parts`, so that few results
keep all cores busy. Parts are joined in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.expression import (
    compiled,
    filled,
    function_text,
    least_operations,
    operands,
    variable,
)
from tunebench.kernels.common.numba_cpu import jitted, rank
from tunebench.kernels.common.numba_expression import (
    PRINTER,
    cpu_elements,
    cpu_parameters,
    cpu_scope,
    has_two_forms,
)
from tunebench.kernels.common.numba_reduction import exact, join_of, neutral_of
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workload import Tensor
from tunebench.workloads.operators.reduction import Reduction

LEAST_PART = 64
"""Least elements of a part."""
LEAST_COLUMNS = 64
"""Least columns of a task; fewer columns would waste fetched bytes."""


def _over_cols(workload: Reduction) -> bool:
    return workload.axis == "cols"


SPACE = Space(
    (
        Parameter("block", tuple(2**n for n in range(15)), "results of a task"),
        Parameter("parts", tuple(2**n for n in range(11)), "parts that the reduced axis is split into"),
        Parameter("unroll", (1, 2, 4, 8), "rows that are added at a time, with axis=rows"),
        Parameter("functions", ("poly", "libm"), "poly: polynomials, which vectorise; libm: calls"),
    ),
    (
        lambda parts, workload: (parts == 1) | (parts * LEAST_PART <= workload.terms),
        lambda block, workload: (
            ((block == 1) | ((block * 2 <= workload.rows) & (block <= 512)))
            if _over_cols(workload)
            else ((block >= LEAST_COLUMNS) & ((block == LEAST_COLUMNS) | (block < 2 * workload.cols)))
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

# The maximum of integers vectorises; NaN is tracked separately.
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
    """Variant for every expression, size and type, over either axis."""

    name = "numba_cpu"
    operator = Reduction
    space = SPACE

    def default(self, workload: Reduction, device: Device) -> Config:
        """Return about 64 k elements per task, and parts only if there are too few results for 16 tasks."""
        over_cols, tasks = _over_cols(workload), 16
        if over_cols:
            most = max(1, 65536 // workload.cols)
            block = max(
                b for b in (2**n for n in range(10)) if b == 1 or (b * 16 <= workload.rows and b <= most)
            )
        else:
            block = max(b for b in (64, 256, 1024, 4096) if b == LEAST_COLUMNS or b < 2 * workload.cols)
        blocks = -(-workload.results // block)
        parts = 1
        while parts < 1024 and parts * blocks < tasks and 2 * parts * 4 * LEAST_PART <= workload.terms:
            parts *= 2
        unroll = 1 if over_cols else max(u for u in (1, 2, 4) if u <= workload.rows)
        return Config({"block": block, "parts": parts, "unroll": unroll, "functions": "poly"})

    def costs(self, workload: Reduction, table: Table, device: Device) -> Costs:
        """Count the products or the sums, whichever are more; one instruction may compute one of each."""
        return Costs(
            blocks=1, full_blocks=0, threads=1, fma=least_fma(workload) * workload.rows * workload.cols
        )

    def scratch(self, workload: Reduction, config: Config) -> tuple[Tensor, ...]:
        """Return memory for results of parts: (rows, parts) if any, or (parts, cols)."""
        parts, over_cols = config["parts"], _over_cols(workload)
        if over_cols and parts == 1:
            return ()
        shape = (workload.rows, parts) if over_cols else (parts, workload.cols)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def arguments(self, workload: Reduction, config: Config) -> tuple[Argument, ...]:
        """Return the inputs in order, out, the shape, the factor of sums, and the results of parts."""
        inputs = tuple(tensor.name for tensor in workload.inputs())
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        scratch = tuple(tensor.name for tensor in self.scratch(workload, config))
        return (*inputs, "out", *sizes, Scalar("float", workload.factor), *scratch)

    def generated(self, workload: Reduction, config: Config) -> str:
        """Return the function of an element, the loop over elements, and the kernel that calls it."""
        over_cols, single = _over_cols(workload), config["parts"] == 1
        assignments, result = PRINTER.write(workload.tree)
        ending, ended = PRINTER.write(workload.end)
        _, addresses = cpu_parameters(workload, over_rows=not over_cols)
        around = (OVER_COLS if single else PARTS_OVER_COLS) if over_cols else OVER_ROWS
        return filled(
            VALUE + (_of_row(workload) if over_cols else _of_columns(workload, config["unroll"])) + around,
            NAMES=operands(workload, {}),
            ADDRESSES=addresses,
            END=(END if single else END_OF_PARTS).strip("\n"),
            ASSIGNMENTS="\n".join(line[4:] for line in assignments),
            RESULT=result,
            ENDING="\n".join(line[4:] for line in ending),
            ENDED=ended,
        )

    def kernel(self, workload: Reduction, config: Config) -> Callable[..., None]:
        """Return the kernel of this expression, which takes `arguments`."""
        text = self.generated(workload, config)
        scope = cpu_scope(workload, workload.out, config["functions"])
        scope |= {"neutral": neutral_of(workload), "join": join_of(workload)}
        for name in ("value", "finish"):
            scope[name] = exact(compiled(function_text(text, name), name, dict(scope)))
        scope["rank_of"], scope["value_of"] = rank()
        scope["extreme"] = min if workload.reduce == "min" else max
        scope |= {name: config[name] for name in ("block", "parts", "unroll")}
        scope["run"] = jitted(self.fastmath)(compiled(function_text(text, "run"), "run", dict(scope)))
        if not _over_cols(workload):
            scope["run_one"] = jitted(self.fastmath)(compiled(_of_columns(workload, 1), "run", dict(scope)))
            scope |= _around_columns(config["parts"], scope)
        return compiled(function_text(text, "reduction"), "reduction", scope)


def least_fma(workload: Reduction) -> float:
    """Return the least instructions of an element; one may compute a product and the next term of the sum."""
    least, counts = least_operations(workload)
    return max(least, counts.get("add", 0) + 1.0 if workload.is_sum else 1.0)


def _of_row(workload: Reduction) -> str:
    """Return the loop over elements of a row."""
    names, _ = cpu_parameters(workload)
    loop = SUM_OF_ROW if workload.is_sum else EXTREME_OF_ROW
    return filled(loop, NAMES=names, ELEMENTS=operands(workload, cpu_elements(workload)))


def _of_columns(workload: Reduction, unroll: int) -> str:
    """Return the loop over columns that adds `unroll` rows at a time."""
    names, _ = cpu_parameters(workload, over_rows=True)
    loads, taken = [], []
    for n in range(unroll):
        in_row = {name: f"{variable(name)}_{n}" for name in workload.column_names}
        loads += [f"    {value} = read({variable(name)}_at[row + {n}])" for name, value in in_row.items()]
        each = operands(workload, {**cpu_elements(workload, f"{n} * cols + "), **in_row})
        taken.append(f"        total = join(total, value({each}))")
    return filled(OF_COLUMNS, NAMES=names, LOAD_COLUMNS="\n".join(loads), TAKEN="\n".join(taken))


def _around_columns(parts: int, scope: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions that clear the results of columns, and join those of parts."""
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
