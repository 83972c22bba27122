"""The tensors of an iteration that is recorded: objects of Python, contents of memory, and storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from tunebench.training.coexecution._call import Constant, Operation, TensorSpec, Value, Variable

__all__ = [
    "Geometry",
    "NotUnderstoodError",
    "Reference",
    "Tensors",
    "dropping",
    "has_foreign_view",
    "has_program_reference",
]

_OWN_USES = 2
"""Uses of a storage that a single tensor has: the tensor, and Python's object of the storage."""


class NotUnderstoodError(Exception):
    """A call that can only run as in eager mode."""


class Reference(weakref.ref[Tensor]):
    """A weak reference of this package; those of other types belong to the program."""

    __slots__ = ()


_UNVIEWED: dict[int, tuple[Reference, int]] = {}
"""Weights, by identity, of whose storage no other use was seen once: a reference and the storage."""


def has_foreign_view(tensor: Tensor) -> bool:
    """Return whether other code may read or write the memory of a tensor.

    NumPy and buffers fix the size of a storage, and another process shares it. DLPack uses the storage of a
    weight once more. A view that the program keeps does so, too, and is treated alike. Threads of torch can
    hold views of a weight for a while, so that other uses count until the weight is seen without one.
    """
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.is_shared():
        return True
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    reference, key = _UNVIEWED.get(id(tensor), (None, 0))
    if reference is not None and reference() is tensor and key == storage._cdata:
        return False
    if torch._C._storage_Use_Count(storage._cdata) > _OWN_USES:
        return True
    identity = id(tensor)
    _UNVIEWED[identity] = (Reference(tensor, lambda _: _forget(identity)), storage._cdata)
    return False


def _forget(identity: int) -> None:
    _UNVIEWED.pop(identity, None)


def has_program_reference(tensor: Tensor) -> bool:
    """Return whether the program holds a weak reference to a tensor."""
    return any(type(reference) is not Reference for reference in weakref.getweakrefs(tensor))


_WATCHERS: list[Callable[[Tensor], None]] = []


def _notice_drop(tensor: Tensor) -> None:
    for watcher in list(_WATCHERS):
        watcher(tensor)


@contextmanager
def dropping(watcher: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with every tensor object that is dropped, while its weak references are alive."""
    _WATCHERS.append(watcher)
    torch.Tensor.__del__ = _notice_drop
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)
        if not _WATCHERS:
            del torch.Tensor.__del__


class Geometry(NamedTuple):
    """Which elements of a storage a tensor holds.

    Attributes:
        storage: Identity of the storage.
        shape: Its sizes.
        stride: Its strides.
        offset: Offset into the storage in elements.
        dtype: Its type.
    """

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Tensors:
    """Variables (tensor objects of the program) and values (geometries of a storage), by index.

    Attributes:
        specs: What is known about each variable.
        geometry: The geometry of each value.
        given: Tensors with the memory of the given ones, by variable; the given ones can be dropped.
        saved: By identity of a given storage: the storage, and its contents before the iteration wrote it.

    Args:
        saves: Whether such contents are saved.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self._saves = saves
        self.specs: list[TensorSpec] = []
        self.geometry: list[Geometry] = []
        self.given: dict[int, Tensor] = {}
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._objects: list[Reference] = []
        self._variables: dict[int, int] = {}
        self._values: dict[Geometry, int] = {}
        self._bases: dict[int, int] = {}
        self._roots: dict[int, tuple[StorageWeakRef, int]] = {}
        self._shared: set[int] = set()

    @property
    def size(self) -> int:
        """Return a number that all indices are smaller than."""
        return max(len(self.specs), len(self.geometry))

    def release(self) -> None:
        """Release given tensors and saved contents."""
        self.given.clear()
        self.saved.clear()

    # -- variables -------------------------------------------------------------------------------------------

    def object(self, index: int) -> Tensor | None:
        """Return the object of a variable; None if it is gone."""
        return self._objects[index]()

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the variable that an object is, or None."""
        index = self._variables.get(id(tensor))
        return index if index is not None and self._objects[index]() is tensor else None

    def rename(self, tensor: Tensor, index: int) -> None:
        """Note that another object is a variable now."""
        self._variables[id(tensor)] = index
        self._objects[index] = Reference(tensor)

    def variable(
        self, tensor: Tensor, specs: dict[int, TensorSpec], *, given: bool, made: bool = False
    ) -> Variable:
        """Return the variable that an object is; if it is none yet, it becomes one.

        Args:
            tensor: The object.
            specs: Where to note what is known about a new variable.
            given: Whether it is an input, a parameter or a new tensor of Python.
            made: Whether the call that is recorded made it.

        Raises:
            NotUnderstoodError: Co-execution cannot follow such a tensor.
        """
        index = self.index_of(tensor)
        if index is None:
            index = self._add(tensor, given, made)
            specs[index] = self.specs[index]
        return Variable(index)

    def _add(self, tensor: Tensor, given: bool, made: bool) -> int:
        _check(tensor)
        if given and not made and tensor.grad_fn is not None:
            raise NotUnderstoodError("a tensor has a history from before the iteration")
        index = len(self.specs)
        storage = tensor.untyped_storage()
        alias, shared = -1, False
        if given:
            known = self._roots.get(storage._cdata)
            if known is None:
                self._roots[storage._cdata] = (StorageWeakRef(storage), index)
            elif known[1] < 0:
                raise NotUnderstoodError("a new tensor shares the memory of a result")
            else:
                alias = known[1]
            if shared := has_foreign_view(tensor):
                self._shared.add(storage._cdata)
            self.given[index] = _same_memory(tensor)
        value = self.value_of(tensor, new=given)
        self.specs.append(
            TensorSpec(
                value=value, shape=tensor.shape, stride=tensor.stride(), offset=tensor.storage_offset(),
                dtype=tensor.dtype, requires_grad=tensor.requires_grad, is_leaf=tensor.is_leaf, given=given,
                alias=alias, shared=shared,
            )
        )  # fmt: skip
        self._objects.append(Reference(tensor))
        self._variables[id(tensor)] = index
        return index

    def is_unchanged(self, tensor: Tensor, index: int) -> bool:
        """Return whether a variable has the shape, type and history that it had first."""
        spec = self.specs[index]
        before = (spec.shape, spec.stride, spec.offset, spec.dtype, spec.requires_grad, spec.is_leaf)
        return before == (*_geometry(tensor)[1:], tensor.requires_grad, tensor.is_leaf)

    # -- values ----------------------------------------------------------------------------------------------

    def has_value(self, tensor: Tensor) -> bool:
        """Return whether contents of memory are a value already."""
        return _geometry(tensor) in self._values

    def value_of(self, tensor: Tensor, *, new: bool = False, views: list[Operation] | None = None) -> int:
        """Return the index of a tensor's value.

        Args:
            tensor: The tensor.
            new: Whether it may be one that nothing is known about.
            views: Where to add the operation that makes an unknown view of a known value.

        Raises:
            NotUnderstoodError: The tensor comes from elsewhere, or is a view that no operation makes.
        """
        geometry = _geometry(tensor)
        index = self._values.get(geometry)
        if index is not None:
            return index
        base = self._bases.get(geometry.storage)
        index = len(self.geometry)
        self.geometry.append(geometry)
        self._values[geometry] = index
        if base is None:
            if not new:
                raise NotUnderstoodError("a tensor comes from elsewhere")
            self._bases[geometry.storage] = index
            if geometry.storage not in self._roots:
                self._roots[geometry.storage] = (StorageWeakRef(tensor.untyped_storage()), -1)
        elif not new:
            if self.geometry[base].dtype != tensor.dtype or views is None:
                raise NotUnderstoodError("a tensor is a view of another with another type")
            views.append(_view(base, geometry, index))
        return index

    def roots(self) -> list[int]:
        """Return for each value the first given variable with its memory, or -1."""
        return [self.root(index) for index in range(len(self.geometry))]

    def root(self, value: int) -> int:
        """Return the first given variable with the memory of a value, or -1."""
        return self._roots[self.geometry[value].storage][1]

    def bases(self) -> list[int]:
        """Return for each value the first value with its memory."""
        return [self._bases[geometry.storage] for geometry in self.geometry]

    # -- storages --------------------------------------------------------------------------------------------

    def is_result(self, tensor: Tensor) -> bool:
        """Return whether an operation made the memory of a tensor."""
        known = self._roots.get(tensor.untyped_storage()._cdata)
        return known is not None and known[1] < 0

    def is_shared(self, value: int) -> bool:
        """Return whether other code may write the memory of a value."""
        return self.geometry[value].storage in self._shared

    def share(self, value: int) -> None:
        """Note that other code may write the memory of a value."""
        self._shared.add(self.geometry[value].storage)

    def is_saved(self, value: int) -> bool:
        """Return whether the memory of a value was saved, because the iteration writes it."""
        return self.geometry[value].storage in self.saved

    def save(self, tensor: Tensor) -> None:
        """Save the contents of a given storage before the iteration writes it."""
        storage = tensor.untyped_storage()
        known = self._roots.get(storage._cdata)
        if self._saves and known is not None and known[1] >= 0 and storage._cdata not in self.saved:
            self.saved[storage._cdata] = (storage, storage.clone())


def _same_memory(tensor: Tensor) -> Tensor:
    """Return another tensor with the memory of a tensor, which the recorder does not see."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def _geometry(tensor: Tensor) -> Geometry:
    storage = tensor.untyped_storage()._cdata
    return Geometry(storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


def _view(base: int, geometry: Geometry, index: int) -> Operation:
    """Return the operation that makes a view of a value."""
    return Operation(
        operator=torch.ops.aten.as_strided.default,
        args=(
            Value(base),
            [*map(Constant, geometry.shape)],
            [*map(Constant, geometry.stride)],
            Constant(geometry.offset),
        ),
        kwargs=(),
        outputs=(index,),
        is_list=False,
    )


def _check(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, Parameter):
        raise NotUnderstoodError(f"a tensor is a {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise NotUnderstoodError(f"a tensor has layout {tensor.layout} on {tensor.device}")
    if tensor._backward_hooks:
        raise NotUnderstoodError("a tensor has hooks")
    if tensor.is_inference():
        raise NotUnderstoodError("a tensor was made in inference mode")
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise NotUnderstoodError("a tensor is quantized, or a conjugate that torch has not computed yet")
