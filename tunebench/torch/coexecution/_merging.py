"""Merge a recorded iteration into the known paths: numbers and sizes that change become inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tunebench.torch.coexecution._call import (
    Call,
    Constant,
    Number,
    TensorSpec,
    flat,
    replaced,
)
from tunebench.torch.coexecution._function import Kind
from tunebench.torch.coexecution._path import End, Node, PathTree, clear, host_operations, outputs_of
from tunebench.torch.coexecution._sizes import SAMPLES, Numbers, SizeFinder, is_instance, is_sized

__all__ = ["merge"]

_MEMBERS = 7
"""Number of paths, besides a new one, that show how sizes change."""

_LEAST_SIZE = 2
"""The smallest size of a tensor that may change: torch treats 0 and 1 in other ways, such as in broadcasts."""


def merge(tree: PathTree, calls: Sequence[Call], end: End) -> tuple[list[Node], End]:
    """Merge the calls of an iteration, and return the nodes of its path without the root, and its end.

    A path that differs from a known one in numbers only, in a way that shows where the numbers go, is the
    known path with numbers as inputs. Several paths that differ in sizes only, in a way that shows how the
    sizes follow from those of given tensors, are one path with sizes that change. Segments that hold such a
    number are gone afterwards, those of all paths.
    """
    freed = (
        (found, roots)
        for path, roots in _similar(tree, calls)
        if path[-1].end is not None and (found := _freed(tree, path, calls, roots)) is not None
    )
    nodes, roots = next(freed, None) or _inserted(tree, calls, end.specs)
    found = nodes[-1].end
    if found is not None:
        found.escaping |= end.escaping
        found.numbers |= roots
        for index, value in roots.items():
            tree.sizes[index] = tree.sizes[index].widened(value)
        return nodes[1:], found
    nodes[-1].end = end
    end.numbers = _numbers(calls) | roots
    end.skeleton = hash(tuple(map(_skeleton, calls)))
    tree.paths.append((nodes[1:], end))
    return _generalised(tree, end) or (nodes[1:], end)


def _skeleton(call: Call) -> int:
    return hash((call.function, len(call.specs), *(operation.operator for operation in call.operations)))


def _similar(tree: PathTree, calls: Sequence[Call]) -> list[tuple[list[Node], dict[int, int]]]:
    """Return the paths that differ from calls in numbers only, those with equal numbers first.

    With each path, return the values that the roots of its sizes have in the calls.
    """
    paths = [([tree.root], Numbers(tree.sizes, strict=False))]
    for call in calls:
        paths = [
            ([*path, each], found)
            for path, numbers in paths
            for each in path[-1].following
            if (found := _found(each, call, numbers)) is not None
        ]
    paths.sort(key=lambda path: not all(map(_same_numbers, path[0][1:], calls)))
    return [(path, numbers.roots()) for path, numbers in paths]


def _found(node: Node, call: Call, numbers: Numbers) -> Numbers | None:
    """Return numbers with the sizes of a call; None if the call differs from a known one in more than numbers."""
    if not node.sized:
        return numbers if node.call.same_but_numbers(call) else None
    found = numbers.copy()
    same = functools.partial(is_instance, numbers=found)
    return found if node.call.same_but_numbers(call, same) else None


def _inserted(
    tree: PathTree, calls: Sequence[Call], specs: list[TensorSpec]
) -> tuple[list[Node], dict[int, int]]:
    """Return the nodes of calls, new ones where none is known, and the values of the roots of their sizes."""
    nodes = [tree.root]
    inputs = Numbers(tree.sizes)
    required: dict[int, Any] | None = None
    for call in calls:
        for each in nodes[-1].following:
            found = _found(each, call, inputs)
            if (
                found is not None
                and _same_numbers(each, call)
                and each.allows(found)
                and _same_constants(each.call, call, found.copy(call.numbers))
            ):
                nodes.append(each)
                inputs = found.copy(_inputs(each, call))
                break
        else:
            if required is None:
                required = inputs.independent()
            node = _new_node(call, {} if call.kind is Kind.OPTIMIZER else dict(call.numbers), specs)
            node.required, required = required, required if call.kind is Kind.CREATE else {}
            nodes[-1].following.append(node)
            nodes.append(node)
    return nodes, inputs.roots()


def _new_node(call: Call, fixed: dict[int, Any], specs: list[TensorSpec]) -> Node:
    """Return a node whose path has tensors like specs."""
    return Node(
        call=call,
        fixed=fixed,
        specs=specs,
        host=tuple(host_operations(call)),
        made=tuple((index, call.specs[index]) for index in outputs_of(call) if not call.specs[index].given),
        sized=is_sized((call.args, dict(call.kwargs), call.specs)),
    )


def _inputs(node: Node, call: Call) -> dict[int, Any]:
    """Return the numbers of a call that are inputs; those of an optimizer concern no other call."""
    if call.kind is Kind.OPTIMIZER:
        return {}
    return {index: value for index, value in call.numbers.items() if index not in node.fixed}


def _same_numbers(node: Node, call: Call) -> bool:
    return all(
        Constant(node.fixed[index]) == Constant(value)
        for index, value in call.numbers.items()
        if index in node.fixed
    )


def _constants(call: Call) -> Iterator[Any]:
    if call.kind is Kind.OPTIMIZER:
        return
    for operation in call.operations:
        yield from flat((operation.args, tuple(value for _, value in operation.kwargs)))


def _same_constants(one: Call, two: Call, numbers: Numbers) -> bool:
    return all(
        Constant(numbers[left.index]) == right if isinstance(left, Number) else left == right
        for left, right in zip(_constants(one), _constants(two), strict=False)
    )


# -- numbers as inputs ---------------------------------------------------------------------------------------


def _freed(
    tree: PathTree, nodes: list[Node], calls: Sequence[Call], roots: dict[int, int]
) -> list[Node] | None:
    """Make numbers that differ from those of a path its inputs; return None if they decide something.

    Args:
        tree: The paths.
        nodes: The path.
        calls: Calls that differ from it in numbers only.
        roots: Values of the roots of its sizes in the calls.
    """
    new = Numbers(tree.sizes, strict=False).copy(_numbers(calls) | roots)
    changes = _changes(nodes, calls, new)
    if changes is None:
        return None
    end = nodes[-1].end
    assert end is not None
    free = {
        index
        for index, value in end.numbers.items()
        if index >= 0 and Constant(value) != Constant(new[index])
    }
    if not free:
        return nodes
    _require_on_other_paths(nodes, free)
    for node in nodes[1:]:
        node.fixed = {index: value for index, value in node.fixed.items() if index not in free}
        node.required = {index: value for index, value in node.required.items() if index not in free}
        node.follow = None
    for node, place, fitting in changes:
        if fitting[0] not in node.call.numbers:
            node.equal |= {(fitting[0], other) for other in fitting[1:]}
        _set_constant(node.call, place, Number(fitting[0]))
        node.host = tuple(host_operations(node.call))
    _join(tree, end)
    found = next(path for path, each in tree.paths if each is end)
    for path in ((found, end), *tree.sharing(found[0], end)):
        clear(*path)
    return [tree.root, *found]


def _changes(
    nodes: list[Node], calls: Sequence[Call], new: Numbers
) -> list[tuple[Node, int, list[int]]] | None:
    """Return the constants of a path that are numbers, with all numbers that equal each both times.

    Return None if a number decides something else: a constant of an operation that differs must equal a
    number that a call passed on, both times.
    """
    end = nodes[-1].end
    assert end is not None
    old = end.numbers
    changes = []
    for node, call in zip(nodes[1:], calls, strict=True):
        known = node.call
        if len(list(_constants(known))) != len(list(_constants(call))):
            return None
        for place, (left, right) in enumerate(zip(_constants(known), _constants(call), strict=True)):
            if left == right:
                continue
            if isinstance(left, Number):
                if Constant(new[left.index]) != right:
                    return None
                continue
            if not (isinstance(left, Constant) and isinstance(right, Constant)):
                return None
            fitting = [
                index
                for index in old
                if index >= 0 and Constant(old[index]) == left and Constant(new[index]) == right
            ]
            fitting.sort(key=lambda index: index not in call.numbers)
            if not fitting:
                return None
            changes.append((node, place, fitting))
    return changes


def _numbers(calls: Iterable[Call]) -> dict[int, Any]:
    return {index: value for call in calls for index, value in call.numbers.items()}


def _require_on_other_paths(nodes: list[Node], free: set[int]) -> None:
    """Keep numbers that become inputs of a path fixed on the paths that leave it afterwards."""
    freed: dict[int, Any] = {}
    for node, after in itertools.zip_longest(nodes, nodes[1:]):
        if node.call.kind is not Kind.OPTIMIZER:
            freed |= {index: value for index, value in node.fixed.items() if index in free}
        for other in node.following:
            if other is not after and freed:
                other.required = {**freed, **other.required}
                other.follow = None


def _set_constant(call: Call, place: int, number: Number) -> None:
    counter = itertools.count()

    def change(leaf: Any) -> Any:
        return number if next(counter) == place else leaf

    call.operations = [
        dataclasses.replace(
            each,
            args=replaced(each.args, change),
            kwargs=tuple((key, replaced(value, change)) for key, value in each.kwargs),
        )
        for each in call.operations
    ]


# -- joining -------------------------------------------------------------------------------------------------


def _join(tree: PathTree, kept: End) -> None:
    """Join calls that differ in numbers only, one of which takes these numbers as inputs.

    Of two paths that are one afterwards, keep the one with an end.
    """
    replaced_by: dict[Node, Node] = {}
    pending = [tree.root]
    while pending:
        node = pending.pop()
        node.following[:] = _joined(tree, node.following, kept, replaced_by)
        pending += node.following
    if not replaced_by:
        return
    for nodes, _ in tree.paths:
        for position, node in enumerate(nodes):
            while node in replaced_by:
                node = nodes[position] = replaced_by[node]
    tree.paths = [(nodes, end) for nodes, end in tree.paths if nodes[-1].end is end]
    for node in (tree.root, *tree.nodes()):
        node.choices.clear()
    for nodes, end in sorted(tree.paths, key=lambda path: path[1].used):
        if end.ready:
            tree.enliven(nodes)


def _joined(
    tree: PathTree, following: Sequence[Node], kept: End, replaced_by: dict[Node, Node]
) -> list[Node]:
    """Return calls that follow a call, joined where they are one; note what replaces each that is gone."""
    joined: list[Node] = []
    for node in following:
        for position, known in enumerate(joined):
            for general, other in ((known, node), (node, known)):
                numbers = _specialised(tree, general, other)
                if numbers is not None:
                    _absorb(general, other, numbers, kept)
                    replaced_by[other] = joined[position] = general
                    break
            else:
                continue
            break
        else:
            joined.append(node)
    return joined


def _specialised(tree: PathTree, one: Node, two: Node) -> Numbers | None:
    """Return the numbers for which a call is another one; None if it is not.

    They are fixed for the other one, and inputs or sizes that change of the first.
    """
    known = Numbers(tree.sizes).copy(two.required | two.fixed)
    found = _found(one, two.call, known)
    left, right = list(_constants(one.call)), list(_constants(two.call))
    if (
        found is not None
        and one.equal == two.equal
        and len(left) == len(right)
        and all(type(value) is type(two.call.numbers[index]) for index, value in one.call.numbers.items())
        and all(
            index in mine_of_two and Constant(mine_of_two[index]) == Constant(value)
            for mine, mine_of_two in ((one.fixed, two.fixed), (one.required, two.required))
            for index, value in mine.items()
        )
        and all(
            mine == other or (isinstance(mine, Number) and Constant(found[mine.index]) == other)
            for mine, other in zip(left, right, strict=True)
        )
    ):
        return found
    return None


def _absorb(one: Node, two: Node, numbers: Numbers, kept: End) -> None:
    """Join a call with one for which numbers are fixed that are its inputs."""
    fixed = {
        index: value
        for index, value in (two.required | two.fixed | numbers.roots()).items()
        if index not in one.required and index not in one.fixed
    }
    for node in two.following:
        node.required = fixed | node.required
        node.follow = None
    one.following += two.following
    if one.end is None or two.end is kept:
        one.end = two.end
    one.pool = None


# -- sizes that change ---------------------------------------------------------------------------------------


class _DifferentError(Exception):
    """Paths differ in more than numbers and sizes."""


def _generalised(tree: PathTree, end: End) -> tuple[list[Node], End] | None:
    """Make a new path and those that differ from it in sizes only one path; return its nodes and its end.

    Return None if too few are known, or if the sizes do not show how they follow from those of given tensors.
    """
    alike = [path for path in tree.paths if path[1].skeleton == end.skeleton and path[1] is not end]
    if len(alike) < SAMPLES - 1:
        return None
    (last,) = (path for path in tree.paths if path[1] is end)
    members = [
        path
        for path in sorted(alike, key=lambda path: path[1].used)[-_MEMBERS:]
        if _is_alike(tree, path, last)
    ]
    if len(members) < SAMPLES - 1:
        return None
    try:
        return _attached(tree, *_Generaliser(tree, [*members, last]).path())
    except _DifferentError:
        return None


def _is_alike(tree: PathTree, one: tuple[list[Node], End], two: tuple[list[Node], End]) -> bool:
    """Return whether two paths may differ in numbers and sizes only."""
    try:
        _Generaliser(tree, [one, two], finder=_AnySize()).path()
    except _DifferentError:
        return False
    return True


class _AnySize:
    """Takes any integers for sizes."""

    def size(self, values: Sequence[int], *, least: int | None) -> Number:
        return Number(-1)

    def add(self) -> None:
        return None


class _Generaliser:
    """Makes one path of paths that differ in numbers and sizes only.

    Args:
        tree: The paths.
        members: Nodes and ends of the paths.
        finder: What finds sizes.

    Raises:
        _DifferentError: By its methods: the paths differ otherwise.
    """

    def __init__(
        self,
        tree: PathTree,
        members: Sequence[tuple[list[Node], End]],
        finder: SizeFinder | _AnySize | None = None,
    ) -> None:
        self._members = members
        self._ends = [end for _, end in members]
        self._numbers = [Numbers(tree.sizes, strict=False).copy(end.numbers) for end in self._ends]
        known = set.intersection(*(set(numbers.roots()) for numbers in self._numbers))
        self._finder = finder or SizeFinder(
            tree.sizes, {root: tuple(numbers[root] for numbers in self._numbers) for root in known}
        )
        self._equal: set[tuple[int, int]] = set()

    def path(self) -> tuple[list[Node], End, SizeFinder | _AnySize]:
        """Return the nodes and the end of the path, and what found its sizes."""
        first, last = self._ends[0], self._ends[-1]
        if any((end.roots, end.bases) != (first.roots, first.bases) for end in self._ends):
            raise _DifferentError
        nodes = [self._node(each) for each in zip(*(nodes for nodes, _ in self._members), strict=True)]
        end = End(
            gradients=last.gradients,
            escaping=set().union(*(each.escaping for each in self._ends)),
            specs=last.specs,
            roots=last.roots,
            bases=last.bases,
            runners=max(each.runners for each in self._ends),
            numbers={index: value for index, value in last.numbers.items() if index >= 0},
        )
        if isinstance(self._finder, SizeFinder):
            end.numbers |= {root: values[-1] for root, values in self._finder.values.items()}
        nodes[-1].end = end
        return nodes, end, self._finder

    def _node(self, nodes: Sequence[Node]) -> Node:
        last = nodes[-1]
        if all(each is last for each in nodes):
            node = _new_node(last.call, dict(last.fixed), last.specs)
            node.equal |= last.equal
        else:
            self._equal = set().union(*(each.equal for each in nodes))
            node = _new_node(self._call(nodes), _common([each.fixed for each in nodes]), last.specs)
            node.equal |= self._equal
        node.required = _common([each.required for each in nodes])
        return node

    def _call(self, nodes: Sequence[Node]) -> Call:
        calls = [each.call for each in nodes]
        *others, last = calls
        if any(
            not last.same_but_numbers(other, _any)
            or last.checked.keys() != other.checked.keys()
            or last.specs.keys() != other.specs.keys()
            for other in others
        ) or any(
            type(value) is not type(other.numbers[index])
            for other in others
            for index, value in last.numbers.items()
        ):
            raise _DifferentError
        given = {
            index: self._spec([each.specs[index] for each in calls])
            for index, spec in last.specs.items()
            if spec.given
        }
        args, kwargs = (
            self._pattern([getattr(each, name) for each in calls], self._argument)
            for name in ("args", "kwargs")
        )
        checked = {
            index: self._pattern(
                [each.checked[index] for each in calls], lambda values: self._size(values, _LEAST_SIZE)
            )
            for index in last.checked
        }
        specs = {
            index: given.get(index) or self._spec([each.specs[index] for each in calls])
            for index in last.specs
        }
        operations = last.operations
        if last.kind is not Kind.OPTIMIZER:
            operations = [
                dataclasses.replace(
                    each[-1],
                    **{
                        name: self._pattern([getattr(operation, name) for operation in each], self._constant)
                        for name in ("args", "kwargs")
                    },
                )
                for each in zip(*(call.operations for call in calls), strict=True)
            ]
        return dataclasses.replace(
            last,
            args=args,
            kwargs=kwargs,
            checked=checked,
            specs=specs,
            operations=operations,
            result=None,
            random_states=[],
        )

    def _pattern(self, patterns: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the pattern of which all are instances."""
        first = patterns[0]
        if all(each == first for each in patterns[1:]):
            return first
        if any(type(each) is not type(first) for each in patterns):
            return leaf(patterns)
        if isinstance(first, dict):
            if any(each.keys() != first.keys() for each in patterns):
                raise _DifferentError
            return {key: self._pattern([each[key] for each in patterns], leaf) for key in first}
        if isinstance(first, (tuple, list)):
            if any(len(each) != len(first) for each in patterns):
                raise _DifferentError
            return type(first)(self._pattern(each, leaf) for each in zip(*patterns, strict=True))
        return leaf(patterns)

    def _spec(self, specs: Sequence[TensorSpec]) -> TensorSpec:
        """Return what is known about a tensor of all paths."""
        *others, last = specs
        if all(each == last for each in others):
            return last

        def geometry(name: str, least: int) -> Any:
            columns = [getattr(each, name) for each in specs]
            return self._pattern(
                [tuple(each) if isinstance(each, tuple) else each for each in columns],
                lambda values: self._size(values, least if last.given else None),
            )

        if len({len(each.shape) for each in specs}) > 1:
            raise _DifferentError
        return dataclasses.replace(
            last,
            shape=geometry("shape", _LEAST_SIZE),
            stride=geometry("stride", 0),
            offset=geometry("offset", 0),
            sized=True,
        )

    def _argument(self, leaves: Sequence[Any]) -> Any:
        """Return an argument of a call that differs."""
        return self._size(
            [self._value(number, each) for number, each in zip(self._numbers, leaves, strict=True)], 0
        )

    def _constant(self, leaves: Sequence[Any]) -> Any:
        """Return an argument of an operation that differs: a number of a call, or a size."""
        values = [self._value(numbers, each) for numbers, each in zip(self._numbers, leaves, strict=True)]
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
        return self._size(values, None)

    @staticmethod
    def _value(numbers: Numbers, leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return numbers[leaf.index]
        if not isinstance(leaf, Constant):
            raise _DifferentError
        return leaf.value

    def _size(self, values: Sequence[Any], least: int | None) -> Number:
        if any(type(each) is not int for each in values):
            raise _DifferentError
        size = self._finder.size(values, least=least)
        if size is None:
            raise _DifferentError
        return size


def _any(one: Any, two: Any) -> bool:
    """Return True: what differs is found later."""
    return True


def _common(numbers: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Return the numbers that have one value on all paths."""
    first, *others = numbers
    return {
        index: value
        for index, value in first.items()
        if all(index in each and Constant(each[index]) == Constant(value) for each in others)
    }


def _attached(
    tree: PathTree, nodes: list[Node], end: End, finder: SizeFinder | _AnySize
) -> tuple[list[Node], End]:
    """Add a path to the tree, and join those that it stands for."""
    finder.add()
    for before, node in itertools.pairwise([tree.root, *nodes]):
        before.following.append(node)
    tree.paths.append((nodes, end))
    _join(tree, end)
    (found,) = (path for path in tree.paths if path[1] is end)
    for path in (found, *tree.sharing(found[0][0], end)):
        clear(*path)
    return found
