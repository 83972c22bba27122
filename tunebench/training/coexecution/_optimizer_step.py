"""Steps of optimizers of torch without loops over parameters, where they only run recorded updates."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tunebench.training.coexecution._update import Record, Updates, UsedRecord

__all__ = [
    "CLASSES",
    "OptimizerStep",
    "OptimizerSteps",
    "is_plain",
    "joined",
    "optimizer_step",
    "same_objects",
]

CLASSES = frozenset((Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RMSprop, SGD))
"""Optimizers whose step collects tensors from states and gradients, and updates them by a function."""

_DECIDING = ("grad_scale", "found_inf", "_init_group")
"""Attributes of an optimizer that change what its step does."""

_TRIES = 4
"""Number of times that a step of an optimizer is prepared, because its states or options were replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The update of a group of parameters.

    Attributes:
        group: The group of the optimizer.
        options: Its options without the learning rate, which must be equal, and their types.
        parameters: Its parameters.
        updated: Those that the update changes.
        states: Their states in the order of the arguments of torch's function.
        counts: Lengths of the function's lists.
        kwargs: Options of the function.
        record: The recorded update.
    """

    group: dict[str, Any]
    options: tuple[list[Any], list[type]]
    parameters: list[Tensor]
    updated: list[Tensor]
    states: list[Tensor]
    counts: tuple[int, ...]
    kwargs: dict[str, Any]
    record: Record

    def arguments(self) -> tuple[list[Tensor], dict[str, Any]] | None:
        """Return tensors and options for the record; None if the step would run another update."""
        kwargs = self.named()
        if kwargs is None or len(self.updated) < len(self.parameters):
            return None
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        tensors = [*self.parameters, *gradients, *self.states]
        return (tensors, kwargs) if self.record.matches(self.counts, kwargs, tensors) else None

    def named(self) -> dict[str, Any] | None:
        """Return the options of torch's function; None with other parameters or options than recorded."""
        group = self.group
        if not same_objects(group["params"], self.parameters) or _options(group) != self.options:
            return None
        return {**self.kwargs, "lr": group["lr"]}

    def numbers(self) -> list[float] | None:
        """Return the numbers for the record; None if the step would run another update."""
        kwargs = self.named()
        if kwargs is None or not self.record.has_options(kwargs):
            return None
        return [kwargs[name] for name in self.record.numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A step of an optimizer.

    Attributes:
        groups: The optimizer's list of groups.
        state: The optimizer's dictionary of states.
        states: Their dictionaries.
        values: The tensors in them.
        parts: The updates of the groups.
    """

    groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    states: list[dict[str, Any]]
    values: list[Tensor]
    parts: tuple[_Group, ...]

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has these groups and states, and its step does nothing else."""
        return (
            optimizer.param_groups is self.groups
            and optimizer.state is self.state
            and same_objects(self.groups, [part.group for part in self.parts])
            and same_objects(list(self.state.values()), self.states)
            and same_objects(_values(self.states), self.values)
            and is_plain(optimizer)
        )

    def updates_all(self) -> bool:
        """Return whether it updates all parameters."""
        return all(len(part.updated) == len(part.parameters) for part in self.parts)

    def numbers(self, optimizer: Optimizer) -> list[float] | None:
        """Return the numbers for the records of all groups; None if the step would do anything else."""
        if not self.is_of(optimizer):
            return None
        return joined(map(_Group.numbers, self.parts))

    def arguments(self, optimizer: Optimizer) -> list[tuple[list[Tensor], dict[str, Any]]] | None:
        """Return the arguments of the record of each group; None if the step would do anything else."""
        if not self.is_of(optimizer):
            return None
        arguments = []
        for part in self.parts:
            pair = part.arguments()
            if pair is None:
                return None
            arguments.append(pair)
        return arguments


class OptimizerSteps:
    """Steps of optimizers, each with the recorded updates of its groups."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._steps: weakref.WeakKeyDictionary[Optimizer, OptimizerStep] = weakref.WeakKeyDictionary()
        self._tries: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def run(self, optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Any:
        """Run a step of an optimizer without closure and hooks."""
        if not self._updates.are_recorded:
            return step(optimizer)
        prepared = self._steps.get(optimizer)
        if prepared is not None:
            arguments = prepared.arguments(optimizer)
            if arguments is not None:
                self._update(prepared, arguments)
                return None
        tries = self._tries.get(optimizer, 0)
        if tries == _TRIES:
            return step(optimizer)
        used: list[UsedRecord] = []
        self._updates.used = used
        try:
            result = step(optimizer)
        finally:
            self._updates.used = None
        if used and is_plain(optimizer):
            prepared = optimizer_step(optimizer, used)
            if prepared is not None and prepared.updates_all():
                self._tries[optimizer] = tries + 1
                self._steps[optimizer] = prepared
        return result

    def _update(self, step: OptimizerStep, arguments: Sequence[tuple[list[Tensor], dict[str, Any]]]) -> None:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for part, (tensors, kwargs) in zip(step.parts, arguments, strict=True):
                self._updates.runs += 1
                part.record.run(tensors, kwargs)
        finally:
            torch._C._set_grad_enabled(enabled)


def optimizer_step(optimizer: Optimizer, used: Sequence[UsedRecord]) -> OptimizerStep | None:
    """Return the step of an optimizer that ran recorded updates; None if it did anything else.

    Args:
        optimizer: The optimizer.
        used: The records of its groups, with the arguments of torch's function.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in CLASSES or len(used) != len(groups):
        return None
    states = list(optimizer.state.values())
    values = _values(states)
    if not all(isinstance(value, Tensor) for value in values):
        return None
    if not all(map(_is_fixed, chain.from_iterable(_options(group)[0] for group in groups))):
        return None
    parts = []
    for group, (record, args, kwargs) in zip(groups, used, strict=True):
        members = set(map(id, group["params"]))
        if kwargs.get("lr") is not group["lr"] or not members.issuperset(map(id, args[0])):
            return None
        parts.append(
            _Group(
                group=group,
                options=_options(group),
                parameters=list(group["params"]),
                updated=args[0],
                states=list(chain.from_iterable(args[2:])),
                counts=tuple(map(len, args)),
                kwargs=kwargs,
                record=record,
            )
        )
    return OptimizerStep(
        groups=groups, state=optimizer.state, states=states, values=values, parts=tuple(parts)
    )


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether nothing but its groups and states decides what the step of an optimizer does."""
    return (
        vars(optimizer).keys().isdisjoint(_DECIDING)
        and not torch.autograd._profiler_enabled()
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
    )


def _options(group: dict[str, Any]) -> tuple[list[Any], list[type]]:
    """Return the options of a group without the learning rate, and their types."""
    values = [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]
    return values, list(map(type, values))


def _is_fixed(option: Any) -> bool:
    """Return whether an option can only change by another object."""
    if isinstance(option, tuple):
        return all(map(_is_fixed, option))
    return isinstance(option, (float, int, str, type(None)))


def _values(states: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


def joined(numbers: Iterable[list[float] | None]) -> list[float] | None:
    """Return the numbers of all lists; None if there is a None, after which no further list is read."""
    all_numbers: list[float] = []
    for values in numbers:
        if values is None:
            return None
        all_numbers += values
    return all_numbers


def same_objects(items: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(items) == len(expected) and all(map(operator.is_, items, expected))
