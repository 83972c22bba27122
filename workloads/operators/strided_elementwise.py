"""strided_elementwise: out[i] = an expression of operands with any strides, slices and padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tunebench.workload import Category, Tensor
from tunebench.workloads.common.expression_value import flops
from tunebench.workloads.common.strided_workload import StridedWorkload

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
