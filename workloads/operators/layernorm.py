"""layernorm: y[i, :] = (x[i, :] - mean) / sqrt(variance + eps) * gamma + beta, for each row i."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tunebench._lazy import np
from tunebench.workload import Reference
from tunebench.workloads.common.norm import Norm

if TYPE_CHECKING:
    from tunebench.workload import Array, Array64

__all__ = ["LayerNorm"]


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm):
    """Layer normalisation of each row of x (rows, cols), computed in f32, with the biased variance.

    Forward: y = (z - mean) rstd gamma + beta, rstd = 1 / sqrt(variance + eps), z = x + bias + residual.
    Backward, with n = (x - mean) rstd and g = dy gamma, means over a row, sums over rows:
    dx = rstd (g - mean(g) - n mean(g n)), dgamma = sum(dy n), dbeta = sum(dy).

    Tensors, all of one type except the f32 statistics: x, residual, y, z, dy, dx (rows, cols); gamma, beta,
    bias, dgamma, dbeta (cols,); mean, rstd (rows,).

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """

    operator: ClassVar[str] = "layernorm"
    weights: ClassVar[tuple[str, ...]] = ("gamma", "beta")
    statistics: ClassVar[tuple[str, ...]] = ("mean", "rstd")
    # Forward: 1 for the mean, 3 for the variance, 1 to normalise, 1 each for gamma and beta. Backward: 2 for
    # the normalised row, 1 for g, 3 for its means, 4 for dx, and 3 for dgamma and dbeta.
    element_flops: ClassVar[Mapping[str, int]] = {"forward": 7, "backward": 13}

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute each row in two passes, mean and variance; or gradients by their formulas."""
        if self.is_backward:
            return self._gradients(inputs)
        z, magnitude = self._summed(inputs)
        gamma, beta = inputs["gamma"], inputs["beta"]
        mean = z.mean(axis=1, keepdims=True)
        rstd = 1.0 / np.sqrt(np.square(z - mean).mean(axis=1, keepdims=True) + self.eps)
        # Rounding in the subtraction of the mean is proportional to the operands, not to the difference.
        level = magnitude.mean(axis=1, keepdims=True)
        normal = (magnitude + level) * rstd
        # Errors of deviations add an error to the root of their mean square (Cauchy-Schwarz).
        excess = np.maximum(1.0, np.sqrt(np.square(normal).mean(axis=1, keepdims=True)))
        return self._references(
            y=((z - mean) * rstd * gamma + beta, normal * np.abs(gamma) + np.abs(beta)),
            z=(z, magnitude),
            mean=(mean[:, 0], level[:, 0]),
            rstd=(rstd[:, 0], (rstd * excess)[:, 0]),
        )

    def _statistics_of(self, x: Array64) -> dict[str, Array]:
        return {
            "mean": x.mean(axis=1).astype(np.float32),
            "rstd": (1.0 / np.sqrt(x.var(axis=1) + self.eps)).astype(np.float32),
        }

    def _gradients(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        x, gamma, dy = inputs["x"], inputs["gamma"], inputs["dy"]
        mean, rstd = inputs["mean"][:, None], inputs["rstd"][:, None]
        normal, g = (x - mean) * rstd, dy * gamma
        along = (g * normal).mean(axis=1, keepdims=True)
        dx = rstd * (g - g.mean(axis=1, keepdims=True) - normal * along)
        size, width = np.abs(g), (np.abs(x) + np.abs(mean)) * rstd
        level = size.mean(axis=1, keepdims=True)
        scale = rstd * (size + level + width * (size * width).mean(axis=1, keepdims=True))
        return self._references(
            dx=(dx, scale),
            dgamma=self._over_rows(dy * normal, np.abs(dy) * width),
            dbeta=self._over_rows(dy, np.abs(dy)),
        )
