"""Inputs and outputs of several launches in memory that two processes share.

One process writes the inputs and reads the outputs, the other runs a kernel between them. Each launch has a
slot of its own: all inputs, and all outputs, each followed by a guard.

Large tensors have huge pages, as NumPy's arrays have. With small pages, a kernel that moves 32 MB takes 1.3
to 1.5 times as long, because the addresses of 8192 pages are not cached either.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import sys
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.measure.verify import GUARD_BYTES, POISON
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["SlotArena", "gives_huge_pages", "slot_bytes"]

_ALIGNMENT = 64
"""Alignment of tensors, in bytes: a cache line."""

HUGE_PAGE_BYTES = 2 << 20
LEAST_HUGE_BYTES = 4 << 20
"""Size of a tensor from which it gets huge pages, in bytes. Source: NumPy, `alloc.c`."""
_MADV_COLLAPSE = 25
"""Source: madvise(2): it acts on shared memory whatever the setting for that is, from Linux 6.1 on."""


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
        descriptor: File descriptor of the memory that another process made, which the caller closes; None
            makes the memory.

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
        self._bytes = _mapped(self.descriptor, nbytes)
        if descriptor is None:
            weakref.finalize(self, os.close, self.descriptor)  # it would keep the memory
            if gives_huge_pages():
                self._request_huge_pages()

    def inputs(self, slot: int) -> dict[str, Array]:
        """Return the inputs of a slot by name, without a copy."""
        return {tensor.name: self._array(slot, tensor) for tensor in self._inputs}

    def outputs(self, slot: int) -> dict[str, Array]:
        """Return the outputs of a slot by name, without a copy."""
        return {tensor.name: self._array(slot, tensor) for tensor in self._outputs}

    def warm(self, slot: int) -> None:
        """Read a slot, so that the caches contain what they can hold of it."""
        self.bytes_of(slot).view(np.uint64).max()

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

    def _request_huge_pages(self) -> None:
        """Replace the pages of large tensors by huge ones; where the system has none left, they stay."""
        for slot in range(self.slots):
            for tensor in (*self._inputs, *self._outputs):
                if tensor.nbytes >= LEAST_HUGE_BYTES:
                    _collapse(self._extent(slot, tensor, tensor.nbytes))

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


def _mapped(descriptor: int, nbytes: int) -> Array:
    """Return the bytes of shared memory, from an address at which a huge page may begin."""
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    # `mmap` takes no address: a reservation, which it unmaps at the end, contains one that is aligned.
    reserved = np.frombuffer(
        mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    start = -reserved.ctypes.data % HUGE_PAGE_BYTES
    place = reserved[start : start + nbytes]
    if _map_at(place.ctypes.data, nbytes, descriptor) != place.ctypes.data:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return place


def _map_at(address: int, nbytes: int, descriptor: int) -> int | None:
    """Map shared memory over what is at an address, and return the address."""
    fixed = 0x10  # MAP_FIXED, which the module `mmap` lacks
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed
    mapped: int | None = function(address, nbytes, protection, flags, descriptor, 0)
    return mapped


def gives_huge_pages() -> bool:
    """Return whether the system gives huge pages to programs that ask for them, as NumPy does."""
    with contextlib.suppress(OSError):
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
        return "[never]" not in setting
    return False


def _collapse(extent: Array) -> None:
    """Replace the pages that lie within bytes by huge ones; where that fails, small ones serve."""
    begin = -extent.ctypes.data % HUGE_PAGE_BYTES
    pages = extent[begin : begin + (extent.size - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES]
    pages[:: mmap.PAGESIZE] = 0  # only memory in use is collapsed
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(pages.ctypes.data, pages.size, _MADV_COLLAPSE)
