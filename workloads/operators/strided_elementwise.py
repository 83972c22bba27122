"""strided_elementwise: out[i] = an expression of operands with any strides, slices and padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tunebench._lazy import np
from tunebench.dtype import unit_roundoff
from tunebench.workload import Category, Reference, Tensor, Tolerance
from tunebench.workloads.operators._expression import flops
from tunebench.workloads.operators._strided import StridedWorkload

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["StridedElementwise"]


@dataclass(frozen=True, kw_only=True)
class StridedElementwise(StridedWorkload):
    """A chain of elementwise operations on operands in any layout, computed in f32 and rounded once.

    See `StridedWorkload` for the operands. out has the index space's shape and is C-contiguous. Copies to
    another layout or type, concatenations (a sum of operands that are 0 elsewhere), slices and padding are
    such operations.
    """

    operator: ClassVar[str] = "strided_elementwise"
    category: ClassVar[Category | None] = "elementwise"

    def outputs(self) -> tuple[Tensor, ...]:
        """Return out, of the index space's shape."""
        return (Tensor(name="out", shape=self.extents, dtype=self.dtype),)

    def flops(self) -> int:
        """Count every distinct operation once per element; a copy counts as one."""
        return self.elements * max(1, flops(self.tree))

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Evaluate some of the first axis at a time, with a running error analysis as scale."""
        value, error = np.empty((2, *self.extents))
        for part, value_there, error_there in self.evaluated(inputs):
            value[part], error[part] = value_there, error_there
        return {"out": self.rounded(value, error)}

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and the error bound of the running error analysis."""
        return Tolerance(
            eps_out=unit_roundoff(self.dtype),
            eps_acc=unit_roundoff("f32"),
            reason=f"one rounding to {self.dtype}; f32 errors are bounded element by element, operation by "
            "operation, with functions accurate to a few units in the last place",
        )
