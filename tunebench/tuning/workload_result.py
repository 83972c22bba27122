"""What tuning a suite tells: where it stands while it goes on, and in the end what became of each problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tunebench.tuning.report import Progress, Report

__all__ = ["State", "SuiteProgress", "SuiteReport", "SuiteWatcher", "WorkloadResult"]

State = Literal["tuned", "known", "failed", "unsuited", "left"]
"""What became of a problem: trials were made; it got none, and what was known stands; no configuration
succeeded, or an error ended it; no variant can do it; not come to.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteProgress:
    """Where tuning a suite stands; given to the watcher after every trial.

    Attributes:
        workload: The problem whose turn it is.
        done: Trials of all problems that are done.
        total: The budget.
        model_us: What the suite takes now: the sum of count times best time, as far as one is known.
        predicted: How many problems have no time yet: in `model_us` they have the one that is predicted of
            their best configurations.
        progress: Of that problem.
    """

    workload: str
    done: int
    total: int
    model_us: float
    predicted: int
    progress: Progress


SuiteWatcher = Callable[[SuiteProgress], None]
"""Is told where tuning a suite stands, after every trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """One problem of a suite.

    Attributes:
        workload: Canonical text.
        layers: Names of the layers that it is.
        count: How often the suite runs it.
        state: What became of it.
        reason: Why it failed or is unsuited; empty otherwise.
        trials: Trials that it was given, by interrupted runs that this one takes up as well.
        before_us: Time of what was served at the beginning, as it was timed again beside the best in the end,
            if it was. Where nothing was, that of what one would ship untuned: the default of the variant that
            is predicted fastest.
        after_us: Time of what is served in the end.
        share: Part of the suite's time in the end that is spent on it.
        report: What its run found; None if it was not begun.
    """

    workload: str
    layers: tuple[str, ...]
    count: int
    state: State
    reason: str = ""
    trials: int = 0
    before_us: float | None = None
    after_us: float | None = None
    share: float | None = None
    report: Report | None = None

    @property
    def time_us(self) -> float:
        """What the suite spends on it in the end; 0 if it has no time."""
        return self.count * (self.after_us or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """What became of a suite.

    Attributes:
        suite: Its name.
        device: Key of the device.
        database: Where the records are.
        how: ``"measured"``, or ``"predicted"`` if the device is not here.
        parts: Its problems, those that the suite spends most time on first, then those without a time.
        total: The budget of trials.
        interrupted: Whether it was stopped by hand, or its workers were lost.
        stopped: Why it ended early, where it was not asked to.
        cut_short: Whether its time was up before its budget was spent.
        wall_s: How long it took.
    """

    suite: str
    device: str
    database: str
    how: Literal["measured", "predicted"]
    parts: tuple[WorkloadResult, ...]
    total: int
    interrupted: bool
    stopped: str | None
    cut_short: bool
    wall_s: float

    @property
    def trials(self) -> int:
        """Trials that were made, by interrupted runs that this one takes up as well."""
        return sum(part.trials for part in self.parts)

    @property
    def after_us(self) -> float:
        """What the suite takes in the end; problems without a time are left out, and `without` tells them."""
        return sum(part.time_us for part in self.parts)

    @property
    def before_us(self) -> float:
        """What the same problems took at the beginning; one without a time then has that of the end."""
        known = (part for part in self.parts if part.after_us is not None)
        return sum(part.count * (part.before_us or part.after_us or 0.0) for part in known)

    @property
    def without(self) -> tuple[WorkloadResult, ...]:
        """Problems that have no time in the end."""
        return tuple(part for part in self.parts if part.after_us is None)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "parts"
        }
        totals = {"trials": self.trials, "before_us": self.before_us, "after_us": self.after_us}
        return {**data, **totals, "parts": [_plain(part) for part in self.parts]}


def _plain(part: WorkloadResult) -> dict[str, Any]:
    told = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {**told, "report": part.report.to_json() if part.report is not None else None}
