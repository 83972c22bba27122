"""Build the segments of a path: cut it into pieces, and choose what another thread may run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tunebench.training.coexecution._call import Constant, Number, Operation, Variable, flat
from tunebench.training.coexecution._function import SHARING, Kind
from tunebench.training.coexecution._path import End, Node, Update
from tunebench.training.coexecution._script import python_runner, script_runner
from tunebench.training.coexecution._segment import Piece, Segment, UpdatePiece

__all__ = ["build"]

_PIECE_US = 400
"""Least work of a piece that runs concurrently with Python, in microseconds: ten times its launch."""

_LAUNCH_US = 50
"""Work that takes as long as waking another thread, in microseconds."""

_BESIDE_US = 200
"""Work of a backward pass that another thread receives at a time, in microseconds."""


def build(nodes: Sequence[Node], end: End, *, scripts: bool = True) -> None:
    """Build the segments of a path.

    Args:
        nodes: Its nodes without the root.
        end: Its end.
        scripts: Whether TorchScript runs operations; else Python, by the calls of eager mode.

    Raises:
        RuntimeError: TorchScript has no such operator or argument.
    """
    _Builder(nodes, end, scripts).build()


@dataclass(slots=True)
class _Stop:
    """A place of a path where pending items begin.

    Attributes:
        node: The call; None at the end.
        items: What begins.
        waits: Whether Python waits.
        needs: First values of each memory that Python waits for; None for all.
        reads: Values that Python reads here.
        shares: Whether Python may write their memory afterwards.
    """

    node: Node | None
    items: list[Operation | Update]
    waits: bool
    needs: frozenset[int] | None = None
    reads: set[int] = field(default_factory=set)
    shares: bool = False


class _Builder:
    def __init__(self, nodes: Sequence[Node], end: End, scripts: bool) -> None:
        self._nodes = nodes
        self._end = end
        self._scripts = scripts
        self._values = [spec.value for spec in end.specs]
        self._given_values = {spec.value for spec in end.specs if spec.given}
        self._number_types: dict[int, type] = {}
        for node in nodes:
            self._number_types |= {index: type(value) for index, value in node.call.numbers.items()}

    def build(self) -> None:
        stops = self._stops()
        needed = self._needed_at_end()
        after = []
        for stop in reversed(stops):
            needed = needed | stop.reads
            after.append(needed)
            needed = (needed - _defined(stop.items)) | _read(stop.items)
        for stop, needed in zip(stops, reversed(after), strict=True):
            self._place(stop, needed)

    def _stops(self) -> list[_Stop]:
        """Cut the path where Python waits, and where enough work is there to begin it."""
        stops: list[_Stop] = []
        pending: list[Operation | Update] = []
        for node in self._nodes:
            call = node.call
            if call.kind is Kind.FETCH:
                stop, pending = self._fetch(node, pending)
                stops.append(stop)
                continue
            items = self._items(node)
            pending = [*pending, *items]
            if call.waits or call.kind is Kind.BACKWARD or _is_enough(pending, first=not stops):
                # Python waits for updates, too: an array of a weight shares the memory that they write.
                ready, pending = (pending, []) if call.waits else self._split(pending)
                stops.append(_Stop(node, ready, call.waits, reads=set(call.checked)))
        return [*stops, _Stop(None, pending, waits=True)]

    def _fetch(self, node: Node, pending: list[Operation | Update]) -> tuple[_Stop, list[Operation | Update]]:
        """Return the stop of a call that reads values, with the operations it needs, and the other ones."""
        call = node.call
        reads = {self._values[index] for index in _variables(call)}
        needs = frozenset(self._end.bases[index] for index in reads)
        shares = call.function in SHARING

        def concern(items: list[Operation | Update]) -> bool:
            return not reads.isdisjoint(_defined(items)) or any(
                needs & (self._touched(item) if shares else self._changed(item)) for item in items
            )

        ready, left = self._split(pending)
        if concern(left):
            ready, left = pending, []
        elif not concern(ready):
            ready, left = [], pending
        return _Stop(node, ready, True, needs, reads, shares), left

    def _split(
        self, pending: list[Operation | Update]
    ) -> tuple[list[Operation | Update], list[Operation | Update]]:
        """Return the operations that can run before the updates among pending items, and these updates.

        If other operations need an update, everything runs in order, and nothing is left.
        """
        ready: list[Operation | Update] = []
        updates: list[Operation | Update] = []
        changed: frozenset[int] = frozenset()
        touched: frozenset[int] = frozenset()
        for item in pending:
            if isinstance(item, Update):
                updates.append(item)
                changed |= self._changed(item)
                touched |= self._touched(item)
            elif self._touched(item) & changed or self._changed(item) & touched:
                return pending, []
            else:
                ready.append(item)
        return ready, updates

    def _items(self, node: Node) -> list[Operation | Update]:
        call = node.call
        if call.kind is Kind.OPTIMIZER:
            return [Update(call=call, values={index: self._values[index] for index in _variables(call)})]
        host = {id(each) for each in node.host}
        return [
            part
            for each in call.operations
            if id(each) not in host and each.operator.namespace == "aten" and not _is_identity(each)
            for part in _parts(each)
        ]

    def _needed_at_end(self) -> set[int]:
        needed = {self._values[index] for index in self._end.escaping}
        return needed | {self._values[found.index] for found in self._end.gradients.values()}

    def _changed(self, item: Operation | Update) -> frozenset[int]:
        """Return the first values of each memory that an item makes or writes."""
        bases = self._end.bases
        if isinstance(item, Update):
            written = {index for operation in item.call.operations for index in operation.writes}
            return frozenset(bases[index] for index in written)
        if item.operator.is_view or item.operator is torch.ops.aten.detach.default:
            return frozenset()
        made = {index for index in item.outputs if index is not None}
        return frozenset(bases[index] for index in made.union(item.writes))

    def _touched(self, item: Operation | Update) -> frozenset[int]:
        return self._changed(item) | {self._end.bases[index] for index in _read([item])}

    def _place(self, stop: _Stop, needed: set[int]) -> None:
        """Build the segment of a stop, after which some values are needed."""
        node = stop.node
        outputs = _defined(stop.items) & needed
        if node is None:
            self._end.segment = self._segment(stop, outputs, _read(stop.items) - needed - self._given_values)
            return
        node.kept |= needed
        last = _read(stop.items).union(_defined(stop.items), node.drops)
        drops = last - node.kept - self._given_values
        node.drops = tuple(sorted(drops))
        outputs |= node.outputs
        if node.segment is None or outputs != node.outputs:
            node.outputs = outputs
            node.segment = self._segment(stop, outputs, drops)
            return
        for part in node.segment.parts:  # another path needs some of what its parts dropped
            part.drops = tuple(index for index in part.drops if index not in node.kept)

    def _segment(self, stop: _Stop, outputs: set[int], drops: set[int]) -> Segment:
        """Return the segment of a stop.

        Args:
            stop: The stop.
            outputs: Values that it makes and that are needed after it.
            drops: Values that are not needed after it: each is freed by the part that reads it last, as a
                backward pass frees what the forward pass saved.
        """
        groups = self._groups(stop)
        needed = set(outputs)
        after: list[set[int]] = []
        for items, _ in reversed(groups):
            after.append(set(needed))
            needed |= _read(_listed(items))
        free = set(drops)
        parts: list[Piece | UpdatePiece] = []
        for (items, beside), needed in zip(groups, reversed(after), strict=True):
            free |= _defined(_listed(items))
            freed = tuple(sorted((_read(_listed(items)) & free) - needed))
            if isinstance(items, Update):
                writes = {index for operation in items.call.operations for index in operation.writes}
                parts.append(UpdatePiece(update=items, writes=self._given(writes), drops=freed))
            else:
                parts.append(self._piece(items, needed, freed, beside=beside))
        count = sum(len(item.call.operations) if isinstance(item, Update) else 1 for item in stop.items)
        return Segment(
            parts=tuple(parts),
            waits=stop.waits,
            reads=None if stop.needs is None else frozenset(stop.reads),
            needs=stop.needs or frozenset(),
            shares=stop.shares,
            operations=count,
            runner="TorchScript" if self._scripts else "Python",
            site=stop.node.call.site if stop.node is not None else "the end of the iteration",
        )

    def _given(self, values: set[int]) -> tuple[int, ...]:
        """Return the first given variables of the memory of values."""
        return tuple(sorted({self._end.roots[index] for index in values} - {-1}))

    def _groups(self, stop: _Stop) -> list[tuple[list[Operation] | Update, bool]]:
        """Return what begins at a stop in order, and what another thread may run beside the later ones.

        In a backward pass these are operations that the longest chain does not need, such as gradients of
        weights.
        """
        groups: list[tuple[list[Operation] | Update, bool]] = []
        group: list[Operation] = []
        beside: list[Operation] = []
        waiting: frozenset[int] = frozenset()
        chosen = _beside(stop)

        def finish() -> None:
            nonlocal waiting
            if group:
                groups.append(
                    (list(group), not stop.waits and not chosen and _cost_us(group) >= 2 * _LAUNCH_US)
                )
            if beside:
                groups.append((list(beside), _cost_us(beside) >= _LAUNCH_US))
            group.clear()
            beside.clear()
            waiting = frozenset()

        for item in stop.items:
            if isinstance(item, Update):
                finish()
                groups.append((item, False))
            elif id(item) in chosen:
                beside.append(item)
                waiting |= self._touched(item)
                if _cost_us(beside) >= _BESIDE_US:
                    finish()
            else:
                if item.writes and waiting & self._changed(item):
                    finish()
                group.append(item)
        finish()
        return groups

    def _piece(
        self, operations: list[Operation], needed: set[int], drops: tuple[int, ...], *, beside: bool
    ) -> Piece:
        defined: set[int] = set()
        inputs: dict[int, None] = {}
        numbers: dict[int, type] = {}
        for operation in operations:
            for index in operation.reads():
                if index not in defined:
                    inputs[index] = None
            for leaf in flat((operation.args, tuple(value for _, value in operation.kwargs))):
                if isinstance(leaf, Number):
                    numbers[leaf.index] = self._number_types.get(leaf.index, int)
            defined.update(index for index in operation.outputs if index is not None)
        outputs = tuple(sorted(defined & needed))
        if self._scripts:
            runner = script_runner(operations, tuple(inputs), numbers, outputs)
        else:
            runner = python_runner(operations, tuple(inputs), tuple(numbers), outputs)
        return Piece(
            operations=tuple(operations),
            runner=runner,
            inputs=tuple(inputs),
            numbers=numbers,
            outputs=outputs,
            made=frozenset(outputs),
            writes=self._given({index for each in operations for index in each.writes}),
            changes=frozenset().union(*map(self._changed, operations)),
            touches=frozenset().union(*map(self._touched, operations)),
            beside=beside and self._scripts,
            drops=drops,
        )


def _is_identity(operation: Operation) -> bool:
    """Return whether an operation returns its argument, seen from below autograd."""
    return operation.operator is torch.ops.aten.detach.default and operation.outputs == (
        operation.args[0].index,
    )


def _parts(operation: Operation) -> list[Operation]:
    """Return an operation, or its parts: each gradient of a convolution as an operation of its own."""
    if operation.operator is not torch.ops.aten.convolution_backward.default:
        return [operation]
    mask = [each.value for each in operation.args[-1]]
    if not mask[0] or not (mask[1] or mask[2]):
        return [operation]
    parts = []
    for chosen in ((False, mask[1], mask[2]), (True, False, False)):
        flags = [Constant(each) for each in chosen]
        outputs = tuple(
            index if wanted else None for index, wanted in zip(operation.outputs, chosen, strict=True)
        )
        parts.append(
            dataclasses.replace(
                operation,
                args=(*operation.args[:-1], flags),
                outputs=outputs,
                cost_us=operation.cost_us / 2,
            )
        )
    return parts


def _beside(stop: _Stop) -> set[int]:
    """Return the identities of operations that can run beside the longest chain of a backward pass.

    What follows from each takes less time than what follows from a later operation. Few of them
    are not worth a thread.
    """
    if stop.node is None or stop.node.call.kind is not Kind.BACKWARD:
        return set()
    chosen: list[Operation] = []
    paths: dict[int, float] = {}  # longest time from a value to the end, by value
    needed: set[int] = set()
    longest = 0.0
    for item in reversed(stop.items):
        if isinstance(item, Update):
            needed |= set(item.values.values())
            continue
        made = [index for index in item.outputs if index is not None]
        length = item.cost_us + max((paths.get(index, 0.0) for index in made), default=0.0)
        if item.writes or not needed.isdisjoint(made) or length > 0.9 * longest:
            needed |= set(item.reads())
        else:
            chosen.append(item)
        longest = max(longest, length)
        for index in item.reads():
            paths[index] = max(paths.get(index, 0.0), length)
    enough = _cost_us(chosen) >= _BESIDE_US
    return {id(each) for each in chosen} if enough else set()


def _is_enough(items: list[Operation | Update], *, first: bool) -> bool:
    """Return whether operations are long enough to start them concurrently with Python.

    At the start of an iteration nothing else runs, so less work is enough.
    """
    return _cost_us(items) >= (2 * _LAUNCH_US if first else _PIECE_US)


def _cost_us(items: Iterable[Operation | Update]) -> float:
    return sum(item.cost_us for item in items if isinstance(item, Operation))


def _variables(call: Any) -> set[int]:
    return {
        leaf.index
        for leaf in flat((call.args, tuple(value for _, value in call.kwargs)))
        if isinstance(leaf, Variable)
    }


def _listed(items: list[Operation] | Update) -> Sequence[Operation | Update]:
    return [items] if isinstance(items, Update) else items


def _defined(parts: Sequence[Operation | Update]) -> set[int]:
    return {
        index for item in parts if isinstance(item, Operation) for index in item.outputs if index is not None
    }


def _read(parts: Sequence[Operation | Update]) -> set[int]:
    found: set[int] = set()
    for item in parts:
        found |= set(item.reads()) if isinstance(item, Operation) else set(item.values.values())
    return found
