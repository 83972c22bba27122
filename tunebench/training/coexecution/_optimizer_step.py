"""Steps of optimizers of torch without loops over parameters, where they only run recorded updates."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tunebench.training.coexecution._update import Record, Updates, UsedRecord

__all__ = ["OptimizerSteps"]

_CLASSES = frozenset((Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RMSprop, SGD))
"""Optimizers whose step collects tensors from states and gradients, and updates them by a function."""

_TRIES = 4
"""Number of times that a step of an optimizer is prepared, because its states or options were replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The update of a group of parameters.

    Attributes:
        group: The group of the optimizer.
        options: Its options without the learning rate, which must be equal, and their types.
        parameters: Its parameters.
        states: Their states in the order of the arguments of torch's function.
        counts: Lengths of the function's lists.
        kwargs: Options of the function.
        record: The recorded update.
    """

    group: dict[str, Any]
    options: tuple[list[Any], list[type]]
    parameters: list[Tensor]
    states: list[Tensor]
    counts: tuple[int, ...]
    kwargs: dict[str, Any]
    record: Record

    def arguments(self) -> tuple[list[Tensor], dict[str, Any]] | None:
        """Return tensors and options for the record; None if the step would run another update."""
        group = self.group
        if not _same_objects(group["params"], self.parameters) or _options(group) != self.options:
            return None
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        tensors = [*self.parameters, *gradients, *self.states]
        kwargs = {**self.kwargs, "lr": group["lr"]}
        return (tensors, kwargs) if self.record.matches(self.counts, kwargs, tensors) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
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

    def arguments(self, optimizer: Optimizer) -> list[tuple[list[Tensor], dict[str, Any]]] | None:
        """Return the arguments of the record of each group; None if the step would do anything else."""
        if (
            optimizer.param_groups is not self.groups
            or optimizer.state is not self.state
            or not _same_objects(self.groups, [part.group for part in self.parts])
            or not _same_objects(list(self.state.values()), self.states)
            or not _same_objects(_values(self.states), self.values)
        ):
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
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()
        self._tries: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def run(self, optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Any:
        """Run a step of an optimizer without closure and hooks."""
        if not self._updates.are_recorded:
            return step(optimizer)
        prepared = self._steps.get(optimizer)
        if prepared is not None and _is_plain(optimizer):
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
        if used and _is_plain(optimizer):
            prepared = _prepared(optimizer, used)
            if prepared is not None:
                self._tries[optimizer] = tries + 1
                self._steps[optimizer] = prepared
        return result

    def _update(self, step: _Step, arguments: Sequence[tuple[list[Tensor], dict[str, Any]]]) -> None:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for part, (tensors, kwargs) in zip(step.parts, arguments, strict=True):
                self._updates.runs += 1
                part.record.run(tensors, kwargs)
        finally:
            torch._C._set_grad_enabled(enabled)


def _prepared(optimizer: Optimizer, used: Sequence[UsedRecord]) -> _Step | None:
    """Return the step of an optimizer that ran recorded updates; None if it did anything else."""
    groups = optimizer.param_groups
    if type(optimizer) not in _CLASSES or len(used) != len(groups):
        return None
    states = list(optimizer.state.values())
    values = _values(states)
    if not all(isinstance(value, Tensor) for value in values):
        return None
    parts = []
    for group, (record, args, kwargs) in zip(groups, used, strict=True):
        if kwargs.get("lr") is not group["lr"] or not _same_objects(group["params"], args[0]):
            return None
        parts.append(
            _Group(
                group=group,
                options=_options(group),
                parameters=args[0],
                states=list(chain.from_iterable(args[2:])),
                counts=tuple(map(len, args)),
                kwargs=kwargs,
                record=record,
            )
        )
    return _Step(groups=groups, state=optimizer.state, states=states, values=values, parts=tuple(parts))


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether nothing but its groups and states decides what the step of an optimizer does."""
    return (
        not hasattr(optimizer, "grad_scale")
        and not hasattr(optimizer, "found_inf")
        and "_init_group" not in vars(optimizer)
        and not torch.autograd._profiler_enabled()
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
    )


def _options(group: dict[str, Any]) -> tuple[list[Any], list[type]]:
    """Return the options of a group without the learning rate, and their types."""
    values = [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]
    return values, list(map(type, values))


def _values(states: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


def _same_objects(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return len(one) == len(two) and all(map(operator.is_, one, two))
