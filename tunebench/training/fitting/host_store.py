"""Copies of memory to the host and back, at the same time as operations.

From a GPU, memory is copied on side streams into pinned memory. From a processor, threads copy it into files
that are mapped into memory. These files have no names, so nothing is left behind, however the process ends.

    host = store.copy_out(tensor)        # starts the copy
    store.wait(host)                     # before the memory of the tensor is used for something else
    memory = store.copy_in(host, device) # allocates, and starts the copy
    store.wait(memory)                   # before memory is read
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tunebench.errors import InputError

__all__ = ["FileStore", "HostStore", "PinnedStore", "memory_of", "view_of"]


class HostStore(Protocol):
    """Memory on the host for tensors of a device."""

    def copy_out(self, tensor: Tensor) -> Tensor:
        """Start to copy the memory of a tensor to the host.

        Args:
            tensor: A tensor on the device, of any layout. All of its memory is copied.

        Returns:
            The bytes on the host, of shape (bytes,). They are freed with the last reference.

        Raises:
            InputError: The host has no room.
        """

    def copy_in(self, host: Tensor, device: torch.device) -> Tensor:
        """Allocate memory on the device, and start to copy bytes from the host, after their copy to it.

        Args:
            host: Result of `copy_out`.
            device: The device.

        Returns:
            The bytes on the device, of shape (bytes,).
        """

    def wait(self, memory: Tensor) -> None:
        """Wait for the copy that `copy_out` or `copy_in` started when it returned this tensor.

        On a GPU, the current stream waits, not the host.

        Raises:
            InputError: The copy failed.
        """

    def abandon(self) -> None:
        """Forget all copies that nothing waits for any more, because the step ended early."""


def memory_of(tensor: Tensor) -> Tensor:
    """Return the bytes of the memory of a tensor, of shape (bytes,), without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def view_of(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Tensor:
    """Return a tensor in given memory.

    Args:
        memory: Any tensor that has the memory.
        dtype: Type of the elements.
        shape: Extents.
        strides: Strides in elements.
        offset: Place of the first element.
    """
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, shape, strides)


class FileStore:
    """Files under a folder, for tensors in the memory of a processor.

    Args:
        folder: The folder; it must exist.

    Raises:
        InputError: The folder does not exist, or is read-only.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[None]] = {}
        self._free: dict[int, list[mmap.mmap]] = {}
        """Mapped files that can be used again, by size."""
        self._out, self._in = (
            ThreadPoolExecutor(1, thread_name_prefix=f"tunebench-copy-{direction}")
            for direction in ("out", "in")
        )
        self._file().close()

    def copy_out(self, tensor: Tensor) -> Tensor:
        """Start to copy the memory of a tensor into a file (see `HostStore.copy_out`)."""
        memory = memory_of(tensor)
        host, mapped = self._mapped(memory.numel())

        def copy() -> None:
            host.copy_(memory)
            if mapped is not None:
                mapped.madvise(mmap.MADV_DONTNEED)  # the pages stay in the file, not in the process

        self._start(self._out, host, copy)
        return host

    def copy_in(self, host: Tensor, device: torch.device) -> Tensor:
        """Allocate memory and start to read a file into it (see `HostStore.copy_in`)."""
        memory = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        with self._lock:
            written = self._pending.get(host.data_ptr())

        def copy() -> None:
            if written is not None:
                written.result()
            memory.copy_(host)

        self._start(self._in, memory, copy)
        return memory

    def wait(self, memory: Tensor) -> None:
        """Wait for the copy that wrote a tensor (see `HostStore.wait`)."""
        with self._lock:
            pending = self._pending.pop(memory.data_ptr(), None)
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            raise self._failed(error) from error

    def abandon(self) -> None:
        """Forget all copies (see `HostStore.abandon`)."""
        with self._lock:
            self._pending.clear()

    def _start(self, threads: ThreadPoolExecutor, written: Tensor, copy: Callable[[], None]) -> None:
        work = [copy]  # taken from here, so that no thread holds its tensors once it has ended
        with self._lock:
            self._pending[written.data_ptr()] = threads.submit(lambda: work.pop()())

    def _mapped(self, size: int) -> tuple[Tensor, mmap.mmap | None]:
        """Return the bytes of a file without a name: one that nothing refers to any more, or a new one."""
        if not size:
            return torch.empty(0, dtype=torch.uint8), None
        with self._lock:
            free = self._free.setdefault(size, [])
            mapped = free.pop() if free else None
        mapped = mapped or self._new(size)
        owner = np.frombuffer(mapped, dtype=np.uint8)
        weakref.finalize(owner, free.append, mapped).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8), mapped

    def _new(self, size: int) -> mmap.mmap:
        with self._file() as file:
            try:
                # Reserves the bytes: writing to a mapped file on a full disk would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                return mmap.mmap(file.fileno(), size)
            except OSError as error:
                raise self._failed(error, size) from error

    def _file(self) -> Any:
        try:
            return tempfile.TemporaryFile(dir=self._folder)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError, size: int | None = None) -> InputError:
        failure = "cannot swap" if size is None else f"cannot swap {size} bytes"
        return InputError(f"{failure} to folder {self._folder}: {error.strerror or error}")


class PinnedStore:
    """Pinned memory of the host, for tensors of a CUDA device. Not run on a GPU."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._pending: dict[int, tuple[torch.cuda.Event, Tensor]] = {}
        """Event and source of the copy that writes each tensor, by address."""

    def copy_out(self, tensor: Tensor) -> Tensor:
        """Start to copy the memory of a tensor into pinned memory (see `HostStore.copy_out`)."""
        memory = memory_of(tensor)
        host = torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=True)
        self._start(host, memory, self._stream(memory.device, "out"))
        return host

    def copy_in(self, host: Tensor, device: torch.device) -> Tensor:
        """Allocate memory and start to copy pinned memory into it (see `HostStore.copy_in`)."""
        memory = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        stream = self._stream(device, "in")
        if host.numel() and (pending := self._pending.get(host.data_ptr())) is not None:
            stream.wait_event(pending[0])
        self._start(memory, host, stream)
        return memory

    def wait(self, memory: Tensor) -> None:
        """Let the current stream wait for the copy that wrote a tensor (see `HostStore.wait`)."""
        pending = self._pending.pop(memory.data_ptr(), None)
        if pending is not None:
            event, source = pending
            device = source.device if source.is_cuda else memory.device
            torch.cuda.current_stream(device).wait_event(event)

    def abandon(self) -> None:
        """Forget all copies (see `HostStore.abandon`)."""
        self._pending.clear()

    def _start(self, written: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        # The memory may still be written, or may have been freed to the current stream with work in flight.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            written.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._pending[written.data_ptr()] = event, source

    def _stream(self, device: torch.device, direction: str) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]
