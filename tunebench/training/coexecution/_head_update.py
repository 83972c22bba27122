"""Updates by optimizers within heads of steps: noted as one entry, and recorded as operations of the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tunebench.training.coexecution._call import (
    Arithmetic,
    Constant,
    Number,
    Operation,
    Value,
    replaced,
)
from tunebench.training.coexecution._optimizer_step import OptimizerStep, optimizer_step, same_objects
from tunebench.training.coexecution._patching import has_hooks
from tunebench.training.coexecution._tensors import NotUnderstoodError
from tunebench.training.coexecution._update import Record, recorded
from tunebench.training.coexecution._words import Word, instance_words, list_words

__all__ = [
    "HeadUpdate",
    "UpdateEntry",
    "UpdateWriter",
    "optimizer_tensors",
    "optimizer_words",
    "parameters_of",
    "states_of",
]


@dataclass(frozen=True, slots=True)
class UpdateEntry:
    """A call of a function that updates parameters, among the operations of a record.

    Attributes:
        function: The function of torch.
        args: Its lists of tensors, without gradients.
        kwargs: Its options.
        gradients: The gradients; none after the record was compared.
        indices: Indices of the values of parameters and gradients.
    """

    function: Callable[..., None]
    args: tuple[list[Tensor], ...]
    kwargs: dict[str, Any]
    gradients: list[Tensor]
    indices: list[int | None]

    def call(self) -> tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]:
        """Return the function, its lists of tensors and its options."""
        return self.function, (self.args[0], self.gradients, *self.args[1:]), self.kwargs

    def is_same(self, other: object) -> bool:
        """Return whether another entry is the same update of the same tensors by the same gradients."""
        if not isinstance(other, UpdateEntry) or self.function is not other.function:
            return False
        options = [{name: Constant(value) for name, value in entry.kwargs.items()} for entry in (self, other)]
        return (
            self.indices == other.indices
            and options[0] == options[1]
            and len(self.args) == len(other.args)
            and all(map(same_objects, self.args, other.args))
        )


def states_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return what the states of optimizers hold."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return list(chain.from_iterable(state.values() for state in states))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_words(optimizer: Optimizer) -> Iterator[Word]:
    """Yield the words on which the parameters of an optimizer depend."""
    yield from instance_words(optimizer)
    yield from list_words(optimizer.param_groups)
    for group in optimizer.param_groups:
        yield group, "tag"
        yield from list_words(group["params"])


def optimizer_tensors(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return parameters and states of optimizers."""
    parameters = chain.from_iterable(map(parameters_of, optimizers))
    return [*parameters, *(state for state in states_of(optimizers) if isinstance(state, Tensor))]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadUpdate:
    """A step of an optimizer in a head.

    Attributes:
        optimizer: The optimizer.
        step: The records of its groups, and what must be there for them.
        assigned: The method that was assigned to ``step`` of the optimizer, as schedulers of learning rates
            do, or None.
        optimizer_class: The class of the optimizer in the record.
    """

    optimizer: Optimizer
    step: OptimizerStep
    assigned: Any
    optimizer_class: type[Optimizer]

    def is_plain(self) -> bool:
        """Return whether the step is the recorded method, without hooks."""
        return (
            type(self.optimizer) is self.optimizer_class
            and vars(self.optimizer).get("step") is self.assigned
            and not has_hooks(self.optimizer)
        )

    def numbers(self) -> list[float] | None:
        """Return the numbers of its update; None with other parameters, states or options."""
        return self.step.numbers(self.optimizer)

    def hook_words(self) -> Iterator[Word]:
        """Yield the words on which it depends that the step is plain."""
        optimizer = self.optimizer
        yield from instance_words(optimizer)
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for owned in (*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            yield owned, "tag"

    def words(self) -> Iterator[Word]:
        """Yield the words on which the numbers depend."""
        yield from optimizer_words(self.optimizer)
        for owned in (self.optimizer.state, *self.optimizer.state.values()):
            yield owned, "tag"

    def finish(self) -> None:
        """Set what the step sets in Python."""
        if self.assigned is not None and getattr(self.optimizer, "_opt_called", None) is not True:
            self.optimizer._opt_called = True


class UpdateWriter:
    """Writes updates as operations of a head.

    Attributes:
        updates: The updates.
        states: Tensors that the operations read beside the values of the record, and their indices.
        numbers: Indices of the numbers that they read.
    """

    def __init__(self, values: int, numbers: int) -> None:
        self.updates: list[HeadUpdate] = []
        self.states: dict[int, tuple[Tensor, int]] = {}
        self.numbers: list[int] = []
        self._values = values
        self._numbers = numbers

    def operations(
        self, optimizer: Optimizer, entries: Sequence[UpdateEntry]
    ) -> list[Operation | Arithmetic]:
        """Return the operations of a step of an optimizer.

        Args:
            optimizer: The optimizer.
            entries: The updates of its groups.

        Raises:
            NotUnderstoodError: The update cannot be recorded.
        """
        with torch.no_grad():
            used = [(recorded(*call), *call[1:]) for call in map(UpdateEntry.call, entries)]
        step = optimizer_step(optimizer, used)
        if step is None:
            raise NotUnderstoodError("a step of an optimizer does more than an update")
        self.updates.append(
            HeadUpdate(
                optimizer=optimizer,
                step=step,
                assigned=vars(optimizer).get("step"),
                optimizer_class=type(optimizer),
            )
        )
        operations: list[Operation | Arithmetic] = []
        for entry, (record, *_) in zip(entries, used, strict=True):
            if None in entry.indices:
                raise NotUnderstoodError("an optimizer updates a parameter that the head does not use")
            states = map(self._state, chain.from_iterable(entry.args[1:]))
            operations += self._renumbered(record, [*entry.indices, *states])
        return operations

    def _renumbered(self, record: Record, inputs: Sequence[Any]) -> list[Operation | Arithmetic]:
        """Return the operations of a record on values and numbers of the head."""
        values = dict(enumerate(inputs))
        first = self._numbers
        self.numbers += range(first, first + len(record.numbers))
        self._numbers += record.total_numbers

        def leaf(item: Any) -> Any:
            if isinstance(item, Value):
                return Value(values[item.index])
            return Number(item.index + first) if isinstance(item, Number) else item

        operations: list[Operation | Arithmetic] = []
        for entry in record.entries:
            if isinstance(entry, Arithmetic):
                operations.append(
                    replace(entry, args=tuple(map(leaf, entry.args)), output=entry.output + first)
                )
                continue
            operations.append(
                replace(
                    entry,
                    args=replaced(entry.args, leaf),
                    kwargs=tuple((name, replaced(value, leaf)) for name, value in entry.kwargs),
                    outputs=tuple(self._output(values, output) for output in entry.outputs),
                )
            )
        return operations

    def _state(self, tensor: Tensor) -> int:
        if id(tensor) not in self.states:
            self.states[id(tensor)] = tensor, self._values
            self._values += 1
        return self.states[id(tensor)][1]

    def _output(self, values: dict[int, int], output: int | None) -> int | None:
        if output is None:
            return None
        if output not in values:
            values[output] = self._values
            self._values += 1
        return values[output]
