"""Predicted time of one training step or one forward pass on several devices: `predict_step`.

Five kinds of parallelism and all their combinations (`Parallelism`):

- data: each rank has the whole network and a part of the batch. Gradients are all-reduced in buckets
  during the backward pass of the last micro-batch, as in PyTorch's DistributedDataParallel;
- tensor: each device has a part of every layer (heads, inner widths, vocabulary). The devices wait for two
  all-reduces per layer forward and two backward (Megatron-LM), unless these hide behind products or behind
  the host;
- context: each device has a part of every sequence. Keys and values go round a ring of the devices, each
  behind the attention to those before; gradients are summed as in data parallelism;
- expert: each device has some of the experts of a layer. The devices are those that also divide data,
  sequences and, with `expert_tensor=1`, tensors, so that this kind needs no devices of its own. Tokens are
  exchanged all to all before and after the experts, while the devices wait;
- pipeline: each device has some of the layers and sends activations on
  (`tunebench.training.schedules`).

Neighbouring ranks share tensors, then sequences, then data, then stages: the group that communicates most is
closest, in the order of Megatron-LM.

Data-parallel ranks may shard the optimizer's states, gradients and parameters (`Parallelism.sharding`).
Collectives beside kernels take SMs from them (`tunebench.training.steps.overlap`). Not modelled: memory
bandwidth that they take.

Sources: Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020; Shoeybi
et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019;
Narayanan et al., as in `tunebench.training.schedules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tunebench._deprecation import renamed
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.forecast.network import NetworkPrediction, predict_kernels, queued_us
from tunebench.training.interconnect.cluster import Cluster, ProcessGroup
from tunebench.training.interconnect.collective import collective_us, send_us
from tunebench.training.schedules.costs import PipelineCosts, StageCosts
from tunebench.training.schedules.schedule import PipelineSchedule
from tunebench.training.schedules.simulation import simulate_pipeline
from tunebench.training.steps.gradient import BUCKET_BYTES
from tunebench.training.steps.parallelism import Parallelism, most_in_flight, pipeline_schedule
from tunebench.training.steps.time_range import End, TimeRange
from tunebench.training.steps.waits import PASSES, CopyWaits, StageWaits, chained, weight_share
from tunebench.workloads.networks import Network, NetworkRun, Phase
from tunebench.workloads.networks.layer_division import LayerDivision, shared_fields

__all__ = ["BUCKET_BYTES", "Parallelism", "PipelineStage", "StepPrediction", "TimeRange", "predict_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """The work of each device of one pipeline stage in a step. Times of passes are those of one micro-batch.

    Attributes:
        layers: Layers of the stage as a half-open range, empty for the embedding or the head alone.
        kernels: Kernel times of one micro-batch and the optimizer step on one device.
        forward: Kernels of a forward pass.
        backward: Kernels of a backward pass.
        optimizer: Kernels of the optimizer step.
        sums_forward: Exposed collectives of tensor parallelism and sends of context parallelism in a forward
            pass.
        sums_backward: The same in a backward pass.
        weights: Kernels of the backward pass that compute gradients of weights.
        gradients: Part of the sum of gradients, and of the gather of updated parameters, that no pass hides;
            for all stages of a device with the first one.
        copies: Exposed communication of data parallelism, for this stage alone.
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
    weights: TimeRange
    sums_forward: TimeRange
    sums_backward: TimeRange
    gradients: TimeRange
    copies: CopyWaits
    send: TimeRange
    send_bytes: int
    parameters: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Predicted time of one step of a network on several devices.

    Four parts add up to the whole, each a mean over the devices: `compute`, exposed `communication`,
    `bubble`, in which a device waits for another stage, and `software`.

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
        modelled: Time of the step without what its software adds (`tunebench.stack`).
    """

    network: str
    device: Device
    run: NetworkRun
    cluster: Cluster
    parallelism: Parallelism
    time: TimeRange
    stages: tuple[PipelineStage, ...]
    sends: TimeRange
    modelled: TimeRange

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
        return TimeRange.of(lambda end: max(0.0, self.modelled.at(end) - parts.at(end)))

    @property
    def software(self) -> TimeRange:
        """Time that the software adds to what is modelled; its lower end may be negative."""
        return TimeRange.of(lambda end: self.time.at(end) - self.modelled.at(end))

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
        run: How the network runs. Its batch and tokens are those of all devices together; `tensor`,
            `context`, `expert` and `layers` must not be set.
        cluster: Devices and links; it may have more devices than are used.
        parallelism: Division of the step among the devices.

    Raises:
        InputError: if the network, the batch or the cluster does not allow this division.
    """
    if (run.tensor, run.context, run.expert) != (1, 1, 1) or run.layers is not None:
        raise InputError(
            "set tensor, context, expert and pipeline parallelism by `parallelism`, not by `tensor`, "
            "`context`, `expert` or `layers` of the run"
        )
    if run.seq % (2 * parallelism.context) and parallelism.context > 1:
        raise InputError(
            f"seq={run.seq} cannot be divided among {parallelism.context} devices: expected a multiple of "
            f"{2 * parallelism.context}, because each has two parts of a sequence"
        )
    if parallelism.devices > cluster.devices:
        raise InputError(f"{parallelism.devices} devices are needed, but the cluster has {cluster.devices}")
    stages = tuple(_stages(network, device, run, cluster, parallelism))
    # One schedule for all three ends of the interval, or the ends could come from different orders of passes.
    schedule = _schedule(stages, parallelism, run)
    stages = tuple(
        dataclasses.replace(stage, in_flight=count, gradients=gradients)
        for stage, count, gradients in zip(
            stages, most_in_flight(schedule), _gradients(stages, parallelism), strict=True
        )
    )
    tied = _tied(network, run, cluster, parallelism)
    modelled = TimeRange.of(lambda end: _step_us(schedule, stages, parallelism, end) + tied.at(end))
    # What sends expose is what the step loses without them: most of each send hides behind passes.
    silent = tuple(dataclasses.replace(stage, send=TimeRange()) for stage in stages)
    sends = TimeRange.of(lambda end: modelled.at(end) - _step_us(schedule, silent, parallelism, end))
    return StepPrediction(
        network=network.name,
        device=device,
        run=run,
        cluster=cluster,
        parallelism=parallelism,
        time=modelled.with_efficiency(run.efficiency),
        stages=stages,
        sends=sends,
        modelled=modelled,
    )


def _gradients(stages: tuple[PipelineStage, ...], parallelism: Parallelism) -> Iterator[TimeRange]:
    """Yield the exposed collectives of copies: for all stages of a device with its first one."""
    placement = parallelism.placement
    for index, rank in enumerate(placement):
        if index != placement.index(rank):
            yield TimeRange()
            continue
        rank_copies = [
            stage.copies for stage, stage_rank in zip(stages, placement, strict=True) if stage_rank == rank
        ][::-1]
        yield chained([copies.gradients for copies in rank_copies]) + chained(
            [copies.gathered for copies in rank_copies]
        )


def _step_us(
    schedule: PipelineSchedule, stages: tuple[PipelineStage, ...], parallelism: Parallelism, end: End
) -> float:
    """Return when the last stage has ended its optimizer step."""
    costs = PipelineCosts(stages=tuple(_costs(stage, parallelism, end) for stage in stages))
    simulation = simulate_pipeline(schedule, costs)
    ends_us = [float(rank_ends_us[-1]) for rank_ends_us in simulation.ends_us]
    for rank, stage in zip(schedule.placement, stages, strict=True):
        ends_us[rank] += (stage.gradients + stage.optimizer).at(end)
    return max(ends_us)


def _schedule(
    stages: tuple[PipelineStage, ...], parallelism: Parallelism, run: NetworkRun
) -> PipelineSchedule:
    """Return the schedule, with gradients of weights where expected times have room for them."""
    costs = PipelineCosts(stages=tuple(_costs(stage, parallelism, "expected") for stage in stages))
    return pipeline_schedule(parallelism, trains=run.trains, costs=costs)


def _costs(stage: PipelineStage, parallelism: Parallelism, end: End) -> StageCosts:
    """Return the costs of a stage at one end of the prediction interval."""
    weights_us = stage.weights.at(end) if parallelism.splits_backward else 0.0
    return StageCosts(
        forward_us=(stage.forward + stage.sums_forward).at(end),
        input_gradient_us=(stage.backward + stage.sums_backward).at(end) - weights_us,
        weight_gradient_us=weights_us,
        send_bytes=stage.send_bytes,
        send_us=stage.send.at(end),
    )


# ------------------------------------------------------------------------------------- one stage


def _stages(
    network: Network, device: Device, run: NetworkRun, cluster: Cluster, parallelism: Parallelism
) -> Iterator[PipelineStage]:
    """Yield the work of each stage, without the micro-batches in flight."""
    whole = parallelism.pipeline == 1
    width = parallelism.width
    placement = parallelism.placement
    network_stages = parallelism.stages(network.layers)
    network, divided_stages = parallelism.divided(network)
    for index, (stage_layers, layers) in enumerate(zip(network_stages, divided_stages, strict=True)):
        part = dataclasses.replace(
            run,
            batch=parallelism.microbatch(run.batch),
            seq=run.seq // parallelism.context,
            **shared_fields(parallelism, LayerDivision),
            layers=None if whole else layers,
            accumulate=run.accumulate or parallelism.microbatches > 1,
            shards=1 if parallelism.sharding == "none" else parallelism.copies,
            sharded_parameters=parallelism.sharding == "full" and run.kernels != "megatron",
        )
        kernels = predict_kernels(network, device, part)
        forward, backward = _phase(kernels, "forward"), _phase(kernels, "backward")
        waits = StageWaits(network, part, layers, kernels, cluster, parallelism)
        copies = waits.of_copies(forward, backward)
        last = layers[1] == network.layers
        send_bytes = 0 if last else network.boundary_bytes(part)
        ranks = placement[index], placement[min(index + 1, len(placement) - 1)]
        link = cluster.link_between(*(rank * width for rank in ranks), width=width)
        silent = last or (ranks[0] == ranks[1] and not whole)
        yield PipelineStage(
            layers=stage_layers,
            kernels=kernels,
            forward=forward,
            backward=backward,
            optimizer=_phase(kernels, "optimizer"),
            weights=backward * weight_share(kernels),
            sums_forward=waits.of_layers("forward") + copies.forward,
            sums_backward=waits.of_layers("backward") + copies.backward,
            gradients=TimeRange(),
            copies=copies,
            send=TimeRange()
            if silent
            else TimeRange.of_communication(float(send_us(send_bytes, link)), link),
            send_bytes=send_bytes,
            parameters=sum(network.held_parameters(part, layers)) if run.trains else 0,
            in_flight=0,
        )


def _phase(kernels: NetworkPrediction, phase: Phase) -> TimeRange:
    """Return the time of one phase: its kernels and their launches.

    The passes of a micro-batch are one queue of kernels, the optimizer another. The interval is scaled alike.
    """
    queue: tuple[Phase, ...] = ("optimizer",) if phase == "optimizer" else PASSES
    device_us = {queued_phase: kernels.phase_us(queued_phase) for queued_phase in queue}
    if not device_us[phase]:
        return TimeRange()
    total_us = sum(device_us.values())
    # Launches of both passes are one queue, which limits them together.
    queue_us = queued_us(kernels.run, total_us, sum(map(kernels.phase_host_us, queue)))
    time = TimeRange(low_us=kernels.low_us, us=kernels.time_us, high_us=kernels.high_us)
    return time * (queue_us * device_us[phase] / total_us / kernels.time_us)


def _tied(network: Network, run: NetworkRun, cluster: Cluster, parallelism: Parallelism) -> TimeRange:
    """Return the time in which the first and the last stage sum the gradients of a matrix that both store."""
    end_ranks = parallelism.placement[0], parallelism.placement[-1]
    if end_ranks[0] == end_ranks[1] or not run.trains:
        return TimeRange()
    divided_network, stages = parallelism.divided(network)
    stage_parameters = sum(divided_network.parameters(parallelism.tensor, layers) for layers in stages)
    shared = (stage_parameters - network.parameters(parallelism.tensor)) * itemsize(run.dtype)
    width = parallelism.width
    link = cluster.link_between(*(rank * width for rank in end_ranks), width=width)
    pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
    return TimeRange.of_communication(float(collective_us("all-reduce", shared, pair)), pair)


__getattr__ = renamed(__name__, {"Division": "Parallelism"})
