"""What an iteration did: calls of functions of torch, and the operations of each below autograd."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tunebench.training.coexecution._function import Kind

__all__ = [
    "Arithmetic",
    "Bound",
    "Call",
    "Constant",
    "Number",
    "Operation",
    "TensorSpec",
    "Value",
    "Variable",
    "flat",
    "holds_tensor",
    "replaced",
]


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor object of the program, by its position among those of the iteration."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """Contents of memory, seen with a geometry, by its position among those of the iteration."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number that a call passes on to its operation, by its position in the iteration.

    A negative index is that of a size; see `_sizes`.
    """

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A Python value; equal only to a value of the same type, and to a float with the same sign and bits."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same value of the same type."""
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, (float, complex)):
            return repr(self.value) == repr(other.value)
        return bool(self.value == other.value)

    def __hash__(self) -> int:
        """Return the hash of the value."""
        return hash((type(self.value), repr(self.value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Metadata of a tensor object: everything except its values.

    Attributes:
        value: Index of its value.
        shape: Its sizes.
        stride: Its strides.
        offset: Offset into its storage in elements.
        dtype: Its type.
        requires_grad: Whether autograd records operations on it.
        is_leaf: Whether it is a leaf of autograd.
        given: Whether it is an input, a parameter or a new tensor of Python, not a result of operations.
        alias: Index of the earlier given variable with the same storage, or -1.
        shared: Whether other code may write its memory, such as a NumPy array.
        sized: Whether sizes, strides or the offset hold sizes that change; see `_sizes`.
    """

    value: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    is_leaf: bool
    given: bool
    alias: int = -1
    shared: bool = False
    sized: bool = False

    def geometry(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """Return sizes, strides and offset."""
        return tuple(self.shape), self.stride, self.offset

    def same_but_geometry(self, other: TensorSpec) -> bool:
        """Return whether another tensor is the same, except for sizes, strides and offset."""
        return len(self.shape) == len(other.shape) and self == replace(
            other, shape=self.shape, stride=self.stride, offset=self.offset, sized=self.sized
        )

    @property
    def has_history(self) -> bool:
        """Return whether autograd holds the operations that made it."""
        return self.requires_grad and not self.is_leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation below autograd.

    Attributes:
        operator: The overload.
        args: Arguments, with `Value` for tensors.
        kwargs: Keyword arguments in the order of the call.
        outputs: Indices of the values that it returns; None for a result that is no tensor.
        is_list: Whether it returns a list of tensors.
        writes: Indices of values whose memory it writes.
        is_random: Whether it draws random numbers.
        cost_us: Rough time on one core in microseconds.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    is_list: bool
    writes: tuple[int, ...] = ()
    is_random: bool = False
    cost_us: float = field(default=0.0, compare=False)

    def same_but_constants(self, other: Operation) -> bool:
        """Return whether another operation is the same, except for its arguments."""
        return (self.operator, self.outputs, self.is_list, self.writes, self.is_random) == (
            other.operator, other.outputs, other.is_list, other.writes, other.is_random
        )  # fmt: skip

    def reads(self) -> Iterator[int]:
        """Return the indices of the values among its arguments."""
        for leaf in flat((self.args, tuple(value for _, value in self.kwargs))):
            if isinstance(leaf, Value):
                yield leaf.index


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An operation on Python numbers, which makes another one.

    Attributes:
        operator: Its name in TorchScript.
        args: Numbers and constants, or the value of which it reads the only element.
        output: Index of the number that it makes.
    """

    operator: str
    args: tuple[Number | Constant | Value, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A given tensor of indices that must be in range.

    Attributes:
        value: Index of its value.
        stop: The smallest index that is out of range.
        ignored: An index that is allowed nevertheless, or None.
    """

    value: int
    stop: int
    ignored: int | None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether all indices are in range, without a record in autograd."""
        if tensor.dtype not in (torch.int64, torch.int32):
            return False
        if not tensor.numel():
            return True
        low, high = torch.aminmax(tensor.detach())
        if low >= 0 and high < self.stop:
            return True
        inside = (tensor >= 0) & (tensor < self.stop)
        return self.ignored is not None and bool((inside | (tensor == self.ignored)).all())


@dataclass(slots=True, kw_only=True)
class Call:
    """A call of a function of torch by the program.

    Attributes:
        function: The function.
        kind: How it is run.
        args: Arguments, with `Variable` for tensors.
        kwargs: Keyword arguments in the order of the call.
        site: File and line of the caller, ``file:line``.
        stack: Call stack within the step, outermost first.
        state: Modes of autograd and autocast that were active.
        outputs: Its result, with `Variable` for tensors.
        specs: What is known about the tensors that it used or made first, by variable.
        operations: What ran below autograd.
        numbers: Values of the `Number` arguments, by index.
        gradients: Leaves whose attribute ``grad`` it changed, with the variable that it is then.
        accumulated: Leaves that had a gradient before the call, and what it was.
        waits: Whether Python may go on only after its operations have run.
        checked: Sizes, strides, offset and type of values whose sizes depend on data.
        bounds: Indices that must be in range, or an operation raises an error.
        result: For a fetch, what it returned.
        random_states: State of the random number generator before each random operation.
        asks: Whether torch is asked for the sizes of its results; see `_sizes`.
    """

    function: Any
    kind: Kind
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    site: str
    state: tuple[Any, ...]
    stack: tuple[str, ...] = ()
    outputs: Any = None
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    numbers: dict[int, Any] = field(default_factory=dict)
    gradients: tuple[tuple[int, int], ...] = ()
    accumulated: tuple[tuple[int, Variable], ...] = ()
    waits: bool = False
    checked: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    bounds: tuple[Bound, ...] = ()
    result: Any = None
    random_states: list[Tensor] = field(default_factory=list)
    asks: bool = False

    def given_specs(self) -> list[TensorSpec]:
        """Return the specs of the given tensors that this call is the first to use."""
        return [spec for spec in self.specs.values() if spec.given]

    def same_but_numbers(self, other: Call, same: Callable[[Any, Any], bool] = operator.eq) -> bool:
        """Return whether another call is the same, except for numbers and constants of operations.

        Args:
            other: The other call.
            same: Whether a pattern of this call is one of the other.
        """
        return (
            self.function == other.function
            and self.kind is other.kind
            and same(self.given_specs(), other.given_specs())  # they can decide what the others are
            and same(self.args, other.args)
            and same(self.kwargs, other.kwargs)
            and same(self.checked, other.checked)
            and self.state == other.state
            and self.outputs == other.outputs
            and same(self.specs, other.specs)
            and self.gradients == other.gradients
            and self.accumulated == other.accumulated
            and self.waits == other.waits
            and self.bounds == other.bounds
            and self.numbers.keys() == other.numbers.keys()
            and len(self.operations) == len(other.operations)
            and all(
                one.same_but_constants(two)
                for one, two in zip(self.operations, other.operations, strict=True)
            )
        )


def flat(tree: Any) -> Iterator[Any]:
    """Return the leaves of a nested pattern."""
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from flat(each)
    elif isinstance(tree, dict):
        yield from flat(tuple(tree.values()))
    elif isinstance(tree, Structure):
        yield from flat(tree.parts)
    else:
        yield tree


def holds_tensor(tree: Any) -> bool:
    """Return whether arguments hold a tensor."""
    return any(isinstance(leaf, Tensor) for leaf in flat(tree))


def replaced(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a nested pattern with another value for each leaf."""
    if type(tree) is tuple:
        return tuple(replaced(each, leaf) for each in tree)
    if type(tree) is list:
        return [replaced(each, leaf) for each in tree]
    if type(tree) is dict:
        return {key: replaced(each, leaf) for key, each in tree.items()}
    if isinstance(tree, Structure):
        return tree.made(tuple(replaced(each, leaf) for each in tree.parts))
    return leaf(tree)


class DifferentError(Exception):
    """Patterns differ in more than what may change."""


def joined(patterns: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    """Return the nested pattern that covers all patterns.

    Args:
        patterns: The patterns.
        leaf: From leaves that differ to the one that replaces them.

    Raises:
        DifferentError: They have other types, lengths or keys.
    """
    first = patterns[0]
    if all(pattern == first for pattern in patterns):
        return first
    kind = type(first)
    if any(type(pattern) is not kind for pattern in patterns):
        return leaf(patterns)
    if kind is dict:
        if any(pattern.keys() != first.keys() for pattern in patterns):
            raise DifferentError
        return {key: joined([pattern[key] for pattern in patterns], leaf) for key in first}
    if kind in (tuple, list):
        if any(len(pattern) != len(first) for pattern in patterns):
            raise DifferentError
        return kind(joined(parts, leaf) for parts in zip(*patterns, strict=True))
    return leaf(patterns)


@dataclass(frozen=True, slots=True)
class Structure:
    """A tuple of another type, such as the result of ``torch.max`` with a dimension."""

    type: Any
    parts: tuple[Any, ...]

    def made(self, parts: tuple[Any, ...]) -> Any:
        """Return a tuple of the type."""
        return self.type(parts)
