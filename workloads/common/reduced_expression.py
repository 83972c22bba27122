"""Base of reduction and strided_reduction: sums, means and extrema of an expression, with error bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import Name, Node, names, parse, write
from tunebench.stress import LARGEST_OFFSET, stressed
from tunebench.workload import Expression, Tolerance
from tunebench.workloads.common.accumulation import F32, sum_error_of
from tunebench.workloads.common.expression_value import LARGEST, Range, evaluate, span
from tunebench.workloads.common.expression_workload import DRAWN, DrawnExpression, substitute

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["Reduce", "ReducedExpression"]

Reduce = Literal["sum", "mean", "max", "min"]

LEAST_OF_RESULT = 2.0**-40
"""Least divisor, and least argument of log, sqrt and rsqrt, in `then`.

Reductions of many elements are rarely as small as their least element, and rsqrt(x+1e-5) of a mean square
must be accepted.
"""
NARROW: tuple[Range, ...] = ((-(2.0**-2), 2.0**-2), (-(2.0**-6), 2.0**-6))
"""Additional narrower ranges, for sums that would overflow the result."""


class ReducedExpression(DrawnExpression):
    """A workload that reduces the values of an expression, then applies `then` to each result.

    Its subclasses have the dimensions `reduce` and `then`.
    """

    drawn_in: ClassVar[tuple[Range, ...]] = (*DRAWN, *NARROW)

    if TYPE_CHECKING:
        reduce: Reduce
        then: Expression

        @property
        def terms(self) -> int:
            """Number of elements that are reduced to one result."""

        @property
        def results(self) -> int:
            """Number of elements of out."""

    def check(self) -> None:
        """Check that `then` has one name, and rename it to x."""
        result_names = names(parse(self.then))
        if len(result_names) != 1:
            raise InputError(
                f"{self.operator}: then={self.then} must have one name, that of the result, such as "
                f"rsqrt(x+0.00001); it has {', '.join(result_names) or 'none'}"
            )
        if result_names != ("x",):
            renamed = substitute(parse(self.then), {Name(result_names[0]): Name("x")})
            object.__setattr__(self, "then", write(renamed))
        super().check()

    @property
    def end(self) -> Node:
        """The expression `then`, parsed."""
        return parse(self.then)

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

    def reduced(
        self, parts: Iterable[tuple[Array64, Array64]], axes: tuple[int, ...], *, joined: bool
    ) -> tuple[Array64, Array64]:
        """Return the results and their error bounds, after `then`.

        Args:
            parts: Values of the expression and their error bounds, for parts of the index space.
            axes: Axes to reduce in each part.
            joined: Whether all parts belong to the same results; otherwise the results of the parts are
                concatenated along the first axis.
        """
        join = getattr(np, _JOIN[self.reduce])
        reduced: list[Array64] = []
        for value, error in parts:
            partial = [join.reduce(figure, axis=axes) for figure in self._figures(value, error)]
            if not reduced:
                reduced = partial
            elif joined:
                reduced = [join(*pair) for pair in zip(reduced, partial, strict=True)]
            else:
                reduced = [np.concatenate(pair) for pair in zip(reduced, partial, strict=True)]
        value, error = self._with_errors(*reduced)
        value, error = evaluate(self.end, {"x": value}, {"x": error})
        return value, np.broadcast_to(error, value.shape)

    def _figures(self, value: Array64, error: Array64) -> tuple[Array64, ...]:
        """Return the values and further arrays to reduce, from which the error of the result follows."""
        if self.is_sum:
            size = np.abs(value) + error
            filled: Array = (size > 0.0) * 1.0
            return value, error, np.square(size), filled
        return value, value + error, value - error

    def _with_errors(self, value: Array64, first: Array64, *others: Array64) -> tuple[Array64, Array64]:
        """Return results and their errors, from the reductions of the arrays of `_figures`."""
        if not self.is_sum:  # the extrema of the upper and of the lower limits of the elements
            return value, np.maximum(np.abs(first - value), np.abs(others[0] - value))
        value, error = value * self.factor, (first + sum_error_of(value, *others)) * self.factor
        return value, error + 3 * F32 * np.abs(value) if self.reduce == "mean" else error

    def draw_stress(self, rng: numpy.random.Generator) -> dict[str, Array] | None:
        """Draw extreme elements; vectors along the reduced axis are also sparse, equal, or far from 0."""
        tensors, stress = super().draw_stress(rng), self.stress()
        low, high = self._widest or (0.0, 0.0)
        if tensors is None or low > -LARGEST_OFFSET or high < LARGEST_OFFSET:
            return tensors
        for tensor in self.inputs():
            if tensor.name in stress:
                drawn = tensors[tensor.name]
                tensors[tensor.name] = stressed(drawn, tensor.dtype, stress[tensor.name], rng)
        return tensors

    @property
    def has_nan(self) -> bool:
        """Whether single elements are NaN: no, vectors have them (`stress`), or all results would be NaN."""
        return False

    def _holds(self, image: Range) -> bool:
        """Return whether f32 can represent the sum of values in a range, and the result's type the result."""
        total = (image[0] * self.terms, image[1] * self.terms)
        if self.is_sum and max(map(abs, total)) > LARGEST:
            return False
        result = span(self.end, {"x": total if self.reduce == "sum" else image}, LEAST_OF_RESULT)
        return result is not None and super()._holds(result)

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and the error bound of the running error analysis."""
        return Tolerance(
            eps_out=unit_roundoff(self.result_type),
            eps_acc=F32,
            reason=f"one rounding to {self.result_type}; f32 errors of elements are bounded operation by "
            "operation, and f32 sums of n of them err by 4 u sqrt(n) of their 2-norm and of the sum with "
            "overwhelming probability (Higham and Mary 2020)",
        )


_JOIN = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}
"""NumPy ufunc that joins two values, by reduction."""
