"""softmax: y[i, :] = exp(z) / sum exp(z), with z = scale * x[i, :] + mask[i, :]; its logarithm; gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress, stressed
from tunebench.workload import AllowedChanges, Reference, Tensor, Tolerance, Workload
from tunebench.workloads.common.accumulation import F32, sum_error
from tunebench.workloads.common.matrix import LOGITS, MatrixWorkload
from tunebench.workloads.operators.elementwise import neighbour

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["Softmax"]


@dataclass(frozen=True, kw_only=True)
class Softmax(MatrixWorkload):
    """Softmax of each row of x (rows, cols), or its logarithm, and the gradient of either; computed in f32.

    ========= ===== ============== ================================================
    direction log   reads          writes
    ========= ===== ============== ================================================
    forward   false x, scale, mask y = exp(z) / sum exp(z), z = scale x + mask
    forward   true  x, scale, mask y = z - log sum exp(z)
    backward  false y, dy, scale   dx = scale y (dy - sum y dy)
    backward  true  y, dy, scale   dx = scale (dy - exp(y) sum dy)
    ========= ===== ============== ================================================

    Tensors are (rows, cols) of one type, except scale () f32. scale and mask are inputs if the prologue
    includes them. Backward reads the result of forward and needs no mask: an addition passes its gradient on
    unchanged.
    """

    operator: ClassVar[str] = "softmax"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"cols": "minus infinity"}, items=("rows",), fusions={"prologue": "before"}
    )

    prologue: Literal["none", "scale", "mask", "scale+mask"] = "none"
    log: bool = False
    direction: Literal["forward", "backward"] = "forward"

    def check(self) -> None:
        """Refuse a gradient with a mask."""
        if self.is_backward and self.has_mask:
            raise InputError(
                f"softmax: prologue={self.prologue} needs direction=forward; "
                "the gradient takes prologue=none or scale, with or without a mask"
            )

    def may_change(self) -> AllowedChanges:
        """Return that rows of gradients may be padded with zeros, and have no operation ahead of them."""
        if not self.is_backward:
            return self.allowed_changes
        return dataclasses.replace(self.allowed_changes, padding={"cols": "zeros"}, fusions={})

    @property
    def has_scale(self) -> bool:
        """Whether x is multiplied by a scalar first."""
        return "scale" in self.prologue

    @property
    def has_mask(self) -> bool:
        """Whether a mask is added before the softmax."""
        return "mask" in self.prologue

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x, or y and dy; then scale and mask of the prologue."""
        tensors = [self._matrix("y"), self._matrix("dy")] if self.is_backward else [self._matrix("x")]
        if self.has_scale:
            tensors.append(Tensor(name="scale", shape=(), dtype="f32"))
        if self.has_mask:
            tensors.append(self._matrix("mask"))
        return tuple(tensors)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y or dx (rows, cols)."""
        return (self._matrix("dx" if self.is_backward else "y"),)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw y for backward: rounded (log-)probabilities of standard normal rows."""
        if not self.is_backward or tensor.name != "y":
            return None
        return self._result(rng.standard_normal(tensor.shape, dtype="float32"))

    def _result(self, z: Array) -> Array:
        """Return rounded (log-)probabilities of logits in f32."""
        z = z - z.max(axis=1, keepdims=True)
        total = np.exp(z).sum(axis=1, keepdims=True)
        y: Array = z - np.log(total) if self.log else np.exp(z) / total
        return y.astype(numpy_dtype(self.dtype))

    def stress(self) -> Mapping[str, Stress]:
        """Return large, shifted, hidden and equal logits, and gradients of any size; NaN makes a row NaN."""
        if self.is_backward:
            return {"dy": Stress(kinds=("offset", "large", "mixed", "zeros", "tiny", "nan"))}
        return {"x": Stress(kinds=LOGITS)}

    def draw_stress(self, rng: numpy.random.Generator) -> dict[str, Array] | None:
        """Draw extreme inputs; for the gradient, y is the result for extreme logits."""
        tensors = super().draw_stress(rng)
        if tensors is not None and self.is_backward:
            z = rng.standard_normal((self.rows, self.cols), dtype="float32")
            tensors["y"] = self._result(stressed(z, "f32", Stress(kinds=("logits", "constant")), rng))
        return tensors

    def flops(self) -> int:
        """Count four or five operations per element, and 1 for each prologue step.

        Forward: maximum, subtraction, exponential, sum, and division (subtraction for the logarithm).
        Backward: product, sum, subtraction, product (for the logarithm one product is an exponential).
        """
        return self.rows * self.cols * (5 - self.is_backward + self.has_scale + self.has_mask)

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute each row after subtracting its maximum, or its gradient."""
        value, scale = (self._backward if self.is_backward else self._forward)(inputs)
        least = underflow(self.dtype) / self.tolerance().eps_acc
        return {self.outputs()[0].name: Reference(value=value, scale=scale + least)}

    def _forward(self, inputs: Mapping[str, Array64]) -> tuple[Array64, Array64]:
        z = inputs["x"] * inputs["scale"] if self.has_scale else inputs["x"]
        if self.has_mask:
            z = z + inputs["mask"]
        top = z.max(axis=1, keepdims=True)
        # Masked elements, which are -inf, are exact.
        largest = np.abs(z).max(axis=1, keepdims=True, where=np.isfinite(z), initial=0)
        e = np.exp(z - top)
        total = e.sum(axis=1, keepdims=True)
        if self.log:
            y = z - (top + np.log(total))
            return y, np.broadcast_to(1 + largest + np.log(total), y.shape)
        y = e / total
        # exp turns an absolute error of its argument into a relative one of the result.
        return y, y * (1 + largest)

    def _backward(self, inputs: Mapping[str, Array64]) -> tuple[Array64, Array64]:
        y, dy = inputs["y"], inputs["dy"]
        factor = inputs["scale"] if self.has_scale else np.float64(1)
        if self.log:
            p = np.exp(y)
            value = dy - p * dy.sum(axis=1, keepdims=True)
            scale = np.abs(dy) + p * (1 + np.abs(y)) * np.abs(dy).sum(axis=1, keepdims=True)
        else:
            product = y * dy
            value = y * (dy - product.sum(axis=1, keepdims=True))
            scale = np.abs(y) * (np.abs(dy) + np.abs(product).sum(axis=1, keepdims=True))
        return factor * value, np.abs(factor) * scale

    def unfused(self) -> tuple[Workload, ...]:
        """Return the prologue as an elementwise chain, and softmax alone; gradients are scaled afterwards."""
        if self.prologue == "none":
            return ()
        written = "dx" if self.is_backward else "x"
        alone = self.changed(prologue="none")
        chain = neighbour(self.prologue, written, (self.rows, self.cols), self.dtype, scalars="scale")
        return (alone, chain) if self.is_backward else (chain, alone)

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and the f32 error of exponentials or of a row's sum."""
        if self.is_backward:
            return Tolerance(
                eps_out=unit_roundoff(self.dtype),
                eps_acc=sum_error(self.cols),
                reason="one rounding to the output type; f32 sums of a row's terms err by sqrt(cols) u with "
                "overwhelming probability (Higham and Mary 2019), and a few roundings follow",
            )
        return Tolerance(
            eps_out=unit_roundoff(self.dtype),
            eps_acc=16 * F32,
            reason="one rounding to the output type; f32 exp2-based exponentials are accurate to a few "
            "units of the argument's roundoff, and pairwise or online sums add a few more",
        )
