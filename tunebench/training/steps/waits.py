"""Exposed communication in the passes of a stage: `StageWaits`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunebench.dtype import itemsize
from tunebench.forecast.network import HOST_US, NetworkPrediction, OperationTime
from tunebench.stack import find_stack
from tunebench.training.interconnect.cluster import Cluster, ProcessGroup
from tunebench.training.interconnect.collective import Collective, collective_us, send_us
from tunebench.training.steps.gradient import BucketExchange, bucket_bytes, chained_us, gradient_bytes
from tunebench.training.steps.layer_stream import LayerWork, stream_us
from tunebench.training.steps.overlap import TensorOverlap, occupied_sms
from tunebench.training.steps.parallelism import Parallelism
from tunebench.training.steps.time_range import End, TimeRange
from tunebench.workloads.networks import Network, NetworkRun, Phase, TensorCollective
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["PASSES", "CopyWaits", "StageWaits", "Transit", "chained", "is_weight_gradient", "weight_share"]

PASSES: tuple[Phase, ...] = ("forward", "backward")


_NOTHING = TimeRange()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transit:
    """Collectives of a stage's copies beside a pass.

    Attributes:
        exposed: What no kernel of the pass hides.
        total: Time of the collectives alone.
        window: Time between the ends of two stages of a device.
    """

    exposed: TimeRange = _NOTHING
    total: TimeRange = _NOTHING
    window: TimeRange = _NOTHING


_SILENT = Transit()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWaits:
    """Exposed communication of data parallelism for a stage.

    Attributes:
        forward: Exposed in each forward pass.
        backward: Exposed in each backward pass.
        gradients: Sums of gradients beside the last backward pass.
        gathered: Gathers of updated parameters beside the first forward pass.
    """

    forward: TimeRange = _NOTHING
    backward: TimeRange = _NOTHING
    gradients: Transit = _SILENT
    gathered: Transit = _SILENT


def chained(stages: Sequence[Transit]) -> TimeRange:
    """Return the exposed collectives of all stages of a device, given the last stage first."""
    return TimeRange.of(
        lambda end: chained_us(
            (stage.exposed.at(end), stage.total.at(end), stage.window.at(end)) for stage in stages
        )
    )


@dataclass(frozen=True, slots=True)
class StageWaits:
    """Communication of a stage that no kernel hides.

    Attributes:
        network: The network.
        run: How a micro-batch runs on each device.
        layers: Layers of the stage.
        kernels: Times of its kernels.
        cluster: Devices and links.
        parallelism: Division of the step.
    """

    network: Network
    run: NetworkRun
    layers: tuple[int, int]
    kernels: NetworkPrediction
    cluster: Cluster
    parallelism: Parallelism

    def of_layers(self, phase: Phase) -> TimeRange:
        """Return the time for which a device waits for parts of layers, experts and sequences in a phase."""
        parallelism = self.parallelism
        groups = {
            "tensor": self.cluster.group(parallelism.tensor),
            "expert": self.cluster.group(parallelism.expert, stride=parallelism.devices_per_expert),
            "expert tensor": self.cluster.group(parallelism.devices_per_expert),
        }
        ring = self.cluster.link_between(
            0, parallelism.tensor, width=parallelism.tensor * (parallelism.context - 1)
        )
        contexts = self.cluster.group(parallelism.context, stride=parallelism.tensor)
        overlap = TensorOverlap(
            products=parallelism.tensor_overlap,
            user_buffers=parallelism.user_buffers,
            parts=parallelism.tensor,
            occupied=self._occupied(groups["tensor"]),
        )
        exposed, direct = TimeRange(), find_stack(self.run.stack).direct_sums
        for collective in self.network.collectives(self.run):
            if collective.phase == phase:
                group = groups[collective.group]
                takes_us = float(
                    collective_us(collective.collective, collective.nbytes, group, direct=direct)
                )
                takes = TimeRange.of_communication(takes_us, group)
                exposed += TimeRange.of(self._exposed(overlap, collective, takes)) * collective.count
        for exchange in self.network.exchanges(self.run):
            if exchange.phase == phase:
                if exchange.collective:
                    us, hidden = float(collective_us(exchange.collective, exchange.nbytes, contexts)), 0.0
                else:
                    us = float(send_us(exchange.nbytes, ring))
                    hidden = _attention_us(self.kernels, exchange.behind)
                takes = TimeRange.of_communication(us, contexts if exchange.collective else ring)
                exposed += (
                    TimeRange.of(lambda end, t=takes, h=hidden: max(0.0, t.at(end) - h))  # type: ignore[misc]
                    * exchange.count
                )
        # While the device waits for launches anyway, collectives cost nothing.
        slack_us = _host_slack_us(self.kernels, phase)
        return TimeRange.of(lambda end: max(0.0, exposed.at(end) - slack_us))

    def _exposed(
        self, overlap: TensorOverlap, collective: TensorCollective, takes: TimeRange
    ) -> Callable[[End], float]:
        product_us = functools.partial(_product_us, self.kernels)
        return lambda end: overlap.exposed_us(collective, takes.at(end), product_us)

    def _occupied(self, group: ProcessGroup) -> float:
        return occupied_sms(group) / self.kernels.device.sm_count

    def of_copies(self, forward: TimeRange, backward: TimeRange) -> CopyWaits:
        """Return the exposed communication of data parallelism.

        Args:
            forward: Kernels of a forward pass.
            backward: Kernels of a backward pass.
        """
        parallelism = self.parallelism
        expert_devices = parallelism.expert * parallelism.devices_per_expert
        group = self.cluster.group(parallelism.copies, stride=parallelism.tensor)
        groups = group, self.cluster.group(parallelism.expert_copies, stride=expert_devices)
        if max(process_group.size for process_group in groups) == 1 or not self.run.trains:
            return CopyWaits()
        parts = gradient_bytes(self.network, self.run, self.layers)
        # Gradients may be summed in wider numbers than parameters are gathered in.
        wide = itemsize(self.run.gradient_dtype) // itemsize(self.run.dtype)
        gathered_parts = [[nbytes // wide for nbytes in sizes] for sizes in parts]
        if parallelism.sharding == "full":
            summed_bytes, gathered_bytes = (
                [sum(pair) for pair in zip(*both_parts, strict=True)]
                for both_parts in (parts, gathered_parts)
            )
            piped = parallelism.pipeline > 1
            scattered_bytes = [0] * len(summed_bytes) if piped else summed_bytes
            gathers, scatters = self._streamed(forward, backward, scattered_bytes, gathered_bytes, group)
            # A pipeline sums whole gradients over micro-batches before it divides them.
            sums = self._behind(parts, backward, groups, "reduce-scatter") if piped else Transit()
            return CopyWaits(forward=gathers, backward=scatters, gradients=sums)
        if parallelism.sharding == "none":
            return CopyWaits(gradients=self._behind(parts, backward, groups, "all-reduce"))
        # Ranks that keep only their share of the gradients have no use for the rest of the sum.
        summing = (
            find_stack(self.run.stack).optimizer_sharding_sum
            if parallelism.sharding == "optimizer"
            else "reduce-scatter"
        )
        summed = self._behind(parts, backward, groups, summing)
        gathered = self._behind(gathered_parts, forward, groups, "all-gather")
        if parallelism.sharding == "gradients":
            return CopyWaits(backward=summed.exposed, gathered=gathered)
        return CopyWaits(gradients=summed, gathered=gathered)

    def _behind(
        self,
        parts: Sequence[Sequence[int]],
        kernels: TimeRange,
        groups: tuple[ProcessGroup, ...],
        collective: Collective,
    ) -> Transit:
        """Return the collectives of all layers in buckets, beside the kernels of a pass."""
        parallelism, run = self.parallelism, self.run
        pace = TimeRange.of_communication(1.0, groups[0])

        def exchange(end: End) -> BucketExchange:
            return BucketExchange(
                groups=groups,
                bucket_bytes=bucket_bytes(run, parallelism.copies),
                overlap=parallelism.overlap,
                slower=pace.at(end),
                occupied=self._occupied(groups[0]),
            )

        return Transit(
            exposed=TimeRange.of(lambda end: exchange(end).exposed_us(collective, parts, kernels.at(end))),
            total=TimeRange.of(lambda end: exchange(end).total_us(collective, parts)),
            # The last passes of two stages of a device are a group of micro-batches apart: as many as ranks,
            # or all.
            window=kernels
            * (min(parallelism.microbatches, parallelism.pipeline) if parallelism.overlap else 0),
        )

    def _listed(
        self, sizes: Sequence[int], gathered_bytes: Sequence[int], group: ProcessGroup
    ) -> tuple[TimeRange, TimeRange]:
        """Return the time of full sharding by lists of tensors in both passes: nothing is hidden.

        A recomputed layer is gathered twice in the backward pass: for recomputation, and for the gradients.
        Source: deepspeedai/DeepSpeed, pull requests 1188 and 1453, which ended this; pytorch,
        `ProcessGroupNCCL.cpp` (copies of lists).
        """
        gathered = _listed_us("all-gather", gathered_bytes, self.network.matrices_of_a_layer, group)
        backward_gathers = 2 if self.run.recompute == "full" else 1
        scattered = _listed_us("reduce-scatter", sizes, self.network.matrices_of_a_layer, group)
        return gathered, gathered * backward_gathers + scattered

    def _streamed(
        self,
        forward: TimeRange,
        backward: TimeRange,
        sizes: Sequence[int],
        gathered_bytes: Sequence[int],
        group: ProcessGroup,
    ) -> tuple[TimeRange, TimeRange]:
        """Return the exposed communication of full sharding in both passes: it gathers one layer ahead."""
        if self.parallelism.gathering == "lists":
            return self._listed(sizes, gathered_bytes, group)
        gathers = [float(collective_us("all-gather", nbytes, group)) for nbytes in gathered_bytes]
        scatters = [nbytes and float(collective_us("reduce-scatter", nbytes, group)) for nbytes in sizes]

        paces = TimeRange.of_communication(1.0, group)

        def exposed(end: End, kernels: TimeRange, after: Sequence[float], before: Sequence[float]) -> float:
            pace, each_us = paces.at(end), kernels.at(end) / len(sizes)
            works = [
                LayerWork(
                    each_us,
                    (("network", pace * before_us),),
                    (("network", pace * after_us),) if after_us else (),
                )
                for before_us, after_us in zip(before, after, strict=True)
            ]
            waits_us = stream_us(works) - kernels.at(end)
            moved_us = pace * (sum(before) + sum(after))
            return waits_us + self._occupied(group) * max(0.0, moved_us - waits_us)

        none = [0.0] * len(sizes)
        return (
            # Sizes are in the order of the backward pass: the forward pass gathers them in reverse.
            TimeRange.of(lambda end: exposed(end, forward, none, gathers[::-1])),
            TimeRange.of(lambda end: exposed(end, backward, scatters, gathers)),
        )


def _listed_us(collective: Collective, sizes: Sequence[int], matrices: int, group: ProcessGroup) -> TimeRange:
    """Return the time of a collective for each matrix, and of a copy kernel for each device's part of it."""
    takes_us = sum(
        matrices * float(collective_us(collective, nbytes / matrices, group)) for nbytes in sizes if nbytes
    )
    copies_us = HOST_US * matrices * sum(map(bool, sizes)) * group.size
    copies = TimeRange(low_us=copies_us, us=copies_us, high_us=copies_us)
    return TimeRange.of_communication(takes_us, group) + copies


def _attention_us(kernels: NetworkPrediction, phase: Phase) -> float:
    """Return the mean time of a kernel of attention in one phase."""
    attention_kernels = [
        kernel
        for kernel in kernels.operations
        if isinstance(kernel.operation.workload, Attention)
        and (kernel.operation.phase, kernel.operation.part) == (phase, "attention")
    ]
    count = sum(kernel.operation.count for kernel in attention_kernels)
    return sum(kernel.time_us for kernel in attention_kernels) / count if count else 0.0


def _host_slack_us(kernels: NetworkPrediction, phase: Phase) -> float:
    """Return the time in which the device waits for the host in one pass, and so hides collectives."""
    if kernels.run.launch_blocking:
        return 0.0
    device_us, host_us = sum(map(kernels.phase_us, PASSES)), sum(map(kernels.phase_host_us, PASSES))
    return max(0.0, host_us - device_us) * kernels.phase_us(phase) / device_us if device_us else 0.0


def _product_us(kernels: NetworkPrediction, part: str, gradient: str) -> float:
    """Return the time of one product of a part: of its forward pass, or of a gradient."""
    phase = "forward" if gradient == "forward" else "backward"
    product_kernels = [
        kernel
        for kernel in kernels.operations
        if kernel.operation.part == part
        and kernel.operation.phase == phase
        and isinstance(kernel.operation.workload, Gemm)
        and (phase == "forward" or (kernel.operation.workload.trans == "tn") == (gradient == "weights"))
    ]
    count = sum(kernel.operation.count for kernel in product_kernels)
    return sum(kernel.time_us for kernel in product_kernels) / count if count else 0.0


_PRODUCTS = ("attention scores", "attention values")
"""Parts whose products have no weights."""


def weight_share(kernels: NetworkPrediction) -> float:
    """Return the share of the kernels of a backward pass that compute gradients of weights."""
    backward = [kernel for kernel in kernels.operations if kernel.operation.phase == "backward"]
    total_us = sum(kernel.time_us for kernel in backward)
    return (
        sum(kernel.time_us for kernel in backward if is_weight_gradient(kernel)) / total_us
        if total_us
        else 0.0
    )


def is_weight_gradient(kernel: OperationTime) -> bool:
    """Return whether an operation of the backward pass computes a gradient of weights."""
    work, part = kernel.operation.workload, kernel.operation.part
    product = isinstance(work, Gemm) and work.trans == "tn" and part not in _PRODUCTS
    return product or part in ("gradients", "embedding")
