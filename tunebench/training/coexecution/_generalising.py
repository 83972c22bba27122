"""Make recorded paths that differ in sizes only one path, whose sizes follow from those of given tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tunebench.training.coexecution._call import (
    Call,
    Constant,
    DifferentError,
    Number,
    Operation,
    TensorSpec,
    joined,
)
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._path import End, Node, PathTree, node_of
from tunebench.training.coexecution._sizes import SAMPLES, SizeFinder

__all__ = ["general_path"]

_MEMBERS = 7
"""Number of paths, besides a new one, that show how sizes change."""

_LEAST_SIZE = 2
"""The smallest size of a tensor that may change: torch handles 0 and 1 in other ways, as in broadcasts."""

Path = tuple[list[Node], End]


def general_path(tree: PathTree, end: End) -> Path | None:
    """Return a path with variable sizes that covers a new path and other known paths, with new nodes.

    Return None if there are too few such paths, or if no formulas give their sizes. The sizes are added to
    those of the tree.

    Args:
        tree: The paths.
        end: End of the new path.
    """
    (last,) = (path for path in tree.paths if path[1] is end)
    alike = [path for path in tree.paths if path[1].skeleton == end.skeleton and path[1] is not end]
    members = [
        path
        for path in sorted(alike, key=lambda path: path[1].used)[-_MEMBERS:]
        if _generalised([path, last], _AnySize()) is not None
    ]
    if len(members) < SAMPLES - 1:
        return None
    members.append(last)
    known = set.intersection(*(set(of.numbers) for _, of in members))
    finder = SizeFinder(
        tree.sizes,
        {index: tuple(of.numbers[index] for _, of in members) for index in known if index < 0},
    )
    found = _generalised(members, finder)
    if found is not None:
        found[1].numbers |= {root: values[-1] for root, values in finder.roots.items()}
        finder.add()
    return found


class _AnySize:
    """Takes any integers for sizes that are large enough."""

    def size(self, values: Sequence[int], *, least: int | None, bounded: bool = True) -> Number | None:
        return Number(-1) if least is None or min(values) >= least else None


def _generalised(members: Sequence[Path], finder: SizeFinder | _AnySize) -> Path | None:
    """Return the path that covers all members, or None if there is none."""
    try:
        return _Generaliser(members, finder).path()
    except DifferentError:
        return None


class _Generaliser:
    """Makes one path of paths that differ in numbers and sizes only.

    Its methods raise `DifferentError` if they differ otherwise.

    Args:
        members: The paths; those with other calls or operations have other skeletons.
        finder: What finds sizes.
    """

    def __init__(self, members: Sequence[Path], finder: SizeFinder | _AnySize) -> None:
        self._nodes = [nodes for nodes, _ in members]
        self._ends = [end for _, end in members]
        self._numbers = [end.numbers for end in self._ends]
        self._finder = finder
        self._equal: set[tuple[int, int]] = set()
        self._asks = False

    def path(self) -> Path:
        """Return the nodes and the end of the path."""
        last = self._ends[-1]
        for end in self._ends:
            if end.roots != last.roots or end.bases != last.bases:
                raise DifferentError
        nodes = [self._node(each) for each in zip(*self._nodes, strict=True)]
        end = End(
            gradients=last.gradients,
            escaping=set().union(*(each.escaping for each in self._ends)),
            specs=last.specs,
            roots=last.roots,
            bases=last.bases,
            numbers=dict(last.numbers),
            runners=max(each.runners for each in self._ends),
        )
        nodes[-1].end = end
        return nodes, end

    def _node(self, nodes: Sequence[Node]) -> Node:
        last = nodes[-1]
        self._equal = set().union(*(each.equal for each in nodes))
        call = last.call if all(each is last for each in nodes) else self._call([each.call for each in nodes])
        node = node_of(call, _common([each.fixed for each in nodes]), last.specs)
        node.required = _common([each.required for each in nodes])
        node.equal = self._equal
        return node

    def _call(self, calls: Sequence[Call]) -> Call:
        last = calls[-1]
        for call in calls:
            if not last.same_but_numbers(call, _any) or any(
                type(value) is not type(call.numbers[index]) for index, value in last.numbers.items()
            ):
                raise DifferentError
        given = {
            index: self._spec([each.specs[index] for each in calls])
            for index, spec in last.specs.items()
            if spec.given
        }
        args = joined([each.args for each in calls], self._argument)
        kwargs = joined([each.kwargs for each in calls], self._argument)
        checked = joined([each.checked for each in calls], self._tensor_size)
        self._asks = False
        specs = {
            index: given.get(index) or self._spec([each.specs[index] for each in calls])
            for index in last.specs
        }
        if self._asks and last.kind is not Kind.COMPUTE:
            raise DifferentError
        operations = last.operations
        if last.kind is not Kind.OPTIMIZER:
            operations = [
                self._operation(each) for each in zip(*(call.operations for call in calls), strict=True)
            ]
        return dataclasses.replace(
            last, args=args, kwargs=kwargs, checked=checked, specs=specs, operations=operations, result=None,
            random_states=[], asks=self._asks,
        )  # fmt: skip

    def _operation(self, operations: Sequence[Operation]) -> Operation:
        return dataclasses.replace(
            operations[-1],
            args=joined([each.args for each in operations], self._constant),
            kwargs=joined([each.kwargs for each in operations], self._constant),
        )

    def _spec(self, specs: Sequence[TensorSpec]) -> TensorSpec:
        """Return the common spec of a tensor of all paths, which may differ in geometry only."""
        last = specs[-1]
        if all(each == last for each in specs):
            return last
        if not all(each.same_but_geometry(last) for each in specs):
            raise DifferentError
        if last.given:
            leaves = (self._tensor_size, self._integer, self._offset)
        else:
            leaves = (self._asked_size, self._asked_size, self._asked_size)
        shape, stride, offset = (
            joined([each.geometry()[part] for each in specs], leaf) for part, leaf in enumerate(leaves)
        )
        return dataclasses.replace(last, shape=shape, stride=stride, offset=offset, sized=True)

    def _constant(self, leaves: Sequence[Any]) -> Any:
        """Return an argument of an operation that differs: a number of a call, or a size."""
        values = self._values(leaves)
        fitting = [
            index
            for index in self._numbers[-1]
            if index >= 0
            and all(
                Constant(numbers[index]) == Constant(value)
                for numbers, value in zip(self._numbers, values, strict=True)
            )
        ]
        if fitting:
            self._equal |= {(fitting[0], other) for other in fitting[1:]}
            return Number(fitting[0])
        return self._result_size(values)

    def _argument(self, leaves: Sequence[Any]) -> Number:
        """Return an argument of a call that differs."""
        return self._integer(self._values(leaves))

    def _values(self, leaves: Sequence[Any]) -> list[Any]:
        return [
            numbers.get(leaf.index) if isinstance(leaf, Number) else getattr(leaf, "value", None)
            for numbers, leaf in zip(self._numbers, leaves, strict=True)
        ]

    def _tensor_size(self, values: Sequence[Any]) -> Number:
        """Return the size of a tensor that is given, or that depends on data."""
        return self._size(values, _LEAST_SIZE)

    def _integer(self, values: Sequence[Any]) -> Number:
        """Return an integer that may be independent of others."""
        return self._size(values, 0)

    def _offset(self, values: Sequence[Any]) -> Number:
        """Return the offset of a given tensor, which decides nothing but where it is."""
        return self._size(values, 0, bounded=False)

    def _result_size(self, values: Sequence[Any]) -> Number:
        """Return an integer that follows from others."""
        return self._size(values, None)

    def _asked_size(self, values: Sequence[Any]) -> Number:
        """Return a size of a result; torch is asked for one that does not follow from others."""
        try:
            return self._result_size(values)
        except DifferentError:
            self._asks = True
            return self._tensor_size(values)

    def _size(self, values: Sequence[Any], least: int | None, *, bounded: bool = True) -> Number:
        if any(type(each) is not int for each in values):
            raise DifferentError
        size = self._finder.size(values, least=least, bounded=bounded)
        if size is None:
            raise DifferentError
        return size


def _any(one: Any, two: Any) -> bool:
    """Return whether patterns have the same keys; other differences are found later."""
    return not isinstance(one, dict) or one.keys() == two.keys()


def _common(numbers: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Return the numbers that have one value on all paths."""
    first, *others = numbers
    return {
        index: value
        for index, value in first.items()
        if all(index in each and Constant(each[index]) == Constant(value) for each in others)
    }
