"""reduction: out[i] = then(the sum, mean, maximum or minimum over j of an expression of x[i, j])."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import Apply, Name, Node, names, parse, write
from tunebench.workload import (
    AllowedChanges,
    Category,
    Expression,
    Reference,
    Tensor,
    Tolerance,
    Workload,
    defaults_to,
)
from tunebench.workloads.operators._accumulation import F32, sum_error
from tunebench.workloads.operators._expression import LARGEST, Range, evaluate, flops, span
from tunebench.workloads.operators._expression_workload import (
    DRAWN,
    LARGEST_OUT,
    ExpressionWorkload,
    substitute,
)
from tunebench.workloads.operators.elementwise import Elementwise

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["Reduction"]

LEAST_OF_RESULT = 2.0**-40
"""Least divisor, and least argument of log, sqrt and rsqrt, in `then`.

Reductions of many elements are rarely as small as their least element, and rsqrt(x+1e-5) of a mean square
must be accepted.
"""
NARROW: tuple[Range, ...] = ((-(2.0**-2), 2.0**-2), (-(2.0**-6), 2.0**-6))
"""Additional narrower ranges, for sums that would overflow `out`."""


@dataclass(frozen=True, kw_only=True)
class Reduction(ExpressionWorkload):
    """An expression reduced over one axis in one kernel, computed in f32 and rounded once.

    See `ExpressionWorkload` for the inputs of the expression. `axis` is the reduced axis, as in NumPy:

    ==== ============ ===========
    axis over         out
    ==== ============ ===========
    cols each row     (rows,)
    rows each column  (cols,)
    ==== ============ ===========

    `then` is applied to each result before rounding: an expression of one name, which is replaced by x. The
    order of summation is not fixed.
    """

    operator: ClassVar[str] = "reduction"
    category: ClassVar[Category | None] = "reduction"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(items=("rows",))
    drawn_in: ClassVar[tuple[Range, ...]] = (*DRAWN, *NARROW)

    reduce: Literal["sum", "mean", "max", "min"]
    axis: Literal["cols", "rows"] = "cols"
    then: Expression = "x"
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    def check(self) -> None:
        """Check that `then` has one name and rename it to x; check that inputs can be drawn."""
        given = names(parse(self.then))
        if len(given) != 1:
            raise InputError(
                f"reduction: then={self.then} must have one name, that of the result, such as "
                f"rsqrt(x+0.00001); it has {', '.join(given) or 'none'}"
            )
        if given != ("x",):
            renamed = substitute(parse(self.then), {Name(given[0]): Name("x")})
            object.__setattr__(self, "then", write(renamed))
        super().check()

    @property
    def end(self) -> Node:
        """The expression `then`, parsed."""
        return parse(self.then)

    @property
    def terms(self) -> int:
        """Number of elements that are reduced to one result."""
        return self.cols if self.axis == "cols" else self.rows

    @property
    def results(self) -> int:
        """Number of elements of out."""
        return self.rows if self.axis == "cols" else self.cols

    @property
    def is_sum(self) -> bool:
        """Whether elements are summed, as for a sum or a mean."""
        return self.reduce in ("sum", "mean")

    @property
    def factor(self) -> float:
        """Factor of the sum: 1 / terms for a mean."""
        return 1.0 / self.terms if self.reduce == "mean" else 1.0

    @property
    def _meaning(self) -> str:
        reduced = f"the {self.reduce} of {self.expression}"
        return reduced if self.then == "x" else f"{self.then} of {reduced}"

    def may_change(self) -> AllowedChanges:
        """Return rows as independent items, unless the reduction is over rows."""
        return self.allowed_changes if self.axis == "cols" else AllowedChanges()

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out (rows,) or (cols,)."""
        return (Tensor(name="out", shape=(self.results,), dtype=self.out),)

    def flops(self) -> int:
        """Count the expression and one reduction per element, and `then` per result."""
        each = self.rows * self.cols * (flops(self.tree) + 1)
        return each + self.results * (flops(self.end) + (self.reduce == "mean"))

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Evaluate some rows at a time and reduce them, with a running error analysis as scale."""
        over, join = (1 if self.axis == "cols" else 0), getattr(np, _JOIN[self.reduce])
        found: list[Array64] = []
        for _, value, error in self.evaluated(inputs):
            here = [join.reduce(each, axis=over) for each in self._figures(value, error)]
            if not found:
                found = here
            elif over == 1:
                found = [np.concatenate(pair) for pair in zip(found, here, strict=True)]
            else:
                found = [join(*pair) for pair in zip(found, here, strict=True)]
        value, error = self._reduced(*found)
        value, error = evaluate(self.end, {"x": value}, {"x": error})
        return {"out": self.rounded(value, np.broadcast_to(error, value.shape))}

    def _figures(self, value: Array64, error: Array64) -> tuple[Array64, Array64, Array64]:
        """Return the values and two further arrays to reduce, from which the error of the result follows."""
        if self.is_sum:
            return value, np.abs(value) + error, error
        return value, value + error, value - error

    def _reduced(self, value: Array64, first: Array64, second: Array64) -> tuple[Array64, Array64]:
        """Return results and their errors, from the reductions of the arrays of `_figures`."""
        if not self.is_sum:  # the extrema of the upper and of the lower limits of the elements
            return value, np.maximum(np.abs(first - value), np.abs(second - value))
        value, error = value * self.factor, (second + sum_error(self.terms) * first) * self.factor
        return value, error + 3 * F32 * np.abs(value) if self.reduce == "mean" else error

    def _holds(self, image: Range) -> bool:
        """Return whether f32 can represent the sum of values in a range, and `out` the result."""
        total = (image[0] * self.terms, image[1] * self.terms)
        if self.is_sum and max(map(abs, total)) > LARGEST:
            return False
        result = span(self.end, {"x": total if self.reduce == "sum" else image}, LEAST_OF_RESULT)
        return result is not None and max(map(abs, result)) <= LARGEST_OUT.get(self.out, math.inf)

    def unfused(self) -> tuple[Workload, ...]:
        """Return the elementwise chain, the reduction alone, and `then` as a chain.

        There are no parts if only one of these is present, or if one could not be checked alone.
        """
        parts: list[Workload] = []
        prefix, shape = self.step_prefix, {"rows": self.rows, "cols": self.cols, "dtype": self.dtype}
        try:
            plain = Reduction.from_dimensions(
                {**shape, "expression": f"{prefix}0", "reduce": self.reduce, "axis": self.axis}
            )
            if isinstance(self.tree, Apply):
                lists = self.lists_of(self.tree)
                parts.append(Elementwise.from_dimensions({**shape, "expression": self.expression, **lists}))
            else:
                plain = plain.changed(expression=self.expression)
            if isinstance(self.end, Apply):
                ended = substitute(self.end, {Name("x"): Name(f"{prefix}{len(parts)}")})
                vector = {"rows": 1, "cols": self.results, "dtype": self.dtype, "out": self.out}
                parts += [plain, Elementwise.from_dimensions({**vector, "expression": write(ended)})]
            else:
                parts.append(plain.changed(out=self.out))
        except InputError:
            return ()
        return tuple(parts) if len(parts) > 1 else ()

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and the error bound of the running error analysis."""
        return Tolerance(
            eps_out=unit_roundoff(self.out),
            eps_acc=F32,
            reason=f"one rounding to {self.out}; f32 errors of elements are bounded operation by operation, "
            "and f32 sums of them err by 2 sqrt(terms) u of the magnitude summed with overwhelming "
            "probability (Higham and Mary 2019)",
        )


_JOIN = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}
"""NumPy ufunc that joins two values, by reduction."""
