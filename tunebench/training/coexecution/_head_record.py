"""Records of heads of steps: operations below autograd, and their comparison with those of eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tunebench.training.coexecution._call import Constant, Number, Operation, Value, flat, replaced
from tunebench.training.coexecution._head_update import UpdateEntry
from tunebench.training.coexecution._operator import may_raise, written

__all__ = [
    "PLAIN_TYPES",
    "OperationRecorder",
    "active_recorder",
    "is_same_operation",
    "made_count",
    "matches",
    "returns_number",
    "tensor_key",
]

_SCALING = {"add", "sub", "rsub", "mul", "div", "lt", "le", "gt", "ge", "scalar_tensor"}
"""Operators without arguments that are integers by type: theirs may be numbers that change.

A number of another operator, such as the exponent 1.0 in the derivative of a square, is a constant.
"""

PLAIN_TYPES = (Tensor, Parameter)
"""Types of tensors that heads use."""


def tensor_key(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
    )  # fmt: skip


class OperationRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Record operations below autograd; values are numbered in the order in which they are seen first.

    Attributes:
        operations: The operations.
        metadata: Shape, strides and type of each value.
        inputs: The tensors that are no results, by index.
        numbers: Indices of numbers of Python, by their text.
        raises: Whether an operation can raise an error.
        raises_late: Whether one can after an update.
        problem: Why the operations cannot be replayed, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation | UpdateEntry] = []
        self.metadata: list[tuple[Any, ...]] = []
        self.inputs: dict[int, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.raises = self.raises_late = False
        self._written: set[int] = set()
        self.problem: str | None = None
        self._indices: dict[tuple[Any, ...], int] = {}
        self._pauses = False
        self._scales = False  # whether the operation that is recorded takes numbers that change
        self._storages: list[StorageWeakRef] = []  # their addresses stay theirs, their memory is freed

    def index(self, tensor: Tensor) -> int | None:
        """Return the index of a value, or None."""
        return self._indices.get(tensor_key(tensor))

    def release(self) -> None:
        """Release tensors; what ran stays known."""
        self.inputs.clear()
        self._storages.clear()
        self._indices.clear()
        for entry in self.operations:
            if isinstance(entry, UpdateEntry):
                entry.gradients.clear()

    def has_updates(self) -> bool:
        """Return whether an optimizer updated parameters."""
        return any(isinstance(entry, UpdateEntry) for entry in self.operations)

    def written_storages(self) -> set[int]:
        """Return the addresses of memory that operations write."""
        return self._written

    def update(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a function that updates parameters, and note it as one entry."""
        if self.problem is None and not all(isinstance(tensors, list) for tensors in args):
            self.problem = f"{function.__name__} gets other arguments than lists of tensors"
        if self.problem is None:
            indices = [self.index(tensor) for tensor in (*args[0], *args[1])]
            tensors = list(args[0]), *map(list, args[2:])
            self.operations.append(UpdateEntry(function, tensors, kwargs, list(args[1]), indices))
        self._pauses = True
        try:
            function(*args, **kwargs)
        finally:
            self._pauses = False

    def _add(self, tensor: Tensor) -> int:
        index = len(self.metadata)
        self._indices[tensor_key(tensor)] = index
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        self.metadata.append((tensor.shape, tensor.stride(), tensor.dtype))
        return index

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            index = self.index(leaf)
            if index is None:
                index = self._add(leaf)
                self.inputs[index] = leaf.detach()
            return Value(index)
        if type(leaf) in (float, int) and self._scales:
            number = self.numbers.get(repr(leaf))
            if number is not None:
                return Number(number)
        return Constant(leaf)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        reads = func is torch.ops.aten._local_scalar_dense.default or func.namespace == "profiler"
        if reads or self._pauses or self.problem is not None:
            return func(*args, **kwargs)
        self._scales = func.overloadpacket.__name__.rstrip("_") in _SCALING
        try:
            arguments = replaced(args, self._argument)
            named = tuple((name, replaced(value, self._argument)) for name, value in kwargs.items())
        except (RuntimeError, NotImplementedError):
            arguments, named = (), ()
            self.problem = f"{func.name()} gets a tensor without memory"
        result = func(*args, **kwargs)
        if self.problem is None:
            try:
                self._note(func, args, kwargs, arguments, named, result)
            except (RuntimeError, NotImplementedError):
                self.problem = f"{func.name()} returns a tensor without memory"
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that torch.compile returned run as without this mode."""
        return True

    def _has_argument_offset(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an argument of an operation is an offset into memory that existed before."""
        storage = tensor_key(args[0])[0]
        return len(args) + len(kwargs) > 3 and any(
            tensor_key(tensor)[0] == storage for tensor in self.inputs.values()
        )

    def _note(self, func: Any, args: Any, kwargs: Any, arguments: Any, named: Any, result: Any) -> None:
        leaves = list(flat((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = list(flat(result)) if result is not None else []
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
            self.problem = f"{func.name()} gets a tensor that is conjugated or negated lazily"
        elif "as_strided" in func.name() and self._has_argument_offset(func, args, kwargs):
            self.problem = f"{func.name()} gets an offset into the memory of an argument"
        elif func.namespace != "aten" or not all(type(tensor) in PLAIN_TYPES for tensor in tensors):
            self.problem = f"{func.name()} is no operator of torch on plain tensors"
        elif any(not isinstance(leaf, Tensor) and leaf is not None for leaf in results):
            self.problem = f"{func.name()} returns no tensors"
        elif any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self.problem = f"{func.name()} draws from a generator of its own"
        elif any(not tensor.is_cpu or tensor.layout is not torch.strided for tensor in tensors):
            self.problem = f"{func.name()} gets a tensor that is no dense one of the processor"
        elif func.name().split(".")[0] in ("aten::set_", "aten::resize_"):
            self.problem = f"{func.name()} replaces memory"
        if self.problem is not None:
            return
        for tensor in written(func, args, kwargs):
            self._written.add(tensor_key(tensor)[0])
        operation = Operation(
            operator=func, args=arguments, kwargs=named,
            outputs=tuple(None if leaf is None else self._add(leaf) for leaf in results),
            is_list=isinstance(result, list), is_random=torch.Tag.nondeterministic_seeded in func.tags,
        )  # fmt: skip
        raises = may_raise(operation, [tensor.dtype for tensor in tensors])
        self.raises = self.raises or raises
        self.raises_late = self.raises_late or (
            raises and self.has_updates() and not returns_number(operation)
        )
        self.operations.append(operation)


def active_recorder() -> OperationRecorder | None:
    """Return the recorder of operations that is the innermost mode of this thread, or None."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, OperationRecorder) else None


def matches(head: OperationRecorder, whole: OperationRecorder, values: Sequence[float]) -> bool:
    """Return whether an iteration of eager mode began with the operations of a head.

    Operators, data flow, shapes, strides, types, constants and numbers must be equal. Dynamo's last
    operations, which return numbers of Python as tensors, are left out.

    Args:
        head: The operations of the head.
        whole: Those of the same iteration in eager mode.
        values: The numbers of Python that are inputs of the head.
    """
    count, made = made_count(head.operations, head.metadata)
    if len(whole.operations) < count or head.metadata[:made] != whole.metadata[:made]:
        return False
    pairs = zip(head.operations[:count], whole.operations[:count], strict=True)
    return all(is_same_operation(ours, theirs, values) for ours, theirs in pairs)


def made_count(operations: Sequence[Any], metadata: Sequence[Any]) -> tuple[int, int]:
    """Return the number of operations without the last ones that return numbers, and of their values."""
    count = len(operations)
    while count and returns_number(operations[count - 1]):
        count -= 1
    return count, len(metadata) - len(operations) + count


def returns_number(entry: Operation | UpdateEntry) -> bool:
    return isinstance(entry, Operation) and entry.operator is torch.ops.aten.scalar_tensor.default


def is_same_operation(ours: Any, theirs: Any, values: Sequence[float]) -> bool:
    """Return whether an entry of a head is one of eager mode, with numbers for those that change."""
    if isinstance(ours, UpdateEntry) or isinstance(theirs, UpdateEntry):
        return isinstance(ours, UpdateEntry) and ours.is_same(theirs)
    return (
        ours.same_but_constants(theirs)
        and [name for name, _ in ours.kwargs] == [name for name, _ in theirs.kwargs]
        and _same_arguments(ours, theirs, values)
    )


def _same_arguments(ours: Operation, theirs: Operation, values: Sequence[float]) -> bool:
    arguments = [
        list(flat((operation.args, tuple(value for _, value in operation.kwargs))))
        for operation in (ours, theirs)
    ]
    return len(arguments[0]) == len(arguments[1]) and all(
        (Constant(values[argument.index]) if isinstance(argument, Number) else argument) == expected
        for argument, expected in zip(*arguments, strict=True)
    )
