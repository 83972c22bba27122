"""Base of layernorm and rmsnorm: fused sum ahead, statistics kept for training, and gradients."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dimension import text_of
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.stress import Stress
from tunebench.workload import AllowedChanges, Positive, Reference, Tensor, Tolerance, Workload
from tunebench.workloads.common.accumulation import F32, excess_rounding, sum_error
from tunebench.workloads.common.matrix import MOMENTS, MatrixWorkload
from tunebench.workloads.operators.elementwise import neighbour

if TYPE_CHECKING:
    from tunebench.workload import Array, Array64

__all__ = ["EPS", "Norm"]

EPS = 1e-5
"""Default term added to a variance or a mean square."""


@dataclass(frozen=True, kw_only=True)
class Norm(MatrixWorkload):
    """Normalisation of each row of a matrix (rows, cols), computed in f32; subclasses define the kind.

    ========= ======================================== ==============================
    direction reads                                    writes
    ========= ======================================== ==============================
    forward   x, weights, bias (cols,), residual       y, z, statistics
    backward  x, gamma, statistics, dy                 dx, gradients of the weights
    ========= ======================================== ==============================

    With a prologue, z = x + bias + residual is normalised and is also an output, rounded once: it continues
    the residual stream, and backward reads it as x. y is computed from z in f32, before z is rounded. `stats`
    adds the statistics of each row as outputs, f32 (rows,), which backward reads.

    `eps` is added to the variance or the mean square. Backward uses the statistics that it reads, which
    include eps and need not be those of x. It has no prologue: the gradient of each term of the sum is dx.
    Gradients of the weights are sums over rows in f32, rounded to `dtype`.
    """

    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        items=("rows",), fusions={"prologue": "before"}
    )
    weights: ClassVar[tuple[str, ...]]
    """Names of the weights, each (cols,): the factor and, if there are two, the shift."""
    statistics: ClassVar[tuple[str, ...]]
    """Names of the statistics that `stats` adds; the last one is the factor `rstd`."""
    element_flops: ClassVar[Mapping[str, int]]
    """FLOPs per element, by direction."""

    prologue: Literal["none", "residual", "bias+residual"] = "none"
    stats: bool = False
    direction: Literal["forward", "backward"] = "forward"
    eps: Positive = EPS

    def check(self) -> None:
        """Refuse gradients with a prologue, with statistics as outputs, or with an eps."""
        if self.direction == "forward":
            return
        if self.prologue != "none":
            raise InputError(
                f"{self.operator}: prologue={self.prologue} needs direction=forward, not backward; leave it "
                "out: dx is the gradient of each part of the sum"
            )
        if self.stats:
            raise InputError(
                f"{self.operator}: stats=true needs direction=forward, which writes them; leave it out: "
                "backward reads them in any case"
            )
        if self.eps != EPS:
            raise InputError(
                f"{self.operator}: eps={text_of(self.eps)} needs direction=forward, not backward; leave "
                "it out: backward reads rstd, which has it"
            )

    @property
    def has_bias(self) -> bool:
        """Whether a vector (cols,) is added to each row first."""
        return "bias" in self.prologue

    @property
    def has_residual(self) -> bool:
        """Whether a matrix of the shape of x is added first, and the sum written."""
        return "residual" in self.prologue

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x and the weights, then bias and residual, if any; or x, gamma, statistics and dy."""
        if self.is_backward:
            return (self._matrix("x"), self._vector("gamma"), *self._statistics(), self._matrix("dy"))
        bias = (self._vector("bias"),) if self.has_bias else ()
        residual = (self._matrix("residual"),) if self.has_residual else ()
        return (self._matrix("x"), *map(self._vector, self.weights), *bias, *residual)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y, then z and statistics, if asked for; or dx and the gradients of the weights."""
        if self.is_backward:
            return (self._matrix("dx"), *(self._vector(f"d{name}") for name in self.weights))
        total = (self._matrix("z"),) if self.has_residual else ()
        return (self._matrix("y"), *total, *(self._statistics() if self.stats else ()))

    def _vector(self, name: str) -> Tensor:
        return Tensor(name=name, shape=(self.cols,), dtype=self.dtype)

    def _statistics(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(name=name, shape=(self.rows,), dtype="f32") for name in self.statistics)

    def flops(self) -> int:
        """Count `element_flops` per element, and 1 for each term of a fused sum ahead."""
        added = self.has_bias + self.has_residual
        return (self.element_flops[self.direction] + added) * self.rows * self.cols

    def unfused(self) -> tuple[Workload, ...]:
        """Return the sum ahead as an elementwise chain, and the normalisation alone."""
        if self.prologue == "none":
            return ()
        shape = (self.rows, self.cols)
        return (
            neighbour(self.prologue, "x", shape, self.dtype, vectors="bias"),
            self.changed(prologue="none"),
        )

    def draw(self, rng: np.random.Generator) -> dict[str, Array]:
        """Draw every fourth row so small that `eps` is as large as its variance.

        With larger rows alone, a kernel that omits `eps` or uses another one would pass. A bias, which all
        rows share, hides the effect.
        """
        tensors = super().draw(rng)
        for name in {"x", "residual"} & tensors.keys() if not self.is_backward else ():
            small = tensors[name][3::4].astype(np.float32) * np.float32(math.sqrt(self.eps))
            tensors[name][3::4] = small.astype(numpy_dtype(self.dtype))
        return tensors

    def draw_by_rule(self, tensor: Tensor, rng: np.random.Generator) -> Array | None:
        """Draw `rstd` from 0.5 to 2; it is positive.

        A mean is drawn as any other tensor: the mean of random x would be near 0, and a kernel that omits it
        would pass.
        """
        if tensor.name != "rstd":
            return None
        return rng.uniform(0.5, 2.0, tensor.shape).astype(np.float32)

    def stress(self) -> Mapping[str, Stress]:
        """Return rows whose squares cancel, overflow f16 or vanish; NaN makes a row NaN.

        Gradients of the weights are sums over all rows: one that is not finite would hide all others.
        """
        if self.is_backward:
            return {
                "x": Stress(kinds=("offset", "mixed", "constant", "sparse")),
                "dy": Stress(kinds=("mixed", "offset", "zeros", "tiny", "sparse")),
            }
        return {"x": Stress(kinds=MOMENTS)}

    def draw_stress(self, rng: np.random.Generator) -> dict[str, Array] | None:
        """Draw extreme rows; for gradients, the statistics are those of the rows."""
        tensors = super().draw_stress(rng)
        if tensors is not None and self.is_backward:
            tensors |= self._statistics_of(tensors["x"].astype(np.float64))
        return tensors

    @abstractmethod
    def _statistics_of(self, x: Array64) -> dict[str, Array]:
        """Return the statistics that forward writes for x."""

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums over a row in any order."""
        return Tolerance(
            eps_out=F32,
            eps_acc=sum_error(self.cols),
            reason="each output rounded once to its type, as scales state; f32 sums of a row's elements "
            "and squares err by sqrt(cols) u with overwhelming probability (Higham and Mary 2019), and a few "
            "roundings follow; sums over rows likewise, by their number",
        )

    # -- parts of the references of both kinds ---------------------------------------------------------------

    def _summed(self, inputs: Mapping[str, Array64]) -> tuple[Array64, Array64]:
        """Return the sum that is normalised, and the sum of the magnitudes of its terms."""
        z, magnitude = inputs["x"], np.abs(inputs["x"])
        for name in ("bias", "residual"):
            if name in inputs:
                z, magnitude = z + inputs[name], magnitude + np.abs(inputs[name])
        return z, magnitude

    def _references(self, **outputs: tuple[Array64, Array64]) -> dict[str, Reference]:
        """Return the references of the outputs of this workload, from values and magnitudes by name."""
        eps_acc = self.tolerance().eps_acc
        references = {}
        for tensor in self.outputs():
            value, magnitude = outputs[tensor.name]
            rounding = excess_rounding(value, tensor.dtype)  # eps_out covers rounding to f32
            references[tensor.name] = Reference(value=value, scale=magnitude + rounding / eps_acc)
        return references

    def _over_rows(self, terms: Array64, magnitudes: Array64) -> tuple[Array64, Array64]:
        """Return sums over rows, and magnitudes scaled for the ratio of rows to columns."""
        errors = sum_error(self.rows) / sum_error(self.cols)
        return terms.sum(axis=0), magnitudes.sum(axis=0) * errors
