"""What a library would take for the same problem: NumPy and torch on a CPU, torch on a GPU.

Baselines run in a process of their own, under the same protocol and on inputs drawn the same way as
variants, so that the two compare. torch is used where it is installed and never required. On a GPU torch
stands for cuBLAS and cuDNN, which it calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import DeviceError, MissingDependency
from tunebench.measure.timing import Protocol, collect, median_interval
from tunebench.workload import Workload
from tunebench.workloads.operators.conv2d import Conv2d
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.softmax import Softmax

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Baseline", "measure_baselines"]

Tensors = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How long a library takes.

    Attributes:
        name: Which library, such as ``"numpy"``.
        median_us: Median time of one run.
        ci_us: 95 % confidence interval of the median.
        samples_us: Every sample, in the order taken.
    """

    name: str
    median_us: float
    ci_us: tuple[float, float]
    samples_us: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, samples_us: Sequence[float]) -> Baseline:
        """Return what samples say."""
        median_us, ci_us = median_interval(samples_us)
        return cls(name=name, median_us=median_us, ci_us=ci_us, samples_us=tuple(samples_us))


def measure_baselines(workload: Workload, device: Device, protocol: Protocol, seed: int) -> list[Baseline]:
    """Time every library that does this workload, fastest first; none for an operator libraries lack."""
    inputs = workload.draw(np.random.default_rng(seed))
    found = []
    if device.kind == "cpu":
        from tunebench.measure.cpu import Stopwatch

        stopwatch = Stopwatch(device, protocol)
        for name, prepare in (("numpy", _numpy), ("torch", _torch_cpu)):
            call = prepare(workload, inputs)
            if call is not None:
                found.append(_time(name, functools.partial(stopwatch.time_us, call), protocol))
    else:
        found += _torch_gpu(workload, inputs, device, protocol)
    return sorted(found, key=lambda baseline: baseline.median_us)


def _time(name: str, sample_us: Callable[[], float], protocol: Protocol) -> Baseline:
    return Baseline.of(name, collect(sample_us, protocol).samples_us)


# -- NumPy -------------------------------------------------------------------------------------------


def _numpy(workload: Workload, inputs: Tensors) -> Callable[[], object] | None:
    """Return a NumPy program for the workload, in f32: half types are not what NumPy is fast at.

    Integers are multiplied in float64, where their sums are exact and a BLAS does them.
    """
    exactly = np.float64 if workload.dtype == "i8" else np.float32
    single = {name: np.asarray(value, dtype=exactly) for name, value in inputs.items()}
    if isinstance(workload, Gemm):
        return lambda: _numpy_gemm(workload, single)
    if isinstance(workload, GroupedGemm):
        return _numpy_grouped_gemm(workload, single, workload.parts(inputs["offsets"]))
    if isinstance(workload, Softmax):
        return lambda: _numpy_softmax(workload, single)
    if isinstance(workload, LayerNorm):
        return lambda: _numpy_layernorm(workload, single)
    if isinstance(workload, Conv2d) and workload.direction == "fprop":
        return lambda: _numpy_conv2d(workload, single)
    return None


def _numpy_gemm(workload: Gemm, t: Tensors) -> Array:
    a = t["a"] if workload.trans[0] == "n" else t["a"].swapaxes(1, 2)
    b = t["b"] if workload.trans[1] == "n" else t["b"].swapaxes(1, 2)
    c: Array = a @ b
    if workload.has_bias:
        c += t["bias"]
    if workload.activation == "relu":
        np.maximum(c, 0, out=c)
    elif workload.activation == "gelu":  # NumPy has no erf: the tanh form costs it less than erf would
        c *= 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (c + 0.044715 * c**3)))
    return c


def _numpy_grouped_gemm(
    workload: GroupedGemm, t: Tensors, parts: list[tuple[int, slice]]
) -> Callable[[], Array]:
    """Multiply one group after the other; that the sizes are known beforehand costs this program nothing."""
    b = t["b"] if workload.trans == "nn" else t["b"].swapaxes(1, 2)
    c = np.empty((workload.m, workload.n), np.float32)

    def run() -> Array:
        for group, part in parts:
            np.matmul(t["a"][part], b[group], out=c[part])
        return c

    return run


def _numpy_softmax(workload: Softmax, t: Tensors) -> Array:
    z = t["x"] * t["scale"] if workload.has_scale else t["x"]
    if workload.has_mask:
        z = z + t["mask"]
    e: Array = np.exp(z - z.max(axis=1, keepdims=True))
    e /= e.sum(axis=1, keepdims=True)
    return e


def _numpy_layernorm(workload: LayerNorm, t: Tensors) -> Array:
    x = t["x"]
    centred = x - x.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + workload.eps)
    y: Array = centred * scale * t["gamma"] + t["beta"]
    return y


def _numpy_conv2d(workload: Conv2d, t: Tensors) -> Array:
    """Gather every window and multiply once: the usual way to convolve with NumPy alone."""
    nhwc = workload.layout == "nhwc"
    x = t["x"] if nhwc else t["x"].transpose(0, 2, 3, 1)
    w = t["w"] if nhwc else t["w"].transpose(0, 2, 3, 1)
    pad, step, gap = workload.pad, workload.stride, workload.dilation
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    reach = ((workload.r - 1) * gap + 1, (workload.s - 1) * gap + 1)
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(1, 2))
    windows = windows[:, ::step, ::step, :, ::gap, ::gap]
    groups, k = workload.groups, workload.k
    parts = [
        np.tensordot(wx, wk, axes=((3, 4, 5), (3, 1, 2)))
        for wx, wk in zip(np.split(windows, groups, axis=3), np.split(w, groups, axis=0), strict=True)
    ]
    y: Array = np.concatenate(parts, axis=3) if groups > 1 else parts[0]
    assert y.shape[3] == k
    if "bias" in t:
        y += t["bias"]
    if "residual" in t:
        y += t["residual"] if nhwc else t["residual"].transpose(0, 2, 3, 1)
    if "relu" in workload.epilogue:
        np.maximum(y, 0, out=y)
    return y if nhwc else np.ascontiguousarray(y.transpose(0, 3, 1, 2))


# -- torch -------------------------------------------------------------------------------------------


def _torch_cpu(workload: Workload, inputs: Tensors) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    tensors = {name: _tensor(torch, value) for name, value in inputs.items()}
    call = torch_call(workload, tensors)
    if call is None:
        return None

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def _tensor(torch: Any, value: Array) -> Any:
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    if value.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(value.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(value) if value.shape else float(value)


def _torch_gpu(workload: Workload, inputs: Tensors, device: Device, protocol: Protocol) -> list[Baseline]:
    """Time torch on a GPU; nothing where it is not installed, or sees no GPU."""
    from tunebench.measure._torch_gpu import TorchGpu

    try:
        gpu = TorchGpu(device)
    except (MissingDependency, DeviceError):
        return []
    gpu.allow_for(workload)
    tensors = gpu.tensors(inputs)
    calls = {"torch": torch_call(workload, tensors), "torch grouped_mm": torch_grouped_mm(workload, tensors)}
    return [
        _time(name, gpu.sampler(call, protocol).sample_us, protocol)
        for name, call in calls.items()
        if call is not None
    ]


def torch_call(workload: Workload, t: Tensors) -> Callable[[], Any] | None:
    """Return torch's own program for a workload, or None if torch has none.

    Args:
        workload: What to compute.
        t: A torch tensor for each input by name; a number for one of shape `()`.
    """
    if isinstance(workload, Gemm):
        return _torch_gemm_8bit(workload, t) if workload.dtype in ("e4m3", "i8") else _torch_gemm(workload, t)
    if isinstance(workload, GroupedGemm):
        return _torch_grouped_gemm(workload, t)
    if isinstance(workload, Softmax):
        return lambda: _torch_softmax(workload, t)
    if isinstance(workload, LayerNorm):
        return _torch_layernorm(workload, t)
    if isinstance(workload, Conv2d):
        return _torch_conv2d(workload, t)
    return None


def _torch_gemm(workload: Gemm, t: Tensors) -> Callable[[], Any]:
    from torch.nn import functional

    a = t["a"] if workload.trans[0] == "n" else t["a"].transpose(1, 2)
    b = t["b"] if workload.trans[1] == "n" else t["b"].transpose(1, 2)
    apply: Callable[[Any], Any] = {"none": lambda c: c, "relu": functional.relu, "gelu": functional.gelu}[
        workload.activation
    ]
    if workload.has_bias and workload.batch == 1:
        weight = b[0].transpose(0, 1)
        return lambda: apply(functional.linear(a[0], weight, t["bias"]))
    if workload.has_bias:
        return lambda: apply(a.matmul(b).add(t["bias"]))
    return lambda: a[0].matmul(b[0]) if workload.batch == 1 else a.matmul(b)


def _torch_gemm_8bit(workload: Gemm, t: Tensors) -> Callable[[], Any] | None:
    """Return torch's product of 8-bit types, which has no public name; None where it has none at all.

    It takes one product without an epilogue. cuBLAS wants lines in multiples of 16 and, for e4m3, k
    contiguous; for i8 torch wants more than 16 rows.
    """
    import torch

    if workload.batch > 1 or workload.epilogue != "none" or workload.n % 16 or workload.k % 16:
        return None
    a = t["a"][0] if workload.trans[0] == "n" else t["a"][0].transpose(0, 1)
    b = t["b"][0] if workload.trans[1] == "n" else t["b"][0].transpose(0, 1)
    if workload.dtype == "i8" and workload.m > 16:
        return lambda: torch._int_mm(a, b)
    if workload.dtype == "i8" or workload.trans != "nt" or not hasattr(torch, "_scaled_mm"):
        return None
    one = torch.ones((), device=a.device)
    out = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[workload.out]
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=out)


def _torch_grouped_gemm(workload: GroupedGemm, t: Tensors) -> Callable[[], Any]:
    """Multiply one group after the other, on a GPU by a call of cuBLAS each, with sizes known beforehand."""
    b = t["b"] if workload.trans == "nn" else t["b"].transpose(1, 2)
    parts = workload.parts(t["offsets"].cpu().numpy())
    c = t["a"].new_empty(workload.m, workload.n)

    def run() -> Any:
        for group, part in parts:
            c[part] = t["a"][part] @ b[group]
        return c

    return run


def torch_grouped_mm(workload: Workload, t: Tensors) -> Callable[[], Any] | None:
    """Return torch's own grouped product, or None where it has none: it is for bf16, in lines of 16 bytes.

    Args:
        workload: What to compute.
        t: A torch tensor for each input by name.
    """
    if not isinstance(workload, GroupedGemm) or (workload.dtype, workload.out) != ("bf16", "bf16"):
        return None
    import torch

    # It got its public name in torch 2.10.
    multiply = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if multiply is None or workload.n % 8 or workload.k % 8:
        return None
    if t["a"].is_cuda and torch.cuda.get_device_capability(t["a"].device) < (9, 0):
        return None  # versions before 2.10 raise there
    b = t["b"] if workload.trans == "nn" else t["b"].transpose(1, 2)
    ends = t["offsets"][1:]
    return lambda: multiply(t["a"], b, offs=ends)


def _torch_softmax(workload: Softmax, t: Tensors) -> Any:
    z = t["x"] * t["scale"] if workload.has_scale else t["x"]
    if workload.has_mask:
        z = z + t["mask"]
    return z.softmax(dim=1)


def _torch_layernorm(workload: LayerNorm, t: Tensors) -> Callable[[], Any]:
    from torch.nn import functional

    return lambda: functional.layer_norm(t["x"], (workload.cols,), t["gamma"], t["beta"], workload.eps)


def _torch_conv2d(workload: Conv2d, t: Tensors) -> Callable[[], Any]:
    """Give torch its own preferred strides: NHWC tensors go in as channels-last views, without a copy."""
    import torch
    from torch.nn import functional

    nhwc = workload.layout == "nhwc"
    view = {name: v.permute(0, 3, 1, 2) if nhwc and v.dim() == 4 else v for name, v in t.items()}
    how = {"stride": workload.stride, "padding": workload.pad, "dilation": workload.dilation}
    if workload.direction == "fprop":

        def fprop() -> Any:
            y = functional.conv2d(view["x"], view["w"], view.get("bias"), groups=workload.groups, **how)
            if "residual" in view:
                y = y + view["residual"]
            return y.relu_() if "relu" in workload.epilogue else y

        return fprop
    gradients = torch.nn.grad
    how["groups"] = workload.groups
    if workload.direction == "dgrad":
        shape = (workload.n, workload.c, workload.h, workload.w)
        return lambda: gradients.conv2d_input(shape, view["w"], view["dy"], **how)
    shape = (workload.k, workload.c // workload.groups, workload.r, workload.s)
    return lambda: gradients.conv2d_weight(view["x"], shape, view["dy"], **how)
