"""Inputs and outputs of several launches in memory that two processes share.

One process writes the inputs and reads the outputs, the other runs a kernel between them. Each launch has a
slot of its own: all inputs, and all outputs, each followed by a guard.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.measure.verify import GUARD_BYTES, POISON
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["SlotArena", "slot_bytes"]

_ALIGNMENT = 64
"""Alignment of tensors, in bytes: a cache line."""


def _offsets(workload: Workload) -> tuple[dict[Tensor, int], int]:
    """Return the offset of each tensor in a slot, and the size of a slot, in bytes."""
    offsets, end = {}, 0
    outputs = workload.outputs()
    for tensor in (*workload.inputs(), *outputs):
        offsets[tensor] = end
        end += tensor.nbytes + (GUARD_BYTES if tensor in outputs else 0)
        end = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def slot_bytes(workload: Workload) -> int:
    """Return the size of a slot, in bytes."""
    return _offsets(workload)[1]


class SlotArena:
    """Slots for launches of one workload.

    Args:
        workload: The workload.
        slots: Number of slots.
        descriptor: File descriptor of the memory that another process made; None makes it. The arena does
            not close it.

    Attributes:
        descriptor: File descriptor of the memory.
        slots: Number of slots.
    """

    def __init__(self, workload: Workload, slots: int, descriptor: int | None = None) -> None:
        self._inputs, self._outputs = workload.inputs(), workload.outputs()
        self._offsets, self._slot_bytes = _offsets(workload)
        self.slots = slots
        nbytes = slots * self._slot_bytes
        self.descriptor = _memory(nbytes) if descriptor is None else descriptor
        self._bytes = np.frombuffer(mmap.mmap(self.descriptor, nbytes), np.uint8)

    def inputs(self, slot: int) -> dict[str, Array]:
        """Return the inputs of a slot by name, without a copy."""
        return {tensor.name: self._array(slot, tensor) for tensor in self._inputs}

    def outputs(self, slot: int) -> dict[str, Array]:
        """Return the outputs of a slot by name, without a copy."""
        return {tensor.name: self._array(slot, tensor) for tensor in self._outputs}

    def bytes_of(self, slot: int) -> Array:
        """Return all bytes of a slot, without a copy."""
        return self._bytes[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def poison(self, slot: int) -> None:
        """Overwrite the outputs of a slot and their guards with poison."""
        for tensor in self._outputs:
            self._extent(slot, tensor, tensor.nbytes + GUARD_BYTES)[:] = POISON

    def overrun(self, slot: int) -> str | None:
        """Return the name of an output that was written past its end since it was poisoned, or None."""
        for tensor in self._outputs:
            if not (self._extent(slot, tensor, tensor.nbytes + GUARD_BYTES)[tensor.nbytes :] == POISON).all():
                return tensor.name
        return None

    def _array(self, slot: int, tensor: Tensor) -> Array:
        values = self._extent(slot, tensor, tensor.nbytes).view(numpy_dtype(tensor.dtype))
        return values.reshape(tensor.shape)

    def _extent(self, slot: int, tensor: Tensor, nbytes: int) -> Array:
        start = slot * self._slot_bytes + self._offsets[tensor]
        return self._bytes[start : start + nbytes]


def _memory(nbytes: int) -> int:
    """Return the file descriptor of new memory that no process can shrink, where the system supports that."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), nbytes)
            return os.dup(file.fileno())
    descriptor = os.memfd_create("tunebench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
