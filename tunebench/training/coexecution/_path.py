"""Paths of iterations: a tree of calls, whose branches are the paths that Python took, and their segments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunebench.training.coexecution._call import (
    Call,
    Constant,
    Operation,
    TensorSpec,
    Variable,
    flat,
)
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._operator import allocates
from tunebench.training.coexecution._sizes import Size, is_sized

__all__ = ["End", "Node", "PathTree", "Update", "clear", "host_operations", "node_of"]


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
        numbers: Values of the numbers of its calls and of the roots of its sizes when it was recorded, by
            index.
        skeleton: Number that is the same for paths whose calls and operations are; None for a path with
            sizes that change.
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
    skeleton: int | None = None


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
        sized: Whether its call holds sizes that change; see `_sizes`.
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
    sized: bool = False

    def allows(self, numbers: Any) -> bool:
        """Return whether numbers of earlier calls, by index, have the values that the call requires."""
        return all(Constant(numbers[index]) == Constant(value) for index, value in self.required.items())


class PathTree:
    """The paths of a step.

    Attributes:
        root: The start of every iteration.
        size: A number that all indices of its calls are smaller than.
        paths: Nodes and end of every path.
        sizes: Sizes that change, by their negative indices.
    """

    def __init__(self) -> None:
        self.root = Node(call=Call(function=None, kind=Kind.UNKNOWN, args=(), kwargs=(), site="", state=()))
        self.size = 0
        self.sizes: dict[int, Size] = {}
        self.paths: list[tuple[list[Node], End]] = []
        self._uses = 0

    def use(self, end: End) -> None:
        """Note that an iteration took a path."""
        self._uses += 1
        end.used = self._uses

    def forget(self, limit: int, operations: int = 0) -> None:
        """Forget the paths that were not taken for the longest time.

        Args:
            limit: Number of paths that may stay.
            operations: Number of operations that all paths but the last one may have together.
        """
        while len(self.paths) > limit or (len(self.paths) > 1 and self._operations() > operations):
            path = min(self.paths, key=lambda path: path[1].used)
            self.paths.remove(path)
            nodes = [self.root, *path[0]]
            nodes[-1].end = None
            while len(nodes) > 1 and not nodes[-1].following and nodes[-1].end is None:
                node = nodes.pop()
                node.follow = None  # which refers to the node
                nodes[-1].following.remove(node)
                if node in nodes[-1].choices:
                    nodes[-1].choices.remove(node)

    def _operations(self) -> int:
        return sum(len(node.call.operations) for node in self.nodes())

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


def clear(nodes: Sequence[Node], end: End) -> None:
    """Remove the segments of a path."""
    for node in nodes:
        node.segment = None
        node.follow = None  # it holds whether there is a segment
    end.segment = None


def node_of(call: Call, fixed: dict[int, Any], specs: list[TensorSpec]) -> Node:
    """Return the node of a call.

    Args:
        call: The call.
        fixed: Its numbers that must have one value, by index.
        specs: What is known about the tensors of its path.
    """
    return Node(
        call=call,
        fixed=fixed,
        specs=specs,
        host=tuple(host_operations(call)),
        made=tuple((index, call.specs[index]) for index in _outputs_of(call) if not call.specs[index].given),
        sized=is_sized((call.args, dict(call.kwargs), call.checked, call.specs)),
    )


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


def _outputs_of(call: Call) -> list[int]:
    """Return the variables that a call made."""
    results = (leaf.index for leaf in flat(call.outputs) if isinstance(leaf, Variable))
    return [index for index in (*results, *(index for _, index in call.gradients)) if index in call.specs]
