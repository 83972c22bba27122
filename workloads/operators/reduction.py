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

F32 = unit_roundoff("f32")
LEAST_OF_RESULT = 2.0**-40
"""Least divisor, and least argument of log, sqrt and rsqrt, that a result may lead to.

Many elements together are hardly ever as small as the least of them; and rsqrt(x+1e-5) of a mean square must
be let through.
"""
NARROW: tuple[Range, ...] = ((-(2.0**-2), 2.0**-2), (-(2.0**-6), 2.0**-6))
"""Ranges besides, where a sum of so many would overflow `out`."""


@dataclass(frozen=True, kw_only=True)
class Reduction(ExpressionWorkload):
    """An expression reduced over one axis in one kernel, computed in f32 and rounded once.

    See `ExpressionWorkload` for the inputs of the expression. `axis` is what is reduced over, as in NumPy:

    ==== ============ ===========
    axis over         out
    ==== ============ ===========
    cols each row     (rows,)
    rows each column  (cols,)
    ==== ============ ===========

    `then` is applied to each result, in f32 still: an expression of one name, which is called x whatever it
    is called. A sum is taken in any order.
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
        """See that `then` is of one name, and call that x; see that inputs can be drawn."""
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
        """What is applied to each result, parsed."""
        return parse(self.then)

    @property
    def terms(self) -> int:
        """Elements that make one result."""
        return self.cols if self.axis == "cols" else self.rows

    @property
    def results(self) -> int:
        """Elements of out."""
        return self.rows if self.axis == "cols" else self.cols

    @property
    def is_sum(self) -> bool:
        """Whether elements are added up: they are for a mean."""
        return self.reduce in ("sum", "mean")

    @property
    def factor(self) -> float:
        """What a sum is multiplied by."""
        return 1.0 / self.terms if self.reduce == "mean" else 1.0

    @property
    def _meaning(self) -> str:
        reduced = f"the {self.reduce} of {self.expression}"
        return reduced if self.then == "x" else f"{self.then} of {reduced}"

    def may_change(self) -> AllowedChanges:
        """Return rows as independent items, unless it is they that are reduced."""
        return self.allowed_changes if self.axis == "cols" else AllowedChanges()

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out (rows,) or (cols,)."""
        return (Tensor(name="out", shape=(self.results,), dtype=self.out),)

    def flops(self) -> int:
        """Count the operations of an element and one that takes it in; then those of a result."""
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
        """Return what is reduced besides values, to tell how far the result may be off."""
        if self.is_sum:
            return value, np.abs(value) + error, error
        return value, value + error, value - error

    def _reduced(self, value: Array64, first: Array64, second: Array64) -> tuple[Array64, Array64]:
        """Return results and their errors, from what `_figures` come to."""
        if not self.is_sum:  # the greatest of what elements may be, and of what they are at least
            return value, np.maximum(np.abs(first - value), np.abs(second - value))
        value, error = value * self.factor, (second + _sum_error(self.terms) * first) * self.factor
        return value, error + 3 * F32 * np.abs(value) if self.reduce == "mean" else error

    def _holds(self, image: Range) -> bool:
        """Tell whether values between these have a result, which `out` can hold, and f32 their sum."""
        total = (image[0] * self.terms, image[1] * self.terms)
        if self.is_sum and max(map(abs, total)) > LARGEST:
            return False
        result = span(self.end, {"x": total if self.reduce == "sum" else image}, LEAST_OF_RESULT)
        return result is not None and max(map(abs, result)) <= LARGEST_OUT.get(self.out, math.inf)

    def unfused(self) -> tuple[Workload, ...]:
        """Return the chain, the reduction alone, and what is then done with the results.

        There are no parts if there is but one of these, or if one could not be checked alone.
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
        """Allow one rounding of the result, and what the running error analysis finds."""
        return Tolerance(
            eps_out=unit_roundoff(self.out),
            eps_acc=F32,
            reason=f"one rounding to {self.out}; f32 errors of elements are bounded operation by operation, "
            "and f32 sums of them err by 2 sqrt(terms) u of the magnitude summed with overwhelming "
            "probability (Higham and Mary 2019)",
        )


def _sum_error(terms: int) -> float:
    """Return the relative error of an f32 sum and of a few roundings after it, per unit of magnitude.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    return (2.0 * math.sqrt(terms) + 8.0) * F32


_JOIN = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}
"""What joins two values, as NumPy calls it."""
