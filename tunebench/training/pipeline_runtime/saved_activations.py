"""Storages that autograd saves in a forward pass, which can leave the device and come back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedActivations", "as_bytes", "storages_of"]


class SavedActivations:
    """Storages that autograd saved for the backward pass of one micro-batch on one stage.

    Views of a storage count once. Storages that outlive the micro-batch, such as those of parameters, are not
    among them. Autograd owns the storages: each is freed after the last operation that needs it.

    Args:
        kept: Identities of the storages that outlive the micro-batch (see `storages_of`).
    """

    def __init__(self, not_evicted: frozenset[int]) -> None:
        self._kept = not_evicted
        self._open: dict[int, _Saved] = {}
        self._saved: list[weakref.ref[_Saved]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add what autograd saves within the context."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._saved = [weakref.ref(saved) for saved in self._open.values()]
        self._open.clear()

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each storage that autograd still needs."""
        return tuple(saved.nbytes for saved in self._alive())

    def tensors(self) -> list[Tensor]:
        """Return each storage as bytes."""
        return [as_bytes(saved.present()) for saved in self._alive()]

    def drop(self) -> None:
        """Release the storages; they must be replaced before the backward pass."""
        for saved in self._alive():
            saved.storage = None

    def replace(self, tensors: list[Tensor]) -> None:
        """Set the storages to those of other tensors with the same bytes."""
        for saved, tensor in zip(self._alive(), tensors, strict=True):
            saved.storage = tensor.untyped_storage()

    def _alive(self) -> list[_Saved]:
        return [saved for reference in self._saved if (saved := reference()) is not None]

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        identity = _identity(storage)
        if identity in self._kept or not storage.nbytes():
            return tensor
        saved = self._open.get(identity)
        if saved is None:
            saved = self._open[identity] = _Saved(storage)
        version = tensor._version
        return _View(
            saved=saved,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=tensor.stride(),
            offset=tensor.storage_offset(),
            source=weakref.ref(tensor),
            version=version,
        )


class _Saved:
    """A storage that autograd saved, or none while it is evicted."""

    __slots__ = ("__weakref__", "nbytes", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.nbytes: int = storage.nbytes()

    def present(self) -> torch.UntypedStorage:
        """Return the storage."""
        if self.storage is None:
            raise RuntimeError("activations are used while they are evicted")
        return self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A tensor of a saved storage."""

    saved: _Saved
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    source: weakref.ref[Tensor]
    version: int


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    source = packed.source()
    if source is not None and source._version != packed.version:
        raise RuntimeError("a tensor needed for the gradient was changed in place after it was saved")
    storage = packed.saved.present()
    tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return tensor.set_(storage, packed.offset, packed.shape, packed.strides)


def storages_of(values: Iterable[Any]) -> frozenset[int]:
    """Return numbers that identify the storages of the tensors among some values, while these exist."""
    return frozenset(_identity(tensor.untyped_storage()) for tensor in values if isinstance(tensor, Tensor))


def _identity(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes (nbytes,) u8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose storages can be evicted."""
