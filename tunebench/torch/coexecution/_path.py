"""Paths of iterations: a tree of calls, whose branches are the paths that Python took, and their segments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunebench.torch.coexecution._call import (
    Call,
    Constant,
    Number,
    Operation,
    Structure,
    TensorSpec,
    Variable,
    flat,
    replaced,
)
from tunebench.torch.coexecution._function import Kind
from tunebench.torch.coexecution._operator import allocates

__all__ = ["End", "Node", "PathTree", "Update", "clear", "host_operations"]


@dataclass(slots=True, kw_only=True)
class End:
    """The end of a path.

    Attributes:
        gradients: Leaves whose attribute ``grad`` is a result at the end, with its variable.
        escaping: Variables that outlived the iteration.
        specs: All variables of the path.
        roots: For each value, the first given variable with its memory, or -1.
        bases: For each value, the first value with its memory.
        ready: Whether its segments were built and gave the results of eager mode.
        refused: Why it can only run as in eager mode.
        segment: What runs after the last point at which Python waits.
        numbers: Values of the numbers of its calls when it was recorded, by index.
        histories: Names of the nodes of autograd of variables through which no backward pass goes any more.
        used: Number of the iteration that took the path last, among those that took a known or a new path.
        runners: Which ways to run segments gave these results, counted from the one preferred.
    """

    gradients: dict[int, Variable]
    escaping: set[int]
    specs: list[TensorSpec]
    roots: list[int]
    bases: list[int]
    ready: bool = False
    refused: str | None = None
    segment: Any = None
    numbers: dict[int, Any] = field(default_factory=dict)
    histories: dict[int, str] = field(default_factory=dict)
    used: int = 0
    runners: int = 0


@dataclass(slots=True, kw_only=True)
class Update:
    """An update of parameters by a function of an optimizer: part of a segment.

    Attributes:
        call: The call.
        values: Values by variable.
    """

    call: Call
    values: dict[int, int]


@dataclass(slots=True, eq=False)
class Node:
    """A call on a path, after a prefix of calls.

    Attributes:
        call: The call; at the root, one that never ran.
        following: The calls that followed.
        specs: What is known about the tensors of its path.
        follow: Function that checks whether a call is this one, and runs it.
        taking: The method of an iteration that runs it, if it is not all in `follow`.
        choices: The calls that followed on paths that are ready, the latest first.
        pool: Placeholders of its results from an earlier iteration that nothing refers to.
        fixed: Numbers that must have one value, by index.
        required: Numbers of earlier calls that must have one value, by index: this call or a later one may
            hold what Python computed from them.
        equal: Pairs of numbers that must be equal.
        segment: What runs when Python waits here.
        outputs: Values that the segment must return.
        kept: Values that something on a path needs after the segment.
        drops: Values that nothing needs after the segment.
        end: The path that ends here.
        made: Variables that it makes as placeholders, with their specs.
        host: Its operations that run in Python's thread.
    """

    call: Call
    following: list[Node] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    follow: Callable[..., Any] | None = None
    choices: list[Node] = field(default_factory=list)
    pool: tuple[Any, ...] | None = None
    taking: Any = None
    fixed: dict[int, Any] = field(default_factory=dict)
    required: dict[int, Any] = field(default_factory=dict)
    equal: set[tuple[int, int]] = field(default_factory=set)
    segment: Any = None
    outputs: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    drops: tuple[int, ...] = ()
    end: End | None = None
    made: tuple[tuple[int, TensorSpec], ...] = ()
    host: tuple[Operation, ...] = ()

    def allows(self, numbers: Any) -> bool:
        """Return whether numbers of earlier calls, by index, have the values that the call requires."""
        return all(Constant(numbers[index]) == Constant(value) for index, value in self.required.items())


class PathTree:
    """The paths of a step.

    Attributes:
        root: The start of every iteration.
        size: A number that all indices of its calls are smaller than.
        paths: Nodes and end of every path.
    """

    def __init__(self) -> None:
        self.root = Node(call=Call(function=None, kind=Kind.UNKNOWN, args=(), kwargs=(), site="", state=()))
        self.size = 0
        self.paths: list[tuple[list[Node], End]] = []
        self._uses = 0

    def use(self, end: End) -> None:
        """Note that an iteration took a path."""
        self._uses += 1
        end.used = self._uses

    def forget(self, limit: int) -> None:
        """Forget the paths that were not taken for the longest time, all but `limit`."""
        while len(self.paths) > limit:
            path = min(self.paths, key=lambda path: path[1].used)
            self.paths.remove(path)
            nodes = [self.root, *path[0]]
            nodes[-1].end = None
            while len(nodes) > 1 and not nodes[-1].following and nodes[-1].end is None:
                node = nodes.pop()
                nodes[-1].following.remove(node)
                if node in nodes[-1].choices:
                    nodes[-1].choices.remove(node)

    def merge(self, calls: Sequence[Call], end: End) -> list[Node]:
        """Merge the calls of an iteration, and return the nodes of its path without the root.

        A path that differs from a known one in numbers only, in a way that shows where the numbers go, is the
        known path with numbers as inputs. Segments that hold such a number are gone afterwards, those of all
        paths.
        """
        freed = (self._freed(path, calls) for path in self._similar(calls) if path[-1].end is not None)
        nodes = next(filter(None, freed), None) or self._inserted(calls, end.specs)
        if nodes[-1].end is None:
            nodes[-1].end = end
            end.numbers = _numbers(calls)
            self.paths.append((nodes[1:], end))
        else:
            nodes[-1].end.escaping |= end.escaping
        return nodes[1:]

    def _freed(self, nodes: list[Node], calls: Sequence[Call]) -> list[Node] | None:
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
        self._join(end)
        found = next(path for path, each in self.paths if each is end)
        for path in ((found, end), *self.sharing(found[0], end)):
            clear(*path)
        return [self.root, *found]

    def _join(self, kept: End) -> None:
        """Join calls that differ in numbers only, one of which takes these numbers as inputs.

        Of two paths that are one afterwards, keep the one with an end.
        """
        replaced_by: dict[Node, Node] = {}
        pending = [self.root]
        while pending:
            node = pending.pop()
            node.following[:] = _joined(node.following, kept, replaced_by)
            pending += node.following
        if not replaced_by:
            return
        for nodes, _ in self.paths:
            for position, node in enumerate(nodes):
                while node in replaced_by:
                    node = nodes[position] = replaced_by[node]
        self.paths = [(nodes, end) for nodes, end in self.paths if nodes[-1].end is end]
        for node in (self.root, *self.nodes()):
            node.choices.clear()
        for nodes, end in sorted(self.paths, key=lambda path: path[1].used):
            if end.ready:
                self.enliven(nodes)

    def _similar(self, calls: Sequence[Call]) -> list[list[Node]]:
        """Return the paths that differ from calls in numbers only, those with equal numbers first."""
        paths = [[self.root]]
        for call in calls:
            paths = [
                [*path, each]
                for path in paths
                for each in path[-1].following
                if each.call.same_but_numbers(call)
            ]
        return sorted(paths, key=lambda path: not all(map(_same_numbers, path[1:], calls)))

    def _inserted(self, calls: Sequence[Call], specs: list[TensorSpec]) -> list[Node]:
        nodes = [self.root]
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

    def enliven(self, nodes: Sequence[Node]) -> None:
        """Note that a path is ready."""
        for before, node in itertools.pairwise([self.root, *nodes]):
            if node not in before.choices:
                before.choices.insert(0, node)

    def abandon(self, nodes: Sequence[Node], end: End) -> None:
        """Note that a path can only run as in eager mode."""
        end.ready = False
        for before, node in reversed(list(itertools.pairwise([self.root, *nodes]))):
            if node.choices or (node.end is not None and node.end.ready):
                return
            if node in before.choices:
                before.choices.remove(node)

    def sharing(self, node: Node, end: End) -> list[tuple[list[Node], End]]:
        """Return the other paths that are ready and begin with a call."""
        return [
            (nodes, other)
            for nodes, other in self.paths
            if other is not end and other.ready and nodes[0] is node
        ]

    def nodes(self) -> Iterator[Node]:
        """Return all nodes below the root."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            pending += node.following
            if node is not self.root:
                yield node


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


def clear(nodes: Sequence[Node], end: End) -> None:
    """Remove the segments of a path."""
    for node in nodes:
        node.segment = None
        node.follow = None  # it holds whether there is a segment
    end.segment = None


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

    operations = []
    for each in call.operations:
        args = replaced(each.args, change)
        kwargs = tuple((key, replaced(value, change)) for key, value in each.kwargs)
        operations.append(
            Operation(
                operator=each.operator,
                args=args,
                kwargs=kwargs,
                outputs=each.outputs,
                is_list=each.is_list,
                writes=each.writes,
                is_random=each.is_random,
                cost_us=each.cost_us,
            )
        )
    call.operations = operations


def host_operations(call: Call) -> Iterable[Operation]:
    """Return the operations that draw random numbers, with those that allocate their memory.

    They run in Python's thread, so that the order of random numbers is that of the program.
    """
    made: dict[int | None, Operation] = {}
    for operation in call.operations:
        if allocates(operation.operator):
            made[operation.outputs[0]] = operation
        elif operation.is_random:
            for index in operation.reads():
                if index in made:
                    yield made.pop(index)
            yield operation


def outputs_of(call: Call) -> list[int]:
    """Return the variables that a call made."""
    results = (leaf.index for leaf in flat(_parts(call.outputs)) if isinstance(leaf, Variable))
    return [index for index in (*results, *(index for _, index in call.gradients)) if index in call.specs]


def _parts(tree: Any) -> Any:
    if isinstance(tree, Structure):
        return tuple(_parts(each) for each in tree.parts)
    if isinstance(tree, (tuple, list)):
        return tuple(_parts(each) for each in tree)
    return tree
