"""The summary of tuning several workloads: one result per workload, and totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunebench._console import as_text
from tunebench._dataframe import Tabular, columns_of
from tunebench._deprecation import renamed_fields
from tunebench._notebook import folded_text
from tunebench.tuning.report_text import html_summary, render_summary
from tunebench.tuning.workload_report import Report

__all__ = ["TuningSummary", "WorkloadResult", "WorkloadStatus"]

WorkloadStatus = Literal["tuned", "known", "failed", "unsuited", "left"]
"""Status of a workload: trials were made; tuned before; no configuration succeeded; no variant supports it;
the run ended before its turn.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """Result of one workload of a weighted list.

    Attributes:
        workload: Canonical text of the workload.
        count: Number of calls: per inference of a suite, or recorded in a profile.
        state: Status of the workload.
        layers: Names of the layers of a suite that are this workload.
        reason: Why it failed or is unsuited; empty otherwise.
        trials: Trials given to it, including those of interrupted runs that this run resumed.
        before_us: Time of the best record before the run, timed again with the finalists if possible, in
            microseconds. Without a record, time of the default of the variant that is predicted fastest.
        after_us: Time of the best configuration after the run, in microseconds.
        share: Fraction of the suite's time spent on it after the run.
        recorded_us: Time spent on it in a profile, all calls together, in microseconds.
        report: Report of its run; None if it was not tuned.
    """

    workload: str
    count: int
    state: WorkloadStatus
    layers: tuple[str, ...] = ()
    reason: str = ""
    trials: int = 0
    before_us: float | None = None
    after_us: float | None = None
    share: float | None = None
    recorded_us: float = 0.0
    report: Report | None = None

    @property
    def time_us(self) -> float:
        """Time of all calls after the run, in microseconds; 0 without a time."""
        return self.count * (self.after_us or 0.0)

    def to_json(self, names: dict[str, str]) -> dict[str, Any]:
        """Return some fields as plain data; `names` holds the JSON name of each."""
        data = {name: getattr(self, field) for field, name in names.items()}
        return {**data, "report": self.report.to_json() if self.report is not None else None}


_SUITE_FIELDS = ("workload", "layers", "count", "state", "reason", "trials", "before_us", "after_us", "share")
_PROFILE_FIELDS = {
    "workload": "workload",
    "count": "calls",
    "recorded_us": "time_us",
    "state": "state",
    "reason": "reason",
}


@renamed_fields({"items": "results", "parts": "results", "suite": "name", "time_us": "recorded_us"})
@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSummary(Tabular):
    """Summary of tuning a suite or a profile.

    Attributes:
        kind: ``"suite"`` or ``"profile"``.
        name: Name of the suite; empty for a profile.
        device: Key of the device.
        database: Location of the records.
        how: ``"measured"``, or ``"predicted"`` if the device is absent.
        results: Result of each workload. Of a suite: the most time first, then those without a time. Of a
            profile: in the order of tuning, then those that were not tuned, the most time first.
        total: Budget of the suite, in trials.
        interrupted: Whether the user stopped the run, or its workers were lost.
        stopped: Why the run ended early, if not by the user.
        cut_short: Whether the time limit ended the run before the budget was spent.
        wall_s: Wall time, in seconds.
    """

    kind: Literal["suite", "profile"]
    device: str
    database: str
    results: tuple[WorkloadResult, ...]
    interrupted: bool
    wall_s: float
    name: str = ""
    how: Literal["measured", "predicted"] = "measured"
    total: int = 0
    stopped: str | None = None
    cut_short: bool = False

    def __str__(self) -> str:
        """Return the summary as `tunebench tune` prints it."""
        return as_text(lambda to: render_summary(self, to))

    def _repr_html_(self) -> str:
        """Return the summary for notebooks."""
        return html_summary(self) + folded_text("summary", str(self))

    def _columns(self) -> Mapping[str, Sequence[object]]:
        names = (
            "workload",
            "count",
            "state",
            "reason",
            "trials",
            "before_us",
            "after_us",
            "share",
            "recorded_us",
        )
        return columns_of(
            {name: getattr(result, name) for name in names}
            | {name: getattr(result.report, name, None) for name in ("variant", "gap")}
            | {"config": str(result.report.config) if result.report is not None else None}
            for result in self.results
        )

    def of(self, state: WorkloadStatus) -> tuple[WorkloadResult, ...]:
        """Return the results with a status."""
        return tuple(result for result in self.results if result.state == state)

    @property
    def trials(self) -> int:
        """Trials of all workloads, including those of interrupted runs that this run resumed."""
        return sum(result.trials for result in self.results)

    @property
    def after_us(self) -> float:
        """Time of one run of the suite after tuning, in microseconds, without the workloads in `without`."""
        return sum(result.time_us for result in self.results)

    @property
    def before_us(self) -> float:
        """Time of the same workloads before tuning, in microseconds; where unknown, that after tuning."""
        timed = (result for result in self.results if result.after_us is not None)
        return sum(result.count * (result.before_us or result.after_us or 0.0) for result in timed)

    @property
    def without(self) -> tuple[WorkloadResult, ...]:
        """Results without a time."""
        return tuple(result for result in self.results if result.after_us is None)

    @property
    def recorded_us(self) -> float:
        """Time of all workloads in the profile, in microseconds."""
        return sum(result.recorded_us for result in self.results)

    @property
    def covered(self) -> float:
        """Fraction of the profile's time in workloads that are tuned, now or before."""
        done_us = sum(result.recorded_us for result in (*self.of("tuned"), *self.of("known")))
        return done_us / self.recorded_us if self.recorded_us else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        if self.kind == "profile":
            names: tuple[str, ...] = ("device", "database", "interrupted", "wall_s")
            totals = {"time_us": self.recorded_us, "covered": self.covered}
            results = {"items": [result.to_json(_PROFILE_FIELDS) for result in self.results]}
        else:
            names = ("device", "database", "how", "total", "interrupted", "stopped", "cut_short", "wall_s")
            totals = {"trials": self.trials, "before_us": self.before_us, "after_us": self.after_us}
            fields = {name: name for name in _SUITE_FIELDS}
            results = {"parts": [result.to_json(fields) for result in self.results]}
        named = {"suite": self.name} if self.kind == "suite" else {}
        return {**named, **{name: getattr(self, name) for name in names}, **totals, **results}


def with_shares(results: list[WorkloadResult]) -> tuple[WorkloadResult, ...]:
    """Return results with their shares of the total time, the most time first."""
    total_us = sum(result.time_us for result in results)
    shared = [
        dataclasses.replace(result, share=result.time_us / total_us)
        if result.after_us is not None
        else result
        for result in results
    ]
    return tuple(sorted(shared, key=lambda result: -result.time_us))
