"""What queries for people return: devices, workloads, trials and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from tunebench.db.claim import CLAIM_S
from tunebench.db.figures import Figures
from tunebench.db.owner import is_dead

__all__ = [
    "Answer",
    "Changes",
    "Cursor",
    "DeviceEntry",
    "FailureEntry",
    "HistoryPoint",
    "RunEntry",
    "RunProgress",
    "RunState",
    "StaleGroup",
    "TrialEntry",
    "TrialFilter",
    "TrialPage",
    "TrialRow",
    "WorkloadEntry",
]

RunState = Literal["running", "silent", "interrupted", "finished", "failed", "imported"]
"""State of a run. A silent one has no end and measured nothing for long, on another machine."""

Cursor = tuple[Any, int]
"""Place in an ordered list: the value it is ordered by, and the id of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """A device: id of its row, `Device.key`, kind, architecture, product, SMs, and stored fields."""

    id: int
    key: str
    kind: str
    architecture: str
    product: str
    sm_count: int
    descriptor: Mapping[str, Any]

    @property
    def has_assumed_rates(self) -> bool:
        """Whether its rates are assumed (see `Device.assumed`)."""
        return bool(self.descriptor.get("assumed"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row of the view `answer_v1`: what `lookup` may return for a workload on a device.

    Attributes:
        trial_id: Id of the trial.
        variant: `Variant.key`.
        config: Text of the configuration.
        stale: Whether the source has changed since.
        kind: ``"measured"`` or ``"predicted"``.
        cache: Cache state; None for a prediction.
        verification: How the result was verified.
        time_us: Time, in microseconds.
        ci_us: 95 % confidence interval; None for a prediction.
        bound_us: Lower bound of the configuration; None if unknown.
        recorded_at: Time of the record.
        is_default: Whether it is the default configuration of its variant.
        figures: Comparison with the default and with baselines.
    """

    trial_id: int
    variant: str
    config: str
    stale: bool
    kind: str
    cache: str | None
    verification: str | None
    time_us: float
    ci_us: tuple[float, float] | None
    bound_us: float | None
    recorded_at: datetime
    is_default: bool
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadEntry:
    """The records of one workload on one device.

    Attributes:
        device_id: Id of the device's row.
        workload: Canonical text.
        trials: Number of trials; `stale` and `claimed` are parts of it.
        stale: Trials whose source has changed since.
        claimed: Trials that a tuner has claimed and not measured.
        measurements: Number of measurements; `measured`, `predicted` and `failed` are parts of it.
        measured: Measurements with a measured time.
        predicted: Measurements with a predicted time.
        failed: Measurements that failed.
        fastest_us: Fastest measured time, verified or not; None without one.
        least_bound_us: Lowest lower bound of any measurement; None if unknown.
        newest_at: Time of the newest measurement; None without one.
        answers: What `lookup` may return, best first.
    """

    device_id: int
    workload: str
    trials: int = 0
    stale: int = 0
    claimed: int = 0
    measurements: int = 0
    measured: int = 0
    predicted: int = 0
    failed: int = 0
    fastest_us: float | None = None
    least_bound_us: float | None = None
    newest_at: datetime | None = None
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """State of a database, to find later which workloads have changed.

    Attributes:
        file: Device and inode of an SQLite file, which differ if it was replaced; None for a server.
        newest: Id of the newest measurement; 0 without one.
        runs: Number of runs.
        stale: Number of stale trials, and sum of their ids.
        claimed: Number of claimed trials.
    """

    file: tuple[int, int] | None = None
    newest: int = 0
    runs: int = 0
    stale: tuple[int, int] = (0, 0)
    claimed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleGroup:
    """Number of stale trials of one variant for one workload on one device."""

    device_id: int
    workload: str
    variant: str
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEntry:
    """Failures of a run with the same outcome class and reason, and their number."""

    kind: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """One measurement in the history of a workload; `time_us` of an aborted one is its fastest sample."""

    id: int
    trial_id: int
    variant: str
    config: str
    purpose: str
    kind: str
    time_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """Selection of trials; an empty text selects all.

    Attributes:
        variant: `Variant.key`.
        kind: Outcome class, or ``"claimed"``.
        source: ``"current"`` or ``"stale"``.
        config: Part of the text of the configuration.
        run: Id of the run that measured them.
    """

    variant: str = ""
    kind: str = ""
    source: str = ""
    config: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEntry:
    """A trial, without its measurements; `state` is ``"claimed"`` or ``"done"``."""

    id: int
    device_id: int
    workload: str
    variant: str
    revision: str
    config: str
    config_values: Mapping[str, Any]
    state: str
    stale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial with one of its measurements: the newest finalist with a time, or else the newest with a time.

    The columns of the measurement are None, and `kind` is ``"claimed"``, if there is none yet.
    """

    id: int
    variant: str
    config: str
    stale: bool
    kind: str
    purpose: str | None
    time_us: float | None
    ci_us: tuple[float, float] | None
    bound_us: float | None
    reason: str | None
    recorded_at: datetime | None
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """A page of trials, and whether there are more before and after it."""

    rows: tuple[TrialRow, ...]
    before: bool
    after: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run.

    Attributes:
        measurements: Number of its measurements.
        searched: Measurements of its search: without finalists and audits.
        failed: Measurements that failed.
        best_us: Best time of its finalists, else its fastest measured or predicted time; None without one.
        least_bound_us: Lowest lower bound of its measurements; None if unknown.
        bound_us: Lower bound of all its configurations, as its records state it; None if they do not.
        newest_at: Time of the newest measurement; None without one.
        claimed: Configurations that are compiled or measured now.
    """

    measurements: int = 0
    searched: int = 0
    failed: int = 0
    best_us: float | None = None
    least_bound_us: float | None = None
    bound_us: float | None = None
    newest_at: datetime | None = None
    claimed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run of `tune`, or an import; `budget_trials` is None if the run has no such budget."""

    id: str
    device_id: int
    workload: str
    sampler: str
    seed: int
    host: str
    versions: Mapping[str, Any]
    started_at: datetime
    finished_at: datetime | None
    budget_trials: int | None
    masked: int
    cached: int
    wall_s: float
    options: Mapping[str, Any] | None
    progress: RunProgress = field(default_factory=RunProgress)

    def state(self, now: datetime) -> RunState:
        """Return the state of the run.

        Args:
            now: Time of the database.
        """
        if self.sampler == "import":
            return "imported"
        if self.finished_at is not None:
            has_time = self.progress.best_us is not None or self.cached > 0
            return "failed" if self.progress.failed and not has_time else "finished"
        if is_dead(self.host):
            return "interrupted"
        newest = self.progress.newest_at or self.started_at
        is_active = self.progress.claimed > 0 or now - newest < timedelta(seconds=CLAIM_S)
        return "running" if is_active else "silent"
