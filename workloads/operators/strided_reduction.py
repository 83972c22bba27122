"""strided_reduction: out[i] = then(the sum, mean or extremum over j of an expression of strided operands)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tunebench.errors import InputError
from tunebench.workload import Category, Expression, Reference, Size, Tensor
from tunebench.workloads.common.expression_value import flops
from tunebench.workloads.common.reduced_expression import Reduce, ReducedExpression
from tunebench.workloads.common.strided_workload import StridedWorkload

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["StridedReduction"]


@dataclass(frozen=True, kw_only=True)
class StridedReduction(ReducedExpression, StridedWorkload):
    """An expression of operands in any layout, reduced over the innermost axes of the index space.

    See `StridedWorkload` for the operands. `axes` is the number of innermost axes that are reduced; out has
    the shape of the others and is C-contiguous. `then` is applied to each result before rounding: an
    expression of one name, which is replaced by x. The order of summation is not fixed.
    """

    operator: ClassVar[str] = "strided_reduction"
    category: ClassVar[Category | None] = "reduction"

    reduce: Reduce
    axes: Size = 1
    then: Expression = "x"

    @property
    def kept(self) -> tuple[int, ...]:
        """Extents of the axes that are not reduced; (1,) if all are."""
        return self.extents[: -self.axes] or (1,)

    @property
    def terms(self) -> int:
        """Number of elements that are reduced to one result."""
        return math.prod(self.extents[-self.axes :])

    @property
    def results(self) -> int:
        """Number of elements of out."""
        return math.prod(self.kept)

    def _reduced_axes(self) -> int:
        if self.axes > len(self.extents):
            raise InputError(f"{self.operator}: axes={self.axes} is more than the axes of shape={self.shape}")
        return self.axes

    def _store(self, shape: tuple[int, ...], reduced: int) -> None:
        if not reduced:  # every reduced axis has extent 1
            raise InputError(f"{self.operator}: the reduced axes of shape={self.shape} have one element")
        super()._store(shape, reduced)
        object.__setattr__(self, "axes", reduced)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out, of the shape of the axes that are not reduced."""
        return (Tensor(name="out", shape=self.kept, dtype=self.dtype),)

    def flops(self) -> int:
        """Count the expression and one reduction per element, and `then` per result."""
        expression_flops = self.elements * (flops(self.tree) + 1)
        return expression_flops + self.results * (flops(self.end) + (self.reduce == "mean"))

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Evaluate some of the first axis at a time and reduce it, with a running error analysis as scale."""
        rank = len(self.extents)
        axes, joined = tuple(range(rank - self.axes, rank)), self.axes == rank
        parts = ((value, error) for _, value, error in self.evaluated(inputs))
        value, error = self.reduced(parts, axes, joined=joined)
        return {"out": self.rounded(value.reshape(self.kept), error.reshape(self.kept))}
