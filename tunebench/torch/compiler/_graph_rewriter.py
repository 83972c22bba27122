"""Replacement of groups in an FX graph by calls of kernels."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from torch import fx

from tunebench.device import Device
from tunebench.dispatch import dispatcher
from tunebench.errors import InputError
from tunebench.graph.group import FusedGroup
from tunebench.torch.compiler._fused_call import FusedCall, GroupKernel
from tunebench.torch.compiler._kernel_operator import layouts_text
from tunebench.torch.compiler._region import GroupRegion
from tunebench.torch.compiler.translation import Translation
from tunebench.workload import MAX_SIZE
from tunebench.workloads import parse
from tunebench.workloads.common.strided_workload import StridedWorkload
from tunebench.workloads.operators.scatter_add import ScatterAdd

__all__ = ["GraphRewriter", "fused_call"]


def fused_call(
    translation: Translation, group: FusedGroup, device: Device, ordinal: int, name: str
) -> FusedCall:
    """Return a group as a call of kernels.

    Args:
        translation: The graph of the group.
        group: The group.
        device: Device of its tensors.
        ordinal: Ordinal of the device among this machine's GPUs.
        name: Name of the call in a graph.
    """
    nodes = [translation.calls[translation.graph.nodes[index].name] for index in group.nodes]
    region = GroupRegion(translation, group, nodes)
    kernels = []
    limits: dict[fx.Node, int] = {}
    for index, text in enumerate(group.workloads):
        workload = parse(text)
        read_input = region.input
        if isinstance(workload, StridedWorkload):
            read_input = region.flat_input
            for source, (_, readers) in workload.gathered.items():
                node = translation.sources[group.role(index, source)]
                limits[node] = min([limits.get(node, MAX_SIZE), *(gather.extent for _, gather in readers)])
        if isinstance(workload, ScatterAdd):
            node = translation.sources[group.role(index, "index")]
            limits[node] = min(limits.get(node, MAX_SIZE), workload.bins)
        inputs = [read_input(spec, group.role(index, spec.name)) for spec in workload.inputs()]
        outputs = [region.output(spec, group.role(index, spec.name)) for spec in workload.outputs()]
        layouts = layouts_text([layout for _, layout in inputs], [output.written for output in outputs])
        read = tuple(read for read, _ in inputs)
        kernels.append(GroupKernel(dispatcher(workload, device, ordinal), read, tuple(outputs), layouts))
    return FusedCall(group, name, kernels, region, limits)


class GraphRewriter:
    """Writes a new FX graph in which some groups are calls.

    Args:
        module: A module whose graph has nodes of the same names as the graphs of the groups.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._owner: dict[fx.Node, FusedCall] = {}
        self._graph = fx.Graph()
        self._written: dict[fx.Node, fx.Node] = {}

    def replace(self, call: FusedCall) -> None:
        """Replace the nodes of a group by a call.

        Raises:
            InputError: if the graph lacks a node of the group.
        """
        region = call.region
        if (
            missing := {node.name for node in (*region.calls, *region.inputs, *region.outputs)}
            - self._nodes.keys()
        ):
            raise InputError(f"the joint graph has no {', '.join(sorted(missing))}")
        self._owner |= {self._nodes[node.name]: call for node in (*region.calls, *region.outputs)}

    def rewrite(self) -> fx.GraphModule:
        """Return a module in which calls replace the groups."""
        live = self._live()
        for node in self._module.graph.nodes:
            if node in live or node.op == "placeholder":
                self._write(node)
        self._graph.lint()
        return fx.GraphModule(self._module, self._graph)

    def _inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that must be written before a node."""
        call = self._owner.get(node)
        before = node.all_input_nodes if call is None else call.region.inputs
        return (self._nodes[read.name] for read in before)

    def _live(self) -> set[fx.Node]:
        """Return the nodes whose results, or effects, are needed."""
        queue = [node for node in self._module.graph.nodes if node.op == "output" or node.is_impure()]
        live = set(queue)
        while queue:
            for before in self._inputs(queue.pop()):
                if before not in live:
                    live.add(before)
                    queue.append(before)
        return live

    def _write(self, node: fx.Node) -> None:
        """Write a node, or the call of its group, after all nodes that it reads."""
        stack, waiting = [node], set[fx.Node]()
        while stack:
            node = stack[-1]
            missing = [before for before in self._inputs(node) if before not in self._written]
            if node in self._written or not missing:
                stack.pop()
                if node not in self._written:
                    self._copy(node)
            elif node in waiting:
                raise InputError(f"{node.name} would read its own result if groups were replaced by kernels")
            else:
                waiting.add(node)
                stack += missing

    def _copy(self, node: fx.Node) -> None:
        call = self._owner.get(node)
        if call is None:
            self._written[node] = self._graph.node_copy(node, self._written.__getitem__)
            return
        region = call.region
        written = self._graph.call_function(
            call, tuple(self._written[self._nodes[n.name]] for n in region.inputs)
        )
        written.meta = _inherited(self._nodes[region.outputs[0].name].meta)
        outputs = [self._nodes[output.name] for output in region.outputs]
        for index, output in enumerate(outputs):
            self._written[output] = written
            if len(outputs) > 1:
                self._written[output] = self._graph.call_function(operator.getitem, (written, index))
                self._written[output].meta = written.meta


def _inherited(meta: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata that a group's call keeps: stack traces, and marks of forward and backward."""
    return {
        key: value for key, value in meta.items() if key not in ("val", "tensor_meta", "eager_input_vals")
    }
