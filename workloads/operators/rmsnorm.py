"""rmsnorm: y[i, :] = x[i, :] / sqrt(mean(x[i, :]**2) + eps) * gamma, for each row i."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.workload import Reference
from tunebench.workloads.common.norm import Norm

if TYPE_CHECKING:
    from tunebench.workload import Array, Array64

__all__ = ["RmsNorm"]


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Norm):
    """Normalisation of each row of x (rows, cols) by its root mean square, computed in f32.

    Forward: y = z rstd gamma, with rstd = 1 / sqrt(mean(z**2) + eps) and z = x + residual.
    Backward, with n = x rstd and g = dy gamma, means over a row, sums over rows:
    dx = rstd (g - n mean(g n)), dgamma = sum(dy n).

    Tensors, all of one type except the f32 statistic: x, residual, y, z, dy, dx (rows, cols); gamma, dgamma
    (cols,); rstd (rows,).

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    operator: ClassVar[str] = "rmsnorm"
    weights: ClassVar[tuple[str, ...]] = ("gamma",)
    statistics: ClassVar[tuple[str, ...]] = ("rstd",)
    # Forward: 2 for the mean square, 1 to normalise, 1 for gamma. Backward: 1 for the normalised row, 1 for
    # g, 2 for its mean, 3 for dx, and 2 for dgamma.
    element_flops: ClassVar[Mapping[str, int]] = {"forward": 4, "backward": 9}

    prologue: Literal["none", "residual"] = "none"

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute each row from its mean square; or gradients by their formulas."""
        if self.is_backward:
            return self._gradients(inputs)
        z, magnitude = self._summed(inputs)
        gamma = inputs["gamma"]
        rstd = 1.0 / np.sqrt(np.square(z).mean(axis=1, keepdims=True) + self.eps)
        # Terms of z that cancel leave their errors, which add an error to the root of the mean square.
        excess = np.maximum(1.0, np.sqrt(np.square(magnitude * rstd).mean(axis=1, keepdims=True)))
        return self._references(
            y=(z * rstd * gamma, magnitude * rstd * excess * np.abs(gamma)),
            z=(z, magnitude),
            rstd=(rstd[:, 0], (rstd * excess)[:, 0]),
        )

    def _statistics_of(self, x: Array64) -> dict[str, Array]:
        return {"rstd": (1.0 / np.sqrt(np.square(x).mean(axis=1) + self.eps)).astype(np.float32)}

    def _gradients(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        x, gamma, dy, rstd = inputs["x"], inputs["gamma"], inputs["dy"], inputs["rstd"][:, None]
        normal, g = x * rstd, dy * gamma
        along = (g * normal).mean(axis=1, keepdims=True)
        width = np.abs(normal)
        scale = rstd * (np.abs(g) + width * (np.abs(g) * width).mean(axis=1, keepdims=True))
        return self._references(
            dx=(rstd * (g - normal * along), scale),
            dgamma=self._over_rows(dy * normal, np.abs(dy) * width),
        )
