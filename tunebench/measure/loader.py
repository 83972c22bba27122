"""Loading of cubins on one GPU, and preparation of launches."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from tunebench.errors import DeviceError, MissingDependency
from tunebench.fault import LaunchRefused
from tunebench.measure._cache_flush import READ_MEMORY, READ_PTX
from tunebench.measure.direct_launch import DirectLaunch, MappedTensor, encode
from tunebench.variant import Launch

__all__ = ["CudaError", "CudaRefused", "KernelLoader", "require_cuda_core", "translated"]

SMEM_WITHOUT_ASKING_BYTES = 48 * 1024
"""Shared memory per block that needs no opt-in of the kernel, in bytes.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""


class CudaError(DeviceError):
    """A CUDA call failed; the message begins with the driver's name of the error."""


class CudaRefused(CudaError, LaunchRefused):
    """A launch requests more than the device has."""


def require_cuda_core() -> None:
    """Raise an error unless the packages that launch kernels are installed.

    Raises:
        MissingDependency: cuda-core is missing, or too old.
    """
    try:
        from cuda.bindings import driver  # noqa: F401
        from cuda.core import Device, EventOptions, LaunchConfig, ObjectCode, launch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("cuda-core (1.0 or later)", "cuda") from error


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Translate errors of cuda.core to `CudaError`.

    Args:
        doing: The operation, for the message.
    """
    from cuda.core._utils.cuda_utils import CUDAError  # it has no public name

    try:
        yield
    except CUDAError as error:
        raise CudaError(f"{error} ({doing})") from error


class KernelLoader:
    """Loaded kernels of one GPU; enqueues nothing and makes no context current.

    Args:
        ordinal: Position in the driver's order.

    Raises:
        CudaError: From every method, if a CUDA call fails.
    """

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self._driver, self._ordinal = driver, ordinal

    def load(self, cubin: bytes, symbols: Sequence[str]) -> tuple[Any, ...]:
        """Return the kernels of a cubin, which is unloaded when the last of them is dropped.

        Args:
            cubin: Machine code.
            symbols: Symbols of the kernels.
        """
        from cuda.core import ObjectCode

        with translated(f"loading {', '.join(dict.fromkeys(symbols))}"):
            code = ObjectCode.from_cubin(cubin)
            kernels = {symbol: code.get_kernel(symbol) for symbol in dict.fromkeys(symbols)}
        return tuple(kernels[symbol] for symbol in symbols)

    def _load_reader(self) -> Any:
        """Return the kernel that flushes the last-level cache, compiled by the driver."""
        from cuda.core import ObjectCode

        with translated(f"loading {READ_MEMORY.entry}"):
            return ObjectCode.from_ptx(READ_PTX).get_kernel(READ_MEMORY.entry)

    def direct(self, kernel: Any, launch: Launch, arguments: tuple[Any, ...]) -> DirectLaunch:
        """Prepare a launch through the driver API.

        Args:
            kernel: From `load`.
            launch: Grid, block and shared memory.
            arguments: One per parameter (see `Gpu.prepare`).
        """
        self._check_parameters(kernel, launch, arguments)
        self._allow_smem(kernel, launch.smem_bytes)
        parameters = [self.parameter_bytes(argument) for argument in arguments]
        return DirectLaunch(self._driver, kernel, launch, self._grid(launch), parameters)

    def _grid(self, launch: Launch) -> tuple[int, int, int]:
        if not launch.blocks_per_sm:
            return launch.grid
        count = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return launch.grid_on(int(self._call("cuDeviceGetAttribute", count, self._ordinal)))

    def parameter_bytes(self, argument: Any) -> bytes:
        """Return the bytes of a parameter; tensor maps are encoded."""
        if isinstance(argument, int):
            return struct.pack("<Q", argument)
        if not isinstance(argument, MappedTensor):
            data: bytes = argument.tobytes()
            return data
        status, encoded = encode(self._driver, argument)
        if int(status):
            raise CudaError(f"{status.name} (encoding {argument.tensor_map})")
        return encoded

    def _check_parameters(self, kernel: Any, launch: Launch, arguments: tuple[Any, ...]) -> None:
        """Raise an error if the arguments differ in size from the kernel's parameters."""
        try:
            with translated("reading the kernel's parameters"):
                takes = [int(parameter.size) for parameter in kernel.arguments_info]
        except NotImplementedError:  # not supported by drivers before 12.4
            return
        passed = [8 if isinstance(argument, int) else int(argument.nbytes) for argument in arguments]
        if takes != passed:
            name = launch.entry or "the kernel"
            raise CudaError(f"{name} has parameters of {takes} bytes, but the launch passes {passed}")

    def _allow_smem(self, kernel: Any, dynamic_bytes: int) -> None:
        """Allow a kernel the dynamic shared memory that it requests."""
        attributes = self._driver.CUfunction_attribute
        handle = self._driver.CUkernel(int(kernel.handle))
        static_bytes = int(
            self._call(
                "cuKernelGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, self._ordinal
            )
        )
        if static_bytes + dynamic_bytes <= SMEM_WITHOUT_ASKING_BYTES:
            return
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        limit = int(self._call("cuDeviceGetAttribute", attribute, self._ordinal))
        if static_bytes + dynamic_bytes > limit:
            asked = f"{static_bytes} + {dynamic_bytes} bytes of shared memory"
            raise CudaRefused(f"a block requests {asked}, static and dynamic; the device allows {limit}")
        largest = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuKernelSetAttribute", largest, dynamic_bytes, handle, self._ordinal)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver, and return its result without the status."""
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status):
            _, words = self._driver.cuGetErrorString(status)
            raise CudaError(f"{status.name}: {(words or b'').decode()} ({name})")
        return values[0] if values else None
