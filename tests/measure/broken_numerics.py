"""Kernels that are right on standard normal numbers, or nearly so, and numerically wrong: what to refuse.

Each is a faulty algorithm in NumPy with the arithmetic of the faulty kernel. `python -m
tests.measure.broken_numerics` prints the table of `docs/numerics.md`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tunebench.dtype import numpy_dtype
from tunebench.measure.verify import draw, draw_stress, worst_error
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.scaled_gemm import unpacked

Arrays = Mapping[str, Any]
Kernel = Callable[[Any, Arrays], dict[str, Any]]

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16


@dataclass(frozen=True)
class BrokenKernel:
    """A faulty kernel.

    Attributes:
        fault: What is wrong with it.
        workload: The workload that it computes.
        kernel: Returns outputs, of any type, from the workload and its inputs.
    """

    fault: str
    workload: str
    kernel: Kernel

    def errors(self, seed: int = 0) -> tuple[float, float]:
        """Return the largest errors on normal and on extreme inputs, as shares of the tolerance."""
        workload = parse(self.workload)
        normal = draw(workload, seed)
        extreme = draw_stress(normal)
        assert extreme is not None
        shares = []
        for inputs in (normal, extreme):
            with np.errstate(all="ignore"):
                computed = self.kernel(workload, inputs.inputs)
                outputs = {
                    tensor.name: np.asarray(computed[tensor.name])
                    .astype(numpy_dtype(tensor.dtype))
                    .reshape(tensor.shape)
                    for tensor in workload.outputs()
                }
            shares.append(worst_error(workload, outputs, inputs.references))
        return shares[0], shares[1]


def verdict(error: float) -> str:
    """Return how clearly a result is refused."""
    if error <= 1:
        return "passed"
    return "refused by more than 10" if error > 10 else "refused"


# -- arithmetic ----------------------------------------------------------------------------------------------


def tf32(x: Any) -> Any:
    """Return numbers rounded to 11 bits, to nearest even."""
    bits = np.asarray(x, F32).view(np.uint32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).view(F32)


def as_type(dtype: Any) -> Callable[[Any], Any]:
    """Return the function that rounds to a type and back to f32."""
    return lambda x: np.asarray(x, F32).astype(dtype).astype(F32)


def summed(x: Any, dtype: Any, axis: int = -1) -> Any:
    """Return sums whose partial sums are rounded to a type: 32 of them in parallel, as a warp has."""
    terms = np.moveaxis(np.asarray(x, F32), axis, 0)
    total = np.zeros((32, *terms.shape[1:]), F32)
    for start in range(0, len(terms), 32):
        part = terms[start : start + 32]
        total[: len(part)] = as_type(dtype)(total[: len(part)] + part)
    while len(total) > 1:
        total = as_type(dtype)(total[::2] + total[1::2])
    return total[0]


def product(rounded: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a product of rounded factors, exact but for its last rounding: more accurate than a kernel."""
    return lambda a, b: (rounded(a).astype(np.float64) @ rounded(b).astype(np.float64)).astype(F32)


def split_product(a: Any, b: Any) -> Any:
    """Return a product of f32 factors as three products of bf16 parts."""
    high_a, high_b = as_type(BF16)(a), as_type(BF16)(b)
    low_a, low_b = as_type(BF16)(a - high_a), as_type(BF16)(b - high_b)
    return high_a @ high_b + (high_a @ low_b + low_a @ high_b)


def accumulated(dtype: Any) -> Callable[[Any, Any], Any]:
    """Return a product whose sums are rounded to a type after every 16 terms."""

    def multiply(a: Any, b: Any) -> Any:
        a, b, total = np.asarray(a, F32), np.asarray(b, F32), np.zeros((a.shape[0], b.shape[1]), F32)
        for start in range(0, a.shape[1], 16):
            total = as_type(dtype)(total + a[:, start : start + 16] @ b[start : start + 16])
        return total

    return multiply


def split_k(dtype: Any) -> Callable[[Any, Any], Any]:
    """Return a product whose sums of 8 parts are stored in a type before they are added."""

    def multiply(a: Any, b: Any) -> Any:
        a, b = np.asarray(a, F32), np.asarray(b, F32)
        bounds = np.linspace(0, a.shape[1], 9).astype(int)
        parts = (a[:, i:j] @ b[i:j] for i, j in itertools.pairwise(bounds))
        return sum(map(as_type(dtype), parts))

    return multiply


def erf(x: Any) -> Any:
    """Return the error function by Abramowitz and Stegun 7.1.25, accurate to 2.5e-5."""
    t = 1 / (1 + 0.47047 * np.abs(x))
    return np.sign(x) * (1 - (0.3480242 * t - 0.0958798 * t**2 + 0.7478556 * t**3) * np.exp(-x * x))


# -- kernels -------------------------------------------------------------------------------------------------


def gemm(multiply: Callable[[Any, Any], Any]) -> Kernel:
    return lambda w, t: {"c": multiply(t["a"][0], t["b"][0])}


def grouped(multiply: Callable[[Any, Any], Any]) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        c = np.zeros((w.m, w.n), F32)
        for group, rows in w.parts(t["offsets"]):
            c[rows] = multiply(t["a"][rows], t["b"][group])
        return {"c": c}

    return kernel


def gated(multiply: Callable[[Any, Any], Any], gate: Callable[[Any], Any]) -> Kernel:
    return lambda w, t: {"c": gate(multiply(t["a"], t["b_gate"])) * multiply(t["a"], t["b_up"])}


def scaled(multiply: Callable[[Any, Any], Any], scales: Callable[[Any], Any] = F32) -> Kernel:
    """Return a product of quantised matrices, whose elements are scaled in f32."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        a = t["a"].astype(F32)
        if w.is_quantized:
            a = a * w.spread(scales(t["scale_a"]), of_b=False)
        weights = unpacked(t["b"].astype(F32)) if w.weight == "i4" else t["b"].astype(F32)
        return {"c": multiply(a, (weights * w.spread(scales(t["scale_b"]), of_b=True)).T)}

    return kernel


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def unstable_silu(x: Any) -> Any:
    return x * np.exp(x) / (1 + np.exp(x))


def convolution(rounded: Callable[[Any], Any]) -> Kernel:
    """Return a convolution of rounded factors, by the reference."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        factors = {name: np.asarray(rounded(x), np.float64) for name, x in t.items()}
        return {name: reference.value for name, reference in w.reference(factors).items()}

    return kernel


def winograd(w: Any, t: Arrays) -> dict[str, Any]:
    """Return a convolution by Winograd's F(4x4, 3x3) in nhwc, whose transforms are rounded to the type."""
    stored = as_type(t["x"].dtype)
    b = np.array(
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        F32,
    )
    g = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], F32) / 24
    a = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]], F32)
    x = np.pad(np.asarray(t["x"], F32), ((0, 0), (1, 5), (1, 5), (0, 0)))
    filters = stored(np.einsum("ir,krsc,js->ijkc", g, np.asarray(t["w"], F32), g))
    y = np.zeros((w.n, w.p + 4, w.q + 4, w.k), F32)
    for i in range(0, w.p, 4):
        for j in range(0, w.q, 4):
            tile = stored(np.einsum("ih,nhwc,jw->ijnc", b, x[:, i : i + 6, j : j + 6], b))
            y[:, i : i + 4, j : j + 4] = np.einsum(
                "hi,ijnk,wj->nhwk", a, tile @ filters.transpose(0, 1, 3, 2), a
            )
    return {"y": y[:, : w.p, : w.q]}


def softmax(
    highest: Callable[[Any], Any], total: Callable[[Any], Any], rounded: Callable[[Any], Any] = F32
) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x = np.asarray(t["x"], F32)
        e = rounded(np.exp(x - highest(x)))
        y = e / total(e)[:, None]
        return {"y": np.log(y) if w.log else y}

    return kernel


def nothing(x: Any) -> Any:
    return F32(0)


def row_max(x: Any) -> Any:
    return x.max(axis=1, keepdims=True)


def row_sum(x: Any) -> Any:
    return x.sum(axis=1)


def softmax_backward(total: Callable[[Any], Any]) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        y, dy = np.asarray(t["y"], F32), np.asarray(t["dy"], F32)
        return {"dx": y * (dy - total(y * dy)[:, None])}

    return kernel


def cross_entropy(log_sum: Callable[[Any], Any]) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x = np.asarray(t["x"], F32)
        lse = log_sum(x)
        return {"lse": lse, "loss": lse - x[np.arange(w.rows), t["target"]]}

    return kernel


def stable_lse(x: Any) -> Any:
    return row_max(x)[:, 0] + np.log(row_sum(np.exp(x - row_max(x))))


def cross_entropy_backward(w: Any, t: Arrays) -> dict[str, Any]:
    """Return the gradient by a quotient of exponentials."""
    x, lse = np.asarray(t["x"], F32), t["lse"][:, None]
    onehot = t["target"][:, None] == np.arange(w.cols)
    return {"dx": (np.exp(x) / np.exp(lse) - onehot) * t["dloss"][:, None]}


def layernorm(moments: Callable[[Any], tuple[Any, Any]]) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x = np.asarray(t["x"], F32)
        mean, variance = moments(x)
        normal = (x - mean[:, None]) / np.sqrt(variance + F32(w.eps))[:, None]
        return {"y": normal * np.asarray(t["gamma"], F32) + np.asarray(t["beta"], F32)}

    return kernel


def of_squares(x: Any, axis: int = 1) -> tuple[Any, Any]:
    """Return the mean, and the mean of squares less the square of the mean."""
    mean = x.mean(axis=axis)
    return mean, np.square(x).mean(axis=axis) - mean * mean


def clamped(x: Any, axis: int = 1) -> tuple[Any, Any]:
    mean, variance = of_squares(x, axis)
    return mean, np.maximum(variance, F32(0))


def moments_in(dtype: Any) -> Callable[[Any], tuple[Any, Any]]:
    def moments(x: Any) -> tuple[Any, Any]:
        mean = summed(x, dtype) / F32(x.shape[1])
        return mean, summed(np.square(x - mean[:, None]), dtype) / F32(x.shape[1])

    return moments


def moments_of(rounded: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    """Return moments of rounded elements, exact but for their last rounding."""

    def moments(x: Any, axis: int = 1) -> tuple[Any, Any]:
        elements = rounded(x).astype(np.float64)
        return elements.mean(axis=axis).astype(F32), elements.var(axis=axis).astype(F32)

    return moments


def rmsnorm(total: Callable[[Any], Any]) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x = np.asarray(t["x"], F32)
        rstd = 1 / np.sqrt(total(np.square(x)) / F32(w.cols) + F32(w.eps))
        return {"y": x * rstd[:, None] * np.asarray(t["gamma"], F32)}

    return kernel


def layernorm_backward(total: Callable[[Any], Any]) -> Kernel:
    """Return gradients whose sums over rows are computed by `total`."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x, dy, gamma = (np.asarray(t[name], F32) for name in ("x", "dy", "gamma"))
        rstd = t["rstd"][:, None]
        n, g = (x - t["mean"][:, None]) * rstd, dy * gamma
        dx = rstd * (g - g.mean(axis=1, keepdims=True) - n * (g * n).mean(axis=1, keepdims=True))
        return {"dx": dx, "dgamma": total(dy * n), "dbeta": total(dy)}

    return kernel


def column_statistics(moments: Callable[[Any, int], tuple[Any, Any]]) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        mean, variance = moments(np.asarray(t["x"], F32), 0)
        kept, share = F32(1 - w.momentum), F32(w.momentum)
        return {
            "mean": mean,
            "rstd": 1 / np.sqrt(variance + F32(w.eps)),
            "new_mean": kept * t["running_mean"] + share * mean,
            "new_var": kept * t["running_var"] + share * F32(w.unbiased) * variance,
        }

    return kernel


def column_gradients(dtype: Any) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x, dy = np.asarray(t["x"], F32), np.asarray(t["dy"], F32)
        return {"dgamma": summed(dy * (x - t["mean"]), dtype, 0) * t["rstd"], "dbeta": summed(dy, dtype, 0)}

    return kernel


def attention(
    highest: Callable[[Any], Any] = row_max,
    scores_in: Callable[[Any], Any] = F32,
    multiply: Callable[[Any, Any], Any] = np.matmul,
) -> Kernel:
    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        q, k, v = (np.asarray(t[name], F32) for name in ("q", "k", "v"))
        o, lse = np.zeros(q.shape, F32), np.zeros(q.shape[:-1], F32)
        for b, h in np.ndindex(w.batch, w.heads):
            s = scores_in(F32(w.scale) * (q[b, h] @ k[b, h].T))
            e = np.exp(s - highest(s))
            total = row_sum(e)
            o[b, h] = multiply(e, v[b, h]) / total[:, None]
            lse[b, h] = np.broadcast_to(highest(s), (len(s), 1))[:, 0] + np.log(total)
        return {"o": o, "lse": lse}

    return kernel


def attention_backward(rounded: Callable[[Any], Any]) -> Kernel:
    """Return gradients whose probabilities and score gradients are rounded."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        q, k, v, o, do = (np.asarray(t[name], F32) for name in ("q", "k", "v", "o", "do"))
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for b, h in np.ndindex(w.batch, w.heads):
            p = np.exp(F32(w.scale) * (q[b, h] @ k[b, h].T) - t["lse"][b, h][:, None])
            ds = rounded(p * (do[b, h] @ v[b, h].T - (do[b, h] * o[b, h]).sum(axis=1, keepdims=True)))
            dq[b, h], dk[b, h] = F32(w.scale) * (ds @ k[b, h]), F32(w.scale) * (ds.T @ q[b, h])
            dv[b, h] = rounded(p).T @ do[b, h]
        return {"dq": dq, "dk": dk, "dv": dv}

    return kernel


def reduction(total: Callable[[Any], Any]) -> Kernel:
    return lambda w, t: {"out": total(np.asarray(t["x"], F32))}


def elementwise(function: Callable[..., Any]) -> Kernel:
    return lambda w, t: {"out": function(*(np.asarray(x, F32) for x in t.values()))}


def tanh_by_exp(x: Any) -> Any:
    return (np.exp(2 * x) - 1) / (np.exp(2 * x) + 1)


def gelu_by_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(F32(0.7978845608) * (x + F32(0.044715) * x**3)))


def rmsnorm_beside_root(w: Any, t: Arrays) -> dict[str, Any]:
    """Return the normalisation with eps added to the root in place of the square."""
    x = np.asarray(t["x"], F32)
    root = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    return {"y": x / (root + F32(w.eps)) * np.asarray(t["gamma"], F32)}


def rmsnorm_backward(total: Callable[[Any], Any]) -> Kernel:
    """Return gradients whose sums over rows are computed by `total`."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        x, dy, gamma = (np.asarray(t[name], F32) for name in ("x", "dy", "gamma"))
        rstd = t["rstd"][:, None]
        n, g = x * rstd, dy * gamma
        return {"dx": rstd * (g - n * (g * n).mean(axis=1, keepdims=True)), "dgamma": total(dy * n)}

    return kernel


def layernorm_of_sum(rounded: Callable[[Any], Any]) -> Kernel:
    """Return a normalisation whose sum with the residual is rounded."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        z = rounded(np.asarray(t["x"], F32) + np.asarray(t["residual"], F32))
        return {"z": z, **layernorm(moments_of(F32))(w, {**t, "x": z})}

    return kernel


def biased_running_variance(w: Any, t: Arrays) -> dict[str, Any]:
    outputs = column_statistics(moments_of(F32))(w, t)
    variance = np.asarray(t["x"], F32).var(axis=0)
    return {**outputs, "new_var": F32(1 - w.momentum) * t["running_var"] + F32(w.momentum) * variance}


def causal_by_penalty(penalty: float) -> Kernel:
    """Return attention that subtracts a finite number from the scores of hidden keys."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        hidden = np.triu(np.full((w.seq_q, w.seq_k), F32(penalty)), 1 + w.seq_k - w.seq_q)
        return attention(scores_in=lambda s: s - hidden)(w, t)

    return kernel


def with_rounded(name: str, rounded: Callable[[Any], Any]) -> Kernel:
    """Return the reference of inputs of which one is rounded."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        inputs = {**t, name: rounded(t[name])}
        exact = {tensor: np.asarray(x, np.float64) for tensor, x in inputs.items()}
        return {output: reference.value for output, reference in w.reference(exact).items()}

    return kernel


def scattered(added: Callable[[Any, Any], Any]) -> Kernel:
    """Return the sums of rows by their index, where `added` adds a row to those before it."""

    def kernel(w: Any, t: Arrays) -> dict[str, Any]:
        sums = np.zeros((w.bins, w.cols), F32)
        for place, row in zip(w.places(t["index"]), np.asarray(t["x"], F32), strict=True):
            sums[place] = added(sums[place], row)
        return {"out": sums}

    return kernel


def sigmoid_by_exp(x: Any) -> Any:
    return np.exp(x) / (1 + np.exp(x))


_ROWS = "rows=37,cols=1000,dtype="
_ATTENTION = "attention:batch=1,heads=2,seq_q=40,head_dim=32,seq_k=96,dtype="
_CONV = "conv2d:n=2,c=64,h=9,w=9,k=16,r=3,s=3,stride=1,pad=1,layout=nhwc,dtype="

BROKEN = (
    BrokenKernel("maximum not subtracted", f"softmax:{_ROWS}f32", softmax(nothing, row_sum)),
    BrokenKernel("maximum not subtracted", f"softmax:{_ROWS}f16", softmax(nothing, row_sum)),
    BrokenKernel("maximum not subtracted", f"softmax:{_ROWS}bf16", softmax(nothing, row_sum)),
    BrokenKernel(
        "maximum of the first 32 columns subtracted",
        f"softmax:{_ROWS}f16",
        softmax(lambda x: row_max(x[:, :32]), row_sum),
    ),
    BrokenKernel(
        "sum of exponentials in f16",
        "softmax:rows=16,cols=8192,dtype=f16",
        softmax(row_max, lambda e: summed(e, F16)),
    ),
    BrokenKernel("logarithm of the softmax", f"softmax:{_ROWS}f32,log=true", softmax(row_max, row_sum)),
    BrokenKernel(
        "NaN ignored",
        f"softmax:{_ROWS}f32",
        softmax(lambda x: np.nanmax(x, 1, keepdims=True), row_sum, np.nan_to_num),
    ),
    BrokenKernel(
        "sum of products in bf16",
        f"softmax:{_ROWS}f32,direction=backward",
        softmax_backward(lambda x: summed(x, BF16)),
    ),
    BrokenKernel(
        "maximum not subtracted",
        f"cross_entropy:{_ROWS}f32",
        cross_entropy(lambda x: np.log(row_sum(np.exp(x)))),
    ),
    BrokenKernel(
        "logits limited to 80",
        f"cross_entropy:{_ROWS}bf16",
        cross_entropy(lambda x: np.log(row_sum(np.exp(np.minimum(x, 80))))),
    ),
    BrokenKernel(
        "quotient of exponentials", f"cross_entropy:{_ROWS}f32,direction=backward", cross_entropy_backward
    ),
    BrokenKernel("mean of squares less squared mean", f"layernorm:{_ROWS}f32", layernorm(of_squares)),
    BrokenKernel("mean of squares less squared mean", f"layernorm:{_ROWS}f16", layernorm(of_squares)),
    BrokenKernel("mean of squares less squared mean", f"layernorm:{_ROWS}bf16", layernorm(of_squares)),
    BrokenKernel("the same, at least 0", f"layernorm:{_ROWS}f32", layernorm(clamped)),
    BrokenKernel("sums in bf16", f"layernorm:{_ROWS}f32", layernorm(moments_in(BF16))),
    BrokenKernel(
        "statistics of elements in tf32", "layernorm:rows=37,cols=4096,dtype=f32", layernorm(moments_of(tf32))
    ),
    BrokenKernel(
        "statistics of elements in tf32",
        "batchnorm_stats:rows=4096,cols=37,dtype=f32",
        column_statistics(moments_of(tf32)),
    ),
    BrokenKernel("sums in f16", f"layernorm:{_ROWS}f16", layernorm(moments_in(F16))),
    BrokenKernel("sum of squares in f16", f"rmsnorm:{_ROWS}f16", rmsnorm(lambda x: summed(x, F16))),
    BrokenKernel(
        "gradients of weights in bf16",
        "layernorm:rows=500,cols=64,dtype=f32,direction=backward",
        layernorm_backward(lambda x: summed(x, BF16, 0)),
    ),
    BrokenKernel(
        "gradients of weights in f16",
        "layernorm:rows=5000,cols=64,dtype=f16,direction=backward",
        layernorm_backward(lambda x: summed(x, F16, 0)),
    ),
    BrokenKernel(
        "mean of squares less squared mean",
        "batchnorm_stats:rows=1000,cols=37,dtype=f32",
        column_statistics(of_squares),
    ),
    BrokenKernel(
        "sums in bf16",
        "batchnorm_stats:rows=1000,cols=37,dtype=bf16,direction=backward",
        column_gradients(BF16),
    ),
    *(
        BrokenKernel("factors rounded to tf32", f"gemm:m=32,n=32,k={k},dtype=f32", gemm(product(tf32)))
        for k in (64, 4096, 16384, 65536)
    ),
    BrokenKernel("factors rounded to bf16", "gemm:m=32,n=32,k=16384,dtype=f32", gemm(product(as_type(BF16)))),
    BrokenKernel("factors rounded to f16", "gemm:m=32,n=32,k=4096,dtype=f32", gemm(product(as_type(F16)))),
    BrokenKernel("three products of bf16 parts", "gemm:m=32,n=32,k=1024,dtype=f32", gemm(split_product)),
    BrokenKernel("sums in f16", "gemm:m=32,n=32,k=16384,dtype=f16", gemm(accumulated(F16))),
    BrokenKernel("sums in bf16", "gemm:m=32,n=32,k=16384,dtype=bf16,out=f32", gemm(accumulated(BF16))),
    BrokenKernel("parts of split k in f16", "gemm:m=32,n=32,k=16384,dtype=f16,out=f32", gemm(split_k(F16))),
    BrokenKernel("parts of split k in bf16", "gemm:m=32,n=32,k=4096,dtype=f32", gemm(split_k(BF16))),
    BrokenKernel("factors rounded to bf16", "gemm:m=32,n=32,k=4096,dtype=tf32", gemm(product(as_type(BF16)))),
    BrokenKernel(
        "factors rounded to tf32", "grouped_gemm:groups=3,m=48,n=32,k=4096,dtype=f32", grouped(product(tf32))
    ),
    BrokenKernel(
        "scales rounded to bf16",
        "scaled_gemm:m=32,n=32,k=4096,dtype=i8,out=f32",
        scaled(product(F32), as_type(BF16)),
    ),
    BrokenKernel(
        "factors rounded to bf16",
        "scaled_gemm:m=32,n=32,k=4096,dtype=f32,weight=i4,scales=group",
        scaled(product(as_type(BF16))),
    ),
    BrokenKernel(
        "gate x exp(x) / (1 + exp(x))",
        "gated_gemm:m=32,n=32,k=64,dtype=bf16",
        gated(product(F32), unstable_silu),
    ),
    BrokenKernel(
        "factors rounded to tf32",
        "gated_gemm:m=32,n=32,k=4096,dtype=f32",
        gated(product(tf32), silu),
    ),
    BrokenKernel("factors rounded to tf32", f"{_CONV}f32", convolution(tf32)),
    BrokenKernel("factors rounded to tf32", f"{_CONV}f32,direction=wgrad", convolution(tf32)),
    BrokenKernel("Winograd's transforms in f16", f"{_CONV}f16", winograd),
    BrokenKernel("maximum not subtracted", f"{_ATTENTION}f32", attention(nothing)),
    BrokenKernel("maximum not subtracted", f"{_ATTENTION}bf16", attention(nothing)),
    BrokenKernel("scores rounded to f16", f"{_ATTENTION}f32", attention(scores_in=as_type(F16))),
    BrokenKernel("scores rounded to bf16", f"{_ATTENTION}bf16", attention(scores_in=as_type(BF16))),
    BrokenKernel("scores rounded to f16", f"{_ATTENTION}f16", attention(scores_in=as_type(F16))),
    BrokenKernel("probabilities in tf32", f"{_ATTENTION}f32", attention(multiply=product(tf32))),
    BrokenKernel(
        "probabilities and ds in bf16",
        f"{_ATTENTION}f16,direction=backward",
        attention_backward(as_type(BF16)),
    ),
    BrokenKernel(
        "probabilities and ds in tf32", f"{_ATTENTION}f32,direction=backward", attention_backward(tf32)
    ),
    BrokenKernel(
        "elements rounded to tf32",
        "reduction:rows=16,cols=65536,dtype=f32,expression=x,reduce=sum",
        reduction(lambda x: row_sum(tf32(x).astype(np.float64))),
    ),
    BrokenKernel(
        "sums in f16",
        "reduction:rows=16,cols=4096,dtype=f16,expression=x,reduce=mean",
        reduction(lambda x: summed(x, F16) / F32(x.shape[1])),
    ),
    BrokenKernel(
        "maximum from 0 on",
        "reduction:rows=37,cols=131,dtype=f32,expression=x,reduce=max",
        reduction(lambda x: np.maximum(x.max(1), 0)),
    ),
    BrokenKernel(
        "x exp(x) / (1 + exp(x))",
        "elementwise:rows=37,cols=131,dtype=f32,expression=silu(x)",
        elementwise(unstable_silu),
    ),
    BrokenKernel(
        "tanh by exponentials",
        "elementwise:rows=37,cols=131,dtype=bf16,expression=tanh(x)",
        elementwise(tanh_by_exp),
    ),
    BrokenKernel(
        "gelu by tanh", "elementwise:rows=37,cols=131,dtype=f32,expression=gelu(x)", elementwise(gelu_by_tanh)
    ),
    BrokenKernel(
        "erf accurate to 2.5e-5",
        "elementwise:rows=37,cols=131,dtype=f16,expression=erf(x)",
        elementwise(erf),
    ),
    BrokenKernel(
        "NaN lost",
        "elementwise:rows=37,cols=131,dtype=f16,expression=max(x,0)",
        elementwise(lambda x: np.fmax(x, F32(0))),
    ),
    BrokenKernel(
        "computed in f16",
        "elementwise:rows=37,cols=131,dtype=f16,expression=x*y-z",
        elementwise(lambda x, y, z: as_type(F16)(x * y) - z),
    ),
    BrokenKernel("eps beside the root", f"rmsnorm:{_ROWS}f32", rmsnorm_beside_root),
    BrokenKernel(
        "dgamma summed in bf16",
        "rmsnorm:rows=1000,cols=64,dtype=f32,direction=backward",
        rmsnorm_backward(lambda x: summed(x, BF16, 0)),
    ),
    BrokenKernel(
        "sum with the residual in f16",
        f"layernorm:{_ROWS}f32,prologue=residual",
        layernorm_of_sum(as_type(F16)),
    ),
    BrokenKernel(
        "biased running variance", "batchnorm_stats:rows=37,cols=100,dtype=f32", biased_running_variance
    ),
    BrokenKernel("hidden keys less 100", f"{_ATTENTION}f32,causal=true", causal_by_penalty(100.0)),
    BrokenKernel("bias in bf16", f"{_ATTENTION}f32,bias=qk", with_rounded("bias", as_type(BF16))),
    BrokenKernel(
        "sigmoid by exponentials",
        "gated_gemm:m=33,n=48,k=64,dtype=f32,activation=sigmoid",
        gated(np.matmul, sigmoid_by_exp),
    ),
    BrokenKernel(
        "gelu by tanh", "gated_gemm:m=33,n=48,k=64,dtype=f32,activation=gelu", gated(np.matmul, gelu_by_tanh)
    ),
    BrokenKernel("factors rounded to tf32", f"{_CONV}f32,direction=wgrad", convolution(lambda x: tf32(x))),
    BrokenKernel("factors rounded to bf16", f"{_CONV}f16,direction=dgrad", convolution(as_type(BF16))),
    BrokenKernel(
        "parts of the sum in bf16",
        "grouped_gemm:groups=4,m=64,n=16,k=512,dtype=bf16",
        grouped(split_k(BF16)),
    ),
    BrokenKernel(
        "scales in bf16",
        "scaled_gemm:m=33,n=48,k=256,dtype=f16,weight=i8,scales=row",
        with_rounded("scale_b", as_type(BF16)),
    ),
    BrokenKernel(
        "sums in bf16",
        "scatter_add:rows=2048,cols=16,bins=4,dtype=bf16",
        scattered(lambda total, row: as_type(BF16)(total + row)),
    ),
    BrokenKernel(
        "rows of one index overwrite each other",
        "scatter_add:rows=64,cols=16,bins=8,dtype=f32",
        scattered(lambda total, row: row),
    ),
)


def table() -> str:
    """Return the table of broken kernels, with errors as multiples of the tolerance."""
    lines = ["| operator | type | fault | normal inputs | extreme inputs |", "|---|---|---|--:|--:|"]
    for broken in BROKEN:
        workload: Workload = parse(broken.workload)
        normal, extreme = (f"{error:.3g}" for error in broken.errors())
        lines.append(f"| {workload.operator} | {workload.dtype} | {broken.fault} | {normal} | {extreme} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
