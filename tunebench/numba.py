"""Tuned kernels on NumPy arrays, and on CPU arrays of any library with DLPack.

Each call runs the best known configuration for the workload on this processor, or a variant's default. The
best known may be a call of torch or NumPy.
There is no fallback: a call that no kernel supports is an error. Results are new arrays, or `out`.

>>> import numpy as np
>>> from tunebench.numba import matmul
>>> float(matmul(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32))[0, 0])
3.0
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device, local_cpu
from tunebench.dispatch import CpuKernel, LibraryKernel, dispatcher, prefer
from tunebench.dispatch.watch import is_watched
from tunebench.dtype import DType, numpy_dtype
from tunebench.errors import InputError
from tunebench.workload import Workload
from tunebench.workloads import workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["attention", "conv2d", "layer_norm", "matmul", "softmax"]


def matmul(a: Any, b: Any, out: Any = None) -> Array:
    """Multiply matrices, or batches of equal size: (..., m, k) and (..., k, n) to (..., m, n).

    Transposed views of contiguous matrices are not copied.

    Args:
        a: Left matrices.
        b: Right matrices, of the same dtype.
        out: Array for the result.

    Raises:
        InputError: No kernel supports the call.
    """
    left, trans_a = _matrix(a)
    right, trans_b = _matrix(b)
    if left.ndim < 2 or right.ndim != left.ndim or left.shape[:-2] != right.shape[:-2]:
        raise InputError(
            f"matmul: expected matrices or batches of equal size, got {left.shape} and {right.shape}"
        )
    batch, (m, k), n = _count(left.shape[:-2]), left.shape[-2:], right.shape[-1]
    sizes = {"m": m, "n": n, "k": k, "batch": batch, "trans": trans_a + trans_b}
    if right.shape[-2] != k:
        raise InputError(f"matmul: shapes {left.shape} and {right.shape} are incompatible")
    operands = [t.swapaxes(-1, -2) if way == "t" else t for t, way in ((left, trans_a), (right, trans_b))]
    return _serve("gemm", sizes, operands, (*left.shape[:-1], n), out)[0]


def softmax(x: Any, out: Any = None, *, log: bool = False) -> Array:
    """Return the softmax along the last axis, or its logarithm.

    Args:
        x: The input.
        out: Array for the result.
        log: Return the logarithm.

    Raises:
        InputError: if no kernel supports the call.
    """
    rows = _array(x)
    sizes = {"rows": _count(rows.shape[:-1]), "cols": rows.shape[-1], "log": log}
    return _serve("softmax", sizes, [rows], rows.shape, out)[0]


def layer_norm(x: Any, gamma: Any, beta: Any, out: Any = None, *, eps: float = 1e-5) -> Array:
    """Normalise the last axis.

    Args:
        x: The input.
        gamma: Scale of each column.
        beta: Offset of each column.
        out: Array for the result.
        eps: Added to the variance.

    Raises:
        InputError: if no kernel supports the call.
    """
    rows = _array(x)
    sizes = {"rows": _count(rows.shape[:-1]), "cols": rows.shape[-1], "eps": eps}
    return _serve("layernorm", sizes, [rows, _array(gamma), _array(beta)], rows.shape, out)[0]


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    out: Any = None,
    *,
    stride: int = 1,
    pad: int = 0,
    pad_w: int | None = None,
    dilation: int = 1,
    groups: int = 1,
    layout: str = "nchw",
) -> Array:
    """Convolve images with filters.

    Args:
        x: Images, (n, c, h, w); channels last for layout ``"nhwc"``.
        w: Filters, (k, c / groups, r, s); channels last for layout ``"nhwc"``.
        bias: Added to each output channel.
        out: Array for the result.
        stride: Step between windows.
        pad: Zeros above and below.
        pad_w: Zeros to the left and right; by default as many.
        dilation: Step within a window.
        groups: Number of channel groups.
        layout: ``"nchw"`` or ``"nhwc"``.

    Raises:
        InputError: if no kernel supports the call.
    """
    images, filters = _array(x), _array(w)
    if images.ndim != 4 or filters.ndim != 4:
        raise InputError(
            f"conv2d expects 4-D images and filters, got shapes {images.shape} and {filters.shape}"
        )
    last = layout == "nhwc"
    (n, height, width, c), (k, r, s, _) = (
        t.shape if last else (t.shape[0], *t.shape[2:], t.shape[1]) for t in (images, filters)
    )
    sizes: dict[str, Any] = {"n": n, "c": c, "h": height, "w": width, "k": k, "r": r, "s": s, "pad": pad}
    sizes |= {"pad_w": pad_w, "stride": stride, "dilation": dilation, "groups": groups, "layout": layout}
    sizes["epilogue"] = "none" if bias is None else "bias"
    operands = [images, filters, *([] if bias is None else [_array(bias)])]
    return _serve("conv2d", sizes, operands, None, out)[0]


def attention(q: Any, k: Any, v: Any, out: Any = None, *, causal: bool = False) -> Array:
    """Compute attention; the result has the shape of `q`.

    Args:
        q: Queries, (batch, heads, seq_q, head_dim).
        k: Keys, (batch, heads_k, seq_k, head_dim).
        v: Values, like `k`.
        out: Array for the result.
        causal: Mask future keys; the last query sees all keys.

    Raises:
        InputError: if no kernel supports the call.
    """
    queries, keys, values = _array(q), _array(k), _array(v)
    if queries.ndim != 4 or keys.ndim != 4:
        raise InputError(f"attention expects 4-D arrays, got shapes {queries.shape} and {keys.shape}")
    batch, heads, seq_q, head_dim = queries.shape
    sizes = {"batch": batch, "heads": heads, "seq_q": seq_q, "head_dim": head_dim, "causal": causal}
    sizes |= {"heads_k": keys.shape[1], "seq_k": keys.shape[2]}
    return _serve("attention", sizes, [queries, keys, values], queries.shape, out)[0]


# -- arrays --------------------------------------------------------------------------------------------------


def _array(source: Any) -> Array:
    """Return a NumPy view of a CPU array of any library."""
    if isinstance(source, np.ndarray):
        return source
    if not hasattr(source, "__dlpack__"):
        raise InputError(f"expected a NumPy array or an object with __dlpack__, got {type(source).__name__}")
    try:
        array: Array = np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as error:
        raise InputError(f"expected an array in CPU memory, got {type(source).__name__}: {error}") from error
    return array


def _matrix(source: Any) -> tuple[Array, str]:
    """Return an array, and whether its matrices are row-major (``"n"``) or column-major (``"t"``)."""
    array = _array(source)
    swapped = array.ndim > 1 and not array.flags.c_contiguous and array.swapaxes(-1, -2).flags.c_contiguous
    return array, "t" if swapped else "n"


def _count(extents: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, extents, 1)


@functools.cache
def _types() -> dict[Any, DType]:
    kinds: tuple[DType, ...] = ("f32", "f16", "bf16")
    return {numpy_dtype(kind): kind for kind in kinds}


@functools.cache
def _device() -> Device:
    return local_cpu()


@functools.lru_cache(maxsize=4096)
def _workload(operator: str, dtype: DType, *sizes: tuple[str, Any]) -> Workload:
    return workload(operator, dtype=dtype, **dict(sizes))


def _serve(
    operator: str, sizes: dict[str, Any], inputs: list[Array], shape: tuple[int, ...] | None, out: Any
) -> list[Array]:
    """Run the kernel of a workload and return its outputs; the first has `shape` and is written to `out`."""
    dtype = _types().get(inputs[0].dtype)
    if dtype is None:
        raise InputError(f"expected float32, float16 or bfloat16, got {inputs[0].dtype}")
    asked = _workload(operator, dtype, *sizes.items())
    kernel_dispatcher = dispatcher(asked, _device())
    with prefer("tunebench"):
        made = kernel_dispatcher.bound_choice()
    if is_watched():
        kernel_dispatcher.notify(made)
    if made.kernel is None:
        raise InputError(f"{asked}: {made.choice.reason}")
    results = [np.empty(tensor.shape, numpy_dtype(tensor.dtype)) for tensor in asked.outputs()]
    out_shape = results[0].shape if shape is None else shape
    if out is not None:
        results[0] = _checked_out(_array(out), out_shape, results[0])
    arrays = [
        array.reshape(tensor.shape) if array.flags.c_contiguous and array.size == tensor.size else array
        for array, tensor in zip([*inputs, *results], made.kernel.tensors, strict=True)
    ]
    assert isinstance(made.kernel, CpuKernel | LibraryKernel)
    made.kernel(*arrays)
    return [results[0].reshape(out_shape), *results[1:]]


def _checked_out(out: Array, shape: tuple[int, ...], like: Array) -> Array:
    if out.shape != shape or out.dtype != like.dtype or not out.flags.c_contiguous or not out.flags.writeable:
        actual = f"{out.shape}, {out.dtype}"
        raise InputError(f"out must be {shape}, {like.dtype}, C-contiguous and writeable, got {actual}")
    return out
