"""Predicted time of one training step or one forward pass on several devices: `predict_step`.

Four kinds of parallelism and all their combinations (`Parallelism`):

- data: each device has the whole network and a share of the batch. Gradients are all-reduced in buckets
  during the backward pass of the last micro-batch, as in PyTorch's DistributedDataParallel;
- tensor: each device has a part of every layer (heads, inner widths, vocabulary). The devices wait for two
  all-reduces per layer forward and two backward (Megatron-LM), unless these hide behind products or behind
  the host;
- context: each device has a part of every sequence. Keys and values go round a ring of the devices, each
  behind the attention to those before; gradients are summed as for copies of the network;
- pipeline: each device has some of the layers and sends activations on
  (`tunebench.forecast.parallel.pipeline`).

Neighbouring ranks share tensors, then sequences, then data, then stages: the group that communicates most is
closest, in the order of Megatron-LM.

Not modelled: collectives that take SMs and bandwidth from concurrent kernels; sharded optimizers.

Sources: Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020; Shoeybi
et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019;
Narayanan et al., as in `tunebench.forecast.parallel.pipeline`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tunebench._deprecation import renamed
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.forecast.network import NetworkPrediction, predict_network
from tunebench.forecast.parallel.cluster import Cluster, Link, ProcessGroup
from tunebench.forecast.parallel.collective import REACHES, collective_us, send_us
from tunebench.forecast.parallel.gradient import BUCKET_BYTES, exposed_gradients_us, gradient_bytes
from tunebench.forecast.parallel.pipeline.costs import PipelineCosts, StageCosts
from tunebench.forecast.parallel.pipeline.generators import gpipe, interleaved_1f1b, one_f_one_b
from tunebench.forecast.parallel.pipeline.schedule import PipelineSchedule
from tunebench.forecast.parallel.pipeline.simulation import simulate_pipeline
from tunebench.workloads.networks import Network, NetworkRun
from tunebench.workloads.networks._network import Phase
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["BUCKET_BYTES", "Parallelism", "PipelineStage", "StepPrediction", "TimeRange", "predict_step"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b")

_PASSES: tuple[Phase, ...] = ("forward", "backward")

End = Literal["low", "expected", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """An expected time with its 90 % prediction interval, in microseconds.

    Sums and products combine equal ends: if kernels run as fast as possible, less communication is hidden
    behind them.
    """

    low_us: float = 0.0
    us: float = 0.0
    high_us: float = 0.0

    def __add__(self, other: TimeRange) -> TimeRange:
        return TimeRange.of(lambda end: self.at(end) + other.at(end))

    def __mul__(self, times: float) -> TimeRange:
        return TimeRange.of(lambda end: self.at(end) * times)

    def at(self, end: End) -> float:
        """Return one of the three times."""
        return {"low": self.low_us, "expected": self.us, "high": self.high_us}[end]

    @classmethod
    def of(cls, value: Callable[[End], float]) -> TimeRange:
        """Return the range whose three times are computed by a function."""
        return cls(low_us=value("low"), us=value("expected"), high_us=value("high"))

    @classmethod
    def of_communication(cls, us: float) -> TimeRange:
        """Return the range of communication with this expected time."""
        return cls(low_us=us * REACHES[0], us=us, high_us=us * REACHES[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Division of a step among devices.

    Attributes:
        data: Copies of the network, each with a share of the batch.
        tensor: Devices that share every layer.
        pipeline: Stages that share the layers.
        microbatches: Parts of each copy's batch that go through the stages one after the other.
        schedule: Order of the passes of a stage.
        chunks: Stages of each device with the schedule ``interleaved-1f1b``.
        tensor_overlap: Whether sums of tensor parallelism may run during products of the backward pass, where
            the network's stack allows it.
        stage_layers: Number of layers of each stage; None for an even division. If it is uneven, the first
            stages have one more, because the last stage also has the head.
        overlap: Whether gradients are all-reduced during the backward pass.
        context: Devices that share every sequence.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = "1f1b"
    chunks: int = 1
    tensor_overlap: bool = True
    stage_layers: tuple[int, ...] | None = None
    overlap: bool = True
    context: int = 1

    def __post_init__(self) -> None:
        degrees = (self.data, self.tensor, self.context, self.pipeline, self.microbatches, self.chunks)
        if min(degrees) < 1:
            raise InputError(
                f"data, tensor, context, pipeline, microbatches and chunks must be at least 1, got {self}"
            )
        if self.schedule not in _SCHEDULES:
            raise InputError(f"schedule must be one of {', '.join(_SCHEDULES)}, got {self.schedule}")
        if self.chunks > 1 and self.schedule != "interleaved-1f1b":
            raise InputError(f"chunks={self.chunks} needs the schedule interleaved-1f1b, got {self.schedule}")
        if self.stage_layers is not None and (
            len(self.stage_layers) != self.pipeline * self.chunks or min(self.stage_layers) < 1
        ):
            raise InputError(
                f"stage_layers must have {self.pipeline * self.chunks} entries of at least one layer, got "
                f"{self.stage_layers}"
            )

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return self.data * self.context * self.tensor * self.pipeline

    def stages(self, layers: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of each stage as a half-open range.

        Args:
            layers: Number of layers of the network.

        Raises:
            InputError: if there are fewer layers than stages, or `stage_layers` does not add up to `layers`.
        """
        stages = self.pipeline * self.chunks
        if layers < stages or (self.stage_layers and sum(self.stage_layers) != layers):
            raise InputError(f"{layers} layers cannot be divided into {self.stage_layers or stages} stages")
        each, more = divmod(layers, stages)
        counts = self.stage_layers or [each + (stage < more) for stage in range(stages)]
        ends = list(itertools.accumulate(counts, initial=0))
        return tuple(itertools.pairwise(ends))

    def microbatch(self, batch: int) -> int:
        """Return the number of samples in a micro-batch.

        Args:
            batch: Samples of all devices together.

        Raises:
            InputError: if the batch is not divisible.
        """
        parts = self.data * self.microbatches
        if batch % parts:
            raise InputError(
                f"a batch of {batch} cannot be divided into {self.data} x {self.microbatches} micro-batches"
            )
        return batch // parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """The work of each device of one pipeline stage in a step. Times of passes are those of one micro-batch.

    Attributes:
        layers: Layers of the stage as a half-open range.
        kernels: Kernel times of one micro-batch and the optimizer step on one device.
        forward: Kernels of a forward pass.
        backward: Kernels of a backward pass.
        optimizer: Kernels of the optimizer step.
        sums_forward: Exposed collectives of tensor parallelism and sends of context parallelism in a forward
            pass.
        sums_backward: The same in a backward pass.
        gradients: Part of the gradient all-reduce that is not hidden behind the last backward pass.
        send: Time to send a micro-batch's activations to the next stage, or their gradients back; 0 in the
            last stage.
        send_bytes: Bytes of that message.
        parameters: Number of parameters on each device.
        in_flight: Most micro-batches whose activations are stored at once.
    """

    layers: tuple[int, int]
    kernels: NetworkPrediction
    forward: TimeRange
    backward: TimeRange
    optimizer: TimeRange
    sums_forward: TimeRange
    sums_backward: TimeRange
    gradients: TimeRange
    send: TimeRange
    send_bytes: int
    parameters: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Predicted time of one step of a network on several devices.

    Three parts add up to the whole, each a mean over the devices: `compute`, exposed `communication`, and
    `bubble`, in which a device waits for another stage.

    Attributes:
        network: Name of the network.
        device: One of the devices.
        run: How the network runs, with the batch of all devices together.
        cluster: Devices and links.
        parallelism: Division of the step among the devices.
        time: Time of the step with its 90 % prediction interval.
        stages: Work of each pipeline stage.
        sends: Exposed communication between stages, included in `communication`: activations, their
            gradients, and the gradients of a matrix that the first and the last stage share.
    """

    network: str
    device: Device
    run: NetworkRun
    cluster: Cluster
    parallelism: Parallelism
    time: TimeRange
    stages: tuple[PipelineStage, ...]
    sends: TimeRange

    @property
    def time_us(self) -> float:
        """Expected time of the step, in microseconds."""
        return self.time.us

    @property
    def low_us(self) -> float:
        """Lower end of the 90 % prediction interval."""
        return self.time.low_us

    @property
    def high_us(self) -> float:
        """Upper end of the 90 % prediction interval."""
        return self.time.high_us

    @property
    def compute(self) -> TimeRange:
        """Time in which kernels run."""
        times = self.parallelism.microbatches
        total = sum(((s.forward + s.backward) * times + s.optimizer for s in self.stages), TimeRange())
        return total * (1 / self.parallelism.pipeline)

    @property
    def communication(self) -> TimeRange:
        """Exposed communication: time in which a device waits for data."""
        times = self.parallelism.microbatches
        total = sum(
            ((s.sums_forward + s.sums_backward) * times + s.gradients for s in self.stages), TimeRange()
        )
        return total * (1 / self.parallelism.pipeline) + self.sends

    @property
    def bubble(self) -> TimeRange:
        """Time in which a device waits for the work of another stage."""
        parts = self.compute + self.communication
        return TimeRange.of(lambda end: max(0.0, self.time.at(end) - parts.at(end)))

    @property
    def samples_per_s(self) -> float:
        """Throughput of all devices in sequences or images per second."""
        return self.run.batch / self.time.us * 1e6


def predict_step(
    network: Network, device: Device, run: NetworkRun, cluster: Cluster, parallelism: Parallelism
) -> StepPrediction:
    """Predict one training step, or one forward pass, on several equal devices.

    Args:
        network: The network.
        device: One of the devices; it does not have to be present.
        run: How the network runs. Its batch and tokens are those of all devices together; `tensor`, `context`
            and `layers` must not be set.
        cluster: Devices and links; it may have more devices than are used.
        parallelism: Division of the step among the devices.

    Raises:
        InputError: if the network, the batch or the cluster does not allow this division.
    """
    if run.tensor != 1 or run.context != 1 or run.layers is not None:
        raise InputError(
            "set tensor, context and pipeline parallelism by `parallelism`, not by `tensor`, `context` or "
            "`layers` of the run"
        )
    if run.seq % (2 * parallelism.context) and parallelism.context > 1:
        raise InputError(
            f"seq={run.seq} cannot be divided among {parallelism.context} devices: expected a multiple of "
            f"{2 * parallelism.context}, because each has two parts of a sequence"
        )
    if parallelism.devices > cluster.devices:
        raise InputError(f"{parallelism.devices} devices are needed, but the cluster has {cluster.devices}")
    stages = tuple(_stages(network, device, run, cluster, parallelism))
    tied = _tied(network, run, cluster, parallelism)
    time = TimeRange.of(lambda end: _step_us(stages, parallelism, run, end) + tied.at(end))
    silent = tuple(dataclasses.replace(stage, send=TimeRange()) for stage in stages)
    sends = TimeRange.of(lambda end: time.at(end) - _step_us(silent, parallelism, run, end))
    return StepPrediction(
        network=network.name,
        device=device,
        run=run,
        cluster=cluster,
        parallelism=parallelism,
        time=time,
        stages=stages,
        sends=sends,
    )


def _step_us(stages: tuple[PipelineStage, ...], parallelism: Parallelism, run: NetworkRun, end: End) -> float:
    """Return when the last stage has ended its optimizer step."""
    schedule = _schedule(parallelism, run)
    simulation = simulate_pipeline(
        schedule, PipelineCosts(stages=tuple(_costs(stage, end) for stage in stages))
    )
    ends_us = [float(each[-1]) for each in simulation.ends_us]
    for rank, stage in zip(schedule.placement, stages, strict=True):
        ends_us[rank] += (stage.gradients + stage.optimizer).at(end)
    return max(ends_us)


def _schedule(parallelism: Parallelism, run: NetworkRun) -> PipelineSchedule:
    ranks, microbatches = parallelism.pipeline, parallelism.microbatches
    if parallelism.chunks > 1:
        return interleaved_1f1b(ranks, microbatches, parallelism.chunks)
    if parallelism.schedule == "gpipe" or not run.trains:
        return gpipe(ranks, microbatches, trains=run.trains)
    return one_f_one_b(ranks, microbatches)


def _costs(stage: PipelineStage, end: End) -> StageCosts:
    """Return the costs of a stage at one end of the prediction interval; its backward pass is not split."""
    return StageCosts(
        forward_us=(stage.forward + stage.sums_forward).at(end),
        input_gradient_us=(stage.backward + stage.sums_backward).at(end),
        weight_gradient_us=0.0,
        send_bytes=stage.send_bytes,
        send_us=stage.send.at(end),
    )


def _in_flight(parallelism: Parallelism, stage: int) -> int:
    """Return the most micro-batches whose activations a stage stores at once during training."""
    count, ranks = parallelism.microbatches, parallelism.pipeline
    if parallelism.schedule == "gpipe":
        return count
    chunk, rank = divmod(stage, ranks)
    return min(count, ranks - rank if parallelism.chunks == 1 else 2 * ranks - rank - ranks * bool(chunk))


# ------------------------------------------------------------------------------------- one stage


def _stages(
    network: Network, device: Device, run: NetworkRun, cluster: Cluster, parallelism: Parallelism
) -> Iterator[PipelineStage]:
    """Yield the work of each stage."""
    whole = parallelism.pipeline == 1
    width = parallelism.tensor * parallelism.context * parallelism.data
    sharing = cluster.group(parallelism.tensor)
    copies = cluster.group(parallelism.context * parallelism.data, stride=parallelism.tensor)
    ring = cluster.link_between(0, parallelism.tensor, width=parallelism.tensor * (parallelism.context - 1))
    for index, layers in enumerate(parallelism.stages(network.layers)):
        part = dataclasses.replace(
            run,
            batch=parallelism.microbatch(run.batch),
            seq=run.seq // parallelism.context,
            tensor=parallelism.tensor,
            context=parallelism.context,
            layers=None if whole else layers,
            accumulate=run.accumulate or parallelism.microbatches > 1,
        )
        kernels = predict_network(network, device, part)
        backward = _phase(kernels, "backward")
        last = layers[1] == network.layers
        send_bytes = 0 if last else network.boundary_bytes(part)
        rank = index % parallelism.pipeline
        link = cluster.link_between(rank * width, (rank + 1) % parallelism.pipeline * width, width=width)
        yield PipelineStage(
            layers=layers,
            kernels=kernels,
            forward=_phase(kernels, "forward"),
            backward=backward,
            optimizer=_phase(kernels, "optimizer"),
            sums_forward=_sums(network, part, sharing, ring, kernels, "forward", parallelism),
            sums_backward=_sums(network, part, sharing, ring, kernels, "backward", parallelism),
            gradients=_gradients(network, part, layers, backward, copies, parallelism),
            send=TimeRange() if last else TimeRange.of_communication(float(send_us(send_bytes, link))),
            send_bytes=send_bytes,
            parameters=network.parameters(parallelism.tensor, layers) if run.trains else 0,
            in_flight=_in_flight(parallelism, index),
        )


def _phase(kernels: NetworkPrediction, phase: Phase) -> TimeRange:
    """Return the time of one phase: that of its kernels, or that of launching them if it is longer.

    The passes of a micro-batch are one queue of kernels, the optimizer another. The interval is scaled alike.
    """
    queue: tuple[Phase, ...] = ("optimizer",) if phase == "optimizer" else _PASSES
    device_us = {each: kernels.phase_us(each) for each in queue}
    if not device_us[phase]:
        return TimeRange()
    total_us = sum(device_us.values())
    queue_us = max(total_us, sum(map(kernels.phase_host_us, queue)))
    time = TimeRange(low_us=kernels.low_us, us=kernels.time_us, high_us=kernels.high_us)
    return time * (queue_us * device_us[phase] / total_us / kernels.time_us)


def _sums(
    network: Network,
    run: NetworkRun,
    group: ProcessGroup,
    ring: Link,
    kernels: NetworkPrediction,
    phase: Phase,
    parallelism: Parallelism,
) -> TimeRange:
    """Return the time for which a device waits for tensor and context parallelism in one phase."""
    collectives = [each for each in network.collectives(run) if each.phase == phase]
    exposed = TimeRange()
    for each in collectives:
        takes = TimeRange.of_communication(float(collective_us(each.collective, each.nbytes, group)))
        hidden = _product_us(kernels, *each.behind) if each.behind and parallelism.tensor_overlap else 0.0
        exposed += TimeRange.of(lambda end, t=takes, h=hidden: max(0.0, t.at(end) - h)) * each.count  # type: ignore[misc]
    for sent in network.exchanges(run):
        if sent.phase == phase:
            takes = TimeRange.of_communication(float(send_us(sent.nbytes, ring)))
            hidden = _attention_us(kernels, sent.behind)
            exposed += TimeRange.of(lambda end, t=takes, h=hidden: max(0.0, t.at(end) - h)) * sent.count  # type: ignore[misc]
    slack_us = _host_slack_us(kernels, phase)
    return TimeRange.of(lambda end: max(0.0, exposed.at(end) - slack_us))


def _attention_us(kernels: NetworkPrediction, phase: Phase) -> float:
    """Return the mean time of a kernel of attention in one phase."""
    found = [
        each
        for each in kernels.operations
        if isinstance(each.operation.workload, Attention)
        and (each.operation.phase, each.operation.part) == (phase, "attention")
    ]
    count = sum(each.operation.count for each in found)
    return sum(each.time_us for each in found) / count if count else 0.0


def _host_slack_us(kernels: NetworkPrediction, phase: Phase) -> float:
    """Return the time in which the device waits for the host in one pass, and so hides collectives."""
    device_us, host_us = sum(map(kernels.phase_us, _PASSES)), sum(map(kernels.phase_host_us, _PASSES))
    return max(0.0, host_us - device_us) * kernels.phase_us(phase) / device_us if device_us else 0.0


def _product_us(kernels: NetworkPrediction, part: str, gradient: str) -> float:
    """Return the time of one product in the backward pass of a part of the network."""
    found = [
        each
        for each in kernels.operations
        if each.operation.part == part
        and each.operation.phase == "backward"
        and isinstance(each.operation.workload, Gemm)
        and (each.operation.workload.trans == "tn") == (gradient == "weights")
    ]
    count = sum(each.operation.count for each in found)
    return sum(each.time_us for each in found) / count if count else 0.0


# ------------------------------------------------------------------------------------- gradients


def _gradients(
    network: Network,
    run: NetworkRun,
    layers: tuple[int, int],
    backward: TimeRange,
    group: ProcessGroup,
    parallelism: Parallelism,
) -> TimeRange:
    """Return the part of the gradient all-reduce that is not hidden behind the backward pass."""
    if group.size == 1 or not run.trains:
        return TimeRange()
    sizes = gradient_bytes(network, run, layers)
    if not parallelism.overlap:
        return TimeRange.of_communication(float(collective_us("all-reduce", sum(sizes), group)))
    expected = TimeRange.of(lambda end: exposed_gradients_us(sizes, backward.at(end), group))
    late = TimeRange.of(lambda end: exposed_gradients_us(sizes, backward.at(end), group, REACHES[1]))
    early = TimeRange.of(lambda end: exposed_gradients_us(sizes, backward.at(end), group, REACHES[0]))
    return TimeRange(low_us=early.low_us, us=expected.us, high_us=late.high_us)


def _tied(network: Network, run: NetworkRun, cluster: Cluster, parallelism: Parallelism) -> TimeRange:
    """Return the time in which the first and the last stage sum the gradients of a matrix that both store."""
    if parallelism.pipeline == 1 or not run.trains:
        return TimeRange()
    held = sum(network.parameters(parallelism.tensor, each) for each in parallelism.stages(network.layers))
    shared = (held - network.parameters(parallelism.tensor)) * itemsize(run.dtype)
    width = parallelism.tensor * parallelism.context * parallelism.data
    link = cluster.link_between(0, (parallelism.pipeline - 1) * width, width=width)
    pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
    return TimeRange.of_communication(float(collective_us("all-reduce", shared, pair)))


__getattr__ = renamed(__name__, {"Division": "Parallelism"})
