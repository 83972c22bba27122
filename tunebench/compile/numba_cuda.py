"""Compilation by Numba-CUDA to a cubin, through LTO-IR and nvJitLink: for any architecture, without a GPU.

The cubin is launched like any other. Numba's own dispatcher is not used: it takes tens of microseconds per
call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Literal

from tunebench.binary.compiled import Binary, CompileError
from tunebench.binary.cubin import read_cubin, resources, spills
from tunebench.binary.ptxas_note import ptxas_notes
from tunebench.compile.cache import binary_key
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import BrokenDependency, MissingDependency, describe_error
from tunebench.space import Config
from tunebench.variant import OLDEST_CC, Argument, NumbaCudaVariant, Scalar, TensorMap
from tunebench.workload import Tensor, Workload

__all__ = [
    "array_parameters",
    "carried_key_numba_cuda",
    "compile_numba_cuda",
    "key_numba_cuda",
    "numba_cuda_versions",
    "numpy_names_of_numba_cuda",
    "ptx_of_numba_cuda",
    "require_numba_cuda",
]

_INCOMPATIBLE = (
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What packages raise that were written for other versions of one another."""


@functools.cache
def numba_cuda_versions() -> str:
    """Return the versions of all tools between a Python kernel and its cubin.

    Raises:
        MissingDependency: One of them is not installed.
        BrokenDependency: Their versions do not work together.
    """
    try:
        # Without the package numba-cuda, numba provides an older module that lacks LTO-IR output.
        compiler = metadata.version("numba-cuda")
        with numpy_names_of_numba_cuda():
            import numba.cuda
        from cuda.bindings import nvjitlink

        linker = ".".join(map(str, nvjitlink.version()))
    except (ModuleNotFoundError, RuntimeError) as error:  # nvJitLink is loaded at its first use
        raise MissingDependency("numba-cuda or nvJitLink", "cuda") from error
    except _INCOMPATIBLE as error:
        raise _broken(error) from error
    try:
        nvvm = metadata.version("nvidia-nvvm")
    except metadata.PackageNotFoundError:
        nvvm = "of the toolkit"
    return f"numba {numba.__version__}, numba-cuda {compiler}, nvvm {nvvm}, nvjitlink {linker}"


@functools.cache
def require_numba_cuda() -> None:
    """Compile and link a kernel of one line, with every package that a kernel needs.

    Installed packages may not fit one another: numba-cuda limits the versions of numba and numpy only from
    below.

    Raises:
        MissingDependency: One of the packages is not installed.
        BrokenDependency: Their versions do not work together.
    """
    numba_cuda_versions()
    from numba import cuda, types
    from numba.core.errors import NumbaError

    if getattr(cuda, "implementation", None) != "NVIDIA":
        raise BrokenDependency(
            f"numba-cuda {metadata.version('numba-cuda')}",
            "cuda",
            f"is installed, but Numba imports its own older module {cuda.__file__}",
            "install numba-cuda where this Python runs .pth files: pip install --force-reinstall numba-cuda",
        )

    def store(values: Any) -> None:
        values[0] = 1

    signature = types.void(types.Array(types.float32, 1, "C"))
    try:
        with numpy_names_of_numba_cuda():
            code, _ = cuda.compile(store, signature, device=False, abi="numba", cc=OLDEST_CC, output="ltoir")
        _link(code, "sm_{}{}".format(*OLDEST_CC))
    except (CompileError, NumbaError, *_INCOMPATIBLE) as error:
        raise _broken(error) from error


@contextlib.contextmanager
def numpy_names_of_numba_cuda() -> Iterator[None]:
    """Let numba-cuda find `numpy.row_stack` while it is imported.

    numba-cuda 0.30 registers an implementation of it, but NumPy 2.5 has no such function. The name is removed
    again, so that programs and kernels do not see it.
    """
    import numpy

    def row_stack(*_: Any) -> None:
        raise AttributeError("NumPy 2.5 and later have no row_stack")

    absent = not hasattr(numpy, "row_stack")
    if absent:
        vars(numpy)["row_stack"] = row_stack
    try:
        yield
    finally:
        if absent:
            del vars(numpy)["row_stack"]


def _broken(error: Exception) -> BrokenDependency:
    """Return the error that names the packages which do not work together, and what to install."""
    numpy, numba = metadata.version("numpy"), metadata.version("numba")
    series = ".".join(numpy.split(".")[:2])
    return BrokenDependency(
        f"numba-cuda {metadata.version('numba-cuda')}",
        "cuda",
        f"does not work with numba {numba} and numpy {numpy} ({describe_error(error)})",
        f"run: pip install --upgrade numba-cuda numba; without a newer version: pip install 'numpy<{series}'",
    )


def key_numba_cuda(variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the cache key of what reaches Numba-CUDA for a configuration on an architecture.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; only its architecture counts.

    Raises:
        MissingDependency: Numba-CUDA or its linker is not installed.
    """
    return binary_key(
        *_key_parts(variant, workload, config, device),
        numba_cuda_versions(),
        repr(_signature(variant, workload, config)),
    )


def carried_key_numba_cuda(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device
) -> str:
    """Return the key of a carried binary: what reaches Numba-CUDA, whatever its version.

    Numba need not be installed: types of arguments stand in for the signature (see `key_numba_cuda`).
    """
    tensors = variant.tensors(workload, config)

    def kind(argument: Argument | TensorMap) -> str:
        if isinstance(argument, Scalar):
            return str(argument.number().dtype)
        tensor = tensors[argument.tensor if isinstance(argument, TensorMap) else argument]
        return f"{tensor.dtype}[{len(tensor.shape)}]"

    (launch, *_) = variant.launches(workload, config)
    return binary_key("carried", *_key_parts(variant, workload, config, device), *map(kind, launch.arguments))


def _key_parts(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device
) -> tuple[str, ...]:
    return (
        "numba-cuda",
        variant.revision(workload, config),
        f"{_threads(variant, workload, config)} threads, {len(variant.launches(workload, config))} launches",
        device.architecture,
        # Besides `config`, `kernel` can close over these dimensions of the workload only.
        ",".join(f"{name}={v}" for name, v in vars(workload).items() if isinstance(v, str | bool | float)),
    )


def _threads(variant: NumbaCudaVariant[Any], workload: Workload, config: Config) -> int:
    blocks = [launch.block for launch in variant.launches(workload, config)]
    return max(x * y * z for x, y, z in blocks)


def _signature(variant: NumbaCudaVariant[Any], workload: Workload, config: Config) -> Any:
    """Return the kernel's signature: tensors as C-contiguous arrays, scalars by value.

    Raises:
        CompileError: The launches, which share one kernel, pass arguments of different types.
    """
    import numba
    from numba import types
    from numba.cuda.types import bfloat16

    stored = {"f32": types.float32, "f16": types.float16, "bf16": bfloat16, "i32": types.int32}
    stored |= {"i64": types.int64, "bool": types.boolean, "i8": types.int8}
    tensors = variant.tensors(workload, config)

    def kind(argument: Argument | TensorMap) -> Any:
        if isinstance(argument, TensorMap):
            raise CompileError(
                f"{variant.key}: Numba kernels accept no tensor maps; write the variant in CUDA C++ instead"
            )
        if isinstance(argument, Scalar):
            return numba.typeof(argument.number())
        tensor = tensors[argument]
        element = stored[tensor.dtype]
        return types.Array(element, len(tensor.shape), "C") if tensor.shape else element

    launches = variant.launches(workload, config)
    signatures = {tuple(map(kind, launch.arguments)) for launch in launches}
    if len(signatures) != 1:
        raise CompileError(
            f"{variant.key}: all launches must pass arguments of the same types, since they share one kernel"
        )
    return types.void(*signatures.pop())


def compile_numba_cuda(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device
) -> Binary:
    """Compile one configuration for the architecture of `device`.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        CompileError: Numba or the linker failed; the message is shortened.
        MissingDependency: Numba-CUDA or its linker is not installed, or does not work.
    """
    require_numba_cuda()
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
        notes=ptxas_notes(log),
        compiler=numba_cuda_versions(),
    )


def ptx_of_numba_cuda(
    variant: NumbaCudaVariant[Any], workload: Workload, config: Config, device: Device
) -> str:
    """Return the PTX of one configuration, before the linker's optimisations.

    Args:
        variant: The kernel variant.
        workload: The workload to compile for.
        config: A valid point of the variant's space.
        device: The target; it need not be on this machine.

    Raises:
        CompileError: Numba rejected the kernel.
        MissingDependency: Numba-CUDA or its linker is not installed, or does not work.
    """
    require_numba_cuda()
    ptx: str = _compile(variant, workload, config, device, "ptx")
    return ptx


def _compile(
    variant: NumbaCudaVariant[Any],
    workload: Workload,
    config: Config,
    device: Device,
    output: Literal["ltoir", "ptx"],
) -> Any:
    """Compile the kernel with Numba and return LTO-IR as bytes, or PTX as text."""
    from numba import cuda
    from numba.core.errors import NumbaError

    kernel = variant.kernel(workload, config)
    try:
        code, _ = cuda.compile(
            kernel,
            _signature(variant, workload, config),
            device=False,
            abi="numba",
            cc=device.compute_capability,
            output=output,
            launch_bounds=_threads(variant, workload, config),
        )
    # numba-cuda raises AttributeError for a name that the installed NumPy does not have.
    except (NumbaError, AttributeError) as error:
        raise CompileError(f"numba-cuda: {str(error).strip()[:2000]}") from error
    return code


def _link(ltoir: bytes, target: str) -> tuple[bytes, str]:
    """Return the cubin of one kernel, and the linker's log, which lists spills and notes."""
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
    """Return the 64-bit parameters of one array argument in Numba's ABI.

    Args:
        tensor: The array, C-contiguous.
        address: Its address on the device.

    Source: numba.core.typing and the array data model of numba-cuda: meminfo, parent, item count, item size,
    data, then shape and strides in bytes.
    """
    size = itemsize(tensor.dtype)
    strides = [size]
    for extent in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * extent)
    return (0, 0, tensor.size, size, address, *tensor.shape, *strides)
