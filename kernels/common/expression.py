"""From an expression to program text: one assignment for each different operation, in C++ or in Python."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench.expression import Apply, Name, Node, Number, names, steps
from tunebench.workloads.operators._expression_workload import ExpressionWorkload

__all__ = ["CodePrinter", "compiled", "least_operations", "lines", "variable"]

LONGEST = 4096
"""Elements of a line that rows are joined to where nothing tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePrinter:
    """How a language writes an expression.

    Attributes:
        assign: An assignment, of ``{0}`` and its value ``{1}``.
        number: A constant ``{0}``.
        operations: Each operation, of its arguments ``{0}`` and ``{1}``.
    """

    assign: str
    number: str
    operations: Mapping[str, str]

    def write(self, tree: Node) -> tuple[list[str], str]:
        """Return the assignments, and what stands for the result; inputs are called as `variable` says."""
        known: dict[Node, str] = {}

        def text(node: Node) -> str:
            if isinstance(node, Name):
                return variable(node.name)
            return self.number.format(repr(node.value)) if isinstance(node, Number) else known[node]

        assignments = []
        for step in steps(tree):
            value = self.operations[step.operation].format(*map(text, step.arguments))
            known[step] = f"v{len(known)}"
            assignments.append(self.assign.format(known[step], value))
        return assignments, text(tree)


def variable(name: str) -> str:
    """Return what an input is called in generated text, so that it meets no word of the language."""
    return f"in_{name}"


def compiled(source: str, function: str, scope: dict[str, Any]) -> Callable[..., None]:
    """Compile generated Python, so that tracebacks and Numba's messages show its lines.

    Args:
        source: Its text.
        function: The name of the function that it defines.
        scope: Its globals; `__name__` must be that of a module, which Numba looks for in other processes.
    """
    name = f"<{function} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)  # noqa: S102 - written here, from a tree of known operations
    made: Callable[..., None] = scope[function]
    return made


def lines(workload: ExpressionWorkload) -> tuple[int, int]:
    """Return rows and columns as a kernel sees them.

    Without vectors and columns a matrix is but one long line: rows are joined, two by two, until lines are
    long enough for many threads, and a multiple of an access.
    """
    rows, cols = workload.rows, workload.cols
    while not workload.vectors and not workload.columns and rows % 2 == 0 and cols < LONGEST:
        rows, cols = rows // 2, cols * 2
    return rows, cols


def least_operations(workload: ExpressionWorkload) -> tuple[float, dict[str, int]]:
    """Return what must be executed for each element at least: multiply-adds, and functions by name.

    One instruction may be a product and a sum. What depends on no element may be computed once for many, what
    differs by signs or by the order of terms once for both, and a compiler may know better than to add or
    multiply a number.
    """
    whole, seen = set(workload.whole_names), set[Any]()
    counts: dict[str, int] = {}
    for step in steps(workload.tree):
        number = any(isinstance(argument, Number) for argument in step.arguments)
        if number or not whole & set(names(step)) or _likeness(step) in seen:
            continue
        seen.add(_likeness(step))
        operation = _ALIKE.get(step.operation, step.operation)
        counts[operation] = counts.get(operation, 0) + 1
    return float(max(counts.get("mul", 0), counts.get("add", 0))), counts


_ALIKE = {"sub": "add", "square": "mul"}


def _likeness(node: Node) -> Any:
    """Return what is equal for all that a compiler may compute as one."""
    if not isinstance(node, Apply):
        return node
    if node.operation in ("neg", "abs"):
        return _likeness(node.arguments[0])
    arguments = [_likeness(argument) for argument in node.arguments]
    if node.operation == "square":
        arguments *= 2
    if node.operation != "div":
        arguments.sort(key=repr)
    return (_ALIKE.get(node.operation, node.operation), *arguments)
