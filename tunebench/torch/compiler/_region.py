"""A group of FX nodes as a function of tensors, and the tensors of its kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from tunebench.graph.group import FusedGroup
from tunebench.torch._layout import has_strides, strides_in_order
from tunebench.torch._tensor import stored_type
from tunebench.torch.compiler._derived_tensor import DerivedTensor
from tunebench.torch.compiler._translation import Translation
from tunebench.workload import Tensor as Specification

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

    def input(self, spec: Specification, value: str) -> KernelInput:
        """Return how to obtain a tensor that a kernel reads."""
        derived = self._translation.derived.get(value)
        if derived is not None:
            return _derived(tuple(map(self.inputs.index, derived.parts)), derived)
        if value in self._between:
            return operator.itemgetter(self._between[value])
        node = self._translation.sources[value]
        strides = self._translation.copied.get(value, tuple(node.meta["val"].stride()))
        return _with_strides(self.inputs.index(node), strides, stored_type(spec.dtype))

    def output(self, spec: Specification, value: str) -> KernelOutput:
        """Return how to allocate and return a tensor that a kernel writes."""
        node, dtype = self.values.get(value), stored_type(spec.dtype)
        if is_intermediate := list(self._group.roles.values()).count(value) > 1:  # the next kernel reads it
            self._between[value] = len(self.inputs) + len(self._between)
        if node is None:
            contiguous = strides_in_order(spec.shape, range(len(spec.shape)))
            return KernelOutput(None, spec.shape, contiguous, dtype, contiguous, dtype, is_intermediate)
        traced = node.meta["val"]
        place, stride = self.outputs.index(node), tuple(traced.stride())
        written = self._translation.relaid.get(value, stride)
        return KernelOutput(place, tuple(traced.shape), written, dtype, stride, traced.dtype, is_intermediate)


KernelInput = Callable[[Sequence[Tensor]], Tensor]
"""Returns a tensor that a kernel reads, from the group's inputs and the results that kernels pass on."""


def _with_strides(place: int, strides: tuple[int, ...], dtype: torch.dtype) -> KernelInput:
    """Read an input of the group, copied if it has another type or other strides.

    Some operators of torch return another layout than they trace, such as hardtanh's gradient for operands of
    different layouts. Axes of stride 0 are reduced to one element.
    """
    read_once = tuple(slice(None) if stride else slice(1) for stride in strides)

    def read(tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[place]
        if 0 in strides:
            tensor = tensor[read_once]
        if tensor.dtype == dtype and (tensor.stride() == strides or has_strides(tensor, strides)):
            return tensor
        copied = torch.empty_strided(tensor.shape, strides, dtype=dtype, device=tensor.device)
        return copied.copy_(tensor)

    return read


def _derived(places: tuple[int, ...], derived: DerivedTensor) -> KernelInput:
    """Compute a derived tensor."""
    return lambda tensors: derived.compute(*(tensors[place].detach() for place in places))


@dataclass(frozen=True, slots=True)
class KernelOutput:
    """A tensor that a kernel writes.

    Attributes:
        place: Place among the group's results; None if it is not one of them.
        shape: Shape in torch.
        stride: Strides with which the kernel writes it.
        dtype: Type that the kernel writes.
        expected_stride: Strides in torch.
        expected_type: Type in torch.
        is_intermediate: Whether the next kernel reads it.
    """

    place: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    expected_stride: tuple[int, ...]
    expected_type: torch.dtype
    is_intermediate: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor that the kernel writes."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def expected(self, written: Tensor) -> Tensor:
        """Return the written tensor in the layout and type that torch expects."""
        if self.stride == self.expected_stride and self.dtype == self.expected_type:
            return written
        expected = torch.empty_strided(
            self.shape, self.expected_stride, dtype=self.expected_type, device=written.device
        )
        return expected.copy_(written)
