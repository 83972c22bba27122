"""Code generation from expressions: one assignment for each distinct operation, in C++ or Python."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench.expression import Apply, Name, Node, Number, names, steps
from tunebench.workloads.common.expression_workload import ExpressionWorkload

__all__ = [
    "COMPARISONS",
    "CodePrinter",
    "compiled",
    "filled",
    "function_text",
    "least_of_tree",
    "least_operations",
    "lines",
    "operands",
    "variable",
]

COMPARISONS: Mapping[str, str] = {"eq": "==", "le": "<=", "lt": "<", "ne": "!="}
"""Symbols of comparisons in C++ and Python."""

MOST_TREES = 2**12
"""Most expressions whose operations are kept: the groups of a model repeat the same ones."""

LONGEST = 4096
"""Length up to which rows are joined if no input depends on the row or the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePrinter:
    """Syntax of a language for expressions.

    Attributes:
        assign: Assignment to ``{0}`` of the value ``{1}``.
        number: Constant ``{0}``.
        operations: Text of each operation, with the arguments ``{0}``, ``{1}`` and ``{2}``.
    """

    assign: str
    number: str
    operations: Mapping[str, str]

    def write(self, tree: Node) -> tuple[list[str], str]:
        """Return the assignments and the text of the result; inputs are named by `variable`."""
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
    """Return the name of an input in generated code; the prefix avoids reserved words."""
    return f"in_{name}"


def filled(text: str, **pieces: str) -> str:
    """Return a template with each ``@WORD@`` replaced by the piece of that name."""
    for word, piece in pieces.items():
        text = text.replace(f"@{word}@", piece)
    return text


def operands(workload: ExpressionWorkload, texts: Mapping[str, str]) -> str:
    """Return the inputs as a list of parameters or arguments, in the order of the workload.

    Args:
        workload: The workload whose inputs are listed.
        texts: Text for an input, by the input's name; other inputs are written as their `variable`.
    """
    return ", ".join(texts.get(tensor.name, variable(tensor.name)) for tensor in workload.inputs())


def function_text(source: str, function: str) -> str:
    """Return one of the functions that generated Python code defines.

    Args:
        source: The generated code.
        function: Name of the function.
    """
    (found,) = (piece for piece in source.split("\ndef ") if piece.startswith(f"{function}("))
    return f"def {found}"


def compiled(source: str, function: str, scope: dict[str, Any]) -> Callable[..., None]:
    """Compile generated Python code; tracebacks and Numba's messages show its lines.

    Args:
        source: The generated code.
        function: Name of the function that it defines.
        scope: Globals; `__name__` must name a module that other processes can import.
    """
    name = f"<{function} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)  # noqa: S102 - written here, from a tree of known operations
    made: Callable[..., None] = scope[function]
    return made


def lines(workload: ExpressionWorkload) -> tuple[int, int]:
    """Return the rows and columns that a kernel processes.

    Without vectors and columns the matrix is one long line: pairs of rows are joined until lines are long
    enough for many threads, and a multiple of an access.
    """
    rows, cols = workload.rows, workload.cols
    while not workload.vectors and not workload.columns and rows % 2 == 0 and cols < LONGEST:
        rows, cols = rows // 2, cols * 2
    return rows, cols


def least_operations(workload: ExpressionWorkload) -> tuple[float, dict[str, int]]:
    """Return the least multiply-adds of an element, and the least calls of each function by name.

    Args:
        workload: The workload; steps that depend on no whole input may be computed once for many elements.
    """
    return least_of_tree(workload.tree, frozenset(workload.whole_names))


@functools.lru_cache(MOST_TREES)
def least_of_tree(
    tree: Node, distinct: frozenset[str], left_out: frozenset[str] = frozenset()
) -> tuple[float, dict[str, int]]:
    """Return the least multiply-adds of an element, and the least calls of each function by name.

    One instruction may compute a product and a sum. Steps that differ in signs or in the order of terms may
    be computed once. A compiler may avoid additions and multiplications of constants.

    Args:
        tree: The expression.
        distinct: Names with a value for each element; other steps may be computed once for many elements.
        left_out: Names that some kernels know to be 0; steps that depend on them are not counted.
    """
    seen = set[Any]()
    counts: dict[str, int] = {}
    for step in steps(tree):
        number = any(isinstance(argument, Number) for argument in step.arguments)
        used = set(names(step))
        if number or not distinct & used or left_out & used or _likeness(step) in seen:
            continue
        seen.add(_likeness(step))
        operation = _ALIKE.get(step.operation, step.operation)
        counts[operation] = counts.get(operation, 0) + 1
    return float(max(counts.get("mul", 0), counts.get("add", 0))), counts


_ALIKE = {"sub": "add", "square": "mul"}


@functools.lru_cache(MOST_TREES)
def _likeness(node: Node) -> Any:
    """Return a value that is equal for steps that a compiler may compute as one."""
    if not isinstance(node, Apply):
        return node
    if node.operation in ("neg", "abs"):
        return _likeness(node.arguments[0])
    arguments = [_likeness(argument) for argument in node.arguments]
    if node.operation == "square":
        arguments *= 2
    if node.operation not in ("div", "le", "lt", "where"):
        arguments.sort(key=repr)
    return (_ALIKE.get(node.operation, node.operation), *arguments)
