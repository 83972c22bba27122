"""GPU kernels on a framework's memory and stream."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tunebench._lazy import np
from tunebench.binary.compiled import Binary
from tunebench.dispatch.kernel import BoundKernel
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.measure.cuda import kernel_arguments
from tunebench.measure.direct_launch import DirectLaunch, MappedTensor
from tunebench.measure.loader import CudaError, KernelLoader, require_cuda_core
from tunebench.space import Config
from tunebench.variant import Argument, GpuVariant, NumbaCudaVariant, Scalar, TensorMap
from tunebench.workload import Tensor, Workload

__all__ = ["GpuKernel"]

ALIGNMENT = 256
"""Alignment of each scratch tensor in bytes: that of a driver allocation."""
_DATA_WORD = 4
"""Index of the address among the words of a Numba array argument."""

Change = tuple[int, int, Callable[[Any], bytes]]
"""A parameter that differs between calls: its index, the index of its tensor, and its encoder."""


class GpuKernel(BoundKernel):
    """A kernel on addresses; it does not wait and may be captured in a CUDA graph.

    The primary context of the device must be current, as it is where a framework's tensors are.

    Args:
        workload: The workload.
        variant: The variant.
        config: Its configuration.
        binary: The compiled binary.
        ordinal: Index of the GPU, in the driver's order.

    Attributes:
        scratch_bytes: Memory that each call needs in addition to its tensors.

    Raises:
        MissingDependency: if cuda-core is not installed.
        CudaError: if the driver refuses the kernels.
    """

    def __init__(
        self, workload: Workload, variant: GpuVariant[Any], config: Config, binary: Binary, ordinal: int
    ) -> None:
        super().__init__(workload, variant, config)
        require_cuda_core()
        self._loader = KernelLoader(ordinal)
        self._kernels = self._loader.load(binary.payload, binary.entries)
        self._launches = binary.launches(variant.launches(workload, config))
        self._named: dict[str, Tensor] = {tensor.name: tensor for tensor in self.tensors}
        self._offsets, self.scratch_bytes = [], 0
        for tensor in variant.scratch(workload, config):
            self._named[tensor.name] = tensor
            self._offsets.append(self.scratch_bytes)
            self.scratch_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._changes = tuple(self._changes_of(launch.arguments) for launch in self._launches)
        self._local = threading.local()
        self._prepared()  # fail at construction if the driver refuses the kernels

    def run(self, *tensors: Any, stream: int = 0, scratch: int = 0, **options: Any) -> None:
        """Enqueue the kernels.

        Args:
            tensors: Address of each tensor, a multiple of 16; the number of a tensor without a shape.
            stream: Handle of the stream.
            scratch: Address of `scratch_bytes` of memory, aligned to 256 bytes.
            options: Arguments of other kernel classes; ignored.

        Raises:
            CudaError: if the driver refuses the launch.
        """
        values = (*tensors, *(scratch + offset for offset in self._offsets))
        for launch, changes in zip(self._prepared(), self._changes, strict=True):
            for index, position, in_bytes in changes:
                launch.replace(index, in_bytes(values[position]))
            status = launch(stream)
            if int(status):
                raise CudaError(f"cannot launch {self.variant.key}: {status.name}")

    def __call__(self, *addresses: int | float, stream: int = 0, scratch: int = 0) -> None:
        """Enqueue the kernels after checking the arguments.

        Args:
            addresses: As the tensors of `run`.
            stream: Handle of the stream.
            scratch: Address of the scratch memory.

        Raises:
            InputError: if the number of tensors is wrong, or required scratch memory is missing.
            CudaError: if the driver refuses the launch.
        """
        self._count(len(addresses))
        if self.scratch_bytes and not scratch:
            raise InputError(
                f"{self.variant.key} needs {self.scratch_bytes} bytes of scratch memory; pass its address"
            )
        self.run(*addresses, stream=stream, scratch=scratch)

    def _prepared(self) -> Sequence[DirectLaunch]:
        """Return this thread's launches; each call overwrites their parameters."""
        launches: list[DirectLaunch] | None = getattr(self._local, "launches", None)
        if launches is None:
            launches = [
                self._loader.direct(kernel, launch, self._placeholders(launch.arguments))
                for kernel, launch in zip(self._kernels, self._launches, strict=True)
            ]
            self._local.launches = launches
        return launches

    def _placeholders(self, arguments: Sequence[Argument | TensorMap]) -> tuple[Any, ...]:
        """Return parameters of the right sizes with dummy addresses."""
        assert isinstance(self.variant, GpuVariant)
        nowhere = dict.fromkeys(self._named, ALIGNMENT)
        zeros = {t.name: np.zeros((), numpy_dtype(t.dtype)) for t in self._named.values() if not t.shape}
        return kernel_arguments(self.variant, arguments, self._named, nowhere, zeros)

    def _changes_of(self, arguments: Sequence[Argument | TensorMap]) -> tuple[Change, ...]:
        changes: list[Change] = []
        index, names = 0, list(self._named)
        for argument in arguments:
            if isinstance(argument, Scalar):
                index += 1
                continue
            name = argument.tensor if isinstance(argument, TensorMap) else argument
            tensor, position = self._named[name], names.index(name)
            if isinstance(argument, TensorMap):
                changes.append((index, position, self._encoding(argument)))
            elif not tensor.shape:
                changes.append((index, position, _number(tensor)))
            elif isinstance(self.variant, NumbaCudaVariant):
                changes.append((index + _DATA_WORD, position, _address))
                index += _DATA_WORD + 2 * len(tensor.shape)
            else:
                changes.append((index, position, _address))
            index += 1
        return tuple(changes)

    def _encoding(self, tensor_map: TensorMap) -> Callable[[int], bytes]:
        """Return an encoder of a tensor map for an address, with a cache of the last ones."""
        encodings: dict[int, bytes] = {}

        def encoded(address: int) -> bytes:
            encoding = encodings.get(address)
            if encoding is None:
                if len(encodings) >= 64:
                    encodings.clear()
                encoding = encodings[address] = self._loader.parameter_bytes(
                    MappedTensor(tensor_map, address)
                )
            return encoding

        return encoded


def _address(value: int) -> bytes:
    return struct.pack("<Q", value)


def _number(tensor: Tensor) -> Callable[[float], bytes]:
    stored = numpy_dtype(tensor.dtype)
    return lambda value: np.asarray(value, stored).tobytes()
