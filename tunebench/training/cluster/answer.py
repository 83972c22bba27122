"""The answer of the planner: the best plans, what binds the best one, and how sure the choice is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tunebench._dataframe import Tabular, columns_of
from tunebench._figure import duration, significant
from tunebench._notebook import html_grid
from tunebench.training.cluster.front import cost_front
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.search import ClusterSearch, Objective, PricedPlan, SearchResult
from tunebench.training.cluster.space import ClusterPlan, TrainingJob
from tunebench.training.cluster.stage_time import Slowdown
from tunebench.training.memory.budget import size_text

__all__ = ["ClusterAnswer", "PlanSensitivity", "ResourceGain", "plan_training"]

SLOWER = 1.1
"""Factor of the sensitivity analysis: kernels or communication 10 % slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceGain:
    """The best plan with twice as much of a resource.

    Attributes:
        resource: What is doubled: memory, links, bandwidth of storage, or batch.
        plan: The best plan then; None if nothing fits.
        speedup: Sequences per second relative to the best plan as it is (higher is better); None without one.
    """

    resource: str
    plan: PricedPlan | None
    speedup: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSensitivity:
    """The best plan if a prediction is wrong.

    Attributes:
        slower: What takes 10 % longer: kernels or communication.
        plan: The best plan then.
        regret: How much longer the step of the original choice takes than that of the best plan then, as a
            share.
    """

    slower: str
    plan: ClusterPlan
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer(Tabular):
    """The best plans of a job on a cluster, with reasons.

    Attributes:
        job: The network and its batch.
        machine: The cluster.
        result: The plans and the proof.
        gains: Best plan with twice as much of each resource.
        sensitivity: Best plan if predictions are wrong.
        next_plans: Plans that need up to twice the memory of a device, each at least 1 % faster than those
            with less, least memory first; none unless the time of a step is minimised.
        cost_front: Plans on some of the nodes for which no other has both a shorter step and fewer device
            hours, fastest first; none for a cluster without a price.
    """

    job: TrainingJob
    machine: TrainingCluster
    result: SearchResult
    gains: tuple[ResourceGain, ...] = ()
    sensitivity: tuple[PlanSensitivity, ...] = ()
    next_plans: tuple[PricedPlan, ...] = ()
    cost_front: tuple[PricedPlan, ...] = ()

    def _columns(self) -> Mapping[str, Sequence[object]]:
        return columns_of(_row(priced) for priced in self.result.best)

    def _repr_html_(self) -> str:
        """Return the best plans for notebooks."""
        rows = (
            (
                duration(priced.step.time_us),
                f"{priced.mfu:.1%}",
                size_text(priced.memory.needed),
                f"{priced.step.bubble_us / priced.step.time_us:.1%}",
                None if priced.cost is None else f"${significant(priced.cost)}",
                priced.plan,
            )
            for priced in self.result.best
        )
        columns = (">step", ">MFU", ">memory", ">bubble", ">cost", "plan")
        proof = ", proved optimal by the model" if self.result.proof.optimal else ""
        title = f"{self.job.network.name} on {self.machine.name}: {self.result.proof.plans} plans{proof}"
        return html_grid(*columns, rows=rows, caption=title if self.best else f"{title}; nothing fits")

    @property
    def best(self) -> PricedPlan | None:
        """The best plan; None if nothing fits."""
        return self.result.best[0] if self.result.best else None

    @property
    def missing_bytes(self) -> int:
        """Memory that each device lacks for the plan that needs the least; 0 if a plan fits."""
        return max(0, self.result.least_memory.memory.needed - self.machine.limit_bytes)

    @property
    def missing_host_bytes(self) -> int:
        """Host memory that each node lacks for the plan that needs the least; 0 if its states fit."""
        needed = self.result.least_memory.memory.host * self.machine.links.devices_per_node
        return max(0, needed - self.machine.host_bytes)

    @property
    def missing_nvme_bytes(self) -> int:
        """NVMe that each node lacks for the plan that needs the least; 0 if its data fits."""
        needed = self.result.least_memory.memory.nvme * self.machine.links.devices_per_node
        return max(0, needed - self.machine.nvme_bytes)

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of each part in the step of the best plan, largest first."""
        if self.best is None:
            return {}
        step = self.best.step
        parts = {
            "kernels": step.compute_us,
            "optimizer": step.optimizer_us,
            "exposed collectives of layers": step.waits_us,
            "exposed gradients": step.gradients_us,
            "exposed sends": step.sends_us,
            "exposed copies to and from storage": step.storage_us,
            "bubble": step.bubble_us,
        }
        return {name: us / step.time_us for name, us in sorted(parts.items(), key=lambda part: -part[1])}


def _row(priced: PricedPlan) -> dict[str, object]:
    """Return a plan with its predictions as one row of a table."""
    return {
        **priced.plan.values,
        **asdict(priced.step),
        "memory_bytes": priced.memory.needed,
        "mfu": priced.mfu,
        "samples_per_s": priced.samples_per_s,
        "cost": priced.cost,
    }


def plan_training(
    job: TrainingJob,
    machine: TrainingCluster,
    *,
    objective: Objective = "time",
    fixed: Mapping[str, str] | None = None,
    top: int = 10,
    reasons: bool = True,
    watcher: Callable[[str], None] = lambda message: None,
) -> ClusterAnswer:
    """Return the best plans to train a network on a cluster, optimal for the model of time and memory.

    Args:
        job: The network and its batch.
        machine: The cluster.
        objective: What to minimise.
        fixed: Value of each fixed parameter as text.
        top: Number of plans.
        reasons: Whether to also plan with twice the memory, links and batch, with slower predictions, and, if
            the cluster has a price, on fewer nodes.
        watcher: Receives the phase.

    Raises:
        UnknownName: if there is no such objective or parameter.
        InputError: if no plan is possible.
    """
    search = ClusterSearch(job, machine, fixed=fixed, objective=objective)
    result = search.run(top, watcher=watcher)
    if not reasons or not result.best:
        return ClusterAnswer(job=job, machine=machine, result=result)
    best = result.best[0]

    def searched(job: TrainingJob, machine: TrainingCluster, *, front: bool) -> SearchResult:
        # Predicted layers depend on the product and on the network, not on links, memory or the batch: all
        # searches share them.
        changed_search = ClusterSearch(job, machine, fixed=fixed, objective=objective, layers=search.layers)
        return changed_search.run(1, front=front)

    def gain(resource: str, changed_result: SearchResult) -> ResourceGain:
        plan = changed_result.best[0] if changed_result.best else None
        speedup = plan.samples_per_s / best.samples_per_s if plan is not None else None
        return ResourceGain(resource=resource, plan=plan, speedup=speedup)

    watcher("plan with twice the memory of each device")
    twice = replace(machine, memory_bytes=2 * machine.memory_bytes)
    # This front also has the plans that the real devices have no memory for: `_next_plans` lists the fastest
    # of them.
    larger = searched(job, twice, front=objective == "time")
    gains = [gain("memory of each device", larger)]
    resources = [
        ("bandwidth of all links", job, machine.with_faster_links(2.0)),
        ("batch", replace(job, batch=2 * job.batch), machine),
    ]
    if machine.host_bytes:
        faster = machine.with_faster_storage(2.0)
        resources.insert(1, ("bandwidth of host memory and NVMe", job, faster))
    for resource, changed_job, changed_machine in resources:
        watcher(f"plan with twice the {resource}")
        gains.append(gain(resource, searched(changed_job, changed_machine, front=False)))
    sensitivity = []
    for name, slowdown in (
        ("kernels", Slowdown(kernels=SLOWER)),
        ("communication", Slowdown(communication=SLOWER)),
    ):
        watcher(f"plan with slower {name}")
        slowed_search = ClusterSearch(
            job, machine, fixed=fixed, objective=objective, layers=search.layers, slowdown=slowdown
        )
        then = slowed_search.run(1, front=False).best[0]
        # Both steps with the slower times: what the choice by the original prediction costs if the prediction
        # is wrong.
        regret = slowed_search.pricer.step_us(best.plan) / then.step.time_us - 1
        sensitivity.append(PlanSensitivity(slower=name, plan=then.plan, regret=regret))
    costs: tuple[PricedPlan, ...] = ()
    if machine.price_per_hour is not None and machine.links.nodes > 1:
        costs = cost_front(job, machine, fixed=fixed, layers=search.layers, watcher=watcher)
    return ClusterAnswer(
        job=job,
        machine=machine,
        result=result,
        gains=tuple(gains),
        next_plans=_next_plans(best, larger.front),
        sensitivity=tuple(sensitivity),
        cost_front=costs,
    )


def _next_plans(best: PricedPlan, front: Iterable[PricedPlan]) -> tuple[PricedPlan, ...]:
    """Return the plans of a front that are faster than the best one, in steps of at least 1 %."""
    outline = [best]
    for priced in sorted(front, key=lambda priced: priced.memory.needed):
        if priced.step.time_us < 0.99 * outline[-1].step.time_us:
            outline.append(priced)
    return tuple(outline[1:])
