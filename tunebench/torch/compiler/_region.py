"""A group of FX nodes as a function of tensors, and the tensors of its kernels."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from tunebench.graph.group import FusedGroup
from tunebench.torch._layout import has_strides, strides_in_order
from tunebench.torch._tensor import stored_type
from tunebench.torch.compiler._aten_argument import number_of
from tunebench.torch.compiler._derived_tensor import DerivedTensor
from tunebench.torch.compiler._kernel_operator import KernelTensor
from tunebench.torch.compiler.translation import Translation
from tunebench.workload import Tensor as Specification

__all__ = ["GroupRegion", "KernelInput", "KernelOutput"]


class GroupRegion:
    """The FX nodes of a group, with the views between them.

    Attributes:
        calls: The nodes that compute, without views.
        inputs: Nodes outside the group whose tensors torch or the kernels read.
        outputs: Nodes inside the group whose tensors are read outside.
        module: Runs the group by torch, as a function of `inputs`.
    """

    def __init__(self, translation: Translation, group: FusedGroup, calls: Sequence[fx.Node]) -> None:
        self._translation, self.calls = translation, frozenset(calls)
        self._group = group
        self._inside: dict[fx.Node, bool] = dict.fromkeys(calls, True)
        sources = translation.sources
        written = [value for index in group.nodes for value in translation.graph.nodes[index].writes]
        output_values = [
            v for v in written if v in sources and not translation.graph.is_internal(v, group.nodes)
        ]
        self.outputs = tuple(sources[value] for value in output_values)
        self.values = dict(zip(output_values, self.outputs, strict=True))
        self.inputs = self._outside()
        self._between: dict[str, tuple[int, KernelTensor]] = {}
        """Places, after the inputs, and layouts of values that one kernel passes to the next."""
        self.module = self._by_torch()

    def _is_inside(self, node: fx.Node) -> bool:
        """Return whether a node belongs to the group, or is a view of its results."""
        if node not in self._inside:
            is_call = node.op != "call_function" or node.name in self._translation.calls
            self._inside[node] = not is_call and any(map(self._is_inside, node.all_input_nodes))
        return self._inside[node]

    def _outside(self) -> tuple[fx.Node, ...]:
        inputs: dict[fx.Node, None] = {}
        queue = [*self.outputs, *self.calls]
        seen = set(queue)
        while queue:
            node = queue.pop()
            for before in node.all_input_nodes:
                if number_of(before) is not None:  # a part of `module`; kernels know it
                    continue
                if not self._is_inside(before):
                    inputs[before] = None
                elif before not in seen:
                    seen.add(before)
                    queue.append(before)
        sources = self._translation.sources
        for value in self._group.roles.values():
            if value in self._translation.derived:
                inputs.update(dict.fromkeys(self._translation.derived[value].parts))
            elif value in sources and not self._is_inside(sources[value]):
                inputs[sources[value]] = None
        return tuple(inputs)

    def _by_torch(self) -> fx.GraphModule:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self.inputs}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                for before in node.all_input_nodes:
                    copied(before)
                copies[node] = graph.node_copy(node, lambda read: copies[read])
            return copies[node]

        results = tuple(copied(node) for node in self.outputs)
        graph.output(results[0] if len(results) == 1 else results)
        return fx.GraphModule(torch.nn.Module(), graph)

    def flat_input(self, spec: Specification, value: str) -> tuple[KernelInput, KernelTensor]:
        """Return how to obtain a tensor whose memory a kernel reads by an index map, and its layout there."""
        read, layout = self.input(spec, value)
        return read, dataclasses.replace(layout, extent=spec.size)

    def input(self, spec: Specification, value: str) -> tuple[KernelInput, KernelTensor]:
        """Return how to obtain a tensor that a kernel reads, and its layout there."""
        derived = self._translation.derived.get(value)
        if derived is not None:
            traced = derived.compute(*(part.meta["val"].detach() for part in derived.parts))
            return _derived(tuple(map(self.inputs.index, derived.parts)), derived), KernelTensor.of(traced)
        if value in self._between:
            position, written = self._between[value]
            return operator.itemgetter(position), written
        node = self._translation.sources[value]
        traced = node.meta["val"]
        strides = self._translation.copied.get(value, tuple(traced.stride()))
        shape = tuple(extent if stride else 1 for extent, stride in zip(traced.shape, strides, strict=True))
        read = KernelTensor(shape, tuple(stride or 1 for stride in strides), stored_type(spec.dtype))
        return _at(self.inputs.index(node), strides), read

    def output(self, spec: Specification, value: str) -> KernelOutput:
        """Return a tensor that a kernel writes, and the layout that torch expects."""
        node, dtype = self.values.get(value), stored_type(spec.dtype)
        if node is None:
            written = KernelTensor(spec.shape, strides_in_order(spec.shape, range(len(spec.shape))), dtype)
            expected, position = written, None
        else:
            traced = node.meta["val"]
            expected, position = KernelTensor.of(traced), self.outputs.index(node)
            strides = self._translation.relaid.get(value, expected.strides)
            written = KernelTensor(expected.shape, strides, dtype)
        if is_intermediate := list(self._group.roles.values()).count(value) > 1:  # the next kernel reads it
            self._between[value] = len(self.inputs) + len(self._between), written
        return KernelOutput(position, written, expected, is_intermediate)


KernelInput = Callable[[Sequence[Tensor]], Tensor]
"""Returns a tensor that a kernel reads, from the group's inputs and the results that kernels pass on."""


def _at(position: int, strides: Sequence[int]) -> KernelInput:
    """Read an input of the group; axes of stride 0 are reduced to one element."""
    if all(strides):
        return operator.itemgetter(position)
    read_once = tuple(slice(None) if stride else slice(1) for stride in strides)
    return lambda tensors: tensors[position][read_once]


def _derived(positions: tuple[int, ...], derived: DerivedTensor) -> KernelInput:
    """Compute a derived tensor."""
    return lambda tensors: derived.compute(*(tensors[position].detach() for position in positions))


@dataclass(frozen=True, slots=True)
class KernelOutput:
    """A tensor that a kernel writes.

    Attributes:
        place: Place among the group's results; None if it is not one of them.
        written: The tensor as the kernel writes it.
        wanted: The tensor in torch.
        is_intermediate: Whether the next kernel reads it.
    """

    place: int | None
    written: KernelTensor
    wanted: KernelTensor
    is_intermediate: bool

    def expected(self, written: Tensor) -> Tensor:
        """Return the written tensor in the layout and type that torch expects."""
        if not has_strides(written, self.wanted.strides):
            order = sorted(range(written.dim()), key=self.wanted.strides.__getitem__, reverse=True)
            restored = [order.index(axis) for axis in range(written.dim())]
            written = written.permute(order).clone(memory_format=torch.contiguous_format).permute(restored)
        return written if written.dtype == self.wanted.dtype else written.to(self.wanted.dtype)
