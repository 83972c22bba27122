"""softmax: y[i, :] = exp(z - max z) / sum exp(z - max z), with z = scale * x[i, :] + mask[i, :]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, underflow, unit_roundoff
from tunebench.workload import Category, Leeway, Reference, Size, Tensor, Tolerance, Workload
from tunebench.workloads.operators.elementwise import neighbour

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["Softmax"]


@dataclass(frozen=True, kw_only=True)
class Softmax(Workload):
    """Softmax of each row of x (rows, cols), computed in f32.

    Tensors: x (rows, cols); scale () f32 and mask (rows, cols) if the prologue has them; y (rows, cols).
    """

    operator: ClassVar[str] = "softmax"
    category: ClassVar[Category | None] = "reduction"
    leeway: ClassVar[Leeway] = Leeway(
        padding={"cols": "minus infinity"}, items=("rows",), fusions={"prologue": "before"}
    )

    rows: Size
    cols: Size
    dtype: Literal["f32", "f16", "bf16"]
    prologue: Literal["none", "scale", "mask", "scale+mask"] = "none"

    @property
    def has_scale(self) -> bool:
        """Whether x is multiplied by a scalar first."""
        return "scale" in self.prologue

    @property
    def has_mask(self) -> bool:
        """Whether a mask is added before the softmax."""
        return "mask" in self.prologue

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x, then scale and mask where the prologue has them."""
        shape = (self.rows, self.cols)
        tensors = [Tensor(name="x", shape=shape, dtype=self.dtype)]
        if self.has_scale:
            tensors.append(Tensor(name="scale", shape=(), dtype="f32"))
        if self.has_mask:
            tensors.append(Tensor(name="mask", shape=shape, dtype=self.dtype))
        return tuple(tensors)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return y (rows, cols)."""
        return (Tensor(name="y", shape=(self.rows, self.cols), dtype=self.dtype),)

    def flops(self) -> int:
        """Count maximum, subtraction, exponential, sum and division, and 1 for each prologue step."""
        return self.rows * self.cols * (5 + self.has_scale + self.has_mask)

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute each row after taking off its maximum."""
        z = inputs["x"] * inputs["scale"] if self.has_scale else inputs["x"]
        if self.has_mask:
            z = z + inputs["mask"]
        e = np.exp(z - z.max(axis=1, keepdims=True))
        y = e / e.sum(axis=1, keepdims=True)
        # exp turns an absolute error of its argument into a relative one of the result.
        scale = y * (1 + np.abs(z).max(axis=1, keepdims=True))
        return {"y": Reference(value=y, scale=scale + underflow(self.dtype) / self.tolerance().eps_acc)}

    def unfused(self) -> tuple[Workload, ...]:
        """Return the prologue as an elementwise chain, and softmax alone."""
        if self.prologue == "none":
            return ()
        shape = (self.rows, self.cols)
        return (
            neighbour(self.prologue, "x", shape, self.dtype, scalars="scale"),
            self.changed(prologue="none"),
        )

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result and f32 arithmetic on exponents."""
        f32: DType = "f32"
        return Tolerance(
            eps_out=unit_roundoff(self.dtype),
            eps_acc=16 * unit_roundoff(f32),
            reason="one rounding to the output type; f32 exp2-based exponentials are good to a few units of "
            "the argument's roundoff, and pairwise or online sums add a few more",
        )
