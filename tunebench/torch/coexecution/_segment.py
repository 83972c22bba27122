"""Segments: operations between two points at which Python waits, and what runs them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunebench.torch.coexecution._call import Call, Constant, Number, Operation, Variable, flat, replaced
from tunebench.torch.coexecution._function import Kind
from tunebench.torch.coexecution._path import End, Node, Update
from tunebench.torch.coexecution._script import Runner, python_runner, script_runner

__all__ = ["Segment", "build"]


@dataclass(frozen=True, slots=True)
class _Operations:
    """Operations that one function runs."""

    runner: Runner
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, values: list[Any], numbers: list[Any]) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            results = self.runner(
                *[values[index] for index in self.inputs], *[numbers[index] for index in self.numbers]
            )
        if self.outputs:
            for index, result in zip(self.outputs, results, strict=True):
                values[index] = result


@dataclass(frozen=True, slots=True)
class _Update:
    """An update of parameters by a function of an optimizer."""

    update: Update
    foreach: bool

    def run(self, values: list[Any], numbers: list[Any]) -> None:
        call = self.update.call
        known = self.update.values

        def leaf(pattern: Any) -> Any:
            if isinstance(pattern, Variable):
                return values[known[pattern.index]]
            return numbers[pattern.index] if isinstance(pattern, Number) else pattern.value

        kwargs = {key: replaced(value, leaf) for key, value in call.kwargs}
        if self.foreach:
            kwargs |= {"foreach": True}
        with torch.no_grad():
            call.function(*replaced(call.args, leaf), **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What runs when Python waits.

    Attributes:
        parts: What to run, in order.
        writes: First given variables of each memory that it writes.
        dead: Values that nothing reads afterwards.
        operations: Number of operations.
        runner: Who runs it.
        site: Where Python waits for it, ``file:line``.
    """

    parts: tuple[_Operations | _Update, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...]
    operations: int
    runner: str
    site: str

    def run(self, values: list[Any], numbers: list[Any]) -> None:
        """Run it on values and numbers by index."""
        optimize = torch._C._get_graph_executor_optimize()
        enabled = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled("cpu")  # casts are operations of the segment already
        torch._C._set_graph_executor_optimize(False)
        torch._C._set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", False)
        try:
            for part in self.parts:
                part.run(values, numbers)
        finally:
            torch._C._set_graph_executor_optimize(optimize)
            torch._C._set_grad_enabled(enabled)
            torch.set_autocast_enabled("cpu", autocast)
        for index in self.dead:
            values[index] = None


def _chooses_foreach(call: Call) -> bool:
    """Return whether the program leaves it to torch whether an update uses functions on lists."""
    given = dict(call.kwargs)
    return _has_foreach(call.function) and all(
        given.get(name, Constant(None)) == Constant(None) for name in ("foreach", "fused")
    )


@functools.cache
def _has_foreach(function: Any) -> bool:
    return "foreach" in inspect.signature(function).parameters


def build(nodes: Sequence[Node], end: End, *, scripts: bool = True, foreach: bool = True) -> str | None:
    """Build the segments of a path; return why not, or None.

    Args:
        nodes: Its nodes without the root.
        end: Its end.
        scripts: Whether TorchScript runs operations; else generated Python.
        foreach: Whether updates of parameters use functions on lists of tensors.
    """
    return _Builder(nodes, end, scripts, foreach).build()


class _Builder:
    def __init__(self, nodes: Sequence[Node], end: End, scripts: bool, foreach: bool) -> None:
        self._nodes = nodes
        self._end = end
        self._scripts = scripts
        self._foreach = foreach
        self._values = [spec.value for spec in end.specs]
        self._given = {spec.value for spec in end.specs if spec.given}
        self._number_types: dict[int, type] = {}
        for node in nodes:
            self._number_types |= {index: type(value) for index, value in node.call.numbers.items()}

    def build(self) -> str | None:
        items: list[tuple[Node, list[Operation | Update]]] = []
        pending: list[Operation | Update] = []
        for node in self._nodes:
            call = node.call
            if call.kind is Kind.FETCH:
                items.append((node, pending))
                pending = []
                continue
            pending = [*pending, *self._items(node)]
            if call.waits or call.kind is Kind.BACKWARD:
                items.append((node, pending))
                pending = []
        last = self._nodes[-1]
        items.append((last, pending))
        needed = self._needed_at_end()
        segments = []
        for position in reversed(range(len(items))):
            node, parts = items[position]
            at_end = position == len(items) - 1
            if not at_end:
                needed = needed | self._needed_here(node)
            segments.append((node, parts, needed, at_end))
            needed = (needed - _defined(parts)) | _read(parts)
        for node, parts, after, at_end in reversed(segments):
            self._place(node, parts, after, at_end)
        return None

    def _items(self, node: Node) -> list[Operation | Update]:
        call = node.call
        if call.kind is Kind.OPTIMIZER:
            return [Update(call=call, values={index: self._values[index] for index in _variables(call)})]
        host = {id(each) for each in node.host}
        return [
            each for each in call.operations if id(each) not in host and each.operator.namespace == "aten"
        ]

    def _needed_at_end(self) -> set[int]:
        needed = {self._values[index] for index in self._end.escaping}
        return needed | {self._values[found.index] for found in self._end.gradients.values()}

    def _needed_here(self, node: Node) -> set[int]:
        call = node.call
        if call.kind is Kind.FETCH:
            return {self._values[index] for index in _variables(call)}
        return set(call.checked)

    def _place(self, node: Node, parts: list[Operation | Update], after: set[int], at_end: bool) -> None:
        outputs = _defined(parts) & after
        if at_end:
            self._end.segment = self._segment(parts, outputs, "the end of the iteration")
            return
        outputs |= node.outputs
        if node.segment is not None and outputs == node.outputs:
            return
        node.outputs = outputs
        node.segment = self._segment(parts, outputs, node.call.site)

    def _segment(self, parts: list[Operation | Update], outputs: set[int], site: str) -> Segment | None:
        if not parts:
            return None
        made: list[_Operations | _Update] = []
        group: list[Operation] = []
        for position, item in enumerate(parts):
            if isinstance(item, Operation):
                group.append(item)
            if group and (isinstance(item, Update) or position == len(parts) - 1):
                rest = parts[position:] if isinstance(item, Update) else []
                made.append(self._group(group, outputs | _read(rest)))
                group = []
            if isinstance(item, Update):
                made.append(_Update(item, self._foreach and _chooses_foreach(item.call)))
        writes = {index for item in parts if isinstance(item, Operation) for index in item.writes}
        for item in parts:
            if isinstance(item, Update):
                writes |= {index for operation in item.call.operations for index in operation.writes}
        return Segment(
            parts=tuple(made),
            writes=tuple(sorted({self._end.roots[index] for index in writes} - {-1})),
            dead=(),
            operations=sum(len(item.call.operations) if isinstance(item, Update) else 1 for item in parts),
            runner="TorchScript" if self._scripts else "Python",
            site=site,
        )

    def _group(self, operations: list[Operation], needed: set[int]) -> _Operations:
        defined: set[int] = set()
        inputs: dict[int, None] = {}
        numbers: dict[int, type] = {}
        for operation in operations:
            for index in operation.reads():
                if index not in defined:
                    inputs[index] = None
            for leaf in flat((operation.args, tuple(value for _, value in operation.kwargs))):
                if isinstance(leaf, Number):
                    numbers[leaf.index] = self._number_types[leaf.index]
            defined.update(index for index in operation.outputs if index is not None)
        outputs = tuple(sorted(defined & needed))
        if self._scripts:
            runner = script_runner(operations, tuple(inputs), numbers, outputs)
        else:
            runner = python_runner(operations, tuple(inputs), tuple(numbers), outputs)
        return _Operations(runner, tuple(inputs), tuple(numbers), outputs)


def _variables(call: Any) -> set[int]:
    return {
        leaf.index
        for leaf in flat((call.args, tuple(value for _, value in call.kwargs)))
        if isinstance(leaf, Variable)
    }


def _defined(parts: Sequence[Operation | Update]) -> set[int]:
    return {
        index for item in parts if isinstance(item, Operation) for index in item.outputs if index is not None
    }


def _read(parts: Sequence[Operation | Update]) -> set[int]:
    found: set[int] = set()
    for item in parts:
        found |= set(item.reads()) if isinstance(item, Operation) else set(item.values.values())
    return found
