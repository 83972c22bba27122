"""Values of a graph, and the FX nodes and memory that hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tunebench.dtype import DType
from tunebench.graph.node import NodeOperand, Value
from tunebench.index_map import IndexMap
from tunebench.torch._layout import (
    has_strides,
    innermost_extent,
    is_dense,
    kernel_strides,
    operand_broadcast,
)
from tunebench.torch._tensor import DTYPES
from tunebench.torch.compiler._aten_argument import arguments_of, traced
from tunebench.torch.compiler._aten_index import broadcast_map, in_memory_order
from tunebench.torch.compiler._derived_tensor import DerivedTensor, group_offsets
from tunebench.workload import Workload

__all__ = ["INDEX_TYPES", "STORED", "TYPES", "GraphValues"]

STORED: Mapping[torch.dtype, DType] = {**DTYPES, torch.bool: "bool", torch.int8: "i8"}
"""Types that kernels read and write in any layout."""

INDEX_TYPES = (torch.int64, torch.int32)
"""Types of indices that kernels read from memory."""

TYPES = {
    **DTYPES,
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3",
    torch.bool: "bool",
}
"""Type of the values of each type of torch."""


class GraphValues:
    """The values of a graph while it is translated.

    Attributes:
        values: The values by name.
        value_of: Name of the value of each FX node with one tensor.
        sources: FX node that holds the memory of each value.
        copied: Strides of each value that is a copy for kernels, in the shape of its source.
        relaid: Strides with which kernels write each value whose strides in torch differ.
        derived: Values that are computed from others instead of by nodes or kernels.
    """

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.value_of: dict[fx.Node, str] = {}
        self.sources: dict[str, fx.Node] = {}
        self.copied: dict[str, tuple[int, ...]] = {}
        self.relaid: dict[str, tuple[int, ...]] = {}
        self.derived: dict[str, DerivedTensor] = {}

    def add(
        self, node: fx.Node | None, name: str, tensor: Tensor, *, constant: bool = False, memory: str = ""
    ) -> str:
        """Add a value and return its name.

        Args:
            node: FX node that holds it; None if kernels alone read or write it.
            name: Its name.
            tensor: The traced tensor.
            constant: Whether it is the same in every step.
            memory: Name of the value whose memory contains it; empty if it has separate memory.
        """
        self.values[name] = Value(
            name=name,
            shape=tuple(int(extent) for extent in tensor.shape),
            dtype=TYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            inner=innermost_extent(tensor),
            memory=memory,
            is_constant=constant,
        )
        if node is not None:
            self.value_of[node] = name
            self.sources[name] = node
        return name

    def memory_of(self, value: str) -> str:
        """Return the value that owns a value's memory."""
        return self.values[value].memory or value

    def add_item(self, node: fx.Node) -> None:
        """Add one of several results; the results of a call that is not a view were added with the call."""
        whole, index = node.args
        name = f"{whole.name}.{index}"
        if name in self.values:
            self.value_of[node] = name
            self.sources[name] = node
        elif isinstance(traced(node), Tensor):  # an item of a view with several results
            base = self.value_of.get(whole.args[0])
            self.add_view(node, base)

    def add_view(self, node: fx.Node, base: str | None) -> None:
        """Add a view: the same value if it covers all of its memory, else a value in that memory."""
        tensor = traced(node)
        if base is None or not isinstance(tensor, Tensor):
            return
        shown = self.values[base]
        is_whole = tensor.numel() == shown.elements and is_dense(tensor) and not shown.memory
        if is_whole and TYPES.get(tensor.dtype) == shown.dtype:
            self.value_of[node] = base
            return
        constant = shown.is_constant
        self.add(node, node.name, tensor, constant=constant, memory=self.memory_of(base))

    def add_relaid(self, value: str, tensor: Tensor, written: tuple[int, ...]) -> int:
        """Add the strides with which a kernel writes a result, and return the bytes to copy to torch's."""
        if has_strides(tensor, written):
            return 0
        self.relaid[value] = written
        return int(tensor.numel() * tensor.element_size())

    def roles(self, workload: Workload, arguments: dict[str, Any]) -> dict[str, str]:
        """Return the value of each input of a workload; inputs that need a copy get a separate value."""
        names = arguments_of(workload, transposed=bool(arguments.get("transposed")))
        roles = {}
        for tensor in workload.inputs():
            operands = [
                arguments[name]
                for name in names.get(tensor.name, ())
                if isinstance(arguments.get(name), fx.Node)
            ]
            if operands:
                roles[tensor.name] = self._role(workload, tensor.name, operands[0])
        return roles

    def _role(self, workload: Workload, name: str, node: fx.Node) -> str:
        if name == "offsets":
            offsets = group_offsets(traced(node))
            return self.derive(f"{node.name}~offsets", offsets, [node], group_offsets)
        shown, tensor = self.value_of[node], traced(node)
        strides = kernel_strides(workload, name, tensor)
        if has_strides(tensor, strides):
            return shown
        copy = f"{node.name}~{'.'.join(map(str, strides))}"
        if copy not in self.values:
            constant = self.values[shown].is_constant
            self.add(None, copy, tensor, constant=constant, memory=self.memory_of(shown))
            self.sources[copy] = node
            self.copied[copy] = strides
        return copy

    def derive(
        self, name: str, tensor: Tensor, parts: Sequence[fx.Node], compute: Callable[..., Tensor]
    ) -> str:
        """Add a value that is computed from others before each call of a kernel, and return its name.

        Args:
            name: Its name.
            tensor: A tensor of its shape and type.
            parts: FX nodes of the other tensors.
            compute: Returns the value from them.
        """
        if name not in self.values:
            self.add(None, name, tensor, constant=all(map(self.is_constant, parts)))
            self.derived[name] = DerivedTensor(tuple(parts), compute)
        return name

    def as_f32(self, node: fx.Node) -> str:
        """Return the value of images, or of statistics in f32."""
        shown, tensor = self.value_of[node], traced(node)
        if tensor.dim() > 1 or tensor.dtype == torch.float32:
            return shown
        name = f"{node.name}~f32"
        if name not in self.values:
            self.add(None, name, tensor.float(), memory=self.memory_of(shown))
            self.sources[name] = node
        return name

    def operand(self, node: fx.Node, result: Tensor) -> NodeOperand | str:
        """Return how an elementwise call reads a tensor, or why kernels cannot read it."""
        tensor = traced(node)
        if node not in self.value_of or not isinstance(tensor, Tensor) or tensor.device != result.device:
            return "operands on another device"
        if tensor.dtype not in STORED:
            return f"operands of type {tensor.dtype}"
        where = operand_broadcast(tensor, result)
        if where is not None and tensor.dtype == result.dtype:
            return NodeOperand(self.value_of[node], where)
        return self.strided_operand(node, in_memory_order(broadcast_map(tensor, result.shape), result))

    def strided_operand(
        self, node: fx.Node, index: IndexMap, indices: Iterable[fx.Node] = ()
    ) -> NodeOperand | str:
        """Return an operand that is read from the memory that owns a tensor, or why kernels cannot read it.

        Args:
            node: The tensor.
            index: Place of each element from the tensor's first one, in the order of the result's memory.
            indices: Tensors that may be sources of gathers.
        """
        memory = self._in_memory(node)
        if memory is None:
            return "a view of another type"
        owner, start = memory
        sources = {source.name: source for source in indices}
        gathers = []
        for gather in index.gathers:
            by = sources[gather.source]
            read, device = self._in_memory(by), traced(node).device
            if read is None or traced(by).dtype not in INDEX_TYPES or traced(by).device != device:
                return "indices on another device, or of another type than int64 and int32"
            gathers.append(dataclasses.replace(gather, source=read[0], start=gather.start + read[1]))
        index = dataclasses.replace(index, start=index.start + start, gathers=tuple(gathers))
        return NodeOperand(owner, "strided", index)

    def _in_memory(self, node: fx.Node) -> tuple[str, int] | None:
        """Return the value that owns a tensor's memory, and its first offset; None if types differ."""
        owner = self.memory_of(self.value_of[node])
        tensor, memory = traced(node), traced(self.sources[owner])
        first = int(tensor.storage_offset()) - int(memory.storage_offset())
        return (owner, first) if memory.dtype == tensor.dtype else None

    def is_constant(self, node: fx.Node) -> bool:
        """Return whether the value of an FX node is known, and the same in every step."""
        return node in self.value_of and self.values[self.value_of[node]].is_constant
