"""Sizes that change from step to step in a head: one function for all of them.

Dynamo's trace has symbols for the sizes of arguments. Records of some of them show by which formulas the
integers of operations follow from these symbols. Other sizes are used once eager mode ran the operations that
the formulas give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunebench.training.coexecution._call import (
    Constant,
    DifferentError,
    Number,
    Operation,
    joined,
    replaced,
)
from tunebench.training.coexecution._head_record import OperationRecorder, is_same_operation, made_count
from tunebench.training.coexecution._head_update import UpdateEntry
from tunebench.training.coexecution._sizes import SAMPLES, Numbers, Size, SizeFinder
from tunebench.training.coexecution._tensors import NotUnderstoodError

__all__ = ["HeadSizes"]

Key = tuple[int, ...]
"""The values of the symbols in a step."""

_KNOWN = 512
"""Number of keys whose operations are compared with those of eager mode; others run in eager mode."""


class HeadSizes:
    """The sizes of a head's arguments, and what follows from them.

    Args:
        nodes: The nodes of Dynamo's graph.

    Attributes:
        positions: Positions of the symbols among the arguments.
        are_passed: Whether all symbols of tensors are arguments.
    """

    def __init__(self, nodes: Sequence[torch.fx.Node]) -> None:
        examples = [node.meta.get("example_value") for node in nodes if node.op == "placeholder"]
        sizes = (
            size
            for example in examples
            if isinstance(example, Tensor)
            for size in (*example.shape, *example.stride(), example.storage_offset())
        )
        self._symbols = set().union(*map(_symbols, sizes))
        self.positions = [position for position, example in enumerate(examples) if self.includes(example)]
        self.are_passed = self._symbols == set().union(
            *(_symbols(examples[position]) for position in self.positions)
        )
        self._samples: dict[Key, tuple[list[Any], list[Any]]] = {}
        self._sizes: dict[int, Size] = {}
        self._operations: list[Any] = []
        self._metadata: list[Any] = []
        self._numbers: list[int] = []
        self._known: dict[Key, list[int] | None] = {}

    def __bool__(self) -> bool:
        """Return whether sizes change."""
        return bool(self.positions)

    def includes(self, value: Any) -> bool:
        """Return whether a symbolic value of a trace follows from sizes alone."""
        symbols = _symbols(value)
        return bool(symbols) and symbols <= self._symbols

    def key(self, args: Sequence[Any]) -> Key:
        """Return the values of the symbols for arguments of the graph."""
        return tuple(args[position] for position in self.positions)

    # ------------------------------------------------------------------------------------------ records

    def lacks_samples(self) -> bool:
        """Return whether formulas need more records; without sizes that change, none do."""
        count = len(self.positions)
        return count > 0 and len(self._samples) < SAMPLES + count - 1

    def needs_others(self, key: Key) -> bool:
        """Return whether formulas need records of other sizes than these."""
        return key in self._samples and self.lacks_samples()

    def add_sample(self, key: Key, record: OperationRecorder) -> None:
        """Add a record that eager mode confirmed."""
        self._samples[key] = list(record.operations), list(record.metadata)

    def general(self, key: Key, record: OperationRecorder) -> list[Any]:
        """Return the operations of a record with numbers in place of integers that follow from sizes.

        Args:
            key: The sizes of the record.
            record: The record.

        Raises:
            NotUnderstoodError: No formulas give the integers.
        """
        self._samples.pop(key, None)  # its updates hold no gradients
        samples = {**self._samples, key: (record.operations, record.metadata)}
        roots = {-1 - index: values for index, values in enumerate(zip(*samples, strict=True))}
        self._sizes = {index: Size() for index in roots}
        finder = SizeFinder(self._sizes, roots)
        operations, metadata = zip(*samples.values(), strict=True)
        if len({*map(len, operations)}) > 1 or len({*map(len, metadata)}) > 1:
            raise NotUnderstoodError("other sizes have other operations")
        self._operations = [
            alike[-1] if isinstance(alike[-1], UpdateEntry) else _joined(alike, finder)
            for alike in zip(*operations, strict=True)
        ]
        self._metadata = [_pattern(values, finder) for values in zip(*map(_constants, metadata), strict=True)]
        finder.add()
        used: set[int] = set()
        for operation in self._operations:
            if isinstance(operation, Operation):
                replaced((operation.args, dict(operation.kwargs)), lambda leaf: _note(used, leaf))
        self._numbers = sorted(used)
        self._known = {key: self._values(key) for key in samples}
        self._samples.clear()
        return self._operations

    # -------------------------------------------------------------------------------------------- sizes

    @property
    def numbers(self) -> list[int]:
        """Return the indices of the numbers of the operations that follow from sizes."""
        return self._numbers

    def values(self, key: Key) -> list[int] | None:
        """Return these numbers; None for sizes that eager mode has not confirmed, or not the same."""
        return self._known.get(key)

    def may_confirm(self, key: Key) -> bool:
        """Return whether the operations of sizes are to be compared with those of eager mode."""
        return key not in self._known and len(self._known) < _KNOWN

    def confirm(self, key: Key, whole: OperationRecorder, values: Sequence[float]) -> bool:
        """Return whether eager mode ran the operations that formulas give for sizes; note it.

        Args:
            key: The sizes.
            whole: The operations of an iteration in eager mode.
            values: The numbers of Python that are inputs of the head.
        """
        numbers = self._all(key)

        def integer(leaf: Any) -> Any:
            return Constant(numbers[leaf.index]) if isinstance(leaf, Number) and leaf.index < 0 else leaf

        count, made = made_count(self._operations, self._metadata)
        metadata = [replaced(pattern, integer) for pattern in self._metadata[:made]]
        is_equal = (
            len(whole.operations) >= count
            and metadata == _constants(whole.metadata[:made])
            and all(
                _is_same_update(ours, theirs)
                if isinstance(ours, UpdateEntry) or isinstance(theirs, UpdateEntry)
                else is_same_operation(_with_leaves(ours, integer), theirs, values)
                for ours, theirs in zip(self._operations[:count], whole.operations[:count], strict=True)
            )
        )
        self._known[key] = self._values(key) if is_equal else None
        return is_equal

    def _all(self, key: Key) -> Numbers:
        numbers = Numbers(self._sizes)
        numbers.update({-1 - index: value for index, value in enumerate(key)})
        return numbers

    def _values(self, key: Key) -> list[int]:
        numbers = self._all(key)
        return [numbers[index] for index in self._numbers]


def _symbols(value: Any) -> set[Any]:
    """Return the symbols of a number of a trace."""
    is_symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return set(value.node.expr.free_symbols) if is_symbolic else set()


def _note(used: set[int], leaf: Any) -> None:
    if isinstance(leaf, Number) and leaf.index < 0:
        used.add(leaf.index)


def _constants(metadata: Sequence[Any]) -> list[Any]:
    """Return what is known about values, as patterns."""
    return [
        (*(tuple(map(Constant, sizes)) for sizes in (shape, stride)), dtype)
        for shape, stride, dtype in metadata
    ]


def _with_leaves(operation: Operation, leaf: Any) -> Operation:
    """Return an operation with other leaves in its arguments."""
    return Operation(
        operator=operation.operator,
        args=replaced(operation.args, leaf),
        kwargs=tuple((name, replaced(value, leaf)) for name, value in operation.kwargs),
        outputs=operation.outputs,
        is_list=operation.is_list,
        is_random=operation.is_random,
    )


def _joined(operations: Sequence[Any], finder: SizeFinder) -> Operation:
    """Return an operation whose integers follow from sizes."""
    last = operations[-1]
    names = [name for name, _ in last.kwargs]
    if not all(
        isinstance(operation, Operation)
        and operation.same_but_constants(last)
        and [name for name, _ in operation.kwargs] == names
        for operation in operations
    ):
        raise NotUnderstoodError("other sizes have other operations")
    arguments = [(operation.args, [value for _, value in operation.kwargs]) for operation in operations]
    args, values = _pattern(arguments, finder)
    return Operation(
        operator=last.operator,
        args=args,
        kwargs=tuple(zip(names, values, strict=True)),
        outputs=last.outputs,
        is_list=last.is_list,
        is_random=last.is_random,
    )


def _pattern(patterns: Sequence[Any], finder: SizeFinder) -> Any:
    """Return the pattern that covers patterns whose integers follow from sizes."""

    def size(leaves: Sequence[Any]) -> Number:
        integers = [leaf.value for leaf in leaves if isinstance(leaf, Constant) and type(leaf.value) is int]
        number = finder.size(integers, least=None) if len(integers) == len(leaves) else None
        if number is None:
            raise NotUnderstoodError("an operation has a number that follows from sizes in no known way")
        return number

    try:
        return joined(patterns, size)
    except DifferentError as error:
        raise NotUnderstoodError("other sizes have other arguments of operations") from error


def _is_same_update(ours: Any, theirs: Any) -> bool:
    """Return whether two entries are the same update, whatever its numbers, which the plan compares."""
    return (
        isinstance(ours, UpdateEntry)
        and isinstance(theirs, UpdateEntry)
        and ours.function is theirs.function
        and ours.indices == theirs.indices
    )
