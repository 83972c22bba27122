"""batchnorm_stats: mean and 1 / sqrt(variance + eps) of each column, and the gradients of scale and shift."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dimension import text_of
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.stress import Stress
from tunebench.workload import AllowedChanges, Positive, Reference, Tensor, Tolerance
from tunebench.workloads.common.accumulation import F32, row_blocks, sum_error
from tunebench.workloads.common.matrix import MOMENTS, MatrixWorkload
from tunebench.workloads.common.norm import EPS

if TYPE_CHECKING:
    from tunebench.workload import Array, Array64

__all__ = ["BatchNormStats"]

FEW = 8.0 * F32
"""Relative error of a few roundings in f32."""
MOMENTUM = 0.1
"""Default weight of the batch in running statistics."""
BLOCK_ELEMENTS = 2**22
"""Elements of intermediate results that the reference keeps: batches of images are large."""


@dataclass(frozen=True, kw_only=True)
class BatchNormStats(MatrixWorkload):
    """Statistics of a batch for its normalisation, and the gradients of its scale and shift; in f32.

    x is (rows, cols): images with channels last, so that a column is a channel and rows = n h w.

    ========= ================================== ====================================
    direction reads                              writes
    ========= ================================== ====================================
    forward   x, running_mean, running_var       mean, rstd, new_mean, new_var
    backward  dy, x, mean, rstd; y               dgamma, dbeta; dz
    ========= ================================== ====================================

    Forward, for each column, with the biased variance v: rstd = 1 / sqrt(v + eps), and
    new_mean = (1 - momentum) running_mean + momentum mean,
    new_var = (1 - momentum) running_var + momentum v rows / (rows - 1).
    Backward: dgamma = sum(dy (x - mean) rstd), dbeta = sum(dy). It uses the statistics that it reads, which
    need not be those of x. With `act=relu` and its result y, backward also writes dz = 0 where y <= 0 and dy
    elsewhere (also where y is NaN, as torch), and the sums use dz in place of dy.

    x, dy, y and dz are (rows, cols) of `dtype`; all others (cols,) f32. The normalisation itself and the
    gradient of x are elementwise chains.

    Source: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal
    Covariate Shift", 2015.
    """

    operator: ClassVar[str] = "batchnorm_stats"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(padding={"cols": "zeros"}, items=("cols",))

    direction: Literal["forward", "backward"] = "forward"
    eps: Positive = EPS
    momentum: Positive = MOMENTUM
    act: Literal["none", "relu"] = "none"

    def check(self) -> None:
        """Refuse a single row, a momentum above 1, and gradients with an eps or a momentum."""
        if self.rows < 2:
            raise InputError(
                "batchnorm_stats: rows=1 must be at least 2: one value a column has no unbiased variance"
            )
        if self.momentum > 1.0:
            raise InputError(
                f"batchnorm_stats: momentum={text_of(self.momentum)} must be at most 1: it is the batch's "
                "share in running statistics"
            )
        if not self.is_backward:
            if self.has_relu:
                raise InputError(
                    f"batchnorm_stats: act={self.act} needs direction=backward, not forward; leave it out: "
                    "an activation follows what normalises"
                )
            return
        for name, default, reads in (
            ("eps", EPS, "backward reads rstd, which has it"),
            ("momentum", MOMENTUM, "backward has no running statistics"),
        ):
            if getattr(self, name) != default:
                raise InputError(
                    f"batchnorm_stats: {name}={text_of(getattr(self, name))} needs direction=forward, not "
                    f"backward; leave it out: {reads}"
                )

    def may_change(self) -> AllowedChanges:
        """Return padding alone: columns are independent, but a layer has a fixed number of them."""
        return AllowedChanges(padding=self.allowed_changes.padding)

    @property
    def has_relu(self) -> bool:
        """Whether gradients pass back through a relu after the normalisation."""
        return self.act == "relu"

    @property
    def unbiased(self) -> float:
        """Factor from the biased to the unbiased variance, for running statistics."""
        return self.rows / (self.rows - 1)

    def _vectors(self, *names: str) -> tuple[Tensor, ...]:
        return tuple(Tensor(name=name, shape=(self.cols,), dtype="f32") for name in names)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x and the running statistics; for gradients dy, x, the statistics, and y of relu."""
        if self.is_backward:
            result = (self._matrix("y"),) if self.has_relu else ()
            return (self._matrix("dy"), self._matrix("x"), *self._vectors("mean", "rstd"), *result)
        return (self._matrix("x"), *self._vectors("running_mean", "running_var"))

    def outputs(self) -> tuple[Tensor, ...]:
        """Return batch and running statistics; or the gradients of scale and shift, then dz."""
        if self.is_backward:
            return (*self._vectors("dgamma", "dbeta"), *((self._matrix("dz"),) if self.has_relu else ()))
        return self._vectors("mean", "rstd", "new_mean", "new_var")

    def flops(self) -> int:
        """Count four operations per element, and a few per column.

        Forward: 1 for the mean and 3 for the variance; 2 divisions, 3 for rstd, 3 and 4 for running
        statistics. Backward: 3 for dgamma and 1 for dbeta, 1 for dz; the factor rstd.
        """
        return (4 + self.has_relu) * self.rows * self.cols + (1 if self.is_backward else 12) * self.cols

    def draw(self, rng: np.random.Generator) -> dict[str, Array]:
        """Draw columns of x that reveal inaccurate variances, in groups of four.

        The second column of each group has a mean much larger than its deviations: the mean square less the
        squared mean would cancel. The fourth is so small that `eps` is as large as its variance.
        """
        tensors = super().draw(rng)
        if not self.is_backward:
            x = tensors["x"].astype(np.float32)
            means = rng.uniform(1.0, 2.0, self.cols) * rng.choice((-1.0, 1.0), self.cols)
            means[1::4] *= 64.0
            means[3::4] = 0.0
            x[:, 3::4] *= np.float32(math.sqrt(self.eps))
            tensors["x"] = (x + means.astype(np.float32)).astype(numpy_dtype(self.dtype))
        return tensors

    def draw_by_rule(self, tensor: Tensor, rng: np.random.Generator) -> Array | None:
        """Draw rstd and variances from 0.5 to 2, which are positive, and y without negative elements."""
        if tensor.name == "y":
            clipped = np.maximum(rng.standard_normal(tensor.shape, dtype="float32"), np.float32(0))
            return clipped.astype(numpy_dtype(tensor.dtype))
        if tensor.name not in ("rstd", "running_var"):
            return None
        return rng.uniform(0.5, 2.0, tensor.shape).astype(np.float32)

    def stress(self) -> Mapping[str, Stress]:
        """Return columns whose squares cancel, overflow f16 or vanish; NaN makes a column NaN."""
        if self.is_backward:
            gradients = Stress(kinds=("mixed", "offset", "large", "zeros", "tiny", "sparse"), axes=(0,))
            return {"x": Stress(kinds=("offset", "mixed", "constant"), axes=(0,)), "dy": gradients}
        return {"x": Stress(kinds=MOMENTS, axes=(0,))}

    def draw_stress(self, rng: np.random.Generator) -> dict[str, Array] | None:
        """Draw extreme columns; for gradients, the statistics are those of the columns."""
        tensors = super().draw_stress(rng)
        if tensors is not None and self.is_backward:
            x = tensors["x"].astype(np.float64)
            tensors["mean"] = x.mean(axis=0).astype(np.float32)
            tensors["rstd"] = (1.0 / np.sqrt(x.var(axis=0) + self.eps)).astype(np.float32)
        return tensors

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute means, then variances in a second pass; or gradients by their formulas."""
        return self._gradients(inputs) if self.is_backward else self._statistics(inputs)

    def _blocks(self) -> Iterator[slice]:
        """Yield slices of some rows at a time."""
        return row_blocks(self.rows, self.cols, BLOCK_ELEMENTS)

    def _statistics(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        x, n, share = inputs["x"], self.rows, self.momentum
        mean, level, variance = np.zeros((3, self.cols))
        for some in self._blocks():
            mean += x[some].sum(axis=0) / n
            level += np.abs(x[some]).sum(axis=0) / n
        for some in self._blocks():
            variance += np.square(x[some] - mean).sum(axis=0) / n
        rstd = 1.0 / np.sqrt(variance + self.eps)
        # Deviations from a mean with error e add e^2. A single pass uses the running mean, which has an error
        # of about one rounding in either direction.
        sums, few = sum_error(n), FEW / sum_error(n)
        off = variance + few * np.sqrt(variance) * level + sums * np.square(level)
        kept_mean, kept_var = ((1.0 - share) * inputs[f"running_{name}"] for name in ("mean", "var"))
        batch_var = share * self.unbiased
        return {
            "mean": Reference(value=mean, scale=level),
            "rstd": Reference(value=rstd, scale=rstd * (few + np.square(rstd) * off)),
            "new_mean": Reference(
                value=kept_mean + share * mean, scale=few * np.abs(kept_mean) + share * level
            ),
            "new_var": Reference(
                value=kept_var + batch_var * variance, scale=few * np.abs(kept_var) + batch_var * off
            ),
        }

    def _gradients(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        dgamma, along, dbeta, size = np.zeros((4, self.cols))
        for some in self._blocks():
            dy, deviation = self._dz(inputs, some), inputs["x"][some] - inputs["mean"]
            dgamma += (dy * deviation).sum(axis=0)
            along += np.abs(dy * deviation).sum(axis=0)
            dbeta += dy.sum(axis=0)
            size += np.abs(dy).sum(axis=0)
        rstd, every = inputs["rstd"], slice(0, self.rows)
        dz = self._dz(inputs, every) if self.has_relu else None
        return {
            **({} if dz is None else {"dz": Reference(value=dz, scale=np.abs(dz))}),
            "dgamma": Reference(value=dgamma * rstd, scale=along * np.abs(rstd)),
            "dbeta": Reference(value=dbeta, scale=size),
        }

    def _dz(self, inputs: Mapping[str, Array64], some: slice) -> Array64:
        """Return the gradient of the normalisation's result, for some rows."""
        dy = inputs["dy"][some]
        return np.where(inputs["y"][some] <= 0.0, 0.0, dy) if self.has_relu else dy

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums of deviations over rows in any order."""
        return Tolerance(
            eps_out=F32,
            eps_acc=sum_error(self.rows),
            reason="one rounding to f32; f32 sums over rows err by 2 sqrt(rows) u of the magnitude summed "
            "with overwhelming probability (Higham and Mary 2019), and a few roundings follow; variances are "
            "sums of squared deviations from about the mean",
        )
