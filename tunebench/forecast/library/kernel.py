"""The library kernels that a framework launches for a workload, with the figures that their time depends on.

A framework fuses little: a bias into a matrix product, a mask into attention. Every other neighbouring
operation is a separate launch, as returned by `Workload.unfused`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunebench.device import Device
from tunebench.dtype import DType, itemsize, storage
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workloads.operators.attention import Attention
    from tunebench.workloads.operators.conv2d import Conv2d
    from tunebench.workloads.operators.gated_gemm import GatedGemm
    from tunebench.workloads.operators.gemm import Gemm
    from tunebench.workloads.operators.grouped_gemm import GroupedGemm
    from tunebench.workloads.operators.scaled_gemm import ScaledGemm

__all__ = ["COLUMNS", "OPERATORS", "Arithmetic", "Family", "LibraryKernel", "library_kernels"]

Family = Literal[
    "product",
    "grouped product",
    "elementwise",
    "softmax",
    "norm",
    "attention",
    "decode attention",
    "encoder attention",
]
"""Kernels whose times are modelled together."""

Arithmetic = Literal["f32", "tf32", "f16", "bf16", "e4m3", "i8"]
"""Arithmetic of a kernel. `f32` is multiply-add units, or tensor cores on devices that have them for f32."""

_ROWS = ("rows", "cols", "read_bytes", "write_bytes")
_ATTENTION = (
    "batch",
    "heads",
    "heads_k",
    "seq_q",
    "seq_k",
    "head_dim",
    "causal",
    "window",
    "bytes",
    "products",
)
COLUMNS: dict[Family, tuple[str, ...]] = {
    "product": ("batch", "m", "n", "k", "in_bytes", "out_bytes", "extra_bytes"),
    "grouped product": ("groups", "m", "n", "k", "in_bytes", "out_bytes", "skewed"),
    "elementwise": _ROWS,
    "softmax": _ROWS,
    "norm": _ROWS,
    "attention": _ATTENTION,
    "decode attention": _ATTENTION,
    "encoder attention": _ATTENTION,
}
"""Figures of a kernel, by family: sizes; bytes of a whole array, or of one element of the operands
(`in_bytes`, `bytes`) and the result (`out_bytes`); bytes in addition to operands and result (`extra_bytes`),
negative where operands are views of smaller arrays; whether a few groups have most rows (`skewed`); number of
matrix products of attention (2 in the forward pass).
"""


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """One kernel launch.

    Attributes:
        family: Family of the kernel.
        arithmetic: Arithmetic of the kernel.
        figures: Figures in the order of `COLUMNS`.
        proxy: Explanation of the substitute if the kernel is predicted as another kind of kernel, because its
            own kind was not measured; otherwise empty.
    """

    family: Family
    arithmetic: Arithmetic
    figures: tuple[float, ...]
    proxy: str = ""


def library_kernels(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield the kernels that a framework launches for a workload on a device, in order."""
    kernels_of = OPERATORS.get(workload.operator)
    if kernels_of is not None:
        yield from kernels_of(workload, device)
        return
    traffic = workload.traffic()
    shape = max((tensor.shape for tensor in workload.outputs()), key=len, default=())
    cols = shape[-1] if shape else 1
    rows = max(1, traffic.write_bytes // max(1, cols * itemsize(storage(workload.dtype))))
    # The features have logarithms of bytes, so a kernel that moves no bytes counts as one that writes one.
    figures = (rows, cols, traffic.read_bytes, max(1, traffic.write_bytes))
    yield LibraryKernel(
        "elementwise", "f32", figures, f"{workload.operator} predicted as an elementwise operation"
    )


# -------------------------------------------------------------------------------------- what multiplies


@functools.cache
def _instead(dtype: str, rates: tuple[str, ...]) -> tuple[Arithmetic, str]:
    """Return the arithmetic for a dtype, given a device's tensor-core types, and a reason if it differs."""
    if dtype == "f32" or dtype in rates:
        return dtype, ""  # type: ignore[return-value]
    fallback: dict[str, tuple[Arithmetic, ...]] = {"e4m3": ("bf16", "f16"), "i8": ("f32",)}
    for candidate in fallback.get(dtype, ()):
        if candidate in rates:
            return candidate, f"{dtype} multiplied in {candidate}: the device has no tensor cores for {dtype}"
    return "f32", f"{dtype} multiplied in f32: the device has no tensor cores for {dtype}"


def _arithmetic(dtype: str, device: Device) -> tuple[Arithmetic, str]:
    return _instead(dtype, tuple(device.mma_flop_per_clock))


def _product(
    device: Device, dtype: str, out: str, m: int, n: int, k: int, batch: int = 1, proxy: str = ""
) -> LibraryKernel:
    arithmetic, why = _arithmetic(dtype, device)
    stored = itemsize(storage(dtype))  # type: ignore[arg-type]
    # 8-bit operands are first converted from 16 bits: 2 bytes read and 1 written per element of a.
    extra = 3 * batch * m * k if dtype == "e4m3" else 0
    figures = (batch, m, n, k, stored, itemsize(out), extra)  # type: ignore[arg-type]
    if arithmetic == "tf32":
        why = "tf32 predicted as another tensor-core type"
    if arithmetic == "i8":
        why = "i8 as e4m3"
    return LibraryKernel("product", arithmetic, figures, proxy or why)


def _moving(product: LibraryKernel, total_bytes: int) -> LibraryKernel:
    """Return a product with the bytes that are moved in total, where operands are not plain matrices."""
    batch, m, n, k, in_bytes, out_bytes, _ = product.figures
    matrices = batch * (in_bytes * (m * k + k * n) + out_bytes * m * n)
    figures = (*product.figures[:-1], total_bytes - matrices)
    return dataclasses.replace(product, figures=figures)


def _rows(family: Family, workload: Workload, proxy: str = "") -> LibraryKernel:
    """Return a kernel over rows. Kernels in 16 bits are predicted as f32 kernels of the same bytes."""
    dimensions: Any = workload
    traffic = workload.traffic()
    figures = (dimensions.rows, dimensions.cols, traffic.read_bytes, traffic.write_bytes)
    if not proxy and workload.dtype != "f32":
        proxy = f"{workload.dtype} predicted as f32 with the same bytes"
    return LibraryKernel(family, "f32", figures, proxy)


def _ahead(rows: int, cols: int, stored: DType) -> LibraryKernel:
    """Return the kernel of a prologue: it reads the left operand and writes the values to multiply."""
    moved = rows * cols * itemsize(stored)
    proxy = "" if stored == "f32" else f"{stored} predicted as f32 with the same bytes"
    return LibraryKernel("elementwise", "f32", (rows, cols, moved, moved), proxy)


# ------------------------------------------------------------------------------------------ by operator


def _parts(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    for part in workload.unfused():
        yield from library_kernels(part, device)


def _gemm(workload: Gemm, device: Device) -> Iterator[LibraryKernel]:
    """Yield the prologue, the product (libraries fuse a bias into it) and the rest of the epilogue."""
    w = workload
    if w.has_pre:
        yield _ahead(w.batch * w.m, w.k, storage(w.dtype))
    yield _product(device, w.dtype, w.out, w.m, w.n, w.k, w.batch)
    if w.epilogue not in ("none", "bias") or w.activation != "none":
        elements, size = w.batch * w.m * w.n, itemsize(w.out)
        reads = elements * size * (1 + w.epilogue.endswith("residual"))
        proxy = "" if w.out == "f32" else f"{w.out} predicted as f32 with the same bytes"
        yield LibraryKernel("elementwise", "f32", (w.batch * w.m, w.n, reads, elements * size), proxy)


def _gated_gemm(workload: GatedGemm, device: Device) -> Iterator[LibraryKernel]:
    yield from _parts(workload, device)


def _scatter_add(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    yield _rows("elementwise", workload, "additions by index predicted as an elementwise operation")


def _scaled_gemm(workload: ScaledGemm, device: Device) -> Iterator[LibraryKernel]:
    """Yield the product of 8-bit types, or the conversion of the weights and the product of their results."""
    w = workload
    if not w.is_quantized:
        read_bytes = sum(tensor.nbytes for tensor in w.inputs()[1:])
        proxy = "" if w.dtype == "f32" else f"{w.dtype} predicted as f32 with the same bytes"
        yield LibraryKernel(
            "elementwise", "f32", (w.n, w.k, read_bytes, w.n * w.k * itemsize(w.dtype)), proxy
        )
    yield _product(device, w.dtype, w.out, w.m, w.n, w.k)


def _grouped_gemm(workload: GroupedGemm, device: Device) -> Iterator[LibraryKernel]:
    """Yield a product of groups in 16 bits, in which layers of experts were measured, or a substitute.

    In other types it is a batch of products; if all rows belong to one group, it is one product.
    """
    w = workload
    arithmetic, why = _arithmetic(w.dtype, device)
    if w.skew == "one":
        yield _product(
            device, w.dtype, w.out, w.m, w.n, w.k, proxy="groups predicted as one product: one has all rows"
        )
        return
    if arithmetic in ("f16", "bf16") and itemsize(storage(w.dtype)) == 2:
        figures = (w.groups, w.m, w.n, w.k, 2, itemsize(w.out), w.skew == "zipf")
        yield LibraryKernel("grouped product", arithmetic, figures, why)
        return
    rows = max(1, round(w.m / w.groups))
    yield _product(
        device,
        w.dtype,
        w.out,
        rows,
        w.n,
        w.k,
        min(w.groups, w.m),
        "groups predicted as a batch of equal products",
    )


def _conv2d(workload: Conv2d, device: Device) -> Iterator[LibraryKernel]:
    """Yield the implicit matrix product of a convolution, and its epilogue as a separate launch."""
    w = workload
    c, k, taps, pixels = w.c // w.groups, w.k // w.groups, w.r * w.s, w.n * w.p * w.q
    out = storage(w.dtype)
    if w.has_pre:
        yield _ahead(w.n * w.h * w.w, w.c, out)
    if w.groups > 1 and min(c, k) < 8:
        traffic = w.traffic()
        figures = (pixels, w.k, traffic.read_bytes, traffic.write_bytes)
        yield LibraryKernel(
            "elementwise", "f32", figures, "convolution with few channels per group predicted from its bytes"
        )
    else:
        m, n, depth = {
            "fprop": (pixels, k, c * taps),
            "dgrad": (w.n * w.h * w.w, c, k * taps),
            "wgrad": (k, c * taps, pixels),
        }[w.direction]
        if w.direction == "dgrad":
            # Only one tap in each stride of both axes contributes to a pixel of the gradient.
            depth = max(1, depth // w.stride**2)
        product = _product(
            device,
            w.dtype,
            out,
            m,
            n,
            depth,
            w.groups,
            "convolution predicted as its implicit matrix product",
        )
        yield _moving(product, w.changed(epilogue="none").traffic().total_bytes)
    if w.epilogue != "none" or w.activation != "none":
        elements = pixels * w.k * itemsize(out)
        reads = elements * (1 + ("residual" in w.epilogue))
        yield LibraryKernel(
            "elementwise", "f32", (pixels, w.k, reads, elements), "epilogue predicted as a separate launch"
        )


def _elementwise(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield the expression as one launch: an elementwise workload is compiled to one kernel."""
    yield _rows("elementwise", workload)


def _reduction(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield the expression and its reduction as one launch with the same bytes."""
    yield _rows(
        "elementwise", workload, "reduction predicted as an elementwise operation with the same bytes"
    )


def _strided(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield the expression, with its reduction if there is one, as one launch with the same bytes."""
    (out,) = workload.outputs()
    cols = out.shape[-1]
    traffic = workload.traffic()
    figures = (out.size // cols, cols, traffic.read_bytes, traffic.write_bytes)
    yield LibraryKernel(
        "elementwise", "f32", figures, "operands of any layout predicted as contiguous with the same bytes"
    )


def _batchnorm_stats(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield statistics or sums over rows as one launch with the same bytes."""
    yield _rows(
        "elementwise", workload, "sums over rows predicted as an elementwise operation with the same bytes"
    )


def _softmax(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    if workload.unfused():
        yield from _parts(workload, device)
    else:
        backward = getattr(workload, "is_backward", False)
        yield _rows(
            "softmax", workload, "gradients predicted as softmax with the same bytes" if backward else ""
        )


def _cross_entropy(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    yield _rows("softmax", workload, "cross_entropy predicted as softmax with the same bytes")


def _norm(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    if workload.unfused():
        yield from _parts(workload, device)
        return
    proxy = (
        "gradients predicted as layernorm with the same bytes"
        if getattr(workload, "is_backward", False)
        else ""
    )
    if workload.operator == "rmsnorm":
        proxy = "rmsnorm predicted as layernorm with the same bytes"
    yield _rows("norm", workload, proxy)


def _attention_family(workload: Attention) -> Family:
    """Return the family by what was measured: prompts, one new query per sequence, or no mask."""
    w = workload
    if w.direction == "backward":
        return "attention"
    if w.seq_q == 1 < w.seq_k:
        return "decode attention"
    return "encoder attention" if not w.causal and w.seq_q == w.seq_k else "attention"


def _attention(workload: Attention, device: Device) -> Iterator[LibraryKernel]:
    """Yield one fused kernel in 16 bits; in f32 the matrix products and the softmax."""
    w = workload
    backward = w.direction == "backward"
    if w.dtype != "f32":
        arithmetic, why = _arithmetic(w.dtype, device)
        family = _attention_family(w)
        # With align=first no query sees the keys after its own: the mask is that of fewer keys.
        keys = int(w.keys_of(w.seq_q - 1)[1])
        window = 0 if w.window >= keys else w.window
        yield LibraryKernel(
            family,
            arithmetic,
            (
                *(w.batch, w.heads, w.heads_k, w.seq_q, keys, w.head_dim),
                *(w.causal and w.seq_q > 1, window, itemsize(w.dtype), 5 if backward else 2),
            ),
            _attention_proxy(w, window) or why,
        )
        return
    heads, why = w.batch * w.heads, "attention in f32 predicted as its products and its softmax"
    scores = w.seq_q * w.seq_k
    for m, n, k in ((w.seq_q, w.seq_k, w.head_dim), (w.seq_q, w.head_dim, w.seq_k)) * (1 + backward):
        yield _product(device, "f32", "f32", m, n, k, heads, why)
    rows = (heads * w.seq_q, w.seq_k, 4 * heads * scores * (1 + backward), 4 * heads * scores)
    yield LibraryKernel("softmax", "f32", rows, why)


def _attention_proxy(workload: Attention, window: int) -> str:
    """Return why attention in 16 bits is predicted as another kind of attention, or an empty text."""
    w = workload
    if w.direction == "backward":
        return "gradients of attention predicted as attention with 5 products instead of 2"
    if w.has_bias:
        return "attention with a bias predicted as attention without it"
    if window and w.seq_q > 1:
        return "attention with a window predicted from the tiles that the window leaves"
    if 1 < w.seq_q != w.seq_k:
        return "attention with unequal lengths predicted from the tiles of equal ones"
    return ""


OPERATORS: dict[str, Callable[[Any, Device], Iterator[LibraryKernel]]] = {
    "attention": _attention,
    "batchnorm_stats": _batchnorm_stats,
    "conv2d": _conv2d,
    "cross_entropy": _cross_entropy,
    "elementwise": _elementwise,
    "gated_gemm": _gated_gemm,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "layernorm": _norm,
    "reduction": _reduction,
    "rmsnorm": _norm,
    "scaled_gemm": _scaled_gemm,
    "scatter_add": _scatter_add,
    "softmax": _softmax,
    "strided_elementwise": _strided,
    "strided_reduction": _strided,
}
