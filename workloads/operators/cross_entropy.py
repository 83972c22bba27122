"""cross_entropy: loss[i] = log sum exp(x[i, :]) - x[i, target[i]], and its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import underflow, unit_roundoff
from tunebench.stress import Stress
from tunebench.workload import AllowedChanges, Reference, Tensor, Tolerance
from tunebench.workloads.common.accumulation import F32, row_blocks
from tunebench.workloads.common.matrix import LOGITS, MatrixWorkload

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["CrossEntropy"]

BLOCK_ELEMENTS = 2**22
"""Elements of intermediate results that the reference keeps: logits of a vocabulary are large."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(MatrixWorkload):
    """Cross entropy of each row of logits x (rows, cols) with one class, and its gradient; computed in f32.

    ========= ======================= ====================================================
    direction reads                   writes
    ========= ======================= ====================================================
    forward   x, target               lse = log sum exp(x), loss = lse - x[target]
    backward  x, target, lse, dloss   dx = (exp(x - lse) - onehot(target)) dloss
    ========= ======================= ====================================================

    x and dx are (rows, cols) of `dtype`; target is (rows,) i32, from 0 to cols - 1; loss, lse and dloss are
    (rows,) f32. No class is ignored and the loss is not averaged: a dloss of 0 excludes a row.
    """

    operator: ClassVar[str] = "cross_entropy"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"cols": "minus infinity"}, items=("rows",)
    )

    direction: Literal["forward", "backward"] = "forward"

    def _of_rows(self, name: str) -> Tensor:
        return Tensor(name=name, shape=(self.rows,), dtype="f32")

    def inputs(self) -> tuple[Tensor, ...]:
        """Return x and target; for the gradient also lse and dloss."""
        target = Tensor(name="target", shape=(self.rows,), dtype="i32")
        more = (self._of_rows("lse"), self._of_rows("dloss")) if self.is_backward else ()
        return (self._matrix("x"), target, *more)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return loss and lse (rows,), or dx (rows, cols)."""
        if self.is_backward:
            return (self._matrix("dx"),)
        return (self._of_rows("loss"), self._of_rows("lse"))

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw valid classes, and lse near its value for rows of standard normal logits.

        The sum of the exponentials of `cols` logits is about cols times their mean, sqrt(e).
        """
        if tensor.name == "target":
            classes: Array = rng.integers(0, self.cols, tensor.shape, dtype="int32")
            return classes
        if tensor.name == "lse":
            spread = rng.standard_normal(tensor.shape, dtype="float32")
            lse: Array = (np.float32(math.log(self.cols) + 0.5) + np.float32(0.1) * spread).astype("float32")
            return lse
        return None

    def stress(self) -> Mapping[str, Stress]:
        """Return large, shifted, hidden and equal logits; NaN makes a row NaN, in the forward direction."""
        finite = tuple(kind for kind in LOGITS if kind not in ("nan", "infinite"))
        return {"x": Stress(kinds=finite if self.is_backward else LOGITS)}

    def draw_stress(self, rng: numpy.random.Generator) -> dict[str, Array] | None:
        """Draw extreme logits; for the gradient, lse is that of the logits."""
        tensors = super().draw_stress(rng)
        if tensors is not None and self.is_backward:
            tensors["lse"] = self._lse(tensors["x"].astype(np.float64))[0].astype("float32")
        return tensors

    def flops(self) -> int:
        """Count four or three operations per element, and a subtraction per row.

        Forward: maximum, subtraction, exponential, sum. Backward: subtraction, exponential, product.
        """
        return self.rows * ((3 if self.is_backward else 4) * self.cols + 1)

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute each row after subtracting its maximum, or its gradient."""
        if self.is_backward:
            return {"dx": self.reference_block(inputs, 0, slice(0, self.rows), slice(0, self.cols))}
        x = inputs["x"]
        lse, largest = self._lse(x)
        chosen = x[np.arange(self.rows), inputs["target"].astype(np.int64)]
        # lse is a maximum plus the logarithm of a sum; the loss may cancel with either.
        scale = 1 + largest + np.abs(lse)
        return {"loss": Reference(value=lse - chosen, scale=scale), "lse": Reference(value=lse, scale=scale)}

    def _lse(self, x: Array64) -> tuple[Array64, Array64]:
        """Return the logarithm of each row's sum of exponentials, and its largest finite magnitude."""
        lse, largest = np.empty((2, self.rows))
        for part in row_blocks(self.rows, self.cols, BLOCK_ELEMENTS):
            logits = x[part]
            top = logits.max(axis=1)
            lse[part] = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            largest[part] = np.abs(logits).max(axis=1, where=np.isfinite(logits), initial=0)
        return lse, largest

    def reference_block(
        self, inputs: Mapping[str, Array64], batch_index: int, rows: slice, cols: slice
    ) -> Reference:
        """Compute only ``dx[rows, cols]``, so that parts of a large gradient can be checked.

        Args:
            inputs: As for `reference` of the gradient.
            batch_index: Always 0: there is one matrix.
            rows: Rows of dx, with unit step.
            cols: Columns of dx, with unit step.

        Returns:
            Value and scale, both of the shape of the block.
        """
        x, lse, dloss = inputs["x"][rows, cols], inputs["lse"][rows, None], inputs["dloss"][rows, None]
        onehot = inputs["target"][rows, None] == np.arange(self.cols)[None, cols]
        p = np.exp(x - lse)
        # exp turns an absolute error of its argument into a relative one of the result.
        argument = np.where(np.isfinite(x), np.abs(x) + np.abs(lse), 0.0)
        scale = np.abs(dloss) * (p * (1 + argument) + onehot)
        # A probability that is not a normal number may be 0 before it is multiplied.
        least = np.maximum(1.0, np.abs(dloss)) * underflow(self.dtype) / self.tolerance().eps_acc
        return Reference(value=(p - onehot) * dloss, scale=scale + least)

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result and f32 arithmetic on exponents."""
        return Tolerance(
            eps_out=unit_roundoff(self.outputs()[0].dtype),
            eps_acc=16 * F32,
            reason="one rounding to the output type; f32 exp2-based exponentials are good to a few units of "
            "the argument's roundoff, and pairwise or online sums add a few more",
        )
