"""Times of a plan's stages, a lower bound of its step, and the step itself by simulation: `StepPricer`.

The composition is that of `predict_step`, whose time it reproduces for plans that do not shard. In addition:

- Optimizer sharding (ZeRO-1): a reduce-scatter of gradients takes the place of the all-reduce (not in
  DeepSpeed: `SoftwareStack.optimizer_sharding_sum`), each copy updates its share, and an all-gather of the
  parameters follows, behind the first forward pass of the next step if gradients overlap too.
- Gradient sharding (ZeRO-2): gradients are reduce-scattered behind each layer of each micro-batch.
- Full sharding (ZeRO-3, FSDP): every layer's parameters are gathered for each pass of each micro-batch,
  behind the layer before (prefetch), and its gradients are reduce-scattered behind the next one, or in a
  pipeline after the last micro-batch. What does not fit behind a layer's pass is exposed.
- States, parameters and activations in host memory or NVMe: see `tunebench.training.cluster.storage`.

Lower bound: a rank cannot start before the first micro-batch has passed the ranks before it, then runs all
its passes, and the last gradient returns through the ranks before it. This holds for any schedule, and for
equal stages 1F1B reaches it. If gradients of weights are apart, the last gradient of an input does not wait
for those of weights, but each rank it returns to still computes one.

The first bound of all plans at once (`floors_us`) is that of the first and the last rank, with the time of a
stage as a linear function of its layers.

Sources: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020;
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import itemsize
from tunebench.stack import find_stack
from tunebench.training.cluster.layer_time import LayerDivision, LayerRun, LayerTimes, PassTime
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.space import ClusterPlan, PlanTable, TrainingJob
from tunebench.training.cluster.storage import StorageLayout, StorageTimes, StreamedLayer
from tunebench.training.interconnect.cluster import ProcessGroup
from tunebench.training.interconnect.collective import Collective, collective_us, send_us
from tunebench.training.pipeline.activation import architecture_of
from tunebench.training.schedules.costs import PipelineCosts, StageCosts
from tunebench.training.schedules.registry import SPLIT_SCHEDULES, V_SCHEDULES, find_schedule
from tunebench.training.schedules.simulation import simulate_pipeline
from tunebench.training.steps.gradient import BucketExchange, bucket_bytes, chained_us, gradient_bytes
from tunebench.training.steps.overlap import TensorOverlap, occupied_sms
from tunebench.training.steps.parallelism import Parallelism, pipeline_schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_FEW_LAYERS = 4
"""Layers from which the communication of a stage follows from that of short stages."""

RUN_PARAMETERS = (
    "tensor",
    "microbatch",
    "recompute",
    "sequence_parallel",
    "flash",
    "context",
    "expert",
    "expert_tensor",
    "context_gather",
)
"""Parameters of a plan that the time of a layer depends on."""

__all__ = ["RUN_PARAMETERS", "Slowdown", "StageTime", "StepPricer", "StepTime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Factors on predicted times, for the sensitivity of a choice and for what software adds.

    Attributes:
        kernels: Factor on the time of kernels.
        communication: Factor on the time of collectives and sends.
        launches: Factor on the time of launches.
    """

    kernels: float = 1.0
    communication: float = 1.0
    launches: float = 1.0

    def with_software(self, job: TrainingJob) -> Slowdown:
        """Return the factors times those of the software of a job."""
        kernels, communication = job.software_factors
        return Slowdown(
            kernels=self.kernels * kernels,
            communication=self.communication * communication,
            launches=self.launches * kernels,
        )


@dataclass(frozen=True, slots=True)
class StageTime:
    """Times of a stage on each device, in microseconds; passes are those of one micro-batch.

    Attributes:
        forward_us: Kernels of a forward pass.
        backward_us: Kernels of a backward pass.
        waits_forward_us: Exposed collectives of a forward pass: tensor parallelism, gathered parameters.
        waits_backward_us: Exposed collectives of a backward pass.
        gradients_us: Exposed sum of gradients after the last backward pass; in a plan, for all stages of a
            device with the first one.
        optimizer_us: Update of the parameters.
        gather_us: Exposed all-gather of the updated parameters, in the same way.
        gradients_total_us: Sum of gradients alone.
        gather_total_us: All-gather of the updated parameters alone.
        storage_forward_us: Exposed transfers of host memory and NVMe in a forward pass.
        storage_backward_us: Exposed transfers of host memory and NVMe in a backward pass.
        weights_us: Kernels of a backward pass that compute gradients of weights.
    """

    forward_us: float
    backward_us: float
    waits_forward_us: float
    waits_backward_us: float
    gradients_us: float = 0.0
    optimizer_us: float = 0.0
    gather_us: float = 0.0
    gradients_total_us: float = 0.0
    gather_total_us: float = 0.0
    storage_forward_us: float = 0.0
    storage_backward_us: float = 0.0
    weights_us: float = 0.0

    @property
    def pass_us(self) -> tuple[float, float]:
        """Forward and backward pass, with waits."""
        return (
            self.forward_us + self.waits_forward_us + self.storage_forward_us,
            self.backward_us + self.waits_backward_us + self.storage_backward_us,
        )

    @property
    def end_us(self) -> float:
        """What follows the last backward pass."""
        return self.gradients_us + self.optimizer_us + self.gather_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of a step and its parts, each a mean over the devices, in microseconds.

    Attributes:
        time_us: The step.
        compute_us: Kernels of the passes.
        optimizer_us: Kernels of the optimizer.
        waits_us: Exposed collectives within layers: tensor parallelism, gathered parameters.
        gradients_us: Exposed sums of gradients, and all-gathers of updated parameters.
        sends_us: Exposed sends between stages, and the sum of gradients of a shared embedding.
        bubble_us: Time in which a device waits for the work of another stage.
        storage_us: Exposed transfers of host memory and NVMe within passes.
    """

    time_us: float
    compute_us: float
    optimizer_us: float
    waits_us: float
    gradients_us: float
    sends_us: float
    bubble_us: float
    storage_us: float = 0.0

    @property
    def communication_us(self) -> float:
        """Exposed communication."""
        return self.waits_us + self.gradients_us + self.sends_us


@dataclass(kw_only=True)
class StepPricer:
    """Times of the plans of a job on a cluster.

    Attributes:
        job: The network and its batch.
        machine: The cluster.
        layers: Times of the layers; plans of several pricers may share them.
        slowdown: Factors on predicted times beside those of the software of the job.
    """

    job: TrainingJob
    machine: TrainingCluster
    layers: LayerTimes
    slowdown: Slowdown = field(default_factory=Slowdown)

    def __post_init__(self) -> None:
        self._given_slowdown = self.slowdown
        self.slowdown = self.slowdown.with_software(self.job)
        self.host_us = self.layers.host_us * self.slowdown.launches
        self._passes = functools.cache(self._stage_passes)
        self._group = functools.cache(self._process_group)
        self._collective = functools.cache(self._collective_us)
        self._ends = functools.cache(self._stage_ends)
        self._short_sums = functools.cache(self._short_sums_us)
        self._update = functools.cache(self._host_update_us)
        self._shared = functools.cache(self._shared_parameters)
        self._send = functools.cache(self._send_us)
        self.step_us = functools.cache(self._step_us)
        """Return the time of the step of a plan, by simulation of its schedule."""

    def floors_us(self, plans: PlanTable) -> Array:
        """Return lower bounds of the steps of many plans, without gradients and the optimizer.

        Args:
            plans: Plans whose layers are predicted.
        """
        linear = _LinearStages(*plans.mapped(self._stage_parts, *RUN_PARAMETERS, "nodes"))
        schedule, ranks, chunks = (plans.column(name) for name in ("schedule", "pipeline", "chunks"))
        v_shaped, split = np.isin(schedule, V_SCHEDULES), np.isin(schedule, SPLIT_SCHEDULES)
        stages, layers = np.where(v_shaped, 2, chunks), self.job.network.layers
        embedding, head = plans.column("embedding_layers"), plans.column("head_layers")
        per_stage, more = np.divmod(layers + embedding + head, ranks * stages)
        no_first = (embedding > 0) & (per_stage + (more > 0) == embedding)
        no_last = (head > 0) & (per_stage == head)
        count = self.job.batch // (plans.column("data") * plans.column("microbatch"))
        recompute_layers, full = plans.column("recompute_layers"), plans.column("recompute") == "full"
        bound_us = np.zeros(len(plans))
        # The bound holds for every rank. It is largest on the first one, on the last one that has a layer
        # more than others, or on the last one.
        for rank in (np.zeros_like(ranks), np.clip(more - 1, 0, ranks - 1), ranks - 1):
            # The first `more` stages have a layer more: of stages r, r + p and so on, or of stages r and
            # 2 p - 1 - r in a V.
            longer = np.where(
                v_shaped, (rank < more).astype(int) + (2 * ranks - 1 - rank < more), -((rank - more) // ranks)
            )
            has_head = rank == np.where(v_shaped, 0, ranks - 1)
            ends = embedding * (rank == 0) + head * has_head
            rank_layers = stages * per_stage + np.maximum(0, longer) - ends
            recomputed = np.where(
                recompute_layers > 0, np.maximum(0, recompute_layers * stages - ends), rank_layers * full
            )
            # A stage of an end alone is no layer with something added: bounds leave it out.
            first, last = (rank == 0) & ~no_first, has_head & ~no_last
            occupied = stages - (no_first & (rank == 0)) - (no_last & has_head)
            work_us = count * linear.work_us(occupied, rank_layers, recomputed, first, last)
            layers_before = rank * per_stage + np.minimum(rank, more) - embedding * (rank > 0)
            occupied = rank - no_first
            before_us = linear.forward_us(occupied, layers_before, ~no_first)
            behind_us = linear.backward_us(
                occupied,
                layers_before,
                ~no_first,
                np.where(
                    recompute_layers > 0,
                    np.maximum(0, recompute_layers * rank - embedding),
                    layers_before * full,
                ),
            )
            # Gradients of weights may run while the last gradient returns, so a bound for split passes leaves
            # the return out.
            ramp_us = np.where(rank > 0, before_us + np.where(split, 0.0, behind_us), 0.0)
            bound_us = np.maximum(bound_us, ramp_us + work_us)
        return bound_us

    def _stage_parts(self, plan: ClusterPlan) -> tuple[float, ...]:
        """Return the fields of `_LinearStages` for the layers of a plan."""
        run = replace(LayerRun.of(plan), recompute_layers=0)
        base = run.kept if run.recompute == "full" else run
        middle = self.job.network.layers // 2
        first, _, last = self.layers.kinds_of_layer()
        ranges = first, (middle, middle + 1), last
        kinds = [self.layers.passes(base, layers) for layers in ranges]
        recomputation = self.layers.passes(run, ranges[1]).without(kinds[1])
        nothing = (0.0, 0.0)
        sums, added, added_again = [nothing] * 3, nothing, nothing
        if self.job.network.layers >= self._few_layers:
            sums = [self._single_sums(base, layers, plan.nodes) for layers in (ranges[0], None, ranges[2])]
            # Networks of fewer layers have no stage of two middle layers to take the difference from: their
            # bound leaves communication out.
            added, added_again = (self._added_sums(layer_run, plan.nodes) for layer_run in (base, run))
        scale, host_us = self.slowdown.kernels, self.host_us
        return (
            *(scale * kind.forward_us + us[0] for kind, us in zip(kinds, sums, strict=True)),
            scale * kinds[1].forward_us + added[0],
            *(scale * kind.backward_us + us[1] for kind, us in zip(kinds, sums, strict=True)),
            scale * kinds[1].backward_us + added[1],
            scale * recomputation.backward_us + added_again[1] - added[1],
            *(host_us * kind.launches for kind in kinds),
            host_us * recomputation.launches,
        )

    def bound_us(self, plan: ClusterPlan) -> float:
        """Return a lower bound of the step, at least `floor_us`."""
        return self.pipeline_bound_us(plan, self.stages(plan), self._sends(plan)) + self._tied_us(plan)

    def _step_us(self, plan: ClusterPlan) -> float:
        return self.pipeline_us(plan, self.stages(plan), self._sends(plan)) + self._tied_us(plan)

    def step(self, plan: ClusterPlan) -> StepTime:
        """Return the time of the step and its parts."""
        stages, count = self.stages(plan), plan.microbatches(self.job.batch)
        time_us = self.step_us(plan)
        # What sends expose is what the step loses without them, in the same order of passes.
        silent = [0.0] * len(stages)
        silent_us = self.pipeline_us(plan, stages, silent, ordered_by=self._sends(plan))

        def mean(values: Sequence[float]) -> float:
            return sum(values) / plan.pipeline

        parts = {
            "compute_us": mean([count * (stage.forward_us + stage.backward_us) for stage in stages]),
            "optimizer_us": mean([stage.optimizer_us for stage in stages]),
            "waits_us": mean(
                [count * (stage.waits_forward_us + stage.waits_backward_us) for stage in stages]
            ),
            "gradients_us": mean([stage.gradients_us + stage.gather_us for stage in stages]),
            "sends_us": time_us - silent_us,
            "storage_us": mean(
                [count * (stage.storage_forward_us + stage.storage_backward_us) for stage in stages]
            ),
        }
        return StepTime(time_us=time_us, bubble_us=max(0.0, time_us - sum(parts.values())), **parts)

    def stages(self, plan: ClusterPlan) -> list[StageTime]:
        """Return the times of all stages of a plan."""
        network, ranges = plan.divided(self.job.network)
        prices = self
        if network.ends_apart:
            prices = self._ends_apart
            prices.layers.predict([LayerRun.of(plan)])
        # Stages between the ends differ in their position only: each kind is priced once.
        kinds = [prices.layers.alike(layers) for layers in ranges]
        shards = [plan.shards] * (plan.states == "device") + [(1, 1)] * (
            plan.microbatches(self.job.batch) > 1
        )
        prices.layers.predict_updates((plan.division, kind, part) for kind in kinds for part in shards)
        by_kind = {kind: prices.stage(plan, kind) for kind in dict.fromkeys(kinds)}
        stages = [by_kind[kind] for kind in kinds]
        return stages if plan.stages_per_device == 1 else self._chained(plan, stages)

    @functools.cached_property
    def _ends_apart(self) -> StepPricer:
        """Times of stages of the network with its embedding and its head as layers of their own."""
        return replace(
            self,
            job=replace(self.job, network=self.job.network.with_ends_apart()),
            layers=self.layers.ends_apart,
            slowdown=self._given_slowdown,
        )

    def _chained(self, plan: ClusterPlan, stages: list[StageTime]) -> list[StageTime]:
        """Return the stages with the exposed collectives of a device's copies in its first one."""
        count = min(plan.microbatches(self.job.batch), plan.pipeline) if self.job.gradient_overlap else 0
        chained = []
        for rank, rank_stages in enumerate(plan.held_stages):
            mine = [stages[stage] for stage in reversed(rank_stages)]
            gradients_us = chained_us(
                (stage.gradients_us, stage.gradients_total_us, count * stage.backward_us) for stage in mine
            )
            gather_us = chained_us(
                (stage.gather_us, stage.gather_total_us, count * stage.forward_us) for stage in mine
            )
            chained.append(replace(stages[rank], gradients_us=gradients_us, gather_us=gather_us))
        return chained + [
            replace(stage, gradients_us=0.0, gather_us=0.0) for stage in stages[plan.pipeline :]
        ]

    def stage(self, plan: ClusterPlan, layers: tuple[int, int]) -> StageTime:
        """Return the times of a stage.

        Args:
            plan: The plan.
            layers: Layers of the stage as a half-open range, the first of its kind (`LayerTimes.alike`), so
                that equal stages share entries of the caches.
        """
        layout = StorageLayout.of(plan)
        accumulates = plan.microbatches(self.job.batch) > 1
        passes = self._passes(LayerRun.of(plan), layers, plan.nodes, layout, accumulates)
        gradients, gather = self._ends(
            (plan.division, plan.nodes, (plan.copies, plan.expert_copies), *_exchanged(plan, self.job.stack)),
            layers,
            (passes.forward_us, passes.backward_us),
        )
        return replace(
            passes,
            gradients_us=gradients[0],
            gradients_total_us=gradients[1],
            gather_us=gather[0],
            gather_total_us=gather[1],
            optimizer_us=self._optimizer_us(plan, layers),
        )

    def _optimizer_us(self, plan: ClusterPlan, layers: tuple[int, int]) -> float:
        """Return the time of the update, by kernels or in host memory."""
        division = plan.division
        if plan.states == "device":
            update = self.layers.update(division, layers, plan.shards)
            return update.optimizer_us * self.slowdown.kernels
        return self._update(division, layers, plan.shards, StorageLayout.of(plan))

    def _host_update_us(
        self, division: LayerDivision, layers: tuple[int, int], shards: tuple[int, int], layout: StorageLayout
    ) -> float:
        layer_parameters = self._layer_parameters(division, layers)
        shares = [
            sum(-(-count // shard_count) for count, shard_count in zip(layer, shards, strict=True))
            for layer in layer_parameters
        ]
        return StorageTimes(self.machine, self.job.optimizer).update_us(shares, layout)

    # -- bound and simulation ------------------------------------------------------------------------------

    def pipeline_bound_us(
        self, plan: ClusterPlan, stages: Sequence[StageTime], sends: Sequence[float]
    ) -> float:
        """Return a lower bound of `pipeline_us`."""
        ranks, count = plan.pipeline, plan.microbatches(self.job.batch)
        weights = [stage.weights_us * plan.splits_backward for stage in stages]
        passes = [
            (stage.pass_us[0], stage.pass_us[1] - us) for stage, us in zip(stages, weights, strict=True)
        ]
        rank_stages = plan.held_stages
        # Stages 0 to p - 1 are on ranks 0 to p - 1, in looped and in V-shaped placements. A rank starts when
        # the first micro-batch has passed the ranks before it, and then has at least all its passes to run.
        before_us, rank_ends = 0.0, []
        for rank in range(ranks):
            inputs_us = count * sum(sum(passes[stage]) for stage in rank_stages[rank])
            rank_ends.append(
                (before_us + inputs_us, count * sum(weights[stage] for stage in rank_stages[rank]))
            )
            before_us += passes[rank][0] + sends[rank]
        # The last gradient returns through all ranks before. A rank computes a gradient of weights after it
        # at the earliest when that gradient has arrived.
        latest_us, bound_us = 0.0, 0.0
        for rank in reversed(range(ranks)):
            back_us = latest_us + passes[rank][1] + sends[rank] if rank < ranks - 1 else 0.0
            inputs_us, weights_us = rank_ends[rank]
            latest_us = max(inputs_us, back_us)
            end_us = max(inputs_us + weights_us, latest_us + weights[rank])
            bound_us = max(bound_us, end_us + sum(stages[stage].end_us for stage in rank_stages[rank]))
        return bound_us

    def pipeline_us(
        self,
        plan: ClusterPlan,
        stages: Sequence[StageTime],
        sends: Sequence[float],
        *,
        ordered_by: Sequence[float] | None = None,
    ) -> float:
        """Return the time of a step with these stages, by simulation of its schedule.

        Args:
            plan: The plan.
            stages: Times of each stage.
            sends: Time to send the output of each stage to the next one; 0 for the last.
            ordered_by: Times of sends that decide the order of passes; None for `sends`.
        """
        count = plan.microbatches(self.job.batch)
        if plan.pipeline == 1:
            return count * sum(stages[0].pass_us) + stages[0].end_us
        costs = _costs(plan, stages, sends)
        order = Parallelism(
            pipeline=plan.pipeline,
            microbatches=count,
            chunks=plan.chunks,
            schedule=plan.schedule_name,
        )
        # Where the order of passes depends on times, it is made for these costs; all other orders are cached.
        depends = find_schedule(order.schedule).depends_on_costs
        schedule = (
            pipeline_schedule(order, costs=_costs(plan, stages, ordered_by or sends))
            if depends
            else _schedule(order)
        )
        simulation = simulate_pipeline(schedule, costs)
        ends_us = [float(passes_us[-1]) for passes_us in simulation.ends_us]
        for rank, stage in zip(schedule.placement, stages, strict=True):
            ends_us[rank] += stage.end_us
        return max(ends_us)

    # -- parts of a stage ----------------------------------------------------------------------------------

    def _stage_passes(
        self,
        run: LayerRun,
        layers: tuple[int, int],
        nodes: int,
        layout: StorageLayout | None,
        accumulates: bool,
    ) -> StageTime:
        """Return the passes of a stage."""
        kernels = self.layers.passes(run, layers)
        if accumulates and not (layout and layout.streams_gradients):
            update = self.layers.update(run.division, layers, (1, 1))
            added_us = update.accumulate_us
            kernels = kernels.plus(PassTime(0.0, added_us, update.accumulate_launches, added_us))
        kernels = kernels.scaled(self.slowdown.kernels)
        busy_us = kernels.forward_us + kernels.backward_us
        # If launches take longer than kernels, both passes stretch, and collectives hide in the time that
        # this leaves.
        stretch = max(1.0, self.host_us * kernels.launches / busy_us)
        slack_us = (stretch - 1.0) * kernels.forward_us, (stretch - 1.0) * kernels.backward_us
        forward_us, backward_us = stretch * kernels.forward_us, stretch * kernels.backward_us
        sums_us = self._sums_us(run, layers, nodes)
        waits = [max(0.0, us - slack) for us, slack in zip(sums_us, slack_us, strict=True)]
        weights_us = stretch * kernels.weights_us
        stage_time = StageTime(forward_us, backward_us, waits[0], waits[1], weights_us=weights_us)
        if layout is None or not layout.streams:
            return stage_time
        streamed = self._streamed_layers(run, layers, nodes, layout, (forward_us, backward_us))
        exposed, stored = StorageTimes(self.machine, self.job.optimizer).waits_us(
            streamed, layout, accumulates
        )
        return replace(
            stage_time,
            waits_forward_us=waits[0] + exposed[0],
            waits_backward_us=waits[1] + exposed[1],
            storage_forward_us=stored[0],
            storage_backward_us=stored[1],
        )

    def _sums_us(self, run: LayerRun, layers: tuple[int, int], nodes: int) -> tuple[float, float]:
        """Return the exposed communication of tensor, expert and context parallelism, by pass.

        Each layer of a stage adds as much, next to what the stage has once, and with the embedding or the
        head. So the sums of a stage follow from those of four short ones.
        """
        count = self.job.network.layers
        if count < self._few_layers or layers == (0, count) or self.layers.ends_alone(layers):
            return self._short_sums(run, layers, nodes)
        has_first, has_last, layer_count = layers[0] == 0, layers[1] == count, layers[1] - layers[0]
        single = self._single_sums(
            run.kept if run.recompute_layers else run,
            (0, 1) if has_first else (count - 1, count) if has_last else None,
            nodes,
        )
        if not run.recompute_layers:
            added = self._added_sums(run, nodes)
            return single[0] + (layer_count - 1) * added[0], single[1] + (layer_count - 1) * added[1]
        recomputed = min(run.recompute_layers, layer_count)
        checkpointed, whole = self._added_sums(run.kept, nodes), self._added_sums(run.whole, nodes)
        forward, backward = (
            first + (layer_count - 1) * added_us + recomputed * (more - added_us)
            for first, added_us, more in zip(single, checkpointed, whole, strict=True)
        )
        return forward, backward

    @property
    def _few_layers(self) -> int:
        """Layers below which the exposed communication of a stage is not a sum of short stages."""
        return _FEW_LAYERS + architecture_of(self.job.network).dense_layers

    @property
    def _first_sparse(self) -> int:
        """Index of the first layer between the ends with experts; of any layer, if no layer is dense."""
        dense = architecture_of(self.job.network).dense_layers
        return max(1, dense + self.job.network.ends_apart)

    def _added_sums(self, run: LayerRun, nodes: int) -> tuple[float, float]:
        """Return what a layer adds to the exposed communication of a stage, by pass."""
        start = self._first_sparse
        ranges = (start, start + 1), (start, start + 2)
        single, two = (self._short_sums(run, layers, nodes) for layers in ranges)
        added = two[0] - single[0], two[1] - single[1]
        if not architecture_of(self.job.network).dense_layers:
            return added
        # Dense layers have no exchange of experts: return the mean of the layers between the ends.
        first_between, end = self.layers.kinds_of_layer()[1]
        between = self._short_sums(run, (first_between, end), nodes)
        count = end - first_between
        forward, backward = (
            (total - (one - more)) / count for total, one, more in zip(between, single, added, strict=True)
        )
        return forward, backward

    def _single_sums(self, run: LayerRun, layers: tuple[int, int] | None, nodes: int) -> tuple[float, float]:
        """Return the exposed communication of a stage of one layer; None for a layer between the ends."""
        dense = architecture_of(self.job.network).dense_layers
        if layers or not dense:
            return self._short_sums(run, layers or (1, 2), nodes)
        start = self._first_sparse
        two = self._short_sums(run, (start, start + 2), nodes)
        single = self._short_sums(run, (start, start + 1), nodes)
        added = self._added_sums(run, nodes)
        return 2 * single[0] - two[0] + added[0], 2 * single[1] - two[1] + added[1]

    def _short_sums_us(self, run: LayerRun, layers: tuple[int, int], nodes: int) -> tuple[float, float]:
        """Return the exposed communication of a stage, from all its collectives and sends."""
        exposed = {"forward": 0.0, "backward": 0.0}
        groups = {
            "tensor": (run.tensor, 1),
            "expert": (run.expert, run.expert_tensor),
            "expert tensor": (run.expert_tensor, 1),
        }
        overlap = TensorOverlap(
            products=self.job.tensor_overlap,
            user_buffers=self.job.user_buffers,
            parts=run.tensor,
            occupied=self._occupied(self._group(nodes, run.tensor, 1)),
        )

        def product_us(part: str, gradient: str) -> float:
            return self.layers.product_us(run, part, gradient) * self.slowdown.kernels

        network_run = run.network_run(self.job, layers)
        for collective in self.job.network.collectives(network_run):
            takes_us = self._collective(
                collective.collective, collective.nbytes, nodes, *groups[collective.group]
            )
            exposed[collective.phase] += collective.count * overlap.exposed_us(
                collective, takes_us, product_us
            )
        for sent in self.job.network.exchanges(network_run):
            hidden_us = 0.0
            if sent.collective:
                us = self._collective(sent.collective, sent.nbytes, nodes, run.context, run.tensor)
            else:
                us = self._send(sent.nbytes, nodes, 0, run.tensor, run.tensor * (run.context - 1))
                hidden_us = product_us("attention", sent.behind)
            exposed[sent.phase] += sent.count * max(0.0, us - hidden_us)
        return exposed["forward"], exposed["backward"]

    def _streamed_layers(
        self,
        run: LayerRun,
        layers: tuple[int, int],
        nodes: int,
        layout: StorageLayout,
        passes_us: tuple[float, float],
    ) -> list[StreamedLayer]:
        """Return the layers of a stage with what moves for them, in the order of the forward pass."""
        size = itemsize(self.job.dtype)
        recomputed = run.recompute_layers
        kinds = [
            self.layers.passes(
                run.whole if index < recomputed or not recomputed else run.kept, (layer, layer + 1)
            )
            for index, layer in enumerate(range(*layers))
        ]
        # Layers share the time of the pass, which may be stretched by launches, in proportion to their
        # kernels.
        forward = passes_us[0] / sum(kind.forward_us for kind in kinds)
        backward = passes_us[1] / sum(kind.backward_us for kind in kinds)
        activation_bytes = 0
        if layout.activations == "host":
            activation_bytes = run.activations(self.job).layer_bytes

        def us(collective: Collective, parameters: int) -> float:
            return self._collective(collective, parameters * size, nodes, layout.copies, run.tensor)

        layer_parameters = [sum(counts) for counts in self._layer_parameters(run.division, layers)]
        return [
            StreamedLayer(
                parameters=parameters,
                activation_bytes=activation_bytes,
                forward_us=forward * kind.forward_us,
                backward_us=backward * kind.backward_us,
                gather_us=us("all-gather", parameters) if layout.gathers else 0.0,
                scatter_us=us("reduce-scatter", parameters) if layout.scatters else 0.0,
            )
            for parameters, kind in zip(layer_parameters, kinds, strict=True)
        ]

    def _layer_parameters(self, division: LayerDivision, layers: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the parameters of each layer outside experts, and of experts.

        A matrix that the first and the last layer share counts once.
        """
        network = self.job.network
        counts = [
            network.held_parameters(division, self.layers.alike((layer, layer + 1)))
            for layer in range(*layers)
        ]
        # A matrix that both ends share is in both counts; the stage stores it once.
        dense, routed = counts[0]
        shared = sum(pair[0] for pair in counts) - network.held_parameters(division, layers)[0]
        return [(dense - shared, routed), *counts[1:]]

    def _stage_ends(
        self,
        exchange_key: tuple[LayerDivision, int, tuple[int, int], Collective | None, bool],
        layers: tuple[int, int],
        passes_us: tuple[float, float],
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the exposed sum of gradients and all of it, and the same of the gather of parameters.

        Args:
            exchange_key: Division of parameters, nodes, data-parallel sizes outside experts and of
                experts, the collective of gradients, if any, and whether updated parameters are gathered.
            layers: Layers of the stage.
            passes_us: Kernels of the forward pass, behind which the gather runs, and of the backward pass.
        """
        division, nodes, copies, summed_by, gathers = exchange_key
        nothing = (0.0, 0.0)
        if max(copies) == 1 or not (summed_by or gathers):
            return nothing, nothing
        # Gradients depend on the division of parameters only: the micro-batch and recomputation are
        # arbitrary.
        of_run = LayerRun(**asdict(division), microbatch=1, sequence_parallel=division.tensor > 1)
        run = of_run.network_run(self.job, layers)
        parts = gradient_bytes(self.job.network, run, layers)
        wide = itemsize(run.gradient_dtype) // itemsize(run.dtype)
        parameter_parts = [[nbytes // wide for nbytes in sizes] for sizes in parts]
        strides = division.tensor, division.expert * division.devices_per_expert
        groups = tuple(
            self._group(nodes, *size_and_stride) for size_and_stride in zip(copies, strides, strict=True)
        )
        exchange = BucketExchange(
            groups=groups,
            bucket_bytes=bucket_bytes(run, copies[0]),
            overlap=self.job.gradient_overlap,
            slower=self.slowdown.communication,
            occupied=self._occupied(groups[0]),
        )

        gather = exchange.times_us("all-gather", parameter_parts, passes_us[0]) if gathers else nothing
        return exchange.times_us(summed_by, parts, passes_us[1]) if summed_by else nothing, gather

    def _occupied(self, group: ProcessGroup) -> float:
        """Return the share of the SMs that a collective takes from kernels beside it."""
        return occupied_sms(group) / self.machine.device.sm_count

    def _sends(self, plan: ClusterPlan) -> list[float]:
        """Return the time to send the output of each stage to the next one; 0 for the last."""
        width = plan.tensor * plan.copies
        nbytes = self.job.network.boundary_bytes(LayerRun.of(plan).network_run(self.job, (0, 1)))
        placement = sorted(
            (stage, rank) for rank, rank_stages in enumerate(plan.held_stages) for stage in rank_stages
        )
        return [
            self._send(nbytes, plan.nodes, rank * width, then * width, width) if rank != then else 0.0
            for (_, rank), (_, then) in itertools.pairwise(placement)
        ] + [0.0]

    def _send_us(self, nbytes: int, nodes: int, first: int, second: int, width: int) -> float:
        link = self.machine.with_nodes(nodes).link_between(first, second, width=width)
        return float(send_us(nbytes, link)) * self.slowdown.communication

    def _tied_us(self, plan: ClusterPlan) -> float:
        """Return the sum of gradients of a matrix that the first and the last stage share."""
        if plan.pipeline == 1 or plan.schedule in V_SCHEDULES:
            return 0.0
        width = plan.tensor * plan.copies
        shared = self._shared(plan.tensor) * itemsize(self.job.dtype)
        link = self.machine.with_nodes(plan.nodes).link_between(0, (plan.pipeline - 1) * width, width=width)
        pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
        return float(collective_us("all-reduce", shared, pair)) * self.slowdown.communication

    def _shared_parameters(self, tensor: int) -> int:
        """Return the parameters of a matrix that the first and the last layer share."""
        network = self.job.network
        parts = network.parameters(tensor, (0, 1)) + network.parameters(tensor, (1, network.layers))
        return parts - network.parameters(tensor)

    def _process_group(self, nodes: int, size: int, stride: int) -> ProcessGroup:
        return self.machine.with_nodes(nodes).group(size, stride=stride)

    def _collective_us(
        self, collective: Collective, nbytes: int, nodes: int, size: int, stride: int
    ) -> float:
        us = float(collective_us(collective, nbytes, self._group(nodes, size, stride)))
        return us * self.slowdown.communication


def _exchanged(plan: ClusterPlan, stack: str) -> tuple[Collective | None, bool]:
    """Return the collective of gradients after the last pass, and whether updated parameters are gathered."""
    if plan.sharding == "none":
        return "all-reduce", False
    if plan.sharding == "optimizer":
        return find_stack(stack).optimizer_sharding_sum, True
    # The reduce-scatter runs behind each layer, and is a part of the passes (`_streamed_layers`).
    behind_layers = plan.pipeline == 1 or plan.parameters != "device"
    return None if behind_layers else "reduce-scatter", plan.sharding == "gradients"


def _costs(plan: ClusterPlan, stages: Sequence[StageTime], sends: Sequence[float]) -> PipelineCosts:
    return PipelineCosts(
        stages=tuple(
            StageCosts(
                forward_us=stage.pass_us[0],
                input_gradient_us=stage.pass_us[1] - stage.weights_us * plan.splits_backward,
                weight_gradient_us=stage.weights_us * plan.splits_backward,
                # The time of a send is given: bytes only decide whether there is one.
                send_bytes=int(us > 0),
                send_us=us,
            )
            for stage, us in zip(stages, sends, strict=True)
        )
    )


_schedule = functools.lru_cache(maxsize=64)(pipeline_schedule)
"""Schedules that do not depend on times."""


@dataclass(frozen=True, slots=True)
class _LinearStages:
    """Least times of stages as linear functions of their layers, for many plans: columns, in microseconds.

    A stage has one layer, of the first, another or the last kind, and others that are added. `again` is what
    a layer adds whose recomputation is counted, and is 0 for other kinds of recomputation.
    """

    first_forward: Array
    one_forward: Array
    last_forward: Array
    added_forward: Array
    first_backward: Array
    one_backward: Array
    last_backward: Array
    added_backward: Array
    again: Array
    first_host: Array
    one_host: Array
    last_host: Array
    again_host: Array

    def work_us(
        self, stages: Array, layers: Array, recomputed: Array, has_first: Array, has_last: Array
    ) -> Array:
        """Return the time of both passes of a device, by its kernels and waits or by launches.

        Args:
            stages: Stages of the device.
            layers: Their layers.
            recomputed: Layers that are recomputed.
            has_first: Whether it has the first layer.
            has_last: Whether it has the last layer.
        """
        single = self.one_forward + self.one_backward
        first = self.first_forward + self.first_backward - single
        last = self.last_forward + self.last_backward - single
        added = self.added_forward + self.added_backward
        busy = (
            stages * single
            + has_first * first
            + has_last * last
            + (layers - stages) * added
            + recomputed * self.again
        )
        host = layers * self.one_host + recomputed * self.again_host
        host = (
            host + has_first * (self.first_host - self.one_host) + has_last * (self.last_host - self.one_host)
        )
        work: Array = np.maximum(busy, host)
        return work

    def forward_us(self, stages: Array, layers: Array, has_first: Array) -> Array:
        """Return the forward passes of the first stages, with so many layers."""
        first_added = has_first * (self.first_forward - self.one_forward)
        return first_added + stages * self.one_forward + (layers - stages) * self.added_forward

    def backward_us(self, stages: Array, layers: Array, has_first: Array, recomputed: Array) -> Array:
        """Return the backward passes of the first stages, with so many layers."""
        first_added = has_first * (self.first_backward - self.one_backward)
        added = (layers - stages) * self.added_backward
        return first_added + stages * self.one_backward + added + recomputed * self.again
