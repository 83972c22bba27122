"""Branch and bound over the plans of a cluster: the best ones, optimal for the model of time and memory.

Plans that do not fit are closed by their memory. The others are ordered by a lower bound. The plan with the
lowest bound is refined in three steps: a bound of its passes, a bound of the whole step, and the simulated
step. A plan whose simulated step comes first is at least as good as all that follow, so the rest is closed by
its bounds.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from tunebench._lazy import np
from tunebench.errors import InputError, UnknownName
from tunebench.forecast.network import require_fp8
from tunebench.training.cluster.device_memory import DeviceMemory, MemoryPricer
from tunebench.training.cluster.layer_time import LayerRun, LayerTimes
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.memory_verdict import MemoryVerdict, memory_verdict
from tunebench.training.cluster.refusal import fixed_space
from tunebench.training.cluster.space import ClusterPlan, PlanTable, TrainingJob, enumerated
from tunebench.training.cluster.stage_time import RUN_PARAMETERS, Slowdown, StepPricer, StepTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ClusterSearch", "Objective", "PlanProof", "PricedPlan", "SearchResult", "peak_flops"]

Objective = Literal["time", "memory", "cost"]
"""What the best plan has least of: time of a step, memory of a device, or device hours of a step."""

OUTLINE = 0.05
"""Share of memory that separates plans in the outline of a front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its predicted step and memory.

    Attributes:
        plan: The plan.
        step: Time of the step and its parts.
        memory: Memory of the fullest device.
        limit_bytes: Memory of each device that a plan may need.
        verdict: Probability that the plan fits the usable memory, and interval of its memory.
        mfu: Model FLOP utilisation: FLOPs of the model without recomputation over the peak of the devices in
            use.
        samples_per_s: Sequences per second.
        cost: Price of the step; None if the price of a device hour is not known.
        stored: Whether host memory and NVMe of a node hold what is not on its devices.
    """

    plan: ClusterPlan
    step: StepTime
    memory: DeviceMemory
    limit_bytes: int
    verdict: MemoryVerdict
    mfu: float
    samples_per_s: float
    cost: float | None
    stored: bool = True

    @property
    def device_hours(self) -> float:
        """Device hours of a step."""
        return self.plan.devices * self.step.time_us / 3.6e9

    @property
    def fits(self) -> bool:
        """Whether the fullest device, with the margin, and its node have enough memory."""
        return self.stored and self.memory.needed <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProof:
    """How each plan was closed; the counts add up to `plans`.

    Attributes:
        plans: Number of plans.
        too_large: Plans that do not fit.
        bounded_by_passes: Plans closed by the bound of their passes.
        bounded_by_step: Plans closed by the bound of the whole step.
        simulated: Plans with a simulated step.
        optimal: Whether no plan that fits can be better than the best one, by the model.
    """

    plans: int
    too_large: int
    bounded_by_passes: int
    bounded_by_step: int
    simulated: int
    optimal: bool


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plans of a search.

    Attributes:
        objective: What was minimised.
        best: The best plans that fit, best first; none if nothing fits. Plans with equal stages that differ
            in their schedule alone, with equal step time and memory, count once.
        front: Plans for which no other that fits has both a shorter step and less memory, shortest step
            first.
        proof: How all plans were closed.
    """

    objective: Objective
    best: tuple[PricedPlan, ...]
    front: tuple[PricedPlan, ...]
    proof: PlanProof
    _least: ClusterPlan = field(repr=False)
    _pricer: PlanPricer = field(repr=False, compare=False)

    @functools.cached_property
    def least_memory(self) -> PricedPlan:
        """The plan whose node lacks the least memory of all kinds, then of a device.

        It is priced when it is read: the simulation of its step may take longer than the search.
        """
        return self._pricer.priced(self._least)

    @property
    def front_outline(self) -> tuple[PricedPlan, ...]:
        """Plans of the front that have at least 5 % less memory than the plan before, shortest step first."""
        shown: list[PricedPlan] = []
        for priced in self.front:
            if not shown or priced.memory.needed <= (1 - OUTLINE) * shown[-1].memory.needed:
                shown.append(priced)
        return tuple(shown)


@dataclass(frozen=True, slots=True)
class PlanPricer:
    """Prices single plans.

    Attributes:
        steps: Times of the plans of a job on a cluster.
        memory: Their memory.
    """

    steps: StepPricer
    memory: MemoryPricer

    def priced(self, plan: ClusterPlan) -> PricedPlan:
        """Return a plan with its step and memory."""
        self.steps.layers.predict([LayerRun.of(plan)])
        job, machine, step = self.steps.job, self.steps.machine, self.steps.step(plan)
        seconds, price = step.time_us / 1e6, machine.price_per_hour
        peak = peak_flops(machine, job) * plan.devices
        memory = self.memory.of(plan)
        return PricedPlan(
            plan=plan,
            step=step,
            memory=memory,
            limit_bytes=machine.limit_bytes,
            verdict=memory_verdict(memory.needed, machine.memory_bytes, job.framework),
            stored=not lacking_bytes(machine, memory.host, memory.nvme),
            mfu=job.model_flops / (seconds * peak),
            samples_per_s=job.batch / seconds,
            cost=None if price is None else price * plan.devices * seconds / 3600,
        )


@dataclass(slots=True)
class _Open:
    """A plan that is not closed; `level` counts how far its time is refined."""

    plan: ClusterPlan
    memory: int
    level: int
    time_us: float


class ClusterSearch:
    """Search of the plans of a job on a cluster.

    Args:
        job: The network and its batch.
        machine: The cluster.
        fixed: Value of each fixed parameter as text.
        objective: What to minimise.
        layers: Times of the layers that another search has predicted; None for new ones.
        slowdown: Factors on predicted times.

    Raises:
        UnknownName: if there is no such objective or parameter.
        InputError: if no plan is possible.
    """

    def __init__(
        self,
        job: TrainingJob,
        machine: TrainingCluster,
        *,
        fixed: Mapping[str, str] | None = None,
        objective: Objective = "time",
        layers: LayerTimes | None = None,
        slowdown: Slowdown | None = None,
    ) -> None:
        if objective not in get_args(Objective):
            raise UnknownName("objective", objective, get_args(Objective))
        require_fp8(machine.device, job.fp8)
        if job.calibration is not None and job.calibration.device != machine.device.name:
            raise InputError(
                f"steps measured on {job.calibration.device} say nothing about "
                f"{machine.device.name}: measure steps on devices of the cluster"
            )
        self.job, self.machine, self.objective = job, machine, objective
        self.fixed, self.slowdown = dict(fixed or {}), slowdown or Slowdown()
        self.layers = layers or LayerTimes.of(job, machine.device)
        space = fixed_space(job, machine, self.fixed, any_nodes=objective == "cost")
        self.plans: PlanTable = enumerated(space)
        self.pricer = StepPricer(job=job, machine=machine, layers=self.layers, slowdown=self.slowdown)
        self.memory = MemoryPricer(job, machine.channels)
        self._priced = PlanPricer(self.pricer, self.memory)

    def run(
        self, top: int = 10, *, front: bool = True, watcher: Callable[[str], None] = lambda message: None
    ) -> SearchResult:
        """Return the best plans.

        Args:
            top: Number of plans.
            front: Whether to also find the front of time and memory.
            watcher: Receives the phase of the search.
        """
        limit = self.machine.limit_bytes
        watcher(f"memory of {len(self.plans)} plans")
        sizes, lacking = self._sizes()
        rows = np.flatnonzero((lacking == 0) & (sizes <= limit))
        fitting = self.plans.take(rows)
        # Reported if nothing fits: the plan that lacks the fewest bytes, then the one with the least memory
        # of a device.
        lacking += self.machine.links.devices_per_node * np.maximum(0, sizes - limit)
        nearest = np.flatnonzero(lacking == lacking.min())
        least = self.plans[int(nearest[sizes[nearest].argmin()])]
        watcher(f"predicting the layers of {len(fitting)} plans that fit")
        self.layers.predict(map(LayerRun.of, [least, *fitting.grouped(*RUN_PARAMETERS)[0]]))
        watcher("lower bounds")
        best, points, closed = self._search(fitting, sizes[rows], top, front, watcher)
        return SearchResult(
            objective=self.objective,
            best=tuple(map(self.priced, best)),
            front=tuple(map(self.priced, sorted(points, key=self.pricer.step_us))),
            proof=PlanProof(
                plans=len(self.plans),
                too_large=len(self.plans) - len(fitting),
                bounded_by_passes=closed[0],
                bounded_by_step=closed[1],
                simulated=closed[2],
                optimal=bool(best),
            ),
            _least=least,
            _pricer=self._priced,
        )

    def priced(self, plan: ClusterPlan) -> PricedPlan:
        """Return a plan with its step and memory."""
        return self._priced.priced(plan)

    def _sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the memory of each plan, and the host memory and NVMe that its node lacks.

        If any plan fits, plans that do not fit may have the memory of their first rank only, which exceeds
        the limit.
        """

        def fits(size: Any, host: Any, nvme: Any) -> Any:
            return (size <= self.machine.limit_bytes) & (lacking_bytes(self.machine, host, nvme) == 0)

        size, *stored = self.memory.sizes(self.plans, fits)
        if not np.any(fits(size, *stored)):
            size, *stored = self.memory.sizes(self.plans)
        return size, lacking_bytes(self.machine, *stored)

    def _search(
        self,
        fitting: PlanTable,
        sizes: NDArray[np.int64],
        top: int,
        front: bool,
        watcher: Callable[[str], None],
    ) -> tuple[list[ClusterPlan], list[ClusterPlan], list[int]]:
        """Return the best plans, the front, and the number of plans at each level when they were closed."""
        if not len(fitting):
            return [], [], [0, 0, 0]
        floors = self.pricer.floors_us(fitting)
        devices = self._devices(fitting)
        firsts, seconds = self._values(floors, sizes, devices)
        # Two sources in ascending order of bounds: the columns, sorted once, and a heap of the few plans that
        # are refined. A plan becomes an object only when it is reached: spaces have millions of plans.
        order = np.lexsort((np.arange(len(fitting)), seconds, firsts))
        untouched = iter(zip(firsts[order].tolist(), seconds[order].tolist(), order.tolist(), strict=True))
        waiting = next(untouched, None)
        heap: list[tuple[float, float, int, _Open]] = []
        refine = (self.pricer.bound_us, self.pricer.step_us)
        best: list[ClusterPlan] = []
        points: list[ClusterPlan] = []
        least = float("inf")
        levels = [len(fitting), 0, 0]
        while heap or waiting:
            # The lowest bound of both sources. Refining never lowers a bound, so a plan that is reached with
            # its simulated step is at least as good as all that follow.
            if waiting and (not heap or waiting[:3] < heap[0][:3]):
                (_, second, index), waiting = waiting, next(untouched, None)
                if len(best) >= top and front and second >= least:
                    continue
                candidate = _Open(fitting[index], int(sizes[index]), 0, float(floors[index]))
            else:
                _, second, index, candidate = heapq.heappop(heap)
            if len(best) >= top:
                if not front:
                    break
                # Plans are reached in ascending order of the first value: one is on the front only if its
                # second value is below all before. A bound that is not below is enough to close it.
                if second >= least:
                    continue
            if candidate.level == 2:
                if len(best) < top and not self._repeats(candidate.plan, best):
                    best.append(candidate.plan)
                if second < least:
                    least = second
                    points.append(candidate.plan)
                continue
            # Bounds are computed in different ways, and rounding may make the tighter one smaller: keep the
            # order monotone.
            candidate.time_us = max(candidate.time_us, refine[candidate.level](candidate.plan))
            levels[candidate.level] -= 1
            candidate.level += 1
            levels[candidate.level] += 1
            if candidate.level == 2:
                watcher(f"simulating {candidate.plan}")
            value = self._values(candidate.time_us, candidate.memory, candidate.plan.devices)
            heapq.heappush(heap, (*value, index, candidate))
        return best, points, levels

    def _repeats(self, plan: ClusterPlan, listed: Sequence[ClusterPlan]) -> bool:
        """Return whether a listed plan differs in its schedule alone, with equal step time and memory."""
        values = self._run_values(plan)
        return any(
            self._run_values(listed_plan) == values
            and self.pricer.step_us(listed_plan) == self.pricer.step_us(plan)
            and self.memory.of(listed_plan).needed == self.memory.of(plan).needed
            for listed_plan in listed
        )

    def _run_values(self, plan: ClusterPlan) -> dict[str, object]:
        """Return what a plan runs but its schedule: stages in place of the layers that its ends count as."""
        stages = plan.stages(self.job.network.layers)
        return {**plan.values, "schedule": "", "embedding_layers": 0, "head_layers": 0, "stages": stages}

    @staticmethod
    def _devices(plans: PlanTable) -> NDArray[np.int64]:
        columns = [plans.column(name) for name in ("tensor", "context", "pipeline", "data")]
        counts: NDArray[np.int64] = np.prod(columns, axis=0)
        return counts

    def _values(self, time_us: Any, memory: Any, devices: Any) -> tuple[Any, Any]:
        """Return the objective, and the second value of the front: time and memory, in some order."""
        if self.objective == "memory":
            return memory, time_us
        return time_us * (devices if self.objective == "cost" else 1), memory


def lacking_bytes(machine: TrainingCluster, host: Any, nvme: Any) -> Any:
    """Return the bytes of host memory and NVMe that a node lacks, given those of each of its devices."""
    # Devices of a node share its host memory and NVMe, each with an equal part of the data.
    count = machine.links.devices_per_node
    lacking = np.maximum(0, host * count - machine.host_bytes)
    return lacking + np.maximum(0, nvme * count - machine.nvme_bytes)


def peak_flops(machine: TrainingCluster, job: TrainingJob) -> float:
    """Return the peak of a device in FLOP/s for the products of a job, at the clock of its datasheet."""
    device, dtype = machine.device, job.dtype if job.fp8 == "none" else "e4m3"
    clock = device.boost_clock_mhz or device.max_clock_mhz
    return device.mma_flop_per_clock.get(dtype, 2 * device.fma_per_clock) * device.sm_count * clock * 1e6
