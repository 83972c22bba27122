"""Choice of the groups of a graph, and their replacement by calls of kernels.

Only graphs that no earlier process has planned need this module and what it imports.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from tunebench.device import Device
from tunebench.dispatch import Preference, choose, preference
from tunebench.errors import InputError
from tunebench.graph.partition_plan import PartitionPlan, plan_partition
from tunebench.torch._layout import is_static, typical_tensor
from tunebench.torch._tensor import device_of
from tunebench.torch.compiler._attention_pattern import fuse_attention
from tunebench.torch.compiler._constant_folding import fold_constants
from tunebench.torch.compiler._fused_call import FusedCall
from tunebench.torch.compiler._graph_rewriter import GraphRewriter, fused_call
from tunebench.torch.compiler._group_check import difference
from tunebench.torch.compiler._kernel_operator import check_later_kernels
from tunebench.torch.compiler._plan_cache import PlannedGroup, RememberedRace
from tunebench.torch.compiler._rms_norm_pattern import fuse_rms_norms
from tunebench.torch.compiler.capture import Phase, constant_inputs
from tunebench.torch.compiler.decomposition import repeat_casts
from tunebench.torch.compiler.inductor import is_inference, is_repeatable, mutated_inputs, parts_of
from tunebench.torch.compiler.translation import translate
from tunebench.workloads import parse

__all__ = ["GroupPlanner", "NoGroupsError"]

_log = logging.getLogger("tunebench.torch.compiler.backend")


class NoGroupsError(Exception):
    """No group of a graph runs by tuned kernels."""


@dataclass(slots=True, kw_only=True)
class GroupPlanner:
    """Replaces groups of one graph by calls of their kernels.

    Attributes:
        name: Name of the model.
        check: Whether to compare the results of groups with torch's.
        constants: Places of inputs that are the same in every step; by default, what AOTAutograd says.
        plans: Plan of inference, or of forward and backward.
        fused: Groups of each plan that were planned for tuned kernels, in the plan's order.
        mutated: Places of inputs that the graph changes.
        may_repeat: Whether it can be timed, running several times on copies of the inputs that it changes.
        seconds: Time that `rewritten` took.
    """

    name: str
    check: bool
    constants: frozenset[int] | None = None
    plans: list[PartitionPlan] = field(default_factory=list)
    fused: list[list[FusedCall]] = field(default_factory=list)
    mutated: frozenset[int] = frozenset()
    may_repeat: bool = True
    seconds: float = 0.0

    @property
    def calls(self) -> list[FusedCall]:
        """Groups that were planned for tuned kernels."""
        return [call for calls in self.fused for call in calls]

    @property
    def groups(self) -> list[PlannedGroup]:
        """The same groups without their places in the graph."""
        return [
            PlannedGroup(
                workloads=call.group.workloads,
                reason=call.reason,
                inlined=tuple(str(kernel.dispatcher.workload) for kernel in call.inlined),
            )
            for call in self.calls
        ]

    def race(self, seconds: float, ratio: float | None) -> RememberedRace:
        """Return what a race of the graph against torch needs.

        Args:
            seconds: Seconds in which the graph was compiled.
            ratio: Result of the race, if there was one.
        """
        mutated = tuple(self.mutated) if self.may_repeat else None
        return RememberedRace(seconds=seconds, mutated=mutated, ratio=ratio)

    def rewritten(
        self, module: fx.GraphModule, may_run: Callable[[FusedCall], str] = lambda call: ""
    ) -> fx.GraphModule:
        """Return a graph of ATen operators with calls of kernels.

        Args:
            module: The graph.
            may_run: Returns why torch must run a group although kernels can; empty if kernels may.

        Raises:
            InputError: if torch has to run the graph.
            NoGroupsError: if no group runs by kernels.
        """
        began = time.monotonic()
        device, ordinal = _device(module)
        if _has_varying_sizes(module.graph) and not is_inference(module):
            raise NoGroupsError
        if is_inference(module):
            fuse_attention(module.graph)
            fuse_rms_norms(module.graph)
        fold_constants(module)
        repeat_casts(module.graph)
        varying = _varying_nodes(module.graph)
        rewriter, planned = GraphRewriter(module), []
        for phase, part in parts_of(module).items():
            if varying:
                _set_typical_sizes(part.graph)
            partition, calls = self._planned(part, phase, device, ordinal, varying)
            planned.append((partition, calls))
            for call in calls:
                if call.by == "tunebench" and (reason := may_run(call)):
                    call.leave_to_torch(reason)
                if call.by == "tunebench":
                    rewriter.replace(call)
        self.plans = [partition for partition, _ in planned]
        self.fused = [calls for _, calls in planned]
        self.seconds += time.monotonic() - began
        # What is faster for the sizes of one call may be slower for others.
        self.mutated, self.may_repeat = mutated_inputs(module), is_repeatable(module) and not varying
        if not any(call.by == "tunebench" for call in self.calls):
            raise NoGroupsError
        return rewriter.rewrite()

    def _planned(
        self, part: fx.GraphModule, phase: Phase, device: Device, ordinal: int, varying: frozenset[str]
    ) -> tuple[PartitionPlan, list[FusedCall]]:
        """Return the plan of a graph, and its groups that tuned kernels may run."""
        constants = constant_inputs(phase) if self.constants is None else self.constants
        translation = translate(part.graph, self.name, phase, constants, varying)
        preferred = preference()
        # Workloads that were not measured would run by torch anyway.
        partition = plan_partition(
            translation.graph, device, preferred=preferred, measured_only=preferred == "faster"
        )
        groups = [offer.group for offer in partition.chosen if offer.price.by == "tunebench"]
        calls = [
            fused_call(translation, group, device, ordinal, f"{phase}_group_{index}")
            for index, group in enumerate(groups)
        ]
        with unset_fake_temporarily():
            for call in calls:
                self._decide(call, preferred)
        _log_plan(partition, calls, preferred)
        return partition, calls

    def _decide(self, call: FusedCall, preferred: Preference) -> None:
        """Leave a group to torch if no kernel runs it, or if its results are wrong."""
        reason = call.missing_kernel(preferred)
        if not reason and self.check:
            if reason := difference(call):
                call.store_wrong_kernels()
                warnings.warn(f"torch runs {' and '.join(call.group.workloads)}: {reason}", stacklevel=2)
            for workload in call.group.workloads:
                check_later_kernels(workload)
        if reason:
            call.leave_to_torch(reason)


def _device(module: fx.GraphModule) -> tuple[Device, int]:
    """Return the device of a graph's inputs and its ordinal.

    Raises:
        InputError: if tuned kernels cannot run the graph.
    """
    inputs = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    device = device_of(devices.pop()) if len(devices) == 1 else f"tensors on {len(devices)} devices"
    if isinstance(device, str):
        raise InputError(device)
    return device


def _has_varying_sizes(graph: fx.Graph) -> bool:
    """Return whether a graph has tensors whose sizes change between calls.

    Raises:
        InputError: if a size depends on data.
    """
    leaves = [leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    varying = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_static(leaf)]
    for leaf in varying:
        typical_tensor(leaf)
    return bool(varying)


def _varying_nodes(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes that read or write a tensor, or a number, of sizes that change."""
    changing = {node for node in graph.nodes if not all(map(_is_constant, tree_leaves(node.meta.get("val"))))}
    return frozenset(
        node.name for node in graph.nodes if node in changing or not changing.isdisjoint(node.all_input_nodes)
    )


def _is_constant(value: object) -> bool:
    """Return whether a traced value has the same sizes in each call."""
    if isinstance(value, torch.Tensor):
        return is_static(value)
    return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _set_typical_sizes(graph: fx.Graph) -> None:
    """Replace sizes that change, in the traced tensors of a graph, by those of the call that was traced.

    Decisions about the graph then limit no size of the model's inputs.
    """
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(torch.Tensor, typical_tensor, node.meta["val"])


def _log_plan(partition: PartitionPlan, calls: Iterable[FusedCall], preferred: Preference) -> None:
    """Log a plan: its time, each group, and each operation left to torch with the reason."""
    if not _log.isEnabledFor(logging.INFO):
        return
    head, *lines = str(partition).splitlines()
    _log.info("%s", head)
    planned = iter(calls)
    for line, offer in zip(lines, partition.chosen, strict=True):
        if offer.price.by == "tunebench":
            reasons = {next(planned).reason}
        else:
            reasons = {
                choose(parse(text), partition.device, preferred).reason for text in offer.group.workloads
            }
        _log.info("%s", " ".join([line, *(f"({reason})" for reason in reasons if reason)]))
    for offer in partition.rejected:
        _log.debug("  not fused, %.1f us longer: %s", -offer.saved_us, " and ".join(offer.group.workloads))
