"""layernorm: y[i, :] = (x[i, :] - mean) / sqrt(variance + eps) * gamma + beta, for each row i."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import underflow, unit_roundoff
from tunebench.workload import Category, Leeway, Reference, Size, Tensor, Tolerance, Workload

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["LayerNorm"]


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Workload):
    """Layer normalisation of each row of x (rows, cols), computed in f32, with the biased variance.

    Tensors, all of one type: x (rows, cols); gamma (cols,); beta (cols,); y (rows, cols).

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """

    operator: ClassVar[str] = "layernorm"
    category: ClassVar[Category | None] = "reduction"
    leeway: ClassVar[Leeway] = Leeway(items=("rows",))
    eps: ClassVar[float] = 1e-5
    """Added to the variance; the customary value."""

    rows: Size
    cols: Size
    dtype: Literal["f32", "f16", "bf16"]

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x, gamma and beta."""
        return (
            Tensor(name="x", shape=(self.rows, self.cols), dtype=self.dtype),
            Tensor(name="gamma", shape=(self.cols,), dtype=self.dtype),
            Tensor(name="beta", shape=(self.cols,), dtype=self.dtype),
        )

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y (rows, cols)."""
        return (Tensor(name="y", shape=(self.rows, self.cols), dtype=self.dtype),)

    def flops(self) -> int:
        """Count 7 an element: 1 for the mean, 3 for the variance, 1 to normalise, gamma and beta."""
        return 7 * self.rows * self.cols

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute each row in two passes: mean, then variance about it."""
        x, gamma, beta = inputs["x"], inputs["gamma"], inputs["beta"]
        deviation = x - x.mean(axis=1, keepdims=True)
        inverse = 1.0 / np.sqrt(np.square(deviation).mean(axis=1, keepdims=True) + self.eps)
        # The subtraction of the mean rounds in proportion to what it subtracts, not to what is left.
        magnitude = (np.abs(x) + np.abs(x).mean(axis=1, keepdims=True)) * inverse
        scale = magnitude * np.abs(gamma) + np.abs(beta) + underflow(self.dtype) / self.tolerance().eps_acc
        return {"y": Reference(value=deviation * inverse * gamma + beta, scale=scale)}

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums over a row in any order."""
        return Tolerance(
            eps_out=unit_roundoff(self.dtype),
            eps_acc=(2.0 * math.sqrt(self.cols) + 8.0) * unit_roundoff("f32"),
            reason="one rounding to the output type; f32 sums of a row's elements and squares err by "
            "sqrt(cols) u with overwhelming probability (Higham and Mary 2019), and a few roundings follow",
        )
