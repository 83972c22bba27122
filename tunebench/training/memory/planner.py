"""Plans of a training step within a memory budget, and the curve of time against budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tunebench._dataframe import Tabular, columns_of
from tunebench._figure import duration
from tunebench._notebook import html_table
from tunebench.errors import InputError
from tunebench.training.memory.bound import least_bytes, lower_bound_us
from tunebench.training.memory.budget import size_text
from tunebench.training.memory.eviction import EvictionPolicy, StepIndex, evict
from tunebench.training.memory.exact import exact_schedule, least_budget_exact
from tunebench.training.memory.greedy import GreedySearch
from tunebench.training.memory.relaxation import relaxed_bound_us
from tunebench.training.memory.schedule import Action, Compute, CopyIn, CopyOut, unplanned
from tunebench.training.memory.simulation import Simulation, simulate
from tunebench.training.memory.step import TrainingStep

__all__ = [
    "LeastBudget",
    "MemoryPlan",
    "PlanEffort",
    "TensorPlan",
    "least_budget",
    "memory_curve",
    "plan_memory",
    "restricted_forms",
]


_STAGES = (6, 12, 24, 48)
"""Numbers of stages of the linear programs that tighten the lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEffort:
    """How long to search for a plan.

    Attributes:
        exact_operations: Steps of at most so many operations are also solved as an integer program.
        limit_s: Time limit of each integer program in seconds.
        rounds: Changes that each local search tries.
        relaxed_size: Most operations times stages of the linear programs that tighten the lower bound; 0 for
            no linear programs, also of large steps.
    """

    exact_operations: int = 24
    limit_s: float = 30.0
    rounds: int = 20
    relaxed_size: int = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What a plan does with a tensor between its uses.

    Attributes:
        tensor: The tensor.
        recomputed_before: The operations before whose first run the tensor is written again.
        sources: The tensors that writing it again reads.
        copied_out_after: The last operation that first ran before the copy to the host; none without a copy.
        copied_in_before: The operations before whose first run a copy to the device starts.
    """

    tensor: int
    recomputed_before: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    copied_out_after: int | None = None
    copied_in_before: tuple[int, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the tensor stays on the device until its last use."""
        return not self.recomputed_before and not self.copied_in_before


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Tabular):
    """A schedule of a step within a budget, and what is known about faster ones.

    Attributes:
        step: The training step.
        budget_bytes: Bytes that the device has.
        schedule: The actions.
        simulation: Time and memory of the schedule.
        lower_us: Lower bound in microseconds of the time of any schedule within the budget.
        optimal: Whether no schedule of the form that `exact_schedule` considers is faster.
    """

    step: TrainingStep
    budget_bytes: int
    schedule: tuple[Action, ...]
    simulation: Simulation
    lower_us: float
    optimal: bool

    @property
    def gap(self) -> float:
        """Largest fraction of the time that a faster schedule could save."""
        return 1 - self.lower_us / self.simulation.step_us if self.simulation.step_us else 0.0

    def _columns(self) -> Mapping[str, Sequence[object]]:
        """Return what happens to each tensor that a later operation than the next one reads."""
        producers = self.step.producers()
        return columns_of(
            {
                "tensor": tensor.tensor,
                "bytes": self.step.tensors[tensor.tensor].size_bytes,
                "operation": self.step.operations[producers[tensor.tensor]].name,
                "kept": tensor.kept,
                "recomputations": len(tensor.recomputed_before),
                "copied_out": tensor.copied_out_after is not None,
                "copies_in": len(tensor.copied_in_before),
            }
            for tensor in self.tensors
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        tensors = self.tensors
        kept_count = sum(tensor.kept for tensor in tensors)
        recomputed_count = sum(bool(tensor.recomputed_before) for tensor in tensors)
        swapped_count = sum(tensor.copied_out_after is not None for tensor in tensors)
        proof = "proved optimal" if self.optimal else f"at most {self.gap:.1%} could be saved"
        facts = (
            ("budget", size_text(self.budget_bytes)),
            ("peak memory", size_text(self.simulation.peak_bytes)),
            ("time of the step", f"{duration(self.simulation.step_us)} ({proof})"),
            (
                "tensors",
                f"{kept_count} kept, {recomputed_count} recomputed, {swapped_count} copied to the host",
            ),
        )
        return html_table(f"plan of {len(self.step.operations)} operations", facts)

    @cached_property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """What happens to each tensor that a later operation than the next one reads."""
        recomputed: dict[int, list[int]] = {}
        out: dict[int, int] = {}
        back: dict[int, list[int]] = {}
        stage = 0
        for action in self.schedule:
            if isinstance(action, Compute):
                if action.operation == stage:
                    stage += 1
                else:
                    for tensor in self.step.operations[action.operation].outputs:
                        recomputed.setdefault(tensor, []).append(stage)
            elif isinstance(action, CopyOut):
                out[action.tensor] = stage - 1
            elif isinstance(action, CopyIn):
                back.setdefault(action.tensor, []).append(stage)
        producers = self.step.producers()
        return tuple(
            TensorPlan(
                tensor=tensor,
                recomputed_before=tuple(recomputed.get(tensor, ())),
                sources=self.step.operations[producers[tensor]].inputs if tensor in recomputed else (),
                copied_out_after=out.get(tensor),
                copied_in_before=tuple(back.get(tensor, ())),
            )
            for tensor in self._saved(producers)
        )

    def _saved(self, producers: dict[int, int]) -> Iterator[int]:
        """Yield the tensors that a later operation than the next one reads, or that the step returns."""
        last = {
            tensor: index
            for index, operation in enumerate(self.step.operations)
            for tensor in operation.inputs
        }
        last.update(dict.fromkeys(self.step.results, len(self.step.operations)))
        for tensor, producer in producers.items():
            if last.get(tensor, producer) > producer + 1:
                yield tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The least budget for which a schedule was found.

    Attributes:
        budget_bytes: The budget in bytes.
        proven: Whether no schedule fits a smaller budget.
    """

    budget_bytes: int
    proven: bool


def least_budget(step: TrainingStep, *, effort: PlanEffort | None = None) -> LeastBudget:
    """Return the least budget for which a schedule is found.

    With a link to the host it is proven: tensors that an operation does not use can be on the host. Without
    one, finding the least budget is hard in general; the result is the least at which a search succeeds.

    Args:
        step: The training step.
        effort: How long to search.
    """
    effort = effort or PlanEffort()
    low = least_bytes(step)
    policy = EvictionPolicy(swapped=frozenset(step.producers()) if step.link else frozenset())
    # `low` is a bound: a schedule that attains it proves it.
    if evict(step, low, policy) is not None:
        return LeastBudget(budget_bytes=low, proven=True)
    above, high = low, max(low, simulate(step, unplanned(step)).peak_bytes)
    resolution = max(1, (high - low) // 1000)
    while high - above > resolution:
        middle = (above + high) // 2
        # Bisection assumes that more memory never makes greedy eviction fail; the result is a budget that
        # works either way.
        above, high = (above, middle) if evict(step, middle, policy) is not None else (middle, high)
    if step.link is None and len(step.operations) <= effort.exact_operations:
        high = min(high, least_budget_exact(step, limit_s=effort.limit_s)[0])
    return LeastBudget(budget_bytes=high, proven=high == low)


def plan_memory(step: TrainingStep, budget_bytes: int, *, effort: PlanEffort | None = None) -> MemoryPlan:
    """Return the fastest plan found within a budget.

    The search includes plans that only recompute and plans that only swap, with the same effort. The result
    is at least as fast as both.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
        effort: How long to search.

    Raises:
        InputError: No plan fits the budget; the message states the least budget.
    """
    plan = _Planner(step, effort or PlanEffort()).best(budget_bytes)
    if plan is None:
        raise InputError(_no_plan(step, budget_bytes, least_budget(step, effort=effort)))
    return plan


def _no_plan(step: TrainingStep, budget_bytes: int, least: LeastBudget) -> str:
    """Return a message that says what needs the memory of a step which no plan fits into a budget."""
    largest = max(step.operations, key=step.working_bytes)
    largest_bytes = step.working_bytes(largest) - step.resident_bytes
    line = f" ({largest.source})" if largest.source else ""
    qualifier = "the least possible budget is" if least.proven else "the least budget with a known plan is"
    static = step.static_bytes
    static_bytes = sum(static.values())
    peak_bytes = simulate(step, unplanned(step)).peak_bytes
    parts = ", ".join(f"{role} {size_text(size_bytes)}" for role, size_bytes in static.items())
    return (
        f"no plan of this step fits a budget of {size_text(budget_bytes)}; {qualifier} "
        f"{size_text(least.budget_bytes, up=True)}, and without a plan it takes {size_text(peak_bytes)}. "
        f"Static memory takes {size_text(static_bytes)} ({parts or 'none'}), activations up to "
        f"{size_text(peak_bytes - min(static_bytes, peak_bytes))} without a plan. The operation that needs "
        f"most, {largest.name}{line}, takes {size_text(largest_bytes)} for what it reads and writes, besides "
        f"{size_text(step.resident_bytes)} that are in memory during the whole step. "
        f"{_remedy(step, budget_bytes)}"
    )


def _remedy(step: TrainingStep, budget_bytes: int) -> str:
    """Return what to do about a budget that is too small."""
    of_model = (size for role, size in step.static_bytes.items() if role not in _GROWING)
    if budget_bytes < sum(of_model):
        return (
            "No batch fits, because parameters, gradients and optimizer states alone are above the budget: "
            "use an optimizer with smaller states, or shard the model."
        )
    return "Pass at least the least budget, or reduce the batch."


_GROWING = ("inputs", "results", "other tensors")
"""Roles of static memory that grow with the batch, or may."""


def memory_curve(
    step: TrainingStep, budgets: Sequence[int] = (), *, points: int = 16, effort: PlanEffort | None = None
) -> tuple[MemoryPlan, ...]:
    """Return a plan for each budget that has one.

    With the budget, times never increase and peaks never decrease. Of a large step only the middle budget is
    searched with the whole effort; the other searches start from the plan of the nearest budget.

    Args:
        step: The training step.
        budgets: Budgets in bytes; none for evenly spaced ones, from the least budget to the peak of the step
            without a plan.
        points: Number of budgets to choose if none are given.
        effort: How long to search at each budget.
    """
    effort = effort or PlanEffort()
    if not budgets:
        low = least_budget(step, effort=effort).budget_bytes
        high = max(low, simulate(step, unplanned(step)).peak_bytes)
        budgets = [low + (high - low) * point // max(1, points - 1) for point in range(points)]
    ordered = sorted(set(budgets))
    planner = _Planner(step, effort)
    middle = ordered[len(ordered) // 2]
    # From the middle outwards, so that each search starts from the policy of a neighbour.
    outward = sorted(ordered, key=lambda budget: abs(budget - middle))
    plans = [plan for budget in outward if (plan := planner.best(budget, near=True)) is not None]
    proven = {plan.budget_bytes for plan in plans if plan.optimal}
    curve = []
    for budget in ordered:
        # A plan for less memory may be the fastest one found for more: greedy search is not monotone.
        fitting = [plan for plan in plans if plan.simulation.peak_bytes <= budget]
        if fitting:
            best = min(fitting, key=lambda plan: (plan.simulation.step_us, plan.simulation.peak_bytes))
            lower_us = planner.lower_us(budget)
            curve.append(replace(best, budget_bytes=budget, lower_us=lower_us, optimal=budget in proven))
    return tuple(curve)


class _Planner:
    """Plans of a step, each at least as fast as those that only recompute and those that only swap."""

    def __init__(self, step: TrainingStep, effort: PlanEffort) -> None:
        self._step, self._effort = step, effort
        self._unplanned = unplanned(step)
        self._simulation = simulate(step, self._unplanned)
        self._least_bytes = least_bytes(step)
        self._small = len(step.operations) <= effort.exact_operations
        self._variants = [(StepIndex(variant), list[GreedySearch]()) for variant in restricted_forms(step)]

    def best(self, budget_bytes: int, *, near: bool = False) -> MemoryPlan | None:
        """Return the fastest plan found, or none.

        Args:
            budget_bytes: Bytes that the device has.
            near: Whether the search of a large step may start from the plan of the nearest budget so far.
        """
        if self._simulation.peak_bytes <= budget_bytes:
            return self._plan(budget_bytes, self._simulation, self._unplanned, optimal=True)
        if budget_bytes < self._least_bytes:
            return None
        schedules: list[tuple[Action, ...]] = []
        optimal = False
        # Recomputation alone and swapping alone first: their schedules are candidates too, so that the result
        # is at least as fast as both.
        for index, searches in self._variants:
            search = GreedySearch(index, budget_bytes)
            neighbours = searches if near and not self._small else []
            start = min(
                neighbours, key=lambda neighbour: abs(neighbour.budget_bytes - budget_bytes), default=None
            )
            relaxed_s = self._effort.limit_s if self._effort.relaxed_size and not self._small else 0.0
            schedules += search.schedules(self._effort.rounds, start, relaxed_s=relaxed_s)
            searches.append(search)
            if self._small:
                solved = exact_schedule(index.step, budget_bytes, limit_s=self._effort.limit_s)
                # In the end that of the step itself; the integer program knows no time that copies take away.
                optimal = solved.optimal and not (self._step.link and self._step.link.lost_fraction)
                if solved.schedule is not None:
                    schedules.append(solved.schedule)
        if not schedules:
            return None
        simulated = [
            (simulate(self._step, schedule, budget_bytes=budget_bytes), schedule) for schedule in schedules
        ]
        best = min(simulated, key=lambda candidate: (candidate[0].step_us, candidate[0].peak_bytes))
        return self._plan(budget_bytes, *best, optimal=optimal)

    def lower_us(self, budget_bytes: int) -> float:
        """Return the highest lower bound; which number of stages of the linear program is best varies."""
        bounds = [lower_bound_us(self._step, budget_bytes)]
        bounds += [search.lower_us for search in self._variants[-1][1] if search.budget_bytes == budget_bytes]
        if self._simulation.peak_bytes > budget_bytes:
            count, effort = len(self._step.operations), self._effort
            for stages in dict.fromkeys(min(stages, count) for stages in _STAGES):
                if stages * count <= effort.relaxed_size:
                    limit_s = effort.limit_s
                    bounds.append(relaxed_bound_us(self._step, budget_bytes, stages=stages, limit_s=limit_s))
        return max(bounds)

    def _plan(
        self, budget_bytes: int, simulation: Simulation, schedule: tuple[Action, ...], *, optimal: bool
    ) -> MemoryPlan:
        """Return a simulated schedule as a plan."""
        return MemoryPlan(
            step=self._step,
            budget_bytes=budget_bytes,
            schedule=schedule,
            simulation=simulation,
            lower_us=self.lower_us(budget_bytes),
            optimal=optimal,
        )


def restricted_forms(step: TrainingStep) -> list[TrainingStep]:
    """Return the step that may only recompute, the one that may only swap, and last the step itself."""
    if step.link is None:
        return [step]
    if not any(operation.recomputable for operation in step.operations):
        return [step]
    return [step.without_link(), step.without_recomputation(), step]
