"""scaled_gemm: c = (scale_a a) @ (scale_b b + shift)^T + bias, a product of quantised matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress
from tunebench.workload import (
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
from tunebench.workloads.operators.gemm import MAX_INTEGER_K, Gemm

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["GROUPS", "ScaledGemm", "unpacked"]

GROUPS = (32, 64, 128, 256)
"""Numbers of elements of k that may share a scale."""

_TYPICAL_SCALE = {"i8": 2.0**-6, "i4": 2.0**-2}
"""Scales for which drawn values are near 1, by type; 1 for other types."""


@dataclass(frozen=True, kw_only=True)
class ScaledGemm(Workload):
    """Matrix product of quantised matrices, or of activations with quantised weights, summed in f32.

    a (m, k) of `dtype`; b (n, k) of `weight`, as the weight of a linear layer. Weights of 4 bits (i4) are
    (n, k / 2) bytes of two signed numbers from -8 to 7: the lower bits hold the element with even k.

    a is quantised if `dtype` has 8 bits, and then has the factors `scale_a` of f32. Those of b are `scale_b`,
    of f32 if a is quantised, else of `dtype`. `shift` is added to scaled elements of b; it has the type and
    shape of `scale_b`. bias (n,) has the type of c (m, n).

    ====== ================================ ======================================
    scales scale_a                          scale_b and shift
    ====== ================================ ======================================
    tensor (1,)                             (1,)
    row    (m,)                             (n,)
    group  (m, k / group)                   (n, k / group)
    block  (m, k / group)                   (n / group, k / group)
    ====== ================================ ======================================

    Extents are rounded up where `group` does not divide them. Scales are applied to elements or to sums, in
    f32. If a is not quantised, scaled weights may be rounded to `dtype` before they are shifted, and before
    they are multiplied. Products of e4m3 may be summed as in `Gemm`.

    Source: torch's `_scaled_mm`, `_int_mm` and `_weight_int4pack_mm`; Frantar et al., "GPTQ", 2022 (groups);
    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3.1 (blocks).
    """

    operator: ClassVar[str] = "scaled_gemm"
    category: ClassVar[Category | None] = "dot product"
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges(
        padding={"m": "zeros", "n": "zeros"}, items=("m",)
    )

    m: Size
    n: Size
    k: Size
    dtype: Literal["f32", "f16", "bf16", "e4m3", "i8"]
    weight: Literal["i8", "i4", "e4m3"] = defaults_to("dtype")
    scales: Literal["tensor", "row", "group", "block"] = "row"
    group: Size = 128
    shift: bool = False
    bias: bool = False
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    def default_of(self, dimension: str, followed: Any) -> Any:
        """Return e4m3 weights for e4m3, else i8; and results of the type of a, or bf16 if it has 8 bits."""
        if dimension == "weight":
            return "e4m3" if followed == "e4m3" else "i8"
        return "bf16" if followed in ("e4m3", "i8") else followed

    def check(self) -> None:
        """Refuse types that are not multiplied with one another, and groups that no scale has."""
        if self.is_quantized and self.weight != self.dtype:
            raise InputError(
                f"scaled_gemm: dtype={self.dtype} needs weight={self.dtype}, got weight={self.weight}"
            )
        if self.is_quantized and self.shift:
            raise InputError(f"scaled_gemm: shift=true is for a of f32, f16 or bf16, got dtype={self.dtype}")
        if self.dtype == "i8" and self.k > MAX_INTEGER_K:
            raise InputError(
                f"scaled_gemm: i8 has k up to {MAX_INTEGER_K}, or sums overflow i32; got {self.k}"
            )
        if self.weight == "i4" and self.k % 2:
            raise InputError(f"scaled_gemm: weight=i4 needs an even k, got {self.k}")
        if self.group not in GROUPS:
            sizes = ", ".join(map(str, GROUPS))
            raise InputError(f"scaled_gemm: group must be one of {sizes}, got {self.group}")
        if self.group != 128 and not self.is_grouped:
            raise InputError(
                f"scaled_gemm: group={self.group} is for scales=group and scales=block; leave it out for "
                f"scales={self.scales}"
            )

    @property
    def trans(self) -> str:
        """Layout of a and b, as `Gemm` names it."""
        return "nt"

    @property
    def is_quantized(self) -> bool:
        """Whether a has 8 bits and scales."""
        return self.dtype in ("e4m3", "i8")

    @property
    def is_grouped(self) -> bool:
        """Whether scales differ along k."""
        return self.scales in ("group", "block")

    @property
    def group_size(self) -> int:
        """Elements of k that share a scale: k without groups."""
        return self.group if self.is_grouped else self.k

    @property
    def stored_weight(self) -> DType:
        """Type of b in memory."""
        return "i8" if self.weight == "i4" else self.weight

    @property
    def scale_type(self) -> DType:
        """Type of scale_b and shift."""
        return "f32" if self.is_quantized else self.dtype

    def _scale_shape(self, extent: int, *, of_b: bool) -> tuple[int, ...]:
        if self.scales == "tensor":
            return (1,)
        if self.scales == "row":
            return (extent,)
        rows = -(-extent // self.group) if of_b and self.scales == "block" else extent
        return (rows, -(-self.k // self.group))

    def inputs(self) -> tuple[Tensor, ...]:
        """Return a, b, the scales, and shift and bias if there are any."""
        k_stored = self.k // 2 if self.weight == "i4" else self.k
        shape_b = self._scale_shape(self.n, of_b=True)
        tensors = [
            Tensor(name="a", shape=(self.m, self.k), dtype=self.dtype),
            Tensor(name="b", shape=(self.n, k_stored), dtype=self.stored_weight),
        ]
        if self.is_quantized:
            shape_a = self._scale_shape(self.m, of_b=False)
            tensors.append(Tensor(name="scale_a", shape=shape_a, dtype="f32"))
        tensors.append(Tensor(name="scale_b", shape=shape_b, dtype=self.scale_type))
        if self.shift:
            tensors.append(Tensor(name="shift", shape=shape_b, dtype=self.scale_type))
        if self.bias:
            tensors.append(Tensor(name="bias", shape=(self.n,), dtype=self.out))
        return tuple(tensors)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return c (m, n)."""
        return (Tensor(name="c", shape=(self.m, self.n), dtype=self.out),)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw positive scales for which scaled elements are near 1, and shifts of half of that."""
        from tunebench.dtype import numpy_dtype

        if tensor.name in ("scale_a", "scale_b"):
            quantized = self.dtype if tensor.name == "scale_a" else self.weight
            drawn = rng.uniform(0.5, 1.5, tensor.shape) * _TYPICAL_SCALE.get(quantized, 1.0)
        elif tensor.name == "shift":
            drawn = 0.5 * rng.standard_normal(tensor.shape)
        else:
            return None
        array: Array = drawn.astype("float32").astype(numpy_dtype(tensor.dtype))
        return array

    def stress(self) -> Mapping[str, Stress]:
        """Return rows of a and of b of the kinds of `accumulation.factors`; i4 has the most negative one."""
        a = accumulation.factors(self.dtype, (-1, -1), self.out)["a"].kinds
        # In f16, sums of the most negative numbers overflow. Roundings of few different weights add up if the
        # elements of a are alike.
        left_out: tuple[str, ...] = ("extreme",) if self.out == "f16" else ()
        left_out += () if self.is_quantized else ("constant", "offset")
        a = tuple(kind for kind in a if kind not in left_out)
        b = accumulation.factors(self.stored_weight, (-1, -1), self.out)["b"].kinds
        return {"a": Stress(kinds=a), "b": Stress(kinds=b)}

    def flops(self) -> int:
        """Count products and sums; scales, shift and bias are not counted."""
        return 2 * self.m * self.n * self.k

    def product(self) -> Gemm:
        """Return the product of a with weights of its type, with sums of f32."""
        dtype: Any = "f32" if self.dtype == "i8" else self.dtype
        return Gemm(m=self.m, n=self.n, k=self.k, dtype=dtype, trans="nt", out=self.out)

    # -- reference -------------------------------------------------------------------------------

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute all of c."""
        return {"c": self.reference_block(inputs, 0, slice(0, self.m), slice(0, self.n))}

    def reference_block(
        self, inputs: Mapping[str, Array64], batch_index: int, rows: slice, cols: slice
    ) -> Reference:
        """Compute only ``c[rows, cols]``, so that parts of a large result can be checked.

        Args:
            inputs: As for `reference`.
            batch_index: Always 0: there is one product.
            rows: Rows of c, with unit step.
            cols: Columns of c, with unit step.

        Returns:
            Value and scale, both of the shape of the block.
        """
        a = inputs["a"][rows]
        if self.is_quantized:
            a = a * self.spread(inputs["scale_a"], rows, of_b=False)
        weights = unpacked(inputs["b"][cols]) if self.weight == "i4" else inputs["b"][cols]
        b = weights * self.spread(inputs["scale_b"], cols, of_b=True)
        magnitude = np.abs(b)
        if self.shift:
            shift = self.spread(inputs["shift"], cols, of_b=True)
            b, magnitude = b + shift, magnitude + np.abs(shift)
        value = a @ b.T
        scale = accumulation.product_scale(a, magnitude.T, self.k, self._summed_as)
        scale = scale + self._of_rounded_weights(a, magnitude)
        if self.bias:
            value, scale = value + inputs["bias"][cols], scale + np.abs(inputs["bias"][cols])
        return Reference(value=value, scale=scale + underflow(self.out) / self.tolerance().eps_acc)

    def _of_rounded_weights(self, a: Array64, magnitude: Array64) -> Any:
        """Return the error of rounding scaled weights to the type of a, in units of `eps_acc`.

        Four times the 2-norm of the products is seven standard deviations of uniform errors.
        """
        if self.is_quantized or self.dtype == "f32":
            return 0.0
        norms = np.sqrt(np.square(a) @ np.square(magnitude).T)
        largest = np.minimum(np.abs(a) @ magnitude.T, 4.0 * norms)
        return (1 + self.shift) * unit_roundoff(self.dtype) * largest / self.tolerance().eps_acc

    def spread(self, scale: Any, rows: slice = slice(None), *, of_b: bool) -> Any:
        """Return scales in a shape that broadcasts to elements.

        Args:
            scale: One of scale_a, scale_b and shift.
            rows: Rows of a or of b, with unit step.
            of_b: Whether it has the scales of b.

        Returns:
            An array that broadcasts to (rows, k).
        """
        if self.scales == "tensor":
            return scale
        if self.scales == "row":
            return scale[rows, None]
        if of_b and self.scales == "block":
            scale = scale[np.arange(self.n)[rows] // self.group]
        else:
            scale = scale[rows]
        return np.repeat(scale, self.group, axis=1)[:, : self.k]

    @property
    def _summed_as(self) -> DType:
        return "e4m3" if self.dtype == "e4m3" else "bf16"

    def tolerance(self) -> Tolerance:
        """Allow one rounding of the result, f32 sums in any order, and roundings of scaled elements."""
        roundings = 4 + self.shift + self.bias
        return Tolerance(
            eps_out=unit_roundoff(self.out),
            eps_acc=accumulation.error(self.k, self._summed_as) + roundings * unit_roundoff("f32"),
            reason=f"one rounding to {self.out}; {accumulation.reason(self._summed_as)}; "
            "scales, shift and bias are a few f32 roundings of an element or a sum; roundings of scaled "
            "weights to the type of a are bounded element by element",
        )


def unpacked(packed: Any) -> Any:
    """Return the signed numbers of 4 bits that bytes hold, as an array of floats.

    Args:
        packed: Signed bytes as floats, (n, k / 2).

    Returns:
        The numbers, (n, k).
    """
    lower = np.mod(packed + 8.0, 16.0) - 8.0
    return np.stack((lower, np.floor(packed / 16.0)), axis=-1).reshape(len(packed), -1)
