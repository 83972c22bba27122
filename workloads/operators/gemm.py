"""gemm: c[z] = activation(pre(op(a[z])) @ op(b[z]) + bias) + residual[z], for each z of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import is_integer, storage, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress
from tunebench.workload import (
    AllowedChanges,
    Expression,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Workload,
    defaults_to,
)
from tunebench.workloads.common import accumulation
from tunebench.workloads.common import activation as activations
from tunebench.workloads.common import prologue as prologues
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.common.fused_product import FusedProduct

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["Gemm"]

MAX_INTEGER_K = 2**17 - 1
"""Largest k for which a sum of products of two i8 always fits in i32: each product is at most 2**14."""


@dataclass(frozen=True, kw_only=True)
class Gemm(FusedProduct):
    """Matrix product of a batch of matrices, accumulated in f32 (i8: in i32), with a fused epilogue.

    The batch is always the first axis, of extent 1 for a single product. All tensors are row-major:
    a (batch, m, k), or (batch, k, m) if `trans` starts with t; b (batch, k, n), or (batch, n, k) if `trans`
    ends with t; bias (n,) of the type of c, one for the whole batch, and residual, of type and shape of c, if
    the epilogue includes them; c (batch, m, n).
    The type tf32 means f32 tensors whose elements the kernel rounds to nearest, to 11 bits, before it
    multiplies them.

    The epilogue works in f32, before the one rounding to `out`, in the order of its name: bias, activation,
    residual. Its gelu is the exact one, ``x * (1 + erf(x / sqrt(2))) / 2``, not the approximation by tanh;
    silu is ``x / (1 + exp(-x))``. If the name has no activation, `act` may be any expression in x, such as
    ``max(min(x,6),0)``; a named one after a bias (``gelu(x)``) becomes a part of the epilogue's name.

    The left factor is `pre` of each element of a, computed in f32 and rounded to the type of a: an expression
    in x, and in scale and shift, which hold one number for each k: ``relu(x*scale+shift)``. Those it uses are
    the inputs pre_scale and pre_shift, both (k,) and of the type of a.

    Products of 8-bit floats (e4m3) are bf16 unless `out` states another type. Products of integers (i8) are
    i32, exact and without an epilogue; k is limited so that no sum overflows.

    Tensor cores of sm_89 and sm_90 keep 13 fraction bits of sums of e4m3 products. `accumulate` is fast if
    that is accurate enough, and f32 if at most 256 products may be summed so before the sum is added in f32
    ("promoted"). Sums of other types are f32 or exact in any case.
    """

    operator: ClassVar[str] = "gemm"
    summed: ClassVar[str] = "k"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"m": "zeros", "n": "zeros", "k": "zeros"},
        items=("m", "batch"),
        layouts=("trans",),
        fusions={"epilogue": "after", "act": "after", "pre": "before"},
    )

    m: Size
    n: Size
    k: Size
    dtype: Literal["f32", "tf32", "f16", "bf16", "e4m3", "i8"]
    batch: Size = 1
    trans: Literal["nn", "nt", "tn", "tt"] = "nn"
    epilogue: Literal[
        "none",
        "bias",
        "bias+relu",
        "bias+gelu",
        "bias+silu",
        "residual",
        "bias+residual",
        "bias+relu+residual",
        "bias+gelu+residual",
        "bias+silu+residual",
    ] = "none"
    out: Literal["f32", "f16", "bf16", "i32"] = defaults_to("dtype")
    act: Expression = IDENTITY
    pre: Expression = IDENTITY
    accumulate: Literal["fast", "f32"] = "fast"

    def default_of(self, dimension: str, followed: Any) -> Any:
        """Return the storage type of a and b as the default type of c, or a wider one if too narrow."""
        return {"e4m3": "bf16", "i8": "i32"}.get(followed, storage(followed))

    def check(self) -> None:
        """Refuse integers with unsupported options, and an expression that the epilogue has no place for."""
        if (self.dtype == "i8") != (self.out == "i32"):
            raise InputError(
                f"gemm: dtype=i8 and out=i32 need each other, got dtype={self.dtype} and out={self.out}"
            )
        if self.dtype == "i8" and self.epilogue != "none":
            raise InputError(f"gemm: i8 has epilogue=none only, got {self.epilogue}")
        if self.dtype == "i8" and self.k > MAX_INTEGER_K:
            raise InputError(f"gemm: i8 has k up to {MAX_INTEGER_K}, or sums overflow i32; got {self.k}")
        if self.dtype == "i8" and self.act != IDENTITY:
            raise InputError(f"gemm: i8 has no epilogue, got act={self.act}")
        accumulation.check(self.operator, self.accumulate, self.dtype)
        self._check_expressions(self.k)

    @property
    def applied(self) -> tuple[str, ...]:
        """Steps of the epilogue including `act`, in order: the residual is last."""
        sums = tuple(step for step in self.steps if step != "residual")
        act = (self.act,) if self.act != IDENTITY else ()
        return (*sums, *act, *self.steps[len(sums) :])

    def inputs(self) -> tuple[Tensor, ...]:
        """Return a and b, then bias and residual of the epilogue, then the inputs of `pre`."""
        a_shape = (self.m, self.k) if self.trans[0] == "n" else (self.k, self.m)
        b_shape = (self.k, self.n) if self.trans[1] == "n" else (self.n, self.k)
        stored = storage(self.dtype)
        tensors = [
            Tensor(name="a", shape=(self.batch, *a_shape), dtype=stored),
            Tensor(name="b", shape=(self.batch, *b_shape), dtype=stored),
        ]
        if self.has_bias:
            tensors.append(Tensor(name="bias", shape=(self.n,), dtype=self.out))
        if self.has_residual:
            tensors.append(Tensor(name="residual", shape=(self.batch, self.m, self.n), dtype=self.out))
        return (*tensors, *prologues.tensors(self.pre, self.k, stored))

    def stress(self) -> Mapping[str, Stress]:
        """Return rows of op(a) and columns of op(b) of the kinds of `accumulation.factors`."""
        axes = (-1 if self.trans[0] == "n" else -2, -2 if self.trans[1] == "n" else -1)
        bounded = self.has_pre or self.act != IDENTITY
        return accumulation.factors(self.dtype, axes, self.out, bounded=bounded)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return c (batch, m, n)."""
        return (Tensor(name="c", shape=(self.batch, self.m, self.n), dtype=self.out),)

    def flops(self) -> int:
        """Count products and sums; prologue and epilogue are not counted, as is customary."""
        return 2 * self.batch * self.m * self.n * self.k

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute all of c, one product of the batch after the other."""
        value, scale = np.empty((2, self.batch, self.m, self.n))
        for z in range(self.batch):
            block = self.reference_block(inputs, z, slice(0, self.m), slice(0, self.n))
            value[z], scale[z] = block.value, block.scale
        return {"c": Reference(value=value, scale=scale)}

    def reference_block(
        self, inputs: Mapping[str, Array64], batch_index: int, rows: slice, cols: slice
    ) -> Reference:
        """Compute only ``c[batch_index, rows, cols]``, so that parts of a large product can be checked.

        Args:
            inputs: As for `reference`.
            batch_index: Index of the product in the batch.
            rows: Rows of c, with unit step.
            cols: Columns of c, with unit step.

        Returns:
            Value and scale, both of the shape of the block.
        """
        a, magnitude = self._multiplied(inputs, batch_index, rows)
        b = inputs["b"][batch_index]
        b = b[:, cols] if self.trans[1] == "n" else b[cols].T
        value, scale = a @ b, accumulation.product_scale(a, b, self.k, self.dtype, promoted=self.promoted)
        if self.has_pre:
            scale = scale + (magnitude - np.abs(a)) @ np.abs(b)
        if self.activation != "none":
            scale = scale + self._relative_scale * np.abs(value)
        if self.has_bias:
            value += inputs["bias"][cols]
            scale += np.abs(inputs["bias"][cols])
        eps_acc = self.tolerance().eps_acc
        if self.act == IDENTITY:
            value, scale = activations.activated(self.activation, value, scale, eps_acc, self.out)
        else:
            value, scale = activations.spread(self.act, value, scale, eps_acc, self.out)
        if self.has_residual:
            residual = inputs["residual"][batch_index, rows, cols]
            # Without an expression |value| is at most `scale`; the value of an expression may exceed it.
            scale = scale if self.act == IDENTITY else np.maximum(scale, np.abs(value))
            value, scale = value + residual, scale + np.abs(residual)
        return Reference(value=value, scale=scale + self._least_scale())

    def _multiplied(
        self, inputs: Mapping[str, Array64], batch_index: int, rows: slice
    ) -> tuple[Array64, Array64]:
        """Return rows of op(a) after `pre`, and their magnitudes (see `_with_prologue`)."""
        a = inputs["a"][batch_index]
        return self._with_prologue(a[rows] if self.trans[0] == "n" else a[:, rows].T, inputs)

    def reference_sums(
        self, inputs: Mapping[str, Array64], batch_index: int, signs: Array64, width: int
    ) -> Reference | None:
        """Compute signed sums of runs of c's columns without computing c, to check all of a large c.

        The sum of ``signs[j] * c[batch_index, i, j]`` over a run costs one product instead of `width`
        products.

        Args:
            inputs: As for `reference`.
            batch_index: Index of the product in the batch.
            signs: One factor for each column of c, (n,).
            width: Columns per run; the last run may be shorter.

        Returns:
            Value (m, ceil(n / width)) and scale, at least the root of the sum of the squared scales of the
            run's elements; or None if c is not linear in its inputs.

        Source: Freivalds, "Probabilistic machines can use less running time", 1977; Cauchy-Schwarz.
        """
        if self.activation != "none":
            return None
        a, magnitude = self._multiplied(inputs, batch_index, slice(None))
        b = inputs["b"][batch_index]
        b = b if self.trans[1] == "n" else b.T
        starts = np.arange(0, self.n, width)
        value = a @ np.add.reduceat(b * signs, starts, axis=1)
        if self.dtype == "f32" and not self.has_pre:
            scale = np.sqrt(np.square(a) @ np.add.reduceat(np.square(b), starts, axis=1))
        else:
            lengths = np.sqrt(np.square(magnitude).sum(axis=1))
            scale = lengths[:, None] * np.sqrt(np.add.reduceat(np.square(b).sum(axis=0), starts))
        if self.has_bias:
            bias = inputs["bias"]
            value += np.add.reduceat(bias * signs, starts)
            scale += np.sqrt(np.add.reduceat(np.square(bias), starts))
        if self.has_residual:
            residual = inputs["residual"][batch_index]
            value += np.add.reduceat(residual * signs, starts, axis=1)
            scale += np.sqrt(np.add.reduceat(np.square(residual), starts, axis=1))
        return Reference(value=value, scale=scale + math.sqrt(width) * self._least_scale())

    def unfused(self) -> tuple[Workload, ...]:
        """Return the prologue as an elementwise chain, the product alone, and the epilogue as a chain.

        There are no parts for a batch of transposed a with scale or shift: an elementwise chain would need a
        number for each row of every product, but the products share these numbers.
        """
        rows_of_k = self.trans[0] == "t"
        if not (self.applied or self.has_pre) or (
            rows_of_k and self.batch > 1 and prologues.vectors(self.pre)
        ):
            return ()
        a = self.inputs()[0]
        return self._apart((a.shape[0] * a.shape[1], a.shape[2]), "columns" if rows_of_k else "vectors")

    @property
    def promoted(self) -> bool:
        """Whether sums of e4m3 products are added in f32."""
        return self.accumulate == "f32"

    @property
    def _relative_scale(self) -> float:
        """Factor of the magnitude of a sum in its scale, ahead of an activation."""
        return 1.0 if accumulation.relative_error(self.k, self.dtype) else 0.0

    def _least_scale(self) -> float:
        """Return the magnitude whose tolerance equals the rounding error of `out` near zero."""
        least = underflow(self.out)
        return least / self.tolerance().eps_acc if least else 0.0

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, and f32 sums of k products in any order; integers are exact."""
        if is_integer(self.out):
            return Tolerance(eps_out=0.0, eps_acc=0.0, reason="sums of integers are exact in any order")
        # The errors of an expression are bounded element by element, in `scale`.
        epilogue_steps = self.has_bias + self.has_residual
        epilogue_steps += activations.roundings(self.activation) if self.act == IDENTITY else 0
        of_sum = accumulation.relative_error(self.k, self.dtype) if self.activation == "none" else 0.0
        return Tolerance(
            eps_out=unit_roundoff(self.out) + of_sum,
            eps_acc=accumulation.error(self.k, self.dtype, promoted=self.promoted)
            + epilogue_steps * unit_roundoff("f32"),
            reason="; ".join(
                [
                    f"one rounding to {self.out}",
                    accumulation.reason(self.dtype, promoted=self.promoted),
                    "a few f32 roundings of the epilogue",
                    *(["errors of pre are bounded element by element"] if self.has_pre else []),
                ]
            ),
        )
