"""Merge a recorded iteration into the known paths: numbers and sizes that change become inputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tunebench.training.coexecution._call import (
    Call,
    Constant,
    Number,
    TensorSpec,
    flat,
    replaced,
)
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._generalising import general_path
from tunebench.training.coexecution._path import End, Node, PathTree, clear, host_operations, node_of
from tunebench.training.coexecution._sizes import Numbers, is_instance

__all__ = ["merge"]


def merge(tree: PathTree, calls: Sequence[Call], end: End) -> tuple[list[Node], End]:
    """Merge the calls of an iteration, and return the nodes of its path without the root, and its end.

    A path that differs from a known one in numbers only, in a way that shows where the numbers go, is the
    known path with numbers as inputs. Several paths that differ in sizes only, in a way that shows how the
    sizes follow from those of given tensors, are one path with sizes that change. Segments that hold such a
    number are removed from all paths.
    """
    freed = (
        (found, roots)
        for path, roots in _similar(tree, calls)
        if path[-1].end is not None and (found := _freed(tree, path, calls, roots)) is not None
    )
    nodes, roots = next(freed, None) or _inserted(tree, calls, end.specs)
    known = nodes[-1].end
    if known is not None:
        known.escaping |= end.escaping
        known.numbers |= roots
        for index, value in roots.items():
            tree.sizes[index] = tree.sizes[index].widened(value)
        return nodes[1:], known
    nodes[-1].end = end
    end.numbers = _numbers(calls) | roots
    end.skeleton = hash(tuple(map(_skeleton, calls)))
    tree.paths.append((nodes[1:], end))
    general = general_path(tree, end)
    return (nodes[1:], end) if general is None else _attached(tree, *general)


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
    """Return numbers with the sizes of a call; None if it differs from a known one in more than numbers."""
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
            node = node_of(call, {} if call.kind is Kind.OPTIMIZER else dict(call.numbers), specs)
            node.required, required = required, required if call.kind is Kind.CREATE else {}
            nodes[-1].following.append(node)
            nodes.append(node)
    return nodes, inputs.roots()


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
    found, _ = _cleared(tree, end)
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
    """Join two calls that differ in numbers only; one of them has these numbers as inputs.

    Of two paths that are one afterwards, keep the one with an end.
    """
    replaced_by: dict[Node, tuple[Node, dict[int, int]]] = {}
    pending = [tree.root]
    while pending:
        node = pending.pop()
        node.following[:] = _joined(tree, node.following, kept, replaced_by)
        pending += node.following
    if not replaced_by:
        return
    starts = {nodes[0] for nodes, _ in tree.paths if not replaced_by.keys().isdisjoint(nodes)}
    for nodes, end in tree.paths:
        for position, node in enumerate(nodes):
            while node in replaced_by:
                node, roots = replaced_by[node]
                nodes[position] = node
                end.numbers |= roots
    tree.paths = [(nodes, end) for nodes, end in tree.paths if nodes[-1].end is end]
    starts |= {replaced_by[node][0] for node in starts if node in replaced_by}
    for nodes, end in tree.paths:
        if nodes[0] in starts:
            clear(nodes, end)
    for node in (tree.root, *tree.nodes()):
        node.choices.clear()
    for nodes, end in sorted(tree.paths, key=lambda path: path[1].used):
        if end.ready:
            tree.enliven(nodes)


def _joined(
    tree: PathTree,
    following: Sequence[Node],
    kept: End,
    replaced_by: dict[Node, tuple[Node, dict[int, int]]],
) -> list[Node]:
    """Return calls that follow a call, joined where they are one.

    Note what replaces each that is gone, with the values that the roots of sizes had.
    """
    joined: list[Node] = []
    for node in following:
        for known in joined:
            if (numbers := _specialised(tree, known, node)) is not None:
                _absorb(known, node, numbers, kept)
                replaced_by[node] = known, numbers.roots()
                break
        else:
            for known in list(joined):
                if (numbers := _specialised(tree, node, known)) is not None:
                    _absorb(node, known, numbers, kept)
                    replaced_by[known] = node, numbers.roots()
                    joined.remove(known)
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


def _attached(tree: PathTree, nodes: list[Node], end: End) -> tuple[list[Node], End]:
    """Add a path to the tree, and join its instances with it."""
    for before, node in itertools.pairwise([tree.root, *nodes]):
        before.following.append(node)
    tree.paths.append((nodes, end))
    _join(tree, end)
    return _cleared(tree, end)


def _cleared(tree: PathTree, end: End) -> tuple[list[Node], End]:
    """Remove the segments of a path and of those that share calls with it, and return it."""
    (found,) = (path for path in tree.paths if path[1] is end)
    for path in (found, *tree.sharing(found[0][0], end)):
        clear(*path)
    return found
