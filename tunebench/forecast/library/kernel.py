"""What kernels of vendor libraries a framework launches for a workload, in the terms their times depend on.

A framework fuses little by itself: a bias into a matrix product, a mask into attention. Any other neighbour
is a launch of its own, as `Workload.unfused` has them.
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

__all__ = ["COLUMNS", "Arithmetic", "Family", "LibraryKernel", "library_kernels"]

Family = Literal["product", "elementwise", "softmax", "norm", "attention"]
"""Kernels whose times follow one from another."""

Arithmetic = Literal["f32", "tf32", "f16", "bf16", "e4m3", "i8"]
"""What a kernel multiplies in; `f32` means multiply-add units where no tensor core does it."""

_ROWS = ("rows", "cols", "read_bytes", "write_bytes")
COLUMNS: dict[Family, tuple[str, ...]] = {
    "product": ("batch", "m", "n", "k", "in_bytes", "out_bytes", "extra_bytes"),
    "elementwise": _ROWS,
    "softmax": _ROWS,
    "norm": _ROWS,
    "attention": ("batch", "heads", "heads_k", "seq_q", "seq_k", "head_dim", "causal", "bytes", "products"),
}
"""The figures of a kernel, by family: sizes as they are; bytes of a whole array, or of one element of
operands (`in_bytes`, `bytes`) and results (`out_bytes`); bytes beyond those of operands and results
(`extra_bytes`), below 0 where operands are views of less; matrix products of attention (2 forward).
"""


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """One launch.

    Attributes:
        family: Which it belongs to.
        arithmetic: What it multiplies in.
        figures: In the order of `COLUMNS`.
        borrowed: Empty, or whose times are taken for those of a kernel that nobody measured.
    """

    family: Family
    arithmetic: Arithmetic
    figures: tuple[float, ...]
    proxy: str = ""


def library_kernels(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Return what a framework launches for a workload on a device, in order."""
    known = _OPERATORS.get(workload.operator)
    if known is not None:
        yield from known(workload, device)
        return
    traffic = workload.traffic()
    shape = max((tensor.shape for tensor in workload.outputs()), key=len, default=())
    cols = shape[-1] if shape else 1
    rows = max(1, traffic.write_bytes // max(1, cols * itemsize(storage(workload.dtype))))
    # A kernel that moves nothing still writes that it ran: there is no logarithm of 0 bytes.
    figures = (rows, cols, traffic.read_bytes, max(1, traffic.write_bytes))
    yield LibraryKernel("elementwise", "f32", figures, f"{workload.operator} as an elementwise operation")


# -------------------------------------------------------------------------------------- what multiplies


@functools.cache
def _instead(dtype: str, rates: tuple[str, ...]) -> tuple[Arithmetic, str]:
    """Return what a device with these tensor-core types multiplies in, and a word if not in `dtype`."""
    if dtype == "f32" or dtype in rates:
        return dtype, ""  # type: ignore[return-value]
    fallback: dict[str, tuple[Arithmetic, ...]] = {"e4m3": ("bf16", "f16"), "i8": ("f32",)}
    for other in fallback.get(dtype, ()):
        if other in rates:
            return other, f"{dtype} multiplied in {other}, since the device has no tensor cores for it"
    return "f32", f"{dtype} multiplied in f32, since the device has no tensor cores for it"


def _arithmetic(dtype: str, device: Device) -> tuple[Arithmetic, str]:
    return _instead(dtype, tuple(device.mma_flop_per_clock))


def _product(
    device: Device, dtype: str, out: str, m: int, n: int, k: int, batch: int = 1, proxy: str = ""
) -> LibraryKernel:
    arithmetic, why = _arithmetic(dtype, device)
    stored = itemsize(storage(dtype))  # type: ignore[arg-type]
    # What is served in 8 bits is rounded to them first: 16 bits read and 8 written an element of a.
    extra = 3 * batch * m * k if dtype == "e4m3" else 0
    figures = (batch, m, n, k, stored, itemsize(out), extra)  # type: ignore[arg-type]
    if arithmetic == "tf32":
        why = "tf32 as other products of tensor cores"
    if arithmetic == "i8":
        why = "i8 as e4m3"
    return LibraryKernel("product", arithmetic, figures, proxy or why)


def _moving(product: LibraryKernel, total_bytes: int) -> LibraryKernel:
    """Return a product whose operands are read from fewer bytes than they would have as matrices, or more."""
    batch, m, n, k, in_bytes, out_bytes, _ = product.figures
    matrices = batch * (in_bytes * (m * k + k * n) + out_bytes * m * n)
    figures = (*product.figures[:-1], total_bytes - matrices)
    return dataclasses.replace(product, figures=figures)


def _rows(family: Family, workload: Workload, proxy: str = "") -> LibraryKernel:
    """Return a kernel that reads and writes rows; 16-bit ones move fewer bytes, but as f32 ones do."""
    dimensions: Any = workload
    traffic = workload.traffic()
    figures = (dimensions.rows, dimensions.cols, traffic.read_bytes, traffic.write_bytes)
    if not proxy and workload.dtype != "f32":
        proxy = f"{workload.dtype} as f32 of as many bytes"
    return LibraryKernel(family, "f32", figures, proxy)


def _ahead(rows: int, cols: int, stored: DType) -> LibraryKernel:
    """Return a function of the left operand as a launch that reads it, and writes what is multiplied."""
    moved = rows * cols * itemsize(stored)
    proxy = "" if stored == "f32" else f"{stored} as f32 of as many bytes"
    return LibraryKernel("elementwise", "f32", (rows, cols, moved, moved), proxy)


# ------------------------------------------------------------------------------------------ by operator


def _parts(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    for part in workload.unfused():
        yield from library_kernels(part, device)


def _gemm(workload: Gemm, device: Device) -> Iterator[LibraryKernel]:
    """Yield what is ahead as a launch, the product, to which libraries add a bias, and the rest behind."""
    w = workload
    if w.has_pre:
        yield _ahead(w.batch * w.m, w.k, storage(w.dtype))
    yield _product(device, w.dtype, w.out, w.m, w.n, w.k, w.batch)
    if w.epilogue not in ("none", "bias") or w.activation != "none":
        elements, size = w.batch * w.m * w.n, itemsize(w.out)
        reads = elements * size * (1 + w.epilogue.endswith("residual"))
        proxy = "" if w.out == "f32" else f"{w.out} as f32 of as many bytes"
        yield LibraryKernel("elementwise", "f32", (w.batch * w.m, w.n, reads, elements * size), proxy)


def _gated_gemm(workload: GatedGemm, device: Device) -> Iterator[LibraryKernel]:
    yield from _parts(workload, device)


def _grouped_gemm(workload: GroupedGemm, device: Device) -> Iterator[LibraryKernel]:
    """Yield a batch of products of the mean number of rows: what serving frameworks' kernels come near."""
    w = workload
    rows = max(1, round(w.m / w.groups))
    yield _product(
        device, w.dtype, w.out, rows, w.n, w.k, min(w.groups, w.m), "groups as a batch of equal products"
    )


def _conv2d(workload: Conv2d, device: Device) -> Iterator[LibraryKernel]:
    """Yield the matrix product that a convolution implies, and its epilogue as a launch of its own."""
    w = workload
    c, k, taps, pixels = w.c // w.groups, w.k // w.groups, w.r * w.s, w.n * w.p * w.q
    out = storage(w.dtype)
    if w.has_pre:
        yield _ahead(w.n * w.h * w.w, w.c, out)
    if w.groups > 1 and min(c, k) < 8:
        traffic = w.traffic()
        figures = (pixels, w.k, traffic.read_bytes, traffic.write_bytes)
        yield LibraryKernel(
            "elementwise", "f32", figures, "a convolution of few channels a group as what it moves"
        )
    else:
        m, n, depth = {
            "fprop": (pixels, k, c * taps),
            "dgrad": (w.n * w.h * w.w, c, k * taps),
            "wgrad": (k, c * taps, pixels),
        }[w.direction]
        if w.direction == "dgrad":
            depth = max(1, depth // w.stride**2)
        product = _product(
            device, w.dtype, out, m, n, depth, w.groups, "a convolution as the product that it implies"
        )
        yield _moving(product, w.changed(epilogue="none").traffic().total_bytes)
    if w.epilogue != "none" or w.activation != "none":
        elements = pixels * w.k * itemsize(out)
        reads = elements * (1 + ("residual" in w.epilogue))
        yield LibraryKernel("elementwise", "f32", (pixels, w.k, reads, elements), "an epilogue as a launch")


def _elementwise(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield the chain as one launch: whoever writes it as one workload has it compiled as one."""
    yield _rows("elementwise", workload)


def _reduction(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield the chain and its reduction as one launch that moves as many bytes."""
    yield _rows("elementwise", workload, "a reduction as an elementwise operation of as many bytes")


def _batchnorm_stats(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    """Yield statistics or sums over rows as one launch that moves as many bytes."""
    yield _rows("elementwise", workload, "sums over rows as an elementwise operation of as many bytes")


def _softmax(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    if workload.unfused():
        yield from _parts(workload, device)
    else:
        backward = getattr(workload, "is_backward", False)
        yield _rows("softmax", workload, "gradients as softmax of as many bytes" if backward else "")


def _cross_entropy(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    yield _rows("softmax", workload, "cross_entropy as softmax of as many bytes")


def _norm(workload: Workload, device: Device) -> Iterator[LibraryKernel]:
    if workload.unfused():
        yield from _parts(workload, device)
        return
    proxy = "gradients as layernorm of as many bytes" if getattr(workload, "is_backward", False) else ""
    if workload.operator == "rmsnorm":
        proxy = "rmsnorm as layernorm of as many bytes"
    yield _rows("norm", workload, proxy)


def _attention(workload: Attention, device: Device) -> Iterator[LibraryKernel]:
    """Yield one fused kernel in 16 bits; in f32 the products and the softmax between, as frameworks do."""
    w = workload
    backward = w.direction == "backward"
    if w.dtype != "f32":
        arithmetic, why = _arithmetic(w.dtype, device)
        products, size = (5 if backward else 2), itemsize(w.dtype)
        if backward:
            why = "gradients of attention as attention of 5 products instead of 2"
        elif not w.causal or w.seq_q != w.seq_k:
            why = why or "attention that is not causal, or of unlike lengths, as causal attention"
        figures = (w.batch, w.heads, w.heads_k, w.seq_q, w.seq_k, w.head_dim, w.causal, size, products)
        yield LibraryKernel("attention", arithmetic, figures, why)
        return
    heads, why = w.batch * w.heads, "attention in f32 as its products and its softmax"
    scores = w.seq_q * w.seq_k
    for m, n, k in ((w.seq_q, w.seq_k, w.head_dim), (w.seq_q, w.head_dim, w.seq_k)) * (1 + backward):
        yield _product(device, "f32", "f32", m, n, k, heads, why)
    rows = (heads * w.seq_q, w.seq_k, 4 * heads * scores * (1 + backward), 4 * heads * scores)
    yield LibraryKernel("softmax", "f32", rows, why)


_OPERATORS: dict[str, Callable[[Any, Device], Iterator[LibraryKernel]]] = {
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
    "softmax": _softmax,
}
