"""torch tensors as kernel arguments: arrays on a CPU, addresses and a stream on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunebench.device import Device, local_cpu, local_gpus
from tunebench.dispatch import BoundKernel, LibraryKernel
from tunebench.dispatch.cpu import SharedCpuKernel
from tunebench.dispatch.numba_threads import set_thread_count
from tunebench.dtype import DType
from tunebench.errors import InputError
from tunebench.workload import Tensor

__all__ = [
    "DTYPES",
    "aligned",
    "bits_of",
    "compute_type",
    "device_of",
    "launch",
    "library_results",
    "may_use_tf32",
    "stored_type",
    "unsupported_reason",
]

DTYPES: dict[torch.dtype, DType] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Tensor types that kernels compute with."""

_STORED: dict[DType, torch.dtype] = {
    **{ours: theirs for theirs, ours in DTYPES.items()},
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}


def stored_type(dtype: DType) -> torch.dtype:
    """Return torch's type of a tensor in a workload."""
    return _STORED[dtype]


@functools.cache
def device_of(device: torch.device) -> tuple[Device, int] | str:
    """Return the device and ordinal of a torch device, or why kernels do not run on it."""
    if device.type == "cpu":
        return local_cpu(), 0
    if device.type != "cuda":
        return f"kernels run on CPUs and NVIDIA GPUs, not on {device.type}"
    gpus, ordinal = local_gpus(), device.index or 0
    return (gpus[ordinal], ordinal) if ordinal < len(gpus) else f"the driver does not list {device}"


def launch(kernel: BoundKernel, tensors: Sequence[Any]) -> None:
    """Run a kernel on its inputs and outputs, whose memory has the workload's layout; scalars are numbers."""
    pairs = zip(tensors, kernel.tensors, strict=True)
    if isinstance(kernel, SharedCpuKernel):
        _use_threads_of_torch(kernel)
        kernel.run_at(*[_address(tensor, spec.shape) for tensor, spec in pairs])
        return
    if isinstance(kernel, LibraryKernel):
        kernel.run(*[_dense(tensor, spec.shape) for tensor, spec in pairs])
        return
    first = next(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
    if first.is_cuda:
        _launch_on_gpu(kernel, tensors, first.device)
        return
    _use_threads_of_torch(kernel)
    kernel.run(*[_array(tensor, spec.shape) for tensor, spec in pairs])


def library_results(kernel: BoundKernel, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return the outputs of a kernel that is a library's call, in the memory that the library allocated.

    They are contiguous and have the workload's types, but may lack dimensions of size 1. None for a kernel
    that writes into memory.

    Args:
        kernel: The kernel.
        inputs: Its inputs, whose memory has the workload's layout; scalars are numbers.
    """
    if not isinstance(kernel, LibraryKernel) or kernel.results is None:
        return None
    specs = kernel.tensors
    results = kernel.results(
        {spec.name: _dense(tensor, spec.shape, 1) for tensor, spec in zip(inputs, specs, strict=False)}
    )
    listed = results if isinstance(results, tuple) else (results,)
    return [_stored(result, spec) for result, spec in zip(listed, kernel.outputs, strict=True)]


def _stored(result: torch.Tensor, spec: Tensor) -> torch.Tensor:
    """Return a library's result, copied if it is strided or has another type than its tensor."""
    dtype = _STORED[spec.dtype]
    return result.contiguous() if result.dtype == dtype else result.to(dtype).contiguous()


def _use_threads_of_torch(kernel: BoundKernel) -> None:
    """Run a kernel on as many threads as torch's own, so that `torch.set_num_threads` limits it too."""
    set_thread_count(1 if kernel.is_small else torch.get_num_threads())


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as CPU kernels receive it: integers for floats of 16 and 8 bits."""
    bits = {torch.float16: torch.uint16, torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(bits[tensor.dtype]) if tensor.dtype in bits else tensor


def _array(tensor: Any, shape: tuple[int, ...]) -> Any:
    """Return an array on a tensor's memory, in memory order; floats of 16 and 8 bits as integers."""
    if not shape:
        return float(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    array = bits_of(tensor).numpy()
    if not array.flags.c_contiguous:  # dense in another order: a transposed matrix, or channels last
        array = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
    return array.reshape(shape)


def _address(tensor: Any, shape: tuple[int, ...]) -> Any:
    """Return the address of a dense tensor; a number for one without a shape."""
    if not shape:
        return float(tensor)
    if tensor.is_neg():
        raise InputError("tensors with a pending negation are not supported: call resolve_neg()")
    return tensor.data_ptr()


def _dense(tensor: Any, shape: tuple[int, ...], missing: int = 0) -> Any:
    """Return a tensor in memory order without its history; a number for one without a shape.

    Args:
        tensor: The tensor, or the number.
        shape: Its shape.
        missing: How many of its first dimensions it may lack if they have size 1.
    """
    if not shape:
        return float(tensor)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():  # dense in another order: a transposed matrix, or channels last
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))
    lacks_ones = missing and shape[0] == 1 and tensor.shape == shape[missing:]
    return tensor if lacks_ones or tensor.shape == shape else tensor.reshape(shape)


ACCESS_BYTES = 16
"""Widest access of kernels on GPUs. Memory that torch allocates starts at multiples of it; views need not."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor, copied if its memory does not start at a multiple of the widest access."""
    return tensor if tensor.data_ptr() % ACCESS_BYTES == 0 else tensor.clone()


def _launch_on_gpu(kernel: BoundKernel, tensors: Sequence[Any], device: torch.device) -> None:
    """Launch on the current stream of the tensors' device; torch's allocator provides the scratch memory."""
    index = device.index
    # Outputs are never copied: they were allocated for this call. Copies live until the launch is enqueued.
    held = [aligned(t) if isinstance(t, torch.Tensor) and t.ndim else t for t in tensors]
    addresses = [t.data_ptr() if isinstance(t, torch.Tensor) and t.ndim else t for t in held]
    scratch = None
    needed: int = kernel.scratch_bytes  # type: ignore[attr-defined]
    if needed:
        scratch = torch.empty(needed, dtype=torch.uint8, device=device)
    run: Callable[..., None] = functools.partial(
        kernel.run,
        *addresses,
        stream=torch.cuda.current_stream(index).cuda_stream,
        scratch=0 if scratch is None else scratch.data_ptr(),
    )
    if index == torch.cuda.current_device():
        run()
    else:
        with torch.cuda.device(index):
            run()


def may_use_tf32() -> tuple[bool, bool]:
    """Return whether torch may use tf32 for float32 on GPUs: in matrix products, and in convolutions."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def compute_type(tensor: torch.Tensor, *, convolution: bool = False) -> DType:
    """Return the type of a tensor's products: tf32 for float32 on a GPU, if torch allows it."""
    if tensor.is_cuda and tensor.dtype == torch.float32 and may_use_tf32()[convolution]:
        return "tf32"
    return DTYPES[tensor.dtype]


def unsupported_reason(tensors: Sequence[torch.Tensor | None]) -> str | None:
    """Return why no kernel reads these tensors together, or None if one may."""
    present = [tensor for tensor in tensors if tensor is not None]
    first = present[0]
    for tensor in present:
        if not isinstance(tensor, torch.Tensor):
            return f"expected a tensor, got {type(tensor).__name__}"
        if tensor.layout != torch.strided:
            return f"a {tensor.layout} tensor"
        if tensor.dtype not in DTYPES:
            return f"kernels compute with float32, float16 and bfloat16, not {tensor.dtype}"
        if tensor.dtype != first.dtype:
            return f"tensors of different types, {first.dtype} and {tensor.dtype}"
        if tensor.device != first.device:
            return f"tensors on different devices, {first.device} and {tensor.device}"
        if tensor.numel() == 0:
            return "an empty tensor"
    return None
