"""Replacement of groups in an FX graph by calls of kernels."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from tunebench.device import Device
from tunebench.dispatch import dispatcher
from tunebench.graph.group import FusedGroup
from tunebench.torch.compiler._fused_call import FusedCall, GroupKernel
from tunebench.torch.compiler._region import GroupRegion
from tunebench.torch.compiler._torch_comparison import TorchComparison
from tunebench.torch.compiler._translation import Translation
from tunebench.workloads import parse

__all__ = ["GraphRewriter"]


class GraphRewriter:
    """Writes a new FX graph in which some groups are calls of kernels.

    Args:
        module: The traced module.
        translation: Its graph.
        device: Device of the module.
        ordinal: Ordinal of the device among this machine's GPUs.
        benchmark: Whether to time groups against torch at their first calls.
        check: Whether to compare the results of groups with torch's at their first call.

    Attributes:
        calls: The calls of the fused groups.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        translation: Translation,
        device: Device,
        ordinal: int,
        *,
        benchmark: bool = False,
        check: bool = False,
    ) -> None:
        self._module, self._translation = module, translation
        self._device, self._ordinal = device, ordinal
        self._benchmark, self._check = benchmark, check or benchmark
        self._graph = fx.Graph()
        self.calls: list[FusedCall] = []
        self._written: dict[fx.Node, fx.Node] = {}

    def rewrite(self, groups: Iterable[tuple[FusedGroup, bool]]) -> fx.GraphModule:
        """Return a module that runs groups by kernels and everything else as before.

        Args:
            groups: All groups in an order in which they can run, and whether tuned kernels may run each.
        """
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._copy(node)
        for group, is_tuned in groups:
            if is_tuned:
                self._fuse(group)
                continue
            for index in group.nodes:  # torch runs them
                self._write(self._call(index))
        for node in self._module.graph.nodes:
            if node.op == "output":
                self._write(node)
        self._graph.lint()
        return fx.GraphModule(self._module, self._graph)

    def _fuse(self, group: FusedGroup) -> None:
        """Replace the nodes of a group by one call."""
        region = GroupRegion(self._translation, group, [self._call(index) for index in group.nodes])
        comparison = TorchComparison() if self._benchmark else None
        kernels = self._kernels(group, region)
        run = FusedCall(group, f"group_{len(self.calls)}", kernels, region, comparison, check=self._check)
        self.calls.append(run)
        call = self._graph.call_function(run, tuple(self._write(node) for node in region.inputs))
        if len(region.outputs) == 1:
            self._written[region.outputs[0]] = call
            return
        for place, node in enumerate(region.outputs):
            self._written[node] = self._graph.call_function(operator.getitem, (call, place))

    def _call(self, index: int) -> fx.Node:
        return self._translation.calls[self._translation.graph.nodes[index].name]

    def _write(self, node: fx.Node) -> fx.Node:
        """Copy a node, and the views before it, which belong to no group."""
        if node not in self._written:
            for before in node.all_input_nodes:
                self._write(before)
            self._copy(node)
        return self._written[node]

    def _copy(self, node: fx.Node) -> None:
        self._written[node] = self._graph.node_copy(node, lambda one: self._written[one])

    def _kernels(self, group: FusedGroup, region: GroupRegion) -> list[GroupKernel]:
        kernels = []
        for index, text in enumerate(group.workloads):
            workload = parse(text)
            inputs = [(spec, group.role(index, spec.name)) for spec in workload.inputs()]
            outputs = [(spec, group.role(index, spec.name)) for spec in workload.outputs()]
            kernels.append(
                GroupKernel(
                    dispatcher(workload, self._device, self._ordinal),
                    tuple(region.input(spec, value) for spec, value in inputs),
                    tuple(region.output(spec, value) for spec, value in outputs),
                )
            )
        return kernels
