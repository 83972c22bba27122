"""Numba-CUDA to a cubin through LTO-IR and nvJitLink: for any architecture, with no GPU and no driver.

The cubin is launched like any other, past Numba's dispatcher, whose calls cost tens of microseconds.
"""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any, Literal

from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import read_cubin, resources, spills
from tunebench.compile.cache import binary_key
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import MissingDependency
from tunebench.space import Config
from tunebench.variant import Argument, NumbaCudaVariant, Scalar, TensorMap
from tunebench.workload import Tensor, Workload

__all__ = [
    "array_parameters",
    "compile_numba_cuda",
    "key_numba_cuda",
    "numba_cuda_versions",
    "ptx_of_numba_cuda",
]


@functools.cache
def numba_cuda_versions() -> str:
    """Return the versions of everything between a Python kernel and its cubin.

    Raises:
        MissingDependency: if one of them is not installed.
    """
    try:
        import numba.cuda
        from cuda.bindings import nvjitlink

        linker = ".".join(map(str, nvjitlink.version()))
        # Without the package numba-cuda, numba brings an older module of that name, which cannot do this.
        compiler = metadata.version("numba-cuda")
    except (ImportError, RuntimeError) as error:
        raise MissingDependency("numba-cuda or nvJitLink", "cuda") from error
    try:
        nvvm = metadata.version("nvidia-nvvm")
    except metadata.PackageNotFoundError:
        nvvm = "of the toolkit"
    return f"numba {numba.__version__}, numba-cuda {compiler}, nvvm {nvvm}, nvjitlink {linker}"


def key_numba_cuda(variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the key of what reaches Numba for this configuration on this architecture.

    Raises:
        MissingDependency: if Numba-CUDA or its linker is not installed.
    """
    launches = variant.launches(workload, config)
    return binary_key(
        "numba-cuda",
        variant.revision(workload, config),
        numba_cuda_versions(),
        repr(_signature(variant, workload, config)),
        f"{_threads(variant, workload, config)} threads, {len(launches)} launches",
        device.architecture,
        # What `kernel` closes over besides `config` can only come from the choices of the workload.
        ",".join(f"{name}={v}" for name, v in vars(workload).items() if isinstance(v, str | bool | float)),
    )


def _threads(variant: NumbaCudaVariant[Any], workload: Workload, config: Config) -> int:
    blocks = [launch.block for launch in variant.launches(workload, config)]
    return max(x * y * z for x, y, z in blocks)


def _signature(variant: NumbaCudaVariant[Any], workload: Workload, config: Config) -> Any:
    """Return the kernel's signature: tensors as C-contiguous arrays, scalars by value.

    Raises:
        CompileError: if the launches do not pass the same types, since they share the one kernel.
    """
    from numba import types
    from numba.cuda.types import bfloat16

    stored = {"f32": types.float32, "f16": types.float16, "bf16": bfloat16, "i32": types.int32}
    scalars = {"int": types.int32, "long long": types.int64, "float": types.float32}
    tensors = {
        t.name: t for t in (*workload.inputs(), *workload.outputs(), *variant.scratch(workload, config))
    }

    def kind(argument: Argument | TensorMap) -> Any:
        if isinstance(argument, TensorMap):
            raise CompileError(f"{variant.key}: Numba kernels take no tensor maps")
        if isinstance(argument, Scalar):
            return scalars[argument.ctype]
        tensor = tensors[argument]
        element = stored[tensor.dtype]
        return types.Array(element, len(tensor.shape), "C") if tensor.shape else element

    launches = variant.launches(workload, config)
    signatures = {tuple(map(kind, launch.arguments)) for launch in launches}
    if len(signatures) != 1:
        raise CompileError(f"{variant.key}: all launches must pass arguments of the same types")
    return types.void(*signatures.pop())


def compile_numba_cuda(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device
) -> Binary:
    """Compile one configuration for the architecture of `device`.

    Raises:
        CompileError: with the first words of Numba or of the linker.
        MissingDependency: if Numba-CUDA or its linker is not installed.
    """
    key = key_numba_cuda(variant, workload, config, device)
    cubin, log = _link(_compile(variant, workload, config, device, "ltoir"), device.architecture)
    symbols = tuple(read_cubin(cubin)) * len(variant.launches(workload, config))
    return Binary(
        key=key,
        language="numba-cuda",
        target=device.architecture,
        payload=cubin,
        entries=symbols,
        resources=resources(cubin, symbols, spills(log)),
    )


def ptx_of_numba_cuda(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device
) -> str:
    """Return the PTX of one configuration, before the linker optimises it once more.

    Raises:
        CompileError: with the first words of Numba.
        MissingDependency: if Numba-CUDA or its linker is not installed.
    """
    numba_cuda_versions()
    ptx: str = _compile(variant, workload, config, device, "ptx")
    return ptx


def _compile(
    variant: NumbaCudaVariant[Any],
    workload: Workload,
    config: Config,
    device: Device,
    output: Literal["ltoir", "ptx"],
) -> Any:
    """Return what Numba makes of the kernel: LTO-IR as bytes, or PTX as text."""
    from numba import cuda
    from numba.core.errors import NumbaError

    try:
        code, _ = cuda.compile(
            variant.kernel(workload, config),
            _signature(variant, workload, config),
            device=False,
            abi="numba",
            cc=device.compute_capability,
            output=output,
            launch_bounds=_threads(variant, workload, config),
        )
    except NumbaError as error:
        raise CompileError(f"numba-cuda: {str(error).strip()[:2000]}") from error
    return code


def _link(ltoir: bytes, target: str) -> tuple[bytes, str]:
    """Return the cubin of one kernel, and the linker's log (which says what was spilled)."""
    from cuda.bindings import nvjitlink

    flags = [f"-arch={target}", "-lto", "-Xptxas=-v"]
    handle = None
    try:
        handle = nvjitlink.create(len(flags), flags)
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        raise CompileError(f"nvJitLink for {target}: {error}{_error_log(handle)}") from error
    finally:
        if handle is not None:
            nvjitlink.destroy(handle)
    return bytes(cubin), log.decode(errors="replace")


def _error_log(handle: int | None) -> str:
    from cuda.bindings import nvjitlink

    if handle is None:
        return ""
    log = bytearray(nvjitlink.get_error_log_size(handle))
    nvjitlink.get_error_log(handle, log)
    text = log.decode(errors="replace").strip(" \n\0")
    return f": {text[:500]}" if text else ""


def array_parameters(tensor: Tensor, address: int) -> tuple[int, ...]:
    """Return the 64-bit parameters that stand for one array argument in Numba's ABI.

    Source: numba.core.typing and the array data model of numba-cuda: meminfo, parent, item count, item size,
    data, then shape and strides in bytes.

    Args:
        tensor: The array, C-contiguous.
        address: Where it is on the device.
    """
    size = itemsize(tensor.dtype)
    strides = [size]
    for extent in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * extent)
    return (0, 0, tensor.size, size, address, *tensor.shape, *strides)
