"""Two searches, or the results of two workloads, side by side: best time, convergence, parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunebench.db.browse import DeviceEntry, HistoryPoint, TrialEntry
from tunebench.report.dashboard.catalogue import Line
from tunebench.report.dashboard.history import timed_points
from tunebench.report.dashboard.search_state import Search
from tunebench.report.search_chart import best_so_far

__all__ = [
    "WITHIN",
    "Side",
    "option_rows",
    "outcome_rows",
    "parameter_rows",
    "side_of_line",
    "side_of_search",
]

WITHIN = 1.05
"""Ratio to the best time within which a search counts as converged."""

_TIMED = ("measured", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two compared searches.

    Attributes:
        kind: ``"search"``, or ``"workload"`` for all measurements of a workload on a device.
        href: URL of its page.
        workload: Canonical text.
        device: The device; None if its row is missing.
        state: State of the search, or how the time of the workload is known.
        best_us: Best time, in microseconds; None without one.
        ci_us: 95 % confidence interval of the best time; None if unknown.
        bound_us: Lowest lower bound of its measurements; None if unknown.
        bound_ratio: Best time over `bound_us`; None without either.
        failed: Measurements that failed.
        points: Its measurements, oldest first.
        facts: Other facts, as texts by name.
        options: Options of the search; None if they are unknown.
        best: Trial of the best time; None without one.
    """

    kind: str
    href: str
    workload: str
    device: DeviceEntry | None
    state: str
    best_us: float | None
    ci_us: tuple[float, float] | None
    bound_us: float | None
    bound_ratio: float | None
    failed: int
    points: Sequence[HistoryPoint]
    facts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    best: TrialEntry | None = None

    @property
    def best_trial(self) -> int | None:
        """Id of the first trial that reached `best_us`; None without one."""
        reached = (
            point.trial_id
            for point in self.points
            if point.kind in _TIMED and point.time_us == self.best_us and self.best_us is not None
        )
        return next(reached, None)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Number of measurements of each outcome class."""
        return Counter(point.kind for point in self.points)

    @property
    def converged_us(self) -> float | None:
        """Fastest time of its measurements, finalists included; None without one."""
        steps = best_so_far(timed_points(self.points))
        return steps[-1][1] if steps else None

    def measurements_to(self, target_us: float | None) -> int | None:
        """Return the number of measurements until a time was reached; None if it never was."""
        steps = best_so_far(timed_points(self.points))
        return next((trial for trial, us in steps if target_us is not None and us <= target_us), None)


def side_of_search(search: Search, points: Sequence[HistoryPoint]) -> Side:
    """Return a search as one side of a comparison.

    Args:
        search: The search.
        points: Its measurements, oldest first.
    """
    run = search.run
    return Side(
        kind="search",
        href=f"/searches/{run.id}",
        workload=run.workload,
        device=search.device,
        state=search.state,
        best_us=run.progress.best_us,
        ci_us=None,
        bound_us=search.bound_us,
        bound_ratio=search.bound_ratio,
        failed=run.progress.failed,
        points=points,
        facts={"sampler": run.sampler, "seed": f"{run.seed}", "excluded by their bound": f"{run.masked:,}"},
        options=run.options,
    )


def side_of_line(line: Line, href: str, points: Sequence[HistoryPoint]) -> Side:
    """Return the results of a workload on a device as one side of a comparison.

    Args:
        line: The workload on the device.
        href: URL of its page.
        points: Its measurements, oldest first.
    """
    return Side(
        kind="workload",
        href=href,
        workload=line.entry.workload,
        device=line.device,
        state=line.how or "none",
        best_us=line.time_us,
        ci_us=line.best.ci_us if line.best is not None else None,
        bound_us=line.bound_us,
        bound_ratio=line.bound_ratio,
        failed=line.entry.failed,
        points=points,
    )


def option_rows(first: Side, second: Side) -> list[tuple[str, str, str]]:
    """Return the options in which two searches differ, as texts; none if they are not known of both."""
    if first.options is None or second.options is None:
        return []
    names = dict.fromkeys([*first.options, *second.options])
    rows = [(name, first.options.get(name), second.options.get(name)) for name in names]
    return [
        (name.replace("_", " "), _text(before), _text(after))
        for name, before, after in rows
        if before != after and name not in ("sampler", "seed")
    ]


def _text(value: object) -> str:
    """Return the value of an option; a dash for none."""
    if value is None or value == [] or value == {}:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def parameter_rows(first: Side, second: Side) -> list[tuple[str, Any, Any]]:
    """Return the parameters of both best configurations, those that differ first; None where one has none."""
    values = [
        {"variant": side.best.variant, **side.best.config_values} if side.best else {}
        for side in (first, second)
    ]
    names = dict.fromkeys([*values[0], *values[1]])
    rows = [(name, values[0].get(name), values[1].get(name)) for name in names]
    return sorted(rows, key=lambda row: row[1] == row[2])


def outcome_rows(first: Side, second: Side) -> Iterator[tuple[str, int, int]]:
    """Yield each outcome class with its number of measurements on both sides."""
    counts = first.outcomes, second.outcomes
    for kind in sorted({*counts[0], *counts[1]}):
        yield kind, counts[0].get(kind, 0), counts[1].get(kind, 0)
