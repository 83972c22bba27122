"""A model's step as a graph: values in memory, and the nodes that read and write them.

A value is told by its memory. Views that show the whole of a tensor in another shape, transposed ones
included, are the same memory, and what works element by element does not care how it is looked at: a kernel
reads and writes memory in its order, as the problem's tensors say.
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

from tunebench.errors import InputError

__all__ = ["Broadcast", "Graph", "Node", "NodeOperand", "Value"]

FORMAT = 1
"""Of files; raised when older ones cannot be read any more."""

Broadcast = Literal["whole", "vector", "row", "channel", "scalar"]
"""How an operand of an elementwise node lies beside its result.

whole   like the result, element by element in the order of memory
vector  one number for each place along the axis that lies innermost in memory
row     one number for each run of as many elements, in the order of memory
channel one number for each channel of images that lie channel by channel (nchw)
scalar  one number for all
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is read and written.

    Attributes:
        name: Unique in its graph.
        shape: Extents, as the model sees them.
        dtype: As workloads name types; what they have no name for, by torch's.
        inner: Extent of the axis that lies innermost in memory; 1 of a number.
        memory: The value whose memory it is a part of; itself, if empty.
        is_constant: Whether it is the same in every step: a parameter, or a buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    inner: int = 1
    memory: str = ""
    is_constant: bool = False

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.elements * ITEM_BYTES.get(self.dtype, 4)


@dataclass(frozen=True, slots=True)
class NodeOperand:
    """A value that an elementwise node reads, and how it lies beside the result."""

    value: str
    place: Broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation of the model.

    Attributes:
        name: Unique in its graph.
        target: The operator of torch, such as ``aten.addmm``.
        reads: Values that own the memory it reads, each once, in the order of the operator's arguments.
        writes: Values, each with memory of its own.
        workloads: What it computes, as canonical texts of problems; none where no operator of ours does it.
        roles: Which value each tensor of the workloads is, inputs and outputs, by the tensor's name. A value
            that no node writes is what one kernel leaves to the next.
        copied: Bytes that must be laid out anew before a kernel of ours can read them.
        expression: What an elementwise node computes, in the names of its operands; after the workloads, if
            there are any, whose results may be among them. It is the first of `writes`.
        operands: What the names of the expression are.
        joins: The images, in order, that it joins channel by channel, channels innermost in memory.
        reason: Why there is no workload.
    """

    name: str
    target: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    workloads: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    copied: int = 0
    expression: str = ""
    operands: Mapping[str, NodeOperand] = field(default_factory=dict)
    joins: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of a step, in an order in which they can run.

    Attributes:
        name: Of the model.
        phase: What the step is.
        nodes: Each after all that write what it reads.
        values: All values by name.
        outputs: Values that the step returns, or keeps for the gradients.
    """

    name: str
    phase: Literal["inference", "forward", "backward"]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    outputs: frozenset[str]

    @functools.cached_property
    def writer(self) -> Mapping[str, int]:
        """Which node writes a value; those that none writes come from outside."""
        return {name: index for index, node in enumerate(self.nodes) for name in node.writes}

    @functools.cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """Which nodes read a value."""
        found: dict[str, list[int]] = {name: [] for name in self.values}
        for index, node in enumerate(self.nodes):
            for name in node.reads:
                found[name].append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    @functools.cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """The nodes whose results each node reads."""
        return tuple(
            frozenset(self.writer[name] for name in node.reads if name in self.writer) for node in self.nodes
        )

    def is_inner(self, value: str, nodes: Iterable[int]) -> bool:
        """Tell whether a value is needed by none but some nodes, so that it need not be written."""
        return value not in self.outputs and set(self.readers[value]) <= set(nodes)

    # -- files ---------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "format": FORMAT,
            "name": self.name,
            "phase": self.phase,
            "values": [dataclasses.asdict(value) for value in self.values.values()],
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "outputs": sorted(self.outputs),
        }

    def save(self, path: str | Path) -> None:
        """Write it to a file, replacing what is there at once."""
        path = Path(path)
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a file that `save` wrote.

        Raises:
            InputError: if it cannot be read, or is none.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the graph {path}: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no graph that `tunebench extract` wrote: {error}") from None

    @classmethod
    def from_json(cls, given: Any) -> Graph:
        """Return the graph that `to_json` gave.

        Raises:
            ValueError, KeyError, TypeError: if it is none.
        """
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']} is not {FORMAT}; extract it anew")
        values = [Value(**{**one, "shape": tuple(one["shape"])}) for one in given["values"]]
        graph = cls(
            name=given["name"],
            phase=given["phase"],
            nodes=tuple(_node(one) for one in given["nodes"]),
            values={value.name: value for value in values},
            outputs=frozenset(given["outputs"]),
        )
        graph.check()
        return graph

    def check(self) -> None:
        """See that nodes name values that there are, and read none that is written later.

        Raises:
            ValueError: naming the node.
        """
        for index, node in enumerate(self.nodes):
            names = {*node.reads, *node.writes, *node.roles.values()}
            names |= {operand.value for operand in node.operands.values()}
            if unknown := names - self.values.keys():
                raise ValueError(f"{node.name} names {', '.join(sorted(unknown))}, which is no value")
            if any(before >= index for before in self.predecessors[index]):
                raise ValueError(f"{node.name} reads what is written after it")


def _node(given: Mapping[str, Any]) -> Node:
    operands = {name: NodeOperand(**one) for name, one in given["operands"].items()}
    listed = {name: tuple(given[name]) for name in ("reads", "writes", "workloads", "joins")}
    return Node(**{**given, **listed, "operands": operands})
