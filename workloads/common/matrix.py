"""Base of operators on a matrix: softmax, cross entropy and the normalisations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench.stress import StressKind
from tunebench.workload import Category, Size, Tensor, Workload

__all__ = ["LOGITS", "MOMENTS", "MatrixWorkload"]

LOGITS: tuple[StressKind, ...] = (
    "logits",
    "offset",
    "hidden",
    "constant",
    "mixed",
    "zeros",
    "denormal",
    "nan",
    "infinite",
)
"""Kinds of rows of logits for which softmax and cross entropy are defined."""
MOMENTS: tuple[StressKind, ...] = (
    "offset",
    "large",
    "mixed",
    "constant",
    "tiny",
    "zeros",
    "sparse",
    "nan",
)
"""Kinds of vectors for whose mean and variance normalisations are defined."""


@dataclass(frozen=True, kw_only=True)
class MatrixWorkload(Workload):
    """An operator on a matrix (rows, cols), with a gradient; subclasses declare `direction`."""

    category: ClassVar[Category | None] = "reduction"

    rows: Size
    cols: Size
    dtype: Literal["f32", "f16", "bf16"]

    if TYPE_CHECKING:  # its place among the dimensions differs between subclasses

        @property
        def direction(self) -> Literal["forward", "backward"]:
            """Whether the result or its gradients are computed."""

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.direction == "backward"

    def _matrix(self, name: str) -> Tensor:
        return Tensor(name=name, shape=(self.rows, self.cols), dtype=self.dtype)
