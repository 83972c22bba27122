"""Merge a recorded iteration into the known paths: numbers that change become inputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
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

__all__ = ["merge"]


def merge(tree: PathTree, calls: Sequence[Call], end: End) -> list[Node]:
    """Merge the calls of an iteration, and return the nodes of its path without the root.

    A path that differs from a known one in numbers only, in a way that shows where the numbers go, is the
    known path with numbers as inputs. Segments that hold such a number are gone afterwards, those of all
    paths.
    """
    freed = (_freed(tree, path, calls) for path in _similar(tree, calls) if path[-1].end is not None)
    nodes = next(filter(None, freed), None) or _inserted(tree, calls, end.specs)
    if nodes[-1].end is None:
        nodes[-1].end = end
        end.numbers = _numbers(calls)
        tree.paths.append((nodes[1:], end))
    else:
        nodes[-1].end.escaping |= end.escaping
    return nodes[1:]


def _similar(tree: PathTree, calls: Sequence[Call]) -> list[list[Node]]:
    """Return the paths that differ from calls in numbers only, those with equal numbers first."""
    paths = [[tree.root]]
    for call in calls:
        paths = [
            [*path, each] for path in paths for each in path[-1].following if each.call.same_but_numbers(call)
        ]
    return sorted(paths, key=lambda path: not all(map(_same_numbers, path[1:], calls)))


def _inserted(tree: PathTree, calls: Sequence[Call], specs: list[TensorSpec]) -> list[Node]:
    nodes = [tree.root]
    inputs: dict[int, Any] = {}
    for call in calls:
        for each in nodes[-1].following:
            if (
                each.call.same_but_numbers(call)
                and _same_numbers(each, call)
                and each.allows(inputs)
                and _same_constants(each.call, call, inputs | call.numbers)
            ):
                nodes.append(each)
                inputs |= _inputs(each, call)
                break
        else:
            node = Node(call=call, fixed={} if call.kind is Kind.OPTIMIZER else dict(call.numbers))
            node.required, inputs = (inputs, inputs if call.kind is Kind.CREATE else {})
            node.specs = specs
            node.host = tuple(host_operations(call))
            node.made = tuple(
                (index, call.specs[index]) for index in outputs_of(call) if not call.specs[index].given
            )
            nodes[-1].following.append(node)
            nodes.append(node)
    return nodes


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


def _same_constants(one: Call, two: Call, numbers: dict[int, Any]) -> bool:
    return all(
        Constant(numbers.get(left.index)) == right if isinstance(left, Number) else left == right
        for left, right in zip(_constants(one), _constants(two), strict=False)
    )


# -- numbers as inputs ---------------------------------------------------------------------------------------


def _freed(tree: PathTree, nodes: list[Node], calls: Sequence[Call]) -> list[Node] | None:
    """Make numbers that differ from those of a path its inputs; return None if they decide something."""
    changes = _changes(nodes, calls)
    if changes is None:
        return None
    end = nodes[-1].end
    assert end is not None
    new = _numbers(calls)
    free = {index for index, value in end.numbers.items() if Constant(value) != Constant(new[index])}
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


def _changes(nodes: list[Node], calls: Sequence[Call]) -> list[tuple[Node, int, list[int]]] | None:
    """Return the constants of a path that are numbers, with all numbers that equal each both times.

    Return None if a number decides something else: a constant of an operation that differs must equal a
    number that a call passed on, both times.
    """
    end = nodes[-1].end
    assert end is not None
    old, new = end.numbers, _numbers(calls)
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
                index for index in old if Constant(old[index]) == left and Constant(new[index]) == right
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
        node.following[:] = _joined(node.following, kept, replaced_by)
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


def _joined(following: Sequence[Node], kept: End, replaced_by: dict[Node, Node]) -> list[Node]:
    """Return calls that follow a call, joined where they are one; note what replaces each that is gone."""
    joined: list[Node] = []
    for node in following:
        for position, known in enumerate(joined):
            general, other = (known, node) if _is_general(known, node) else (node, known)
            if general is known or _is_general(node, known):
                _absorb(general, other, kept)
                replaced_by[other] = joined[position] = general
                break
        else:
            joined.append(node)
    return joined


def _is_general(one: Node, two: Node) -> bool:
    """Return whether a call is another one with numbers as inputs that are fixed for the other."""
    known = two.required | two.fixed
    left, right = list(_constants(one.call)), list(_constants(two.call))
    return (
        one.call.same_but_numbers(two.call)
        and one.equal == two.equal
        and len(left) == len(right)
        and all(type(value) is type(two.call.numbers[index]) for index, value in one.call.numbers.items())
        and all(
            index in mine_of_two and Constant(mine_of_two[index]) == Constant(value)
            for mine, mine_of_two in ((one.fixed, two.fixed), (one.required, two.required))
            for index, value in mine.items()
        )
        and all(
            mine == other
            or (isinstance(mine, Number) and mine.index in known and Constant(known[mine.index]) == other)
            for mine, other in zip(left, right, strict=True)
        )
    )


def _absorb(one: Node, two: Node, kept: End) -> None:
    """Join a call with one for which numbers are fixed that are its inputs."""
    fixed = {
        index: value
        for of_two, of_one in ((two.required, one.required), (two.fixed, one.fixed))
        for index, value in of_two.items()
        if index not in of_one
    }
    for node in two.following:
        node.required = fixed | node.required
        node.follow = None
    one.following += two.following
    if one.end is None or two.end is kept:
        one.end = two.end
    one.pool = None
