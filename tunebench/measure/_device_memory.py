"""Tensors on a GPU; those that kernels write are poisoned and followed by a guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.measure._gpu import Gpu
from tunebench.measure.verify import GUARD_BYTES, POISON, InputSet
from tunebench.workload import Tensor

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """Tensors on the device, each in a separate allocation, kept while the next run needs the same tensors.

    Args:
        gpu: The GPU.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._addresses: dict[Tensor, int] = {}
        self._uploaded: InputSet | None = None

    def hold(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> dict[str, int]:
        """Allocate the tensors that kernels read and write, and free all others.

        Args:
            read: Tensors that kernels read.
            written: Tensors that kernels write; each is followed by a guard.

        Returns:
            Addresses by name, for tensors with a shape.
        """
        sizes = {tensor: tensor.nbytes for tensor in read if tensor.shape}
        sizes |= {tensor: tensor.nbytes + GUARD_BYTES for tensor in written}
        for tensor in [tensor for tensor in self._addresses if tensor not in sizes]:
            self._gpu.free(self._addresses.pop(tensor))
        for tensor, nbytes in sizes.items():
            if tensor not in self._addresses:
                self.forget_inputs()
                self._addresses[tensor] = self._gpu.allocate(nbytes)
        return {tensor.name: self._addresses[tensor] for tensor in sizes}

    def upload(self, inputs: InputSet) -> None:
        """Copy inputs to the device, unless they are there already."""
        if self._uploaded is inputs:
            return
        for tensor in inputs.workload.inputs():
            if tensor.shape:
                self._gpu.upload(self._addresses[tensor], np.ascontiguousarray(inputs.inputs[tensor.name]))
        self._uploaded = inputs

    def write(self, tensor: Tensor, start: int, values: Array) -> None:
        """Overwrite elements of a tensor, from the flat index `start`."""
        self._gpu.upload(self._addresses[tensor] + start * values.itemsize, np.ascontiguousarray(values))

    def forget_inputs(self) -> None:
        """Upload inputs again before the next run: a failed kernel may have overwritten them."""
        self._uploaded = None

    def poison(self, written: Iterable[Tensor]) -> None:
        """Overwrite tensors and their guards with poison."""
        for tensor in written:
            self._gpu.fill(self._addresses[tensor], POISON, tensor.nbytes + GUARD_BYTES)

    def download(self, tensor: Tensor) -> Array:
        """Return a copy of a tensor."""
        array = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self._gpu.download(self._addresses[tensor], array)
        return array

    def overrun(self, written: Iterable[Tensor]) -> str | None:
        """Return the name of a tensor that was written past its end since it was poisoned, or None."""
        guard = np.empty(GUARD_BYTES, np.uint8)
        for tensor in written:
            self._gpu.download(self._addresses[tensor] + tensor.nbytes, guard)
            if not (guard == POISON).all():
                return tensor.name
        return None
