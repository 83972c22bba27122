"""Plans on nodes of different products: stages of unequal speed get unequal numbers of layers.

Each stage of a pipeline has devices of one product: tensor and data parallelism never join different
products, so all micro-batches are equal. The stages of a group follow each other and have
equal numbers of layers; if these do not divide, its first stages have one more. The search chooses the order
of the groups, the layers of each group, and all that a plan for equal devices has, except several stages on
a device (interleaved and V-shaped schedules) and recomputation of some layers of a stage.
Data may be in host memory or NVMe if the nodes of all groups have it.

Branch and bound: a stage takes at least the time of its layers' kernels, so the slowest stage takes at least
the number of layers over the layers that all stages together run in a unit of time, in each micro-batch. This
bound holds for every division of the layers. The plan with the lowest bound is divided in every way. A
division is bounded by its slowest stage, then, if it fits, by `StepPricer.pipeline_bound_us`, and the one
with the lowest bound is simulated. A simulated step that is below all other bounds is optimal.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tunebench._dataframe import Tabular, columns_of
from tunebench._figure import duration
from tunebench._notebook import html_grid
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.training.cluster.device_memory import DeviceMemory, MemoryPricer
from tunebench.training.cluster.layer_time import HOST_US, LayerRun, LayerTimes
from tunebench.training.cluster.mixed_machine import MixedCluster
from tunebench.training.cluster.refusal import fixed_space
from tunebench.training.cluster.search import ClusterSearch, PricedPlan, peak_flops
from tunebench.training.cluster.space import ClusterPlan, TrainingJob, enumerated
from tunebench.training.cluster.stage_time import StageTime, StepPricer
from tunebench.training.interconnect.cluster import ProcessGroup
from tunebench.training.interconnect.collective import collective_us, send_us
from tunebench.training.memory.budget import size_text
from tunebench.training.pipeline.activation import architecture_of

__all__ = ["MixedAnswer", "MixedPlan", "MixedProof", "MixedSearch", "PricedMixedPlan", "plan_mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """One way to train a network on groups of different devices.

    Attributes:
        plan: Parallelism and recomputation; `pipeline` counts the stages of all groups.
        order: Groups in the order of the stages.
        stages: Stages of each group, in that order.
        layers: Layers of each group, in that order.
    """

    plan: ClusterPlan
    order: tuple[int, ...]
    stages: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage, the first stage first."""
        counts: list[int] = []
        for stages, layers in zip(self.stages, self.layers, strict=True):
            per_stage, more = divmod(layers, stages)
            counts += [per_stage + (stage < more) for stage in range(stages)]
        return tuple(counts)

    @property
    def stage_groups(self) -> tuple[int, ...]:
        """Group of each stage."""
        return tuple(
            group for group, count in zip(self.order, self.stages, strict=True) for _ in range(count)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedMixedPlan:
    """A plan with its predicted step and memory.

    Attributes:
        mixed: The plan.
        step_us: Time of the step.
        memory_bytes: Memory of the fullest device of each group of the cluster.
        mfu: Model FLOP utilisation: FLOPs of the model without recomputation over the peak of all devices.
        samples_per_s: Sequences per second.
        cost: Price of the step; None if a price of a device hour is not known.
    """

    mixed: MixedPlan
    step_us: float
    memory_bytes: tuple[int, ...]
    mfu: float
    samples_per_s: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedProof:
    """How plans and their divisions of the layers were closed.

    Attributes:
        plans: Plans, each with one order of the groups.
        bounded: Plans closed with all their divisions by the bound of the layers.
        divisions: Divisions of the layers of the other plans.
        too_large: Divisions that do not fit, of those that no bound of layers closed.
        bounded_by_layers: Divisions closed by the layers of their slowest stage.
        bounded_by_step: Divisions closed by the bound of the step.
        simulated: Divisions with a simulated step.
    """

    plans: int
    bounded: int
    divisions: int
    too_large: int
    bounded_by_layers: int
    bounded_by_step: int
    simulated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAnswer(Tabular):
    """The best plans on all groups, and what each group can do alone.

    Attributes:
        job: The network and its batch.
        machine: The cluster.
        best: The best plans, best first; none if nothing fits.
        proof: How all plans were closed.
        missing_bytes: Memory that a device lacks in the plan that lacks least; 0 if a plan fits.
        equal_layers: The best plan whose stages have equal numbers of layers, within one; None if none fits.
        alone: The best plan on each group alone; None where nothing fits.
    """

    job: TrainingJob
    machine: MixedCluster
    best: tuple[PricedMixedPlan, ...]
    proof: MixedProof
    missing_bytes: int
    equal_layers: PricedMixedPlan | None = None
    alone: tuple[PricedPlan | None, ...] = ()

    def _columns(self) -> Mapping[str, Sequence[object]]:
        names = ("step_us", "mfu", "samples_per_s", "cost")
        return columns_of(
            {
                **priced.mixed.plan.values,
                "order": list(priced.mixed.order),
                "stages": list(priced.mixed.stages),
                **{name: getattr(priced, name) for name in names},
                "memory_bytes": max(priced.memory_bytes),
            }
            for priced in self.best
        )

    def _repr_html_(self) -> str:
        """Return the best plans for notebooks."""
        rows = (
            (
                f"{priced.mixed.plan}, {list(priced.mixed.stage_layers)} layers by stage",
                duration(priced.step_us),
                f"{priced.mfu:.1%}",
                size_text(max(priced.memory_bytes)),
            )
            for priced in self.best
        )
        title = f"{self.job.network.name} on {self.machine.name}"
        return html_grid("plan", ">step", ">MFU", ">memory", rows=rows, caption=title)


class MixedSearch:
    """Search of the plans of a job on groups of different devices.

    Args:
        job: The network and its batch.
        machine: The cluster.
        fixed: Value of each fixed parameter as text; `pipeline` counts the stages of the first group.

    Raises:
        UnknownName: if there is no such parameter.
        InputError: if no plan is possible.
    """

    def __init__(
        self, job: TrainingJob, machine: MixedCluster, *, fixed: Mapping[str, str] | None = None
    ) -> None:
        if architecture_of(job.network).decoder_layers:
            raise InputError(
                f"{job.network.name} has an encoder and a decoder: every stage of a decoder also needs the "
                "output of the encoder, which no schedule here sends, and groups of devices are stages of a "
                "pipeline; plan for one group"
            )
        self.job, self.machine = replace(job, full_sharding=False), machine
        self.layers = [LayerTimes.of(job, group.device) for group in machine.groups]
        self.pricers = [
            StepPricer(job=self.job, machine=group, layers=layers)
            for group, layers in zip(machine.groups, self.layers, strict=True)
        ]
        self.memory = MemoryPricer(self.job, max(group.channels for group in self.machine.groups))
        self.plans = self._plans(dict(fixed or {}))
        self._layer = functools.cache(self._layer_us)
        self._stage = functools.cache(self._stage_time)
        self._stage_memory = functools.cache(self._stage_bytes)
        self._links = functools.cache(self._sends)
        self._tied = functools.cache(self._tied_us)

    def _plans(self, fixed: Mapping[str, str]) -> list[MixedPlan]:
        """Return the plans in each order of the groups, with no layers yet."""
        first, groups = self.machine.groups[0], self.machine.groups
        if not all(group.host_bytes for group in groups):
            first = replace(first, host_bytes=0, nvme_bytes=0)
        elif not all(group.nvme_bytes for group in groups):
            first = replace(first, nvme_bytes=0)
        space = fixed_space(self.job, first, {"chunks": "1", "recompute_layers": "0", **fixed})
        plans = []
        for plan in enumerated(space):
            width = plan.tensor * plan.copies
            # The space is that of the first group, which may be one stage. All groups together are a
            # pipeline, and a pipeline shards neither gradients nor parameters.
            sharded = plan.sharding == "gradients" or (
                plan.sharding == "full" and plan.parameters == "device"
            )
            if (
                sharded
                or plan.stages_per_device > 1
                or plan.recompute_layers
                or plan.head_layers
                or any(
                    group.devices % width or group.links.devices_per_node % plan.tensor
                    for group in self.machine.groups
                )
            ):
                continue
            stages = [group.devices // width for group in self.machine.groups]
            if sum(stages) > self.job.network.layers:
                continue
            whole = replace(
                plan,
                pipeline=sum(stages),
                nodes=sum(group.links.nodes for group in self.machine.groups),
            )
            for order in itertools.permutations(range(len(stages))):
                plans.append(
                    MixedPlan(
                        plan=whole, order=order, stages=tuple(stages[index] for index in order), layers=()
                    )
                )
        if not plans:
            raise InputError(
                "no plan divides this batch and network among the groups: expected groups whose devices the "
                "same tensor and data parallelism divide; change the batch, the devices or --fix"
            )
        return plans

    def run(
        self,
        top: int = 10,
        *,
        equal: bool = False,
        watcher: Callable[[str], None] = lambda message: None,
    ) -> MixedAnswer:
        """Return the best plans, each with its best division of the layers.

        Args:
            top: Number of plans.
            equal: Whether all stages must have equal numbers of layers, within one.
            watcher: Receives the phase of the search.
        """
        watcher("predicting the layers")
        for layers in self.layers:
            layers.predict({LayerRun.of(mixed.plan) for mixed in self.plans})
        # Levels: 0 a plan with the bound of all its divisions, 1 a division with the bound of its slowest
        # stage, 2 with the bound of its step, 3 with its simulated step. An entry never gets a lower bound,
        # so the first one that is popped at level 3 is optimal among all that remain.
        heap = [(self.floor_us(mixed), index, 0, mixed) for index, mixed in enumerate(self.plans)]
        heapq.heapify(heap)
        # Ties are popped in the order of insertion, and plans are never compared.
        number = itertools.count(len(heap))
        best: list[MixedPlan] = []
        listed: set[tuple[ClusterPlan, tuple[int, ...]]] = set()
        opened = divisions = too_large = bounded = simulated = 0
        missing: float = float("inf")
        while heap and len(best) < top:
            bound_us, _, level, mixed = heapq.heappop(heap)
            if level == 3:
                # The best division of a plan is popped first. Its other divisions are not alternatives to
                # report.
                if (mixed.plan, mixed.order) not in listed:
                    listed.add((mixed.plan, mixed.order))
                    best.append(mixed)
            elif level == 2:
                simulated += 1
                heapq.heappush(heap, (self.step_us(mixed), next(number), 3, mixed))
            elif level == 1:
                excess = self.excess_bytes(mixed)
                missing = min(missing, excess)
                if excess:
                    too_large += 1
                    continue
                bounded += 1
                heapq.heappush(heap, (max(bound_us, self.bound_us(mixed)), next(number), 2, mixed))
            else:
                watcher(f"dividing the layers of {mixed.plan}")
                # A plan is divided only when its bound is the lowest one: most plans never are.
                opened += 1
                for division in self.divisions(mixed, equal=equal):
                    divisions += 1
                    heapq.heappush(heap, (self.slowest_us(division), next(number), 1, division))
        return MixedAnswer(
            job=self.job,
            machine=self.machine,
            best=tuple(map(self.priced, best)),
            proof=MixedProof(
                plans=len(self.plans),
                bounded=len(self.plans) - opened,
                divisions=divisions,
                too_large=too_large,
                bounded_by_layers=divisions - too_large - bounded,
                bounded_by_step=bounded - simulated,
                simulated=simulated,
            ),
            missing_bytes=int(missing) if missing < float("inf") else 0,
        )

    def divisions(self, each: MixedPlan, *, equal: bool = False) -> Iterator[MixedPlan]:
        """Yield the plan with each number of layers of the groups; at least one layer for each stage."""
        layers, stages = self.job.network.layers, each.stages
        if equal:
            share, more = divmod(layers, sum(stages))
            starts = itertools.accumulate(stages, initial=0)
            parts = [
                count * share + max(0, min(count, more - start))
                for start, count in zip(starts, stages, strict=False)
            ]
            yield replace(each, layers=tuple(parts))
            return
        ranges = [range(count, layers + 1) for count in stages[:-1]]
        for first in itertools.product(*ranges):
            rest = layers - sum(first)
            if rest >= stages[-1]:
                yield replace(each, layers=(*first, rest))

    # -- times ---------------------------------------------------------------------------------------------

    def floor_us(self, each: MixedPlan) -> float:
        """Return a lower bound of the step for every division of the layers."""
        run = LayerRun.of(each.plan)
        pairs = zip(each.order, each.stages, strict=True)
        speed = sum(stages / self._layer(run, group) for group, stages in pairs)
        # The best division gives every stage the same time. Layers cannot be cut, so that no real one is
        # faster.
        return each.plan.microbatches(self.job.batch) * self.job.network.layers / speed

    def slowest_us(self, each: MixedPlan) -> float:
        """Return a lower bound of the step of a division: the layers of its slowest stage."""
        run = LayerRun.of(each.plan)
        groups = zip(each.order, each.stages, each.layers, strict=True)
        slowest_us = max(-(-layers // stages) * self._layer(run, group) for group, stages, layers in groups)
        return each.plan.microbatches(self.job.batch) * slowest_us

    def _layer_us(self, run: LayerRun, group: int) -> float:
        """Return the least time of a layer in both passes, by its kernels or by their launches."""
        last = self.job.network.layers - 1
        kinds = [self.layers[group].passes(run, (layer, layer + 1)) for layer in {0, (last + 1) // 2, last}]
        kernels_us = min(kind.forward_us + kind.backward_us for kind in kinds)
        modelled_us = max(kernels_us, HOST_US * min(kind.launches for kind in kinds))
        return self.pricers[group].slowdown.kernels * modelled_us

    def bound_us(self, each: MixedPlan) -> float:
        """Return a lower bound of the step of a division."""
        # Stages and sends are given, so that the pricer of any group composes them to the same step.
        return self.pricers[0].pipeline_bound_us(each.plan, *self._pipeline(each)) + self._tied(
            each.plan.tensor
        )

    def step_us(self, each: MixedPlan) -> float:
        """Return the time of the step of a division, by simulation of its schedule."""
        return self.pricers[0].pipeline_us(each.plan, *self._pipeline(each)) + self._tied(each.plan.tensor)

    def priced(self, each: MixedPlan) -> PricedMixedPlan:
        """Return a division with its step and memory."""
        for layers in self.layers:
            layers.predict([LayerRun.of(each.plan)])
        step_us, groups = self.step_us(each), self.machine.groups
        fullest = [0] * len(groups)
        for group, size in self._sizes(each):
            fullest[group] = max(fullest[group], size.needed)
        peak = sum(peak_flops(group, self.job) * group.devices for group in groups)
        prices = [group.price_per_hour for group in groups]
        hourly = sum(
            price * group.devices for price, group in zip(prices, groups, strict=True) if price is not None
        )
        return PricedMixedPlan(
            mixed=each,
            step_us=step_us,
            memory_bytes=tuple(fullest),
            mfu=self.job.model_flops / (step_us / 1e6 * peak),
            samples_per_s=self.job.batch / (step_us / 1e6),
            cost=None if None in prices else hourly * step_us / 3.6e9,
        )

    def excess_bytes(self, each: MixedPlan) -> int:
        """Return the most bytes that a device lacks, with its share of its node; 0 if all fit."""
        return max(self._lacking(group, size) for group, size in self._sizes(each))

    def _lacking(self, group: int, size: DeviceMemory) -> int:
        machine = self.machine.groups[group]
        count = machine.links.devices_per_node
        stored = max(0, size.host - machine.host_bytes // count) + max(
            0, size.nvme - machine.nvme_bytes // count
        )
        return max(0, size.needed - machine.limit_bytes) + stored

    def _sizes(self, mixed: MixedPlan) -> Iterator[tuple[int, DeviceMemory]]:
        """Yield the group and the memory of a device of each stage."""
        for rank, (group, layers) in enumerate(zip(mixed.stage_groups, self._ranges(mixed), strict=True)):
            yield group, self._stage_memory(mixed.plan, rank, self.layers[group].alike(layers))

    def _stage_bytes(self, plan: ClusterPlan, rank: int, layers: tuple[int, int]) -> DeviceMemory:
        return self.memory.of_stage(plan, rank, [layers])

    def _pipeline(self, mixed: MixedPlan) -> tuple[list[StageTime], tuple[float, ...]]:
        """Return the times of the stages, and of the sends between them."""
        stages = [
            self._stage(mixed.plan, group, self.layers[group].alike(layers))
            for group, layers in zip(mixed.stage_groups, self._ranges(mixed), strict=True)
        ]
        return stages, self._links(mixed.plan, mixed.order, mixed.stages)

    def _stage_time(self, plan: ClusterPlan, group: int, layers: tuple[int, int]) -> StageTime:
        nodes = self.machine.groups[group].links.nodes
        return self.pricers[group].stage(replace(plan, nodes=nodes), layers)

    def _sends(self, plan: ClusterPlan, order: tuple[int, ...], stages: tuple[int, ...]) -> tuple[float, ...]:
        """Return the time to send the output of each stage to the next one; 0 for the last."""
        width = plan.tensor * plan.copies
        run = LayerRun.of(plan).network_run(self.job, (0, 1))
        nbytes = self.job.network.boundary_bytes(run)
        times_us: list[float] = []
        for group, count in zip(order, stages, strict=True):
            cluster = self.machine.groups[group].links
            inside = [
                cluster.link_between(stage * width, (stage + 1) * width, width=width)
                for stage in range(count - 1)
            ]
            times_us += [float(send_us(nbytes, link)) for link in (*inside, self.machine.between)]
        # The last stage sends to nobody.
        return (*times_us[:-1], 0.0)

    def _tied_us(self, tensor: int) -> float:
        """Return the sum of gradients of a matrix that the first and the last stage share."""
        network = self.job.network
        parts = network.parameters(tensor, (0, 1)) + network.parameters(tensor, (1, network.layers))
        shared = (parts - network.parameters(tensor)) * itemsize(self.job.dtype)
        link = self.machine.between
        pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
        return float(collective_us("all-reduce", shared, pair))

    @staticmethod
    def _ranges(mixed: MixedPlan) -> list[tuple[int, int]]:
        return list(itertools.pairwise(itertools.accumulate(mixed.stage_layers, initial=0)))


def plan_mixed(
    job: TrainingJob,
    machine: MixedCluster,
    *,
    fixed: Mapping[str, str] | None = None,
    top: int = 10,
    reasons: bool = True,
    watcher: Callable[[str], None] = lambda message: None,
) -> MixedAnswer:
    """Return the fastest plans to train a network on groups of different devices.

    Args:
        job: The network and its batch.
        machine: The cluster.
        fixed: Value of each fixed parameter as text.
        top: Number of plans.
        reasons: Whether to also plan with equal layers, and on each group alone.
        watcher: Receives the phase.

    Raises:
        UnknownName: if there is no such parameter.
        InputError: if no plan is possible.
    """
    search = MixedSearch(job, machine, fixed=fixed)
    answer = search.run(top, watcher=watcher)
    if not reasons:
        return answer
    equal = search.run(1, equal=True, watcher=watcher).best
    alone: list[PricedPlan | None] = []
    for group, layers in zip(machine.groups, search.layers, strict=True):
        watcher(f"planning on {group.name} alone")
        try:
            best = ClusterSearch(job, group, fixed=fixed, layers=layers).run(1, front=False).best
        except InputError:  # the batch, or a fixed value, does not divide among its devices
            best = ()
        alone.append(best[0] if best else None)
    return replace(answer, equal_layers=equal[0] if equal else None, alone=tuple(alone))
