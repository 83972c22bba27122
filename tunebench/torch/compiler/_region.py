"""A group of FX nodes as a function of tensors, and the tensors of its kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tunebench.graph.group import FusedGroup
from tunebench.torch._layout import has_workload_layout, memory_format
from tunebench.torch._tensor import stored_type
from tunebench.torch.compiler._derived_tensor import DerivedTensor
from tunebench.torch.compiler._translation import Translation
from tunebench.workload import Tensor as Specification
from tunebench.workload import Workload

__all__ = ["GroupRegion", "KernelInput", "KernelOutput"]


class GroupRegion:
    """The FX nodes of a group, with the views between them.

    Attributes:
        inputs: Nodes outside the group whose tensors torch or the kernels read.
        outputs: Nodes inside the group whose tensors are read outside.
        module: Runs the group by torch, as a function of `inputs`.
    """

    def __init__(self, translation: Translation, group: FusedGroup, calls: Sequence[fx.Node]) -> None:
        self._translation, self._calls = translation, frozenset(calls)
        self._group = group
        self._inside: dict[fx.Node, bool] = dict.fromkeys(calls, True)
        sources = translation.sources
        written = [value for index in group.nodes for value in translation.graph.nodes[index].writes]
        wanted = [v for v in written if v in sources and not translation.graph.is_internal(v, group.nodes)]
        self.outputs = tuple(sources[value] for value in wanted)
        self.values = dict(zip(wanted, self.outputs, strict=True))
        self.inputs = self._outside()
        self._between: dict[str, int] = {}
        """Places of values that one kernel passes to the next, after the inputs."""
        self.module = self._by_torch()

    def _is_inside(self, node: fx.Node) -> bool:
        """Return whether a node belongs to the group, or is a view of its results."""
        if node not in self._inside:
            is_call = node.op != "call_function" or node.name in self._translation.calls
            self._inside[node] = not is_call and any(map(self._is_inside, node.all_input_nodes))
        return self._inside[node]

    def _outside(self) -> tuple[fx.Node, ...]:
        found: dict[fx.Node, None] = {}
        queue = [*self.outputs, *self._calls]
        seen = set(queue)
        while queue:
            node = queue.pop()
            for before in node.all_input_nodes:
                if not self._is_inside(before):
                    found[before] = None
                elif before not in seen:
                    seen.add(before)
                    queue.append(before)
        sources = self._translation.sources
        for value in self._group.roles.values():
            if value in self._translation.derived:
                found.update(dict.fromkeys(self._translation.derived[value].parts))
            elif value in sources and not self._is_inside(sources[value]):
                found[sources[value]] = None
        return tuple(found)

    def _by_torch(self) -> fx.GraphModule:
        graph = fx.Graph()
        known = {node: graph.placeholder(node.name) for node in self.inputs}

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                for before in node.all_input_nodes:
                    copied(before)
                known[node] = graph.node_copy(node, lambda one: known[one])
            return known[node]

        results = tuple(copied(node) for node in self.outputs)
        graph.output(results[0] if len(results) == 1 else results)
        return fx.GraphModule(torch.nn.Module(), graph)

    def input(self, workload: Workload, spec: Specification, value: str) -> KernelInput:
        """Return how to obtain a tensor that a kernel reads."""
        derived = self._translation.derived.get(value)
        if derived is not None:
            return _derived(tuple(map(self.inputs.index, derived.parts)), derived)
        if value in self._between:
            return operator.itemgetter(self._between[value])
        node, dtype = self._translation.sources[value], stored_type(spec.dtype)
        place, traced = self.inputs.index(node), node.meta["val"]
        if traced.dtype != dtype:
            return lambda tensors: tensors[place].to(dtype)
        if has_workload_layout(workload, traced) or not self._translation.graph.values[value].memory:
            return _as_traced(place, tuple(traced.stride()))
        return _copied(place, workload)

    def output(self, workload: Workload, spec: Specification, value: str) -> KernelOutput:
        """Return how to allocate and return a tensor that a kernel writes."""
        node = self.values.get(value)
        if is_intermediate := list(self._group.roles.values()).count(value) > 1:  # the next kernel reads it
            self._between[value] = len(self.inputs) + len(self._between)
        if node is None:
            dtype = stored_type(spec.dtype)
            return KernelOutput(None, spec.shape, None, dtype, None, dtype, is_intermediate)
        traced = node.meta["val"]
        how = None if has_workload_layout(workload, traced) else memory_format(workload, traced)
        place, shape, stride = self.outputs.index(node), tuple(traced.shape), tuple(traced.stride())
        return KernelOutput(place, shape, stride, stored_type(spec.dtype), how, traced.dtype, is_intermediate)


KernelInput = Callable[[Sequence[Tensor]], Tensor]
"""Returns a tensor that a kernel reads, from the group's inputs and the results that kernels pass on."""


def _as_traced(place: int, stride: tuple[int, ...]) -> KernelInput:
    """Read an input of the group, copied only if its strides differ from those in the trace.

    Some operators of torch return another layout than they trace, such as hardtanh's gradient for operands of
    different layouts.
    """

    def read(tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[place]
        if tensor.stride() == stride:
            return tensor
        steps = zip(tensor.shape, tensor.stride(), stride, strict=True)
        if all(extent == 1 or step == traced for extent, step, traced in steps):
            return tensor
        copied = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        return copied.copy_(tensor)

    return read


def _copied(place: int, workload: Workload) -> KernelInput:
    """Read an input of the group, copied to the workload's layout."""

    def read(tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[place]
        if workload.operator == "gemm" and tensor.stride(-1) != 1 and tensor.stride(-2) == 1:
            return tensor.mT.contiguous().mT  # the workload reads it column by column
        return tensor.contiguous(memory_format=memory_format(workload, tensor))

    return read


def _derived(places: tuple[int, ...], derived: DerivedTensor) -> KernelInput:
    """Read a derived tensor, computed again when one of its parts changes."""
    known: dict[tuple[Any, ...], Tensor] = {}

    def read(tensors: Sequence[Tensor]) -> Tensor:
        parts = [tensors[place] for place in places]
        key = tuple((part.data_ptr(), part._version) for part in parts)
        if key not in known:
            known.clear()
            known[key] = derived.compute(*(part.detach() for part in parts))
        return known[key]

    return read


@dataclass(frozen=True, slots=True)
class KernelOutput:
    """A tensor that a kernel writes.

    Attributes:
        place: Place among the group's results; None if it is not one of them.
        shape: Shape in torch.
        stride: Strides in torch; None for contiguous.
        dtype: Type that the kernel writes.
        written_as: Memory format that the kernel writes, if torch expects another one.
        expected_type: Type in torch.
        is_intermediate: Whether the next kernel reads it.
    """

    place: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    written_as: torch.memory_format | None
    expected_type: torch.dtype
    is_intermediate: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor that the kernel writes."""
        if self.stride is None or self.written_as is not None:
            how = self.written_as or torch.contiguous_format
            return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=how)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def expected(self, written: Tensor) -> Tensor:
        """Return the written tensor in the layout and type that torch expects."""
        if self.written_as is None or self.stride is None:
            return written if self.dtype == self.expected_type else written.to(self.expected_type)
        wanted = torch.empty_strided(self.shape, self.stride, dtype=self.expected_type, device=written.device)
        return wanted.copy_(written)
