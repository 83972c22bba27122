"""Schedules of a pipeline side by side: step time, bubble, memory and transfers of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from tunebench._dataframe import Tabular, columns_of
from tunebench._figure import duration
from tunebench._notebook import html_grid
from tunebench.errors import InputError
from tunebench.training.memory.budget import size_text
from tunebench.training.pipeline.balance import balance
from tunebench.training.pipeline.optimiser import optimise_schedule
from tunebench.training.schedules import (
    ActionKind,
    PipelineCosts,
    PipelineSchedule,
    PipelineSimulation,
    looped_placement,
    simulate_pipeline,
    v_placement,
)
from tunebench.training.schedules.registry import SCHEDULES, find_schedule
from tunebench.training.steps.time_range import End

__all__ = ["ComparedSchedule", "Comparison", "SkippedSchedule", "StageSource", "compare_schedules"]

SLOWDOWNS = (0.01, 0.25)
"""Shares by which balancing may lengthen a step; the second one if no schedule fits with the first one."""
MOST_PASSES = 1_000_000
"""Most forward passes of a simulated step: stages times micro-batches."""
LEAST_GAIN = 0.01
"""Share of the largest peak that balancing must save."""


class StageSource(Protocol):
    """Costs of the stages of any schedule on some ranks."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    def costs(self, placement: Sequence[int], *, pairs: bool = False) -> PipelineCosts:
        """Return the costs of stages on these ranks."""

    def optimizer_us(self, placement: Sequence[int]) -> float:
        """Return the time of the optimizer on the slowest rank."""

    def at(self, end: End) -> Self:
        """Return the same with the times of an end of the prediction interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSchedule:
    """A schedule and its simulation.

    Attributes:
        name: Name of the schedule.
        schedule: The schedule.
        costs: Costs of its stages.
        simulation: Its simulation.
        memory_bytes: Memory of each rank; None if it is not limited.
        optimizer_us: Time of the optimizer after the passes.
        low_us: Lower end of the 90 % prediction interval of the step; the step itself for given times.
        high_us: Upper end of the interval.
        bound_us: Time that no order of passes with the same stages beats, with the optimizer; None if it was
            not searched for.
    """

    name: str
    schedule: PipelineSchedule
    costs: PipelineCosts
    simulation: PipelineSimulation
    memory_bytes: int | None
    optimizer_us: float
    low_us: float
    high_us: float
    bound_us: float | None = None

    @property
    def step_us(self) -> float:
        """Time of the step, with its optimizer."""
        return self.simulation.step_us + self.optimizer_us

    @property
    def peak_bytes(self) -> int:
        """Most memory of any rank."""
        return max(self.simulation.peak_bytes)

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes

    @property
    def evictions(self) -> int:
        """Number of micro-batches whose activations are copied to another rank and back."""
        kinds = (action.kind for actions in self.schedule.actions for action in actions)
        return sum(kind is ActionKind.EVICT for kind in kinds)

    @property
    def hidden(self) -> bool:
        """Whether no rank waits for evictions or loads."""
        return self.simulation.exposed_us <= 1e-9 * self.simulation.step_us


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSchedule:
    """A schedule that the model or its costs do not allow.

    Attributes:
        name: Name of the schedule.
        reason: What was expected and found.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Tabular):
    """Schedules of one pipeline, in the order in which they were asked for.

    Attributes:
        schedules: The schedules.
        skipped: Schedules that are not possible.
    """

    schedules: tuple[ComparedSchedule, ...]
    skipped: tuple[SkippedSchedule, ...]

    def _columns(self) -> Mapping[str, Sequence[object]]:
        names = ("name", "step_us", "low_us", "high_us", "bound_us", "peak_bytes", "memory_bytes", "fits")
        return columns_of(
            {name: getattr(schedule, name) for name in (*names, "evictions")}
            | {"bubble": schedule.simulation.bubble}
            for schedule in self.schedules
        )

    def _repr_html_(self) -> str:
        """Return the schedules for notebooks; the best one is marked."""
        best = self.best
        rows = (
            (
                f"{schedule.name} (best)" if schedule is best else schedule.name,
                duration(schedule.step_us),
                f"{duration(schedule.low_us)} to {duration(schedule.high_us)}",
                f"{schedule.simulation.bubble:.1%}",
                size_text(schedule.peak_bytes),
                "yes" if schedule.fits else "no",
            )
            for schedule in self.schedules
        )
        columns = ("schedule", ">step", ">90 % interval", ">bubble", ">peak memory", "fits")
        return html_grid(*columns, rows=rows)

    @property
    def best(self) -> ComparedSchedule | None:
        """The schedule with the shortest step that fits; None if none fits.

        Of several, one without evictions, and then the one with the least memory.
        """
        fitting = [schedule for schedule in self.schedules if schedule.fits]
        return min(
            fitting,
            key=lambda schedule: (schedule.step_us, schedule.evictions > 0, schedule.peak_bytes),
            default=None,
        )


def compare_schedules(
    source: StageSource,
    microbatches: int,
    *,
    names: Sequence[str] | None = None,
    memory_bytes: int | None = None,
    balanced: bool = True,
    search_s: float = 0.0,
    watcher: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Simulate schedules by name, each also with balanced memory if that needs at least 1 % less.

    A search adds the best schedules found with one stage on each rank, and with two that go around the ranks
    or to the last one and back (V-shaped).

    Args:
        source: Costs of the stages.
        microbatches: Number of micro-batches.
        names: Names of schedules; None for all.
        memory_bytes: Memory of each rank; None if it is not limited.
        balanced: Whether to balance the memory of schedules.
        search_s: Time limit of the search in seconds; 0 for none.
        watcher: Receives the name of each schedule before it is simulated.

    Raises:
        UnknownName: if there is no schedule of a name.
        InputError: if none of the schedules is possible.
    """
    chosen = [find_schedule(name) for name in (SCHEDULES if names is None else dict.fromkeys(names))]
    compared: list[ComparedSchedule] = []
    skipped: list[SkippedSchedule] = []
    for schedule in chosen:
        watcher(schedule.name)
        try:
            _require_possible(source, schedule.placement(source.ranks), microbatches)
            pipeline_schedule = schedule.make(source.ranks, microbatches)
            compared += _compared(source, pipeline_schedule, memory_bytes, balanced, watcher)
        except InputError as error:
            skipped.append(SkippedSchedule(name=schedule.name, reason=str(error)))
    if search_s:
        for placement in _placements(source.ranks):
            name = f"optimised, {placement[0]}"
            watcher(name)
            try:
                compared.append(
                    _optimised(source, name, placement[1], microbatches, memory_bytes, search_s / 3)
                )
            except InputError as error:
                skipped.append(SkippedSchedule(name=name, reason=str(error)))
    if not compared:
        raise InputError(f"no schedule is possible: {skipped[0].name}: {skipped[0].reason}")
    return Comparison(schedules=tuple(compared), skipped=tuple(skipped))


def _require_possible(source: StageSource, placement: Sequence[int], microbatches: int) -> None:
    """Raise InputError for stages or sizes that are not possible, before a schedule is made."""
    if len(placement) * microbatches > MOST_PASSES:
        raise InputError(
            f"{microbatches} micro-batches on {len(placement)} stages: expected at most {MOST_PASSES} "
            "forward passes in a step; give fewer micro-batches"
        )
    source.costs(placement)


def _placements(ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the placements that a search tries, with their names."""
    yield "1 stage", looped_placement(ranks)
    if ranks > 1:
        yield "2 stages", looped_placement(ranks, 2)
        yield "V", v_placement(ranks)


def _optimised(
    source: StageSource,
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    memory_bytes: int | None,
    search_s: float,
) -> ComparedSchedule:
    """Return the best schedule found with a placement of stages."""
    best = optimise_schedule(
        placement, microbatches, source.costs(placement), memory_bytes, time_limit_s=search_s
    )
    compared = _simulated(source, replace(best.schedule, name=name), memory_bytes, pairs=False)
    return replace(compared, bound_us=best.lower_bound_us + compared.optimizer_us)


def _compared(
    source: StageSource,
    schedule: PipelineSchedule,
    memory_bytes: int | None,
    balanced: bool,
    watcher: Callable[[str], None],
) -> Iterator[ComparedSchedule]:
    """Yield a schedule, and the same with balanced memory if that lowers its peak."""
    plain = _simulated(source, schedule, memory_bytes, pairs=False)
    yield plain
    if not balanced or source.ranks == 1 or schedule.acceptors:
        return
    watcher(f"{schedule.name} balanced")
    balanced_schedule = _balanced(source, schedule, memory_bytes)
    if balanced_schedule is not None and balanced_schedule.peak_bytes <= (1 - LEAST_GAIN) * plain.peak_bytes:
        yield balanced_schedule


def _balanced(
    source: StageSource, schedule: PipelineSchedule, memory_bytes: int | None
) -> ComparedSchedule | None:
    """Return the schedule with balanced memory: in about the same time if that fits, else in more."""
    pairs = True
    try:
        costs = source.costs(schedule.placement, pairs=True)
    except InputError:  # partners cannot share nodes
        pairs, costs = False, source.costs(schedule.placement)
    candidates = [balance(schedule, costs, slowdown=SLOWDOWNS[0])]
    peaks = simulate_pipeline(candidates[0], costs).peak_bytes
    if memory_bytes is not None and max(peaks) > memory_bytes:
        candidates.append(balance(schedule, costs, slowdown=SLOWDOWNS[1]))
    balanced = [
        _simulated(source, candidate, memory_bytes, pairs=pairs)
        for candidate in candidates
        if candidate.acceptors
    ]
    return min(balanced, key=lambda compared: compared.peak_bytes, default=None)


def _simulated(
    source: StageSource, schedule: PipelineSchedule, memory_bytes: int | None, *, pairs: bool
) -> ComparedSchedule:
    """Return a schedule with its simulation, and the ends of the interval of its step."""
    placement = schedule.placement
    costs = source.costs(placement, pairs=pairs)
    low_us, high_us = (
        simulate_pipeline(schedule, stages_at_end.costs(placement, pairs=pairs)).step_us
        + stages_at_end.optimizer_us(placement)
        for stages_at_end in (source.at("low"), source.at("high"))
    )
    return ComparedSchedule(
        name=schedule.name,
        schedule=schedule,
        costs=costs,
        simulation=simulate_pipeline(schedule, costs),
        memory_bytes=memory_bytes,
        optimizer_us=source.optimizer_us(placement),
        low_us=low_us,
        high_us=high_us,
    )
