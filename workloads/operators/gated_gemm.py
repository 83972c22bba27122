"""gated_gemm: c = activation(a @ op(b_gate)) * (a @ op(b_up)), first half of a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import storage, underflow, unit_roundoff
from tunebench.stress import Stress
from tunebench.workload import (
    ActivationName,
    AllowedChanges,
    Category,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Workload,
    defaults_to,
)
from tunebench.workloads.common import accumulation
from tunebench.workloads.common.activation import activated, roundings
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gemm import Gemm

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["GatedGemm"]


@dataclass(frozen=True, kw_only=True)
class GatedGemm(Workload):
    """Two matrix products of the same rows, accumulated in f32; the activation of one gates the other.

    With silu this is SwiGLU, with gelu GeGLU, with relu ReGLU, with sigmoid GLU; `tunebench.activation` has
    all names. All tensors are row-major: a (m, k); b_gate and b_up (k, n), or (n, k) if `trans` is nt;
    c (m, n). Sums are activated and multiplied in f32, before the one rounding to `out`. gelu, silu and the
    type tf32 have the meaning they have in `Gemm`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    operator: ClassVar[str] = "gated_gemm"
    category: ClassVar[Category | None] = "dot product"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"m": "zeros", "n": "zeros", "k": "zeros"}, items=("m",), layouts=("trans",)
    )

    m: Size
    n: Size
    k: Size
    dtype: Literal["f32", "tf32", "f16", "bf16"]
    activation: ActivationName = "silu"
    trans: Literal["nn", "nt"] = "nn"
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    def default_of(self, dimension: str, followed: Any) -> Any:
        """Return the storage type of a, b_gate and b_up as the default type of c."""
        return storage(followed)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return a, b_gate and b_up."""
        shape = (self.k, self.n) if self.trans == "nn" else (self.n, self.k)
        stored = storage(self.dtype)
        return (
            Tensor(name="a", shape=(self.m, self.k), dtype=stored),
            Tensor(name="b_gate", shape=shape, dtype=stored),
            Tensor(name="b_up", shape=shape, dtype=stored),
        )

    def stress(self) -> Mapping[str, Stress]:
        """Return rows of a and columns of both factors of the kinds of `accumulation.factors`."""
        axes = (-1, -2 if self.trans == "nn" else -1)
        a, b = accumulation.factors(self.dtype, axes, self.out).values()
        return {"a": a, "b_gate": b, "b_up": b}

    def outputs(self) -> tuple[Tensor, ...]:
        """Return c (m, n)."""
        return (Tensor(name="c", shape=(self.m, self.n), dtype=self.out),)

    def flops(self) -> int:
        """Count the products and sums of both matrix products; the gating is not counted, as is customary."""
        return 4 * self.m * self.n * self.k

    def product(self) -> Gemm:
        """Return one of the two products, with c as its result."""
        return Gemm(m=self.m, n=self.n, k=self.k, dtype=self.dtype, trans=self.trans, out=self.out)

    def unfused(self) -> tuple[Workload, ...]:
        """Return the two products and the gating as an elementwise chain."""
        gating = Elementwise(
            rows=self.m, cols=self.n, dtype=self.out, expression=f"{self.activation}(gate)*up"
        )
        return (self.product(), self.product(), gating)

    # -- reference -------------------------------------------------------------------------------

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute all of c."""
        return {"c": self.reference_block(inputs, 0, slice(0, self.m), slice(0, self.n))}

    def reference_block(
        self, inputs: Mapping[str, Array64], batch_index: int, rows: slice, cols: slice
    ) -> Reference:
        """Compute only ``c[rows, cols]``, so that parts of a large result can be checked.

        With gate g and up u, sums of magnitudes G and U, and a relative error e of both sums, the error of c
        is at most ``e (s G |u| + |act(g)| U + e s G U)``, where s is the slope of the activation. This is the
        scale.

        Args:
            inputs: As for `reference`.
            batch_index: Always 0: there is one c.
            rows: Rows of c, with unit step.
            cols: Columns of c, with unit step.

        Returns:
            Value and scale, both of the shape of the block.
        """
        a = inputs["a"][rows]
        gate, gates = self._product(a, inputs["b_gate"], cols)
        up, ups = self._product(a, inputs["b_up"], cols)
        eps_acc = self.tolerance().eps_acc
        gate, gates = activated(self.activation, gate, gates, eps_acc, self.out)
        scale = gates * np.abs(up) + np.abs(gate) * ups + eps_acc * gates * ups
        return Reference(value=gate * up, scale=scale + underflow(self.out) / eps_acc)

    def _product(self, a: Array64, b: Array64, cols: slice) -> tuple[Array64, Array64]:
        """Return columns of ``a @ op(b)``, and the magnitudes to which their error is relative."""
        part = b[:, cols] if self.trans == "nn" else b[cols].T
        value, scale = a @ part, accumulation.product_scale(a, part, self.k, self.dtype)
        if accumulation.relative_error(self.k, self.dtype):
            scale = scale + np.abs(value)
        return value, scale

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, f32 sums in any order, and roundings of the gating."""
        steps = roundings(self.activation) + 1
        return Tolerance(
            eps_out=unit_roundoff(self.out),
            eps_acc=accumulation.error(self.k, self.dtype) + steps * unit_roundoff("f32"),
            reason=f"one rounding to {self.out}; {accumulation.reason(self.dtype)}; "
            "errors of gate and up grow by the other's value; a few f32 roundings of activation and gating",
        )
