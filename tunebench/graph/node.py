"""A model's step as a graph: values in memory, and the nodes that read and write them.

A value is identified by its memory. A view of a whole tensor in another shape, also a transposed one, is the
same value: elementwise kernels read and write memory in its order, whatever the shape.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tunebench._foreign_file import interpreting, read_table
from tunebench._private_file import replaceable
from tunebench.index_map import Gather, Guard, IndexMap

__all__ = ["Broadcast", "Graph", "Node", "NodeOperand", "Pattern", "Value"]

LARGEST_BYTES = 256 << 20
"""Largest size of a file."""

FORMAT = 1
"""Version of the file format; raised when older files can no longer be read."""

Broadcast = Literal["whole", "vector", "row", "channel", "scalar", "strided"]
"""How an operand of an elementwise node is broadcast to the result.

whole   the same elements as the result, in the order of memory
vector  one number per place along the innermost axis in memory
row     one number per run of consecutive elements in memory
channel one number per channel of images in nchw layout
scalar  one number
strided by an index map, as a transposed, sliced or padded tensor is
"""

ITEM_BYTES = {
    "f64": 8,
    "i64": 8,
    "f32": 4,
    "i32": 4,
    "f16": 2,
    "bf16": 2,
    "i16": 2,
    "bool": 1,
    "u8": 1,
    "i8": 1,
    "e4m3": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor in memory.

    Attributes:
        name: Unique name in the graph.
        shape: Extents, as in the model.
        dtype: Type, as workloads name it; torch's name if workloads have none.
        inner: Extent of the innermost axis in memory; 1 for a scalar.
        memory: Name of the value whose memory contains this value; empty if it has separate memory.
        is_constant: Whether it is the same in every step: a parameter or a buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    inner: int = 1
    memory: str = ""
    is_constant: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Size of an element in bytes."""
        return ITEM_BYTES.get(self.dtype, 4)


@dataclass(frozen=True, slots=True)
class NodeOperand:
    """A value that an elementwise node reads, and how it is broadcast to the result.

    Attributes:
        value: Name of the value; of the value that owns the memory for a strided operand.
        place: How it is broadcast.
        index: Place in the value's memory of each element of the result, in the order of the result's
            memory; only for a strided operand. Sources of its gathers are values that own their memory.
    """

    value: str
    place: Broadcast
    index: IndexMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation of the model.

    Attributes:
        name: Unique name in the graph.
        target: Operator of torch, such as ``aten.addmm``.
        reads: Values that own the memory it reads, each once, in the order of the operator's arguments.
        writes: Values it writes, each with separate memory.
        workloads: Canonical texts of what it computes; empty if no operator of tunebench computes it.
        roles: Value of each input and output tensor of the workloads, by the tensor's name. A value that no
            node writes is passed from one kernel to the next.
        copied: Bytes that must be copied to another layout before a tuned kernel can read them.
        relaid: Bytes of results that must be copied to torch's layout after a tuned kernel wrote them.
        expression: Expression of an elementwise node in the names of its operands; it runs after the
            workloads, if any, and may read their results. Its result is the first of `writes`.
        operands: Operand of each name in the expression.
        joins: Images that it concatenates along channels, which are innermost in memory, in order.
        reason: Why it has no workload.
    """

    name: str
    target: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    workloads: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    copied: int = 0
    relaid: int = 0
    expression: str = ""
    operands: Mapping[str, NodeOperand] = field(default_factory=dict)
    joins: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Nodes that were recognised as one workload, whatever each of them computes alone.

    Attributes:
        nodes: Names of the nodes.
        workload: Canonical text of what they compute together.
        roles: Value of each input and output tensor of the workload, by the tensor's name.
    """

    nodes: tuple[str, ...]
    workload: str
    roles: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of a step, in an order in which they can run.

    Attributes:
        name: Name of the model.
        phase: Phase of the step.
        nodes: The nodes; each comes after all nodes that write what it reads.
        values: All values by name.
        outputs: Values that the step returns, or saves for the gradients.
        patterns: Nodes that are one workload together.
    """

    name: str
    phase: Literal["inference", "forward", "backward"]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    outputs: frozenset[str]
    patterns: tuple[Pattern, ...] = ()

    @functools.cached_property
    def writer(self) -> Mapping[str, int]:
        """Index of the node that writes each value; inputs of the graph have none."""
        return {name: index for index, node in enumerate(self.nodes) for name in node.writes}

    @functools.cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the nodes that read each value."""
        # Inputs and outputs without readers need an entry too.
        indices_of: dict[str, list[int]] = {name: [] for name in self.values}
        for index, node in enumerate(self.nodes):
            for name in node.reads:
                indices_of[name].append(index)
        return {name: tuple(indices) for name, indices in indices_of.items()}

    @functools.cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """Immediate predecessors of each node: the nodes whose results it reads."""
        return tuple(
            frozenset(self.writer[name] for name in node.reads if name in self.writer) for node in self.nodes
        )

    def is_view_of(self, value: str, nodes: Iterable[int]) -> bool:
        """Return whether a value is a part of the memory of a value that one of the given nodes writes."""
        owner = self.values[value].memory
        return bool(owner) and self.writer.get(owner) in set(nodes)

    def is_internal(self, value: str, nodes: Iterable[int]) -> bool:
        """Return whether only the given nodes read a value, so that it need not be written to memory."""
        return value not in self.outputs and set(self.readers[value]) <= set(nodes)

    # -- files ---------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the graph as plain data."""
        return {
            "format": FORMAT,
            "name": self.name,
            "phase": self.phase,
            "values": [dataclasses.asdict(value) for value in self.values.values()],
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "outputs": sorted(self.outputs),
            "patterns": [dataclasses.asdict(pattern) for pattern in self.patterns],
        }

    def save(self, path: str | Path) -> None:
        """Write the graph to a file, replacing an existing file atomically.

        Raises:
            InputError: if the path is a device or a pipe.
        """
        path = replaceable(Path(path))
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a graph that `save` wrote.

        Raises:
            InputError: if the file cannot be read, or is not a graph.
        """
        data = read_table(path, "graph ", LARGEST_BYTES, LARGEST_BYTES)
        with interpreting(f"{path} is not a graph that `tunebench extract` wrote"):
            return cls.from_json(data)

    @classmethod
    def from_json(cls, given: Any) -> Graph:
        """Return the graph of the data that `to_json` returned.

        Raises:
            ValueError, KeyError, TypeError: if the data are not a graph.
        """
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']} is not {FORMAT}; extract the model again")
        values = [Value(**{**value, "shape": tuple(value["shape"])}) for value in given["values"]]
        graph = cls(
            name=given["name"],
            phase=given["phase"],
            nodes=tuple(_node(node) for node in given["nodes"]),
            values={value.name: value for value in values},
            outputs=frozenset(given["outputs"]),
            patterns=tuple(
                Pattern(**{**pattern, "nodes": tuple(pattern["nodes"])})
                for pattern in given.get("patterns", ())
            ),
        )
        graph.check()
        return graph

    def check(self) -> None:
        """Check that all values exist, and that no node reads a value that is written later.

        Raises:
            ValueError: naming the node.
        """
        for index, node in enumerate(self.nodes):
            names = {*node.reads, *node.writes, *node.roles.values()}
            names |= {operand.value for operand in node.operands.values()}
            maps = (operand.index for operand in node.operands.values() if operand.index is not None)
            names |= {gather.source for index in maps for gather in index.gathers}
            if unknown := names - self.values.keys():
                raise ValueError(
                    f"{node.name} names {', '.join(sorted(unknown))}, which is not a value of the graph"
                )
            if any(before >= index for before in self.predecessors[index]):
                raise ValueError(f"{node.name} reads a value that is written after it")
        names = {node.name for node in self.nodes}
        for pattern in self.patterns:
            unknown = {*pattern.nodes} - names | {*pattern.roles.values()} - self.values.keys()
            if unknown:
                raise ValueError(f"a pattern names {', '.join(sorted(unknown))}, which the graph lacks")


def _node(data: Mapping[str, Any]) -> Node:
    operands = {
        name: NodeOperand(**{**operand, "index": _index_map(operand.get("index"))})
        for name, operand in data["operands"].items()
    }
    listed = {name: tuple(data[name]) for name in ("reads", "writes", "workloads", "joins")}
    return Node(**{**data, **listed, "operands": operands})


def _index_map(data: Mapping[str, Any] | None) -> IndexMap | None:
    if data is None:
        return None

    def listed(kind: type[Any], key: str) -> tuple[Any, ...]:
        limits = data.get(key, ())
        return tuple(kind(**{**limit, "coefficients": tuple(limit["coefficients"])}) for limit in limits)

    rest = listed(Guard, "guards"), listed(Gather, "gathers")
    return IndexMap(tuple(data["shape"]), tuple(data["strides"]), data["start"], *rest)
