"""How a step is divided among devices: `Parallelism`, and the schedules of its pipeline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from tunebench._deprecation import renamed, warn_renamed
from tunebench.errors import InputError, UnknownName
from tunebench.training.schedules.action import ActionKind
from tunebench.training.schedules.costs import PipelineCosts
from tunebench.training.schedules.generators import gpipe, one_f_one_b
from tunebench.training.schedules.registry import SCHEDULES, NamedSchedule, find_schedule
from tunebench.training.schedules.schedule import PipelineSchedule
from tunebench.workloads.networks import Network
from tunebench.workloads.networks.layer_division import LayerDivision

__all__ = [
    "Gathering",
    "Parallelism",
    "ScheduleName",
    "Sharding",
    "StepDivision",
    "most_in_flight",
    "pipeline_schedule",
]

ScheduleName: TypeAlias = str
"""Name of a schedule in `tunebench.training.schedules.registry`."""

Sharding = Literal["none", "optimizer", "gradients", "full"]
"""What data-parallel ranks shard: nothing, the states of the optimizer (ZeRO-1, distributed optimizer), also
gradients (ZeRO-2), or parameters, gradients and states (ZeRO-3, FSDP)."""

Gathering = Literal["ahead", "lists"]
"""How full sharding moves parameters and gradients (see `Parallelism.gathering`)."""


@dataclass(frozen=True, kw_only=True)
class StepDivision(LayerDivision):
    """How devices divide a step, whatever its batch: the fields that `Parallelism` and `ClusterPlan` share.

    The devices of a stage are those of data, context and tensor parallelism; expert parallelism divides the
    experts among the same devices.

    Attributes:
        data: Data-parallel size.
        pipeline: Pipeline-parallel size.
        chunks: Stages of each device with a looped schedule.
        schedule: Order of the passes of a stage, by its name in `tunebench.training.schedules.registry`.
        sharding: What data-parallel ranks shard. A pipeline with full sharding gathers parameters for each
            pass, and sums whole gradients over micro-batches before it divides them (FSDP2).
        embedding_layers: Layers as which the embedding counts when a pipeline divides layers evenly.
        head_layers: Layers as which the head and the loss count.
    """

    data: int = 1
    pipeline: int = 1
    chunks: int = 1
    schedule: ScheduleName = "1f1b"
    sharding: Sharding = "none"
    embedding_layers: int = 0
    head_layers: int = 0

    @property
    def copies(self) -> int:
        """Devices with the same parameters, which sum gradients: of data and context parallelism."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        """Devices with the same parts of the same experts, which sum the gradients of these."""
        return self.width // (self.expert * self.devices_per_expert)

    @property
    def width(self) -> int:
        """Devices of each stage."""
        return self.copies * self.tensor

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return self.width * self.pipeline

    @property
    def registered_schedule(self) -> NamedSchedule:
        """Record of the schedule."""
        return find_schedule(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.registered_schedule.splits_backward and self.pipeline > 1

    @property
    def stages_per_device(self) -> int:
        """Stages of each device."""
        return self.registered_schedule.stages_per_rank(self.chunks) if self.pipeline > 1 else 1

    @property
    def stage_count(self) -> int:
        """Number of stages of the pipeline."""
        return self.pipeline * self.stages_per_device

    def stages(self, layers: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of each stage as a half-open range.

        The first stages have one more if the division is uneven.

        Args:
            layers: Number of layers of the network.

        Raises:
            InputError: if there are fewer layers than stages.
        """
        return _stage_ranges(layers, self.stage_count, self.embedding_layers, self.head_layers)

    def divided(self, network: Network) -> tuple[Network, tuple[tuple[int, int], ...]]:
        """Return a network and the layers of each stage in it, as half-open ranges.

        If the first or the last stage has no layer, the network is one whose embedding and head are layers.

        Args:
            network: The network.

        Raises:
            InputError: as `stages`, or if the network has no embedding and head for stages without layers.
        """
        stages = self.stages(network.layers)
        if all(first < last for first, last in stages):
            return network, stages
        shifted = [(first + 1, last + 1) for first, last in stages]
        shifted[0] = 0, shifted[0][1]
        shifted[-1] = shifted[-1][0], network.layers + 2
        return network.with_ends_apart(), tuple(shifted)


@functools.lru_cache(maxsize=2**12)
def _stage_ranges(
    layers: int, stages: int, embedding_layers: int, head_layers: int
) -> tuple[tuple[int, int], ...]:
    counted = embedding_layers + head_layers
    layers_per_stage, remainder = divmod(layers + counted, stages)
    counts = [layers_per_stage + (stage < remainder) for stage in range(stages)]
    counts[0] -= embedding_layers
    counts[-1] -= head_layers
    if min(counts) < 0 or min(counts[1:-1], default=1) < 1 or (not counted and min(counts) < 1):
        if not counted:
            raise InputError(
                f"{layers} layers cannot be divided into {stages} stages: expected at most {layers}"
            )
        raise InputError(
            f"{layers} layers, the embedding as {embedding_layers} and the head as {head_layers} more, "
            f"cannot be divided into {stages} stages with a layer in all but the ends"
        )
    return _ranges(counts)


def _ranges(counts: Iterable[int]) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate(counts, initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism(StepDivision):
    """Division of a step among devices, with the micro-batches of a batch.

    Attributes:
        microbatches: Micro-batches of each data-parallel rank in a step.
        tensor_overlap: Whether sums of tensor parallelism may run during products of the backward pass, where
            the network's stack allows it.
        user_buffers: Whether collectives of sequence parallelism run in parts behind the parts of the product
            before or after them (Transformer Engine).
        stage_layers: Number of layers of each stage, for the first and the last one possibly 0; None for an
            even division. If it is uneven, the first stages have one more, because the last stage also has
            the head.
        overlap: Whether gradients are summed during the backward pass, and updated parameters are gathered
            during the next forward pass.
        gathering: How full sharding moves parameters and gradients: those of a layer at once, one layer
            ahead (FSDP, ZeRO-3 since 2022); or each matrix on its own, while nothing else runs, with a copy
            kernel for the part of each copy (ZeRO-3 until 2021, by lists of tensors).
    """

    microbatches: int = 1
    tensor_overlap: bool = True
    user_buffers: bool = False
    stage_layers: tuple[int, ...] | None = None
    overlap: bool = True
    gathering: Gathering = "ahead"

    def __post_init__(self) -> None:
        self._check_stages()
        degrees = (self.data, self.tensor, self.context, self.pipeline, self.microbatches, self.chunks)
        if min(*degrees, self.expert) < 1:
            raise InputError(
                "data, tensor, context, pipeline, microbatches, chunks and expert must be at least 1, got "
                f"{self}"
            )
        self._check_experts()
        registered = find_schedule(self.schedule)
        if self.sharding not in get_args(Sharding):
            raise UnknownName("sharding", self.sharding, get_args(Sharding))
        if self.gathering not in get_args(Gathering):
            raise UnknownName("gathering", self.gathering, get_args(Gathering))
        if self.chunks > 1 and registered.layout != "looped":
            looped = [name for name, schedule in SCHEDULES.items() if schedule.layout == "looped"]
            raise InputError(
                f"chunks={self.chunks} needs the schedule {' or '.join(looped)}, got {self.schedule}"
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise InputError(f"chunks={self.chunks} needs a pipeline of at least 2 ranks, got pipeline=1")
        if self.sharding == "gradients" and self.pipeline > 1:
            raise InputError(
                "sharding=gradients needs pipeline=1, because a pipeline sums whole gradients over its "
                f"micro-batches, got pipeline={self.pipeline}: expected sharding=optimizer or full"
            )
        if self.sharding == "full" and self.pipeline > 1 and self.gathering == "lists":
            raise InputError("gathering=lists, ZeRO-3 of 2021, has no pipeline: expected gathering=ahead")

    def _check_stages(self) -> None:
        ends = self.embedding_layers, self.head_layers
        if min(ends) < 0 or (any(ends) and (self.pipeline == 1 or self.stage_layers)):
            raise InputError(
                "embedding_layers and head_layers must be 0 or more, and need a pipeline without "
                f"stage_layers, got {self}"
            )
        if self.stage_layers is not None and (
            len(self.stage_layers) != self.stage_count
            or min(self.stage_layers) < 0
            or 0 in (self.stage_layers[1:-1] if self.pipeline > 1 else self.stage_layers)
        ):
            raise InputError(
                f"stage_layers must have {self.stage_count} entries of at least one layer, the first and the "
                f"last one of 0 or more, got {self.stage_layers}"
            )

    def _check_experts(self) -> None:
        if self.expert_tensor not in (None, 1, self.tensor):
            raise InputError(f"expert_tensor must be 1 or {self.tensor}, as tensor, got {self.expert_tensor}")
        if self.width % (self.expert * self.devices_per_expert):
            raise InputError(
                f"{self.expert} x {self.devices_per_expert} devices with the experts of a layer must divide "
                f"the {self.width} devices of a stage (tensor x context x data)"
            )
        divided = self.expert > 1 or self.devices_per_expert != self.tensor
        if divided and self.sharding in ("gradients", "full"):
            raise InputError(
                f"sharding={self.sharding} is not possible with experts that are divided otherwise than the "
                "rest of a layer: expected sharding=none or optimizer"
            )

    @property
    def parameter_sizes(self) -> dict[str, Any]:
        """Fields of `LayerDivision` that divide parameters; a deprecated alias."""
        warn_renamed("Parallelism.parameter_sizes", "Parallelism.division")
        return {"tensor": self.tensor, "expert": self.expert, "expert_tensor": self.expert_tensor}

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        schedule = self.registered_schedule
        return schedule.placement(self.pipeline, self.chunks) if self.pipeline > 1 else (0,)

    def stages(self, layers: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of each stage as a half-open range.

        Args:
            layers: Number of layers of the network.

        Raises:
            InputError: if there are fewer layers than stages, or `stage_layers` does not add up to `layers`.
        """
        if not self.stage_layers:
            return StepDivision.stages(self, layers)
        if sum(self.stage_layers) != layers:
            raise InputError(
                f"{layers} layers cannot be divided into stages of {self.stage_layers}: expected a sum "
                f"of {layers}"
            )
        return _ranges(self.stage_layers)

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


def pipeline_schedule(
    parallelism: Parallelism, *, trains: bool = True, costs: PipelineCosts | None = None
) -> PipelineSchedule:
    """Return the schedule of the pipeline.

    Args:
        parallelism: Division of the step.
        trains: Whether there are backward passes.
        costs: Costs of the stages, for the place of gradients of weights; equal ones by default.
    """
    ranks, microbatches = parallelism.pipeline, parallelism.microbatches
    schedule = find_schedule(parallelism.schedule)
    # A forward pass alone is the same for every schedule with one stage on each rank.
    if not trains and not parallelism.splits_backward and parallelism.chunks == 1:
        return gpipe(ranks, microbatches, trains=False)
    if ranks == 1:
        return one_f_one_b(ranks, microbatches)
    if not trains and parallelism.splits_backward:
        raise InputError(f"the schedule {schedule.name} has backward passes: expected a training step")
    return schedule.make(
        ranks,
        microbatches,
        chunks=parallelism.chunks,
        costs=_rounded(costs) if costs and schedule.depends_on_costs else None,
    )


def _rounded(costs: PipelineCosts) -> PipelineCosts:
    """Return times in whole nanoseconds, so that sums in another order do not give another schedule."""
    names = ("forward_us", "input_gradient_us", "weight_gradient_us", "send_us")
    return replace(
        costs,
        stages=tuple(
            replace(
                stage, **{name: round(us, 3) for name in names if (us := getattr(stage, name)) is not None}
            )
            for stage in costs.stages
        ),
    )


def most_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the most micro-batches whose activations each stage stores at once."""
    stored, peaks = [0] * schedule.stages, [0] * schedule.stages
    for action in itertools.chain.from_iterable(schedule.actions):
        # The gradient of the input ends a flight; what the gradient of weights still needs is not counted
        # here.
        if action.kind == ActionKind.FORWARD:
            stored[action.stage] += 1
            peaks[action.stage] = max(peaks[action.stage], stored[action.stage])
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            stored[action.stage] -= 1
    return tuple(peaks)


def _timed_schedules(name: str) -> tuple[str, ...]:
    if name != "TIMED_SCHEDULES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", "tunebench.training.schedules.registry.SCHEDULES")
    return tuple(schedule.name for schedule in SCHEDULES.values() if schedule.depends_on_costs)


__getattr__ = renamed(__name__, {"Division": "Parallelism"}, _timed_schedules)
