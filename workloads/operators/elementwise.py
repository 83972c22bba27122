"""elementwise: out[i, j] = an expression of x[i, j], of vectors at j, and of scalars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, numpy_dtype, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import FUNCTIONS, Apply, Name, Node, names, parse, steps, write
from tunebench.workload import (
    Category,
    Expression,
    Leeway,
    Names,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Workload,
    defaults_to,
)
from tunebench.workloads.operators._expression import Range, evaluate, flops, span

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["Elementwise", "neighbour"]

DRAWN: tuple[Range, ...] = ((-8.0, 8.0), (0.5, 1.5), (0.125, 0.875))
"""Ranges that inputs are drawn in: the first in which an expression is sure to have a value.

The first is that of normal numbers: of 1e12 of them none is expected beyond it.
"""
LARGEST_OUT = {"f16": 65504.0}
ELEMENTS_AT_ONCE = 2**20
"""About so many are evaluated at a time: temporaries of all of a large problem may not fit in memory."""


@dataclass(frozen=True, kw_only=True)
class Elementwise(Workload):
    """A chain of elementwise operations in one kernel, computed in f32 and rounded once.

    Tensors: each name of the expression is an input, in the order they first appear in. Those that `vectors`
    lists are (cols,), the same for all rows; those that `scalars` lists are () f32; all others are
    (rows, cols), and there is at least one. out (rows, cols).

    Functions: abs, exp, gelu (the exact one), log, max, min, relu, rsqrt, sigmoid, silu, sqrt, square, tanh.
    """

    operator: ClassVar[str] = "elementwise"
    category: ClassVar[Category | None] = "elementwise"
    leeway: ClassVar[Leeway] = Leeway(items=("rows",))

    rows: Size
    cols: Size
    dtype: Literal["f32", "f16", "bf16"]
    expression: Expression
    vectors: Names = ""
    scalars: Names = ""
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    def check(self) -> None:
        """Hold the lists of names against the expression, and see that inputs can be drawn for it."""
        used, lists = names(self.tree), {"vectors": self.vector_names, "scalars": self.scalar_names}
        for name, listed in lists.items():
            if unknown := set(listed) - set(used):
                raise InputError(
                    f"elementwise: {name}: no {', '.join(sorted(unknown))} in {self.expression}; "
                    f"it has {', '.join(used) or 'no names'}"
                )
        if both := set(self.vector_names) & set(self.scalar_names):
            raise InputError(f"elementwise: {', '.join(sorted(both))} cannot be in vectors and in scalars")
        if "out" in used:
            raise InputError("elementwise: out is the result; give the input another name")
        if not self.whole_names:
            raise InputError("elementwise: at least one input must be neither in vectors nor in scalars")
        if self._drawn_between is None:
            raise InputError(
                f"elementwise: {self.expression} may divide by 0, leave the domain of log, sqrt or rsqrt, "
                f"or overflow f32 or {self.out}, whether inputs are within {', '.join(map(str, DRAWN))}: "
                "nothing could be checked. Keep arguments positive (abs(x)+0.01), or limit them (min, max)"
            )

    @property
    def tree(self) -> Node:
        """The expression, parsed."""
        return parse(self.expression)

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Inputs of shape (cols,)."""
        return tuple(filter(None, self.vectors.split("+")))

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Inputs of shape ()."""
        return tuple(filter(None, self.scalars.split("+")))

    @property
    def whole_names(self) -> tuple[str, ...]:
        """Inputs of shape (rows, cols)."""
        others = {*self.vector_names, *self.scalar_names}
        return tuple(name for name in names(self.tree) if name not in others)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs, in the order they first appear in."""
        return tuple(map(self._input, names(self.tree)))

    def _input(self, name: str) -> Tensor:
        if name in self.scalar_names:
            return Tensor(name=name, shape=(), dtype="f32")
        shape = (self.cols,) if name in self.vector_names else (self.rows, self.cols)
        return Tensor(name=name, shape=shape, dtype=self.dtype)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out (rows, cols)."""
        return (Tensor(name="out", shape=(self.rows, self.cols), dtype=self.out),)

    def flops(self) -> int:
        """Count every different operation once for each element; a copy counts as one."""
        return self.rows * self.cols * max(1, flops(self.tree))

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Evaluate some rows at a time, with a running error analysis as scale."""
        value, scale = np.empty((2, self.rows, self.cols))
        rows = max(1, ELEMENTS_AT_ONCE // self.cols)
        whole = set(self.whole_names)
        for first in range(0, self.rows, rows):
            part = slice(first, first + rows)
            given = {name: array[part] if name in whole else array for name, array in inputs.items()}
            value[part], scale[part] = evaluate(self.tree, given)
        # What is rounded in the end is the value with its error; near zero f16 rounds by a constant.
        scale *= (1 + unit_roundoff(self.out)) / self.tolerance().eps_acc
        scale += underflow(self.out) / self.tolerance().eps_acc
        return {"out": Reference(value=value, scale=scale)}

    def unfused(self) -> tuple[Workload, ...]:
        """Return each operation by itself, if there are two or more.

        Their results are called step0, step1 and so on where others read them. What is the same for all rows
        is no kernel of its own, but stays a part of those that use it. There are no parts if one of them
        could not be checked alone, because no inputs can be drawn for it.
        """
        whole, prefix = set(self.whole_names), "step"
        kernels = [step for step in steps(self.tree) if whole & set(names(step))]
        if len(kernels) < 2:
            return ()
        while any(name.startswith(prefix) for name in names(self.tree)):
            prefix += "_"
        known: dict[Node, Node] = {}
        parts = []
        for index, step in enumerate(kernels):
            alone = Apply(step.operation, tuple(_replaced(argument, known) for argument in step.arguments))
            known[step] = Name(f"{prefix}{index}")
            out = self.out if step is kernels[-1] else self.dtype
            try:
                parts.append(self._part(alone, out))
            except InputError:
                return ()
        return tuple(parts)

    def _part(self, tree: Node, out: DType) -> Workload:
        lists = {"vectors": self.vector_names, "scalars": self.scalar_names}
        there = {key: "+".join(name for name in names(tree) if name in all_) for key, all_ in lists.items()}
        return self.changed(expression=write(tree), out=out, **there)

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and what the running error analysis finds."""
        return Tolerance(
            eps_out=unit_roundoff(self.out),
            eps_acc=unit_roundoff("f32"),
            reason=f"one rounding to {self.out}; f32 errors are bounded element by element, operation by "
            "operation, functions being good to a few units in the last place",
        )

    @property
    def _drawn_between(self) -> Range | None:
        """The first of `DRAWN` in which the expression has a finite value whatever its inputs."""
        for drawn in DRAWN:
            scalar = drawn if drawn[0] > 0 else (0.5, 1.5)  # as `Workload.draw` draws them
            ranges = {name: scalar if name in self.scalar_names else drawn for name in names(self.tree)}
            image = span(self.tree, ranges)
            if image is not None and max(map(abs, image)) <= LARGEST_OUT.get(self.out, math.inf):
                return drawn
        return None

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw uniformly from a range in which the expression has a value, where not all numbers do."""
        drawn = self._drawn_between
        if drawn is None or drawn == DRAWN[0]:
            return None
        array: Array = np.asarray(rng.uniform(*drawn, tensor.shape)).astype(numpy_dtype(tensor.dtype))
        return array


def _replaced(node: Node, known: Mapping[Node, Node]) -> Node:
    """Return an expression in which known parts are names."""
    if node in known or not isinstance(node, Apply):
        return known.get(node, node)
    return Apply(node.operation, tuple(_replaced(argument, known) for argument in node.arguments))


def neighbour(
    fused: str, first: str, shape: tuple[int, int], dtype: DType, *, vectors: str = "", scalars: str = ""
) -> Workload:
    """Return as a workload what an operator does by the way to its first input, or to its result.

    Args:
        fused: Names joined by ``+``, in the order they are applied: functions; `scale`, which multiplies; and
            other inputs, which are added.
        first: What that tensor is called.
        shape: Rows and columns of the tensor, seen as a matrix.
        dtype: Its type.
        vectors: Names of inputs that are the same for all rows, joined by ``+``, whether fused or not.
        scalars: Names of numbers, likewise.
    """
    expression, applied = first, fused.split("+")
    for name in applied:
        if name in FUNCTIONS:
            expression = f"{name}({expression})"
        else:
            expression += f"*{name}" if name == "scale" else f"+{name}"
    lists = {
        key: "+".join(name for name in given.split("+") if name in applied)
        for key, given in (("vectors", vectors), ("scalars", scalars))
    }
    rows, cols = shape
    return Elementwise.from_dimensions(
        {"rows": rows, "cols": cols, "dtype": dtype, "expression": expression, **lists}
    )
