"""Records that the store takes and returns: dataclasses that need no SQLAlchemy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tunebench.db.figures import BaselineComparison, Figures
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import (
    FAILURES,
    CacheState,
    Effort,
    Outcome,
    Resources,
    Result,
    WrongResult,
    from_json,
    time_us,
    to_json,
)
from tunebench.space import Config

if TYPE_CHECKING:
    from tunebench.cache_file import RejectedEntry

__all__ = [
    "MAX_FAULTS",
    "PURPOSES",
    "RECORDED",
    "Demand",
    "FastestSample",
    "ImportResult",
    "InterruptedRun",
    "MeasuredSpace",
    "MeasurementBatch",
    "NewMeasurement",
    "Purpose",
    "Record",
    "RunStart",
    "RunSummary",
    "SpaceKey",
    "Stats",
    "StoredRun",
    "TrialKey",
    "TrialOutcome",
    "Verdict",
    "VersusDefault",
    "default_record",
    "figures_of",
    "outcome_from_row",
    "result_columns",
]

Purpose = Literal["search", "finalist", "audit"]
"""Reason for a measurement: search, comparison of finalists, or audit of a pruned configuration."""

RECORDED = "recorded:"
"""Prefix of the workload text of recorded tuning spaces; no operator has this name."""

AUTOTUNED = "/autotune"
"""End of the variants of `tunebench.triton.autotune`: only the program with the kernel knows its source."""

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

MAX_FAULTS = 1000
"""Rejected rows of an imported file that are kept with their reason."""


VersusDefault = Literal["itself", "faster", "not faster"]
"""Comparison with the variant's default: the default itself, significantly faster, or not faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of a configuration with others.

    Attributes:
        versus_default: Comparison with the variant's default; None if unknown.
        comparison: Baselines it was compared with, and confidence intervals; plain data, empty if there are
            none.
    """

    versus_default: VersusDefault | None = None
    comparison: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceKey:
    """Search space of one variant for one workload on one device.

    Attributes:
        device: `Device.key`.
        workload: Canonical text.
        variant: `Variant.key`.
    """

    device: str
    workload: str
    variant: str

    def __str__(self) -> str:
        return f"{self.variant} for {self.workload} on {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialKey:
    """Identity of a trial: a result is valid for exactly this key.

    Attributes:
        device: `Device.key`; includes the number of SMs and the power limit.
        workload: Canonical text.
        variant: `Variant.key`.
        revision: `Variant.revision` of the configuration: a hash of the source that was compiled.
        config: A point of the variant's space, with parameters in the space's order.
    """

    device: str
    workload: str
    variant: str
    revision: str
    config: Config

    @property
    def space(self) -> SpaceKey:
        """Return the search space of the trial."""
        return SpaceKey(device=self.device, workload=self.workload, variant=self.variant)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Start of a run of `tune` on one workload.

    Attributes:
        device: Device that is tuned for; its full description is stored.
        workload: Canonical text.
        sampler: Name of the sampler.
        seed: Seed of all random choices of the run.
        host: Machine and process of the run (see `tunebench.db.new_owner`).
        versions: Versions of tunebench, compilers and drivers; for an import, the name of the file.
        budget_trials: Most trials of the run, without those of its earlier, interrupted attempts; None if it
            has no such budget.
        options: Every option of the run by name, as plain data; None if it is not a run of `tune`.
    """

    device: Device
    workload: str
    sampler: str
    seed: int
    host: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    budget_trials: int | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedRun:
    """A run of a workload on a device that ended early, after the last finished run with the same options.

    Attributes:
        id: Id of the run.
        started_at: Start, UTC.
        trials: Number of its search trials whose source has not changed since.
        sampler: Name of the sampler.
        seed: Seed of the run.
        options: Every option of the run by name; None for a run of an earlier version.
    """

    id: str
    started_at: datetime
    trials: int
    sampler: str
    seed: int
    options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run of `tune` with its device and its options.

    Attributes:
        id: Id of the run.
        device: `Device.key`.
        descriptor: Stored fields of the device.
        workload: Canonical text.
        options: Every option of the run by name; None for an import, or a run of an earlier version.
    """

    id: str
    device: str
    descriptor: Mapping[str, Any]
    workload: str
    options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """End of a run of `tune` on one workload.

    Attributes:
        masked: Configurations that were never run because their lower bound exceeded the incumbent.
        cached: Configurations whose outcome was already in the database.
        wall_s: Wall time of the run, in seconds.
        effort: Sum over the trials of the run; compilation may overlap measurement.
        overhead_s: Wall time without compilation, verification or measurement, in seconds.
    """

    masked: int = 0
    cached: int = 0
    wall_s: float = 0.0
    effort: Effort = dataclasses.field(default_factory=Effort)
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Outcome of one trial for a resumed search: the one its search measured, or else the newest.

    Attributes:
        config: The configuration.
        revision: Hash of the compiled source; with another revision the trial must be measured again.
        outcome: The outcome.
        bound_us: Lower bound when it was measured, in microseconds; None if unknown.
        purpose: Reason for the measurement.
        resources: Resources of the binary; empty if it did not compile.
    """

    config: Config
    revision: str
    outcome: Outcome
    bound_us: float | None
    purpose: Purpose
    resources: Resources = Resources()


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestSample:
    """Fastest sample of one measurement.

    Attributes:
        config: The configuration.
        revision: Hash of the compiled source.
        cache: Cache state; None for aborted measurements, which do not store it.
        fastest_us: The sample, in microseconds.
        bound_us: Lower bound when it was measured, in microseconds; None if unknown.
        resources: Resources of the binary.
    """

    config: Config
    revision: str
    cache: CacheState | None
    fastest_us: float
    bound_us: float | None
    resources: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMeasurement:
    """A measurement to store.

    Attributes:
        key: Its trial.
        result: Outcome, resources, effort and conditions.
        purpose: Reason for the measurement.
        bound_us: Lower bound when it was measured, in microseconds; None if unknown.
        seed: Seed of the inputs.
        recorded_at: Time of the measurement in the database it comes from. `Store.add` skips it if the trial
            has a later measurement. None is the current time and is never skipped.
        verdict: Comparison with other configurations.
    """

    key: TrialKey
    result: Result
    purpose: Purpose = "search"
    bound_us: float | None = None
    seed: int | None = None
    recorded_at: datetime | None = None
    verdict: Verdict = Verdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementBatch:
    """Measurements of one workload on one device, to store in one run.

    Attributes:
        start: The run.
        measurements: The measurements, oldest first.
    """

    start: RunStart
    measurements: tuple[NewMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Result of importing a file.

    Attributes:
        file: Path of the file.
        spaces: Search spaces of its rows.
        added: Number of new rows.
        known: Number of rows that the database already contained.
        faults: Rejected rows with the reason, at most `MAX_FAULTS`.
        refused: Number of rejected rows.
    """

    file: Path
    spaces: tuple[SpaceKey, ...]
    added: int
    known: int
    faults: tuple[RejectedEntry, ...]
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpace:
    """A search space with measurements, for a warm start.

    Attributes:
        device: `Device.key`.
        architecture: Architecture of the device.
        workload: Canonical text.
        variant: `Variant.key`.
        count: Number of configurations that were run, failures included; predictions do not count.
    """

    device: str
    architecture: str
    workload: str
    variant: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Time that programs spent on a workload on one device.

    Attributes:
        workload: Canonical text.
        calls: Number of calls.
        time_us: Time of all calls, in microseconds.
        first_noted_at: Time of the first count; None for counts that are not stored yet.
        last_noted_at: Time of the last count.

    Raises:
        InputError: if `calls` is less than 1, or `time_us` is negative or not finite.
    """

    workload: str
    calls: int
    time_us: float
    first_noted_at: datetime | None = None
    last_noted_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.calls < 1 or not 0 <= self.time_us < math.inf:
            raise InputError(
                f"demand of {self.workload}: expected calls >= 1 and a finite time, "
                f"got {self.calls} calls in {self.time_us} us"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stored measurement.

    Attributes:
        id: Row id; ids ascend in the order of recording.
        key: Its trial.
        purpose: Reason for the measurement.
        result: Outcome, resources, effort and conditions.
        bound_us: Lower bound when it was measured, in microseconds; None if unknown.
        seed: Seed of the inputs.
        run_id: Run that measured it.
        recorded_at: Time of the commit, UTC.
        stale: Whether the variant's source has changed since (see `Store.recheck`).
        verdict: Comparison with other configurations.
    """

    id: int
    key: TrialKey
    purpose: Purpose
    result: Result
    bound_us: float | None
    seed: int | None
    run_id: str | None
    recorded_at: datetime
    stale: bool
    verdict: Verdict = Verdict()

    @property
    def violates_bound(self) -> bool:
        """Whether the fastest sample is below the recorded lower bound: one of the two is wrong."""
        samples_us = getattr(self.result.outcome, "samples_us", ())
        return bool(samples_us) and self.bound_us is not None and min(samples_us) < self.bound_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of a database.

    Attributes:
        database: Path, or URL without password.
        revision: Schema revision.
        devices: Keys of the devices.
        workloads: Number of distinct workloads.
        runs: Number of runs.
        trials: Number of trials with at least one measurement.
        recorded: Number of these trials that come from recorded tuning spaces.
        claimed: Number of trials that are claimed by a running or a dead tuner.
        stale: Number of trials whose source has changed since they were measured.
        outcomes: Number of measurements of each outcome class.
        violations: Number of measurements whose fastest sample is below their lower bound.
        effort: Sum over all measurements except those of recorded tuning spaces.
    """

    database: str
    revision: str
    devices: tuple[str, ...]
    workloads: int
    runs: int
    trials: int
    recorded: int
    claimed: int
    stale: int
    outcomes: Mapping[str, int]
    violations: int
    effort: Effort


_OWN_COLUMNS = ("kind", "median_us", "predicted_us", "samples_us", "cache", "reason", "metrics")


def figures_of(best: Record, records: Iterable[Record]) -> Figures:
    """Return the figures of a best record.

    If the default of its variant was not timed in the same rounds, as in a search without finalists, its
    newest record of the same kind and cache state is compared instead, without a confidence interval.

    Args:
        best: The record.
        records: All records of its workload and device, oldest first.
    """
    best_us = time_us(best.result.outcome)
    figures = Figures.of(best.verdict.comparison, best_us)
    default = default_record(best, records)
    if figures.default is not None or default is None or default.key == best.key or not best_us:
        return figures
    default_us = time_us(default.result.outcome)
    assert default_us is not None, default
    versus = BaselineComparison(ratio=default_us / best_us, low=0.0, high=None, time_us=default_us)
    return dataclasses.replace(figures, default=versus)


def default_record(best: Record, records: Iterable[Record]) -> Record | None:
    """Return the newest record of the default of a variant that is comparable with its best, if any.

    As in `answer_v1`, a default that failed since, or ever had a wrong result, has none.

    Args:
        best: The best record.
        records: All records of its workload and device, oldest first.
    """
    if best.verdict.versus_default == "itself":
        return best
    kind, cache = best.result.outcome.kind, getattr(best.result.outcome, "cache", None)
    newest, wrong = None, set()
    for record in records:
        outcome = record.result.outcome
        if record.key.variant != best.key.variant or record.stale != best.stale:
            continue
        if isinstance(outcome, WrongResult):
            wrong.add(record.key)
        same_kind = outcome.kind == kind and getattr(outcome, "cache", None) == cache
        if same_kind and record.verdict.versus_default == "itself":
            newest = record
        elif isinstance(outcome, FAILURES) and newest is not None and newest.key == record.key:
            newest = None
    return None if newest is None or newest.key in wrong else newest


def result_columns(result: Result) -> dict[str, Any]:
    """Return a result as columns of table `measurement`; fields without a column become `detail`."""
    detail = to_json(result.outcome)
    columns = {name: detail.pop(name, None) for name in _OWN_COLUMNS}
    columns["ci_low_us"], columns["ci_high_us"] = detail.pop("ci_us", (None, None))
    verification = detail.pop("verification", {})
    columns["verification"] = verification.pop("how", None)
    if verification:
        detail["verification"] = verification
    return {
        **columns,
        "fastest_us": min(columns["samples_us"], default=None) if columns["samples_us"] is not None else None,
        **dataclasses.asdict(result.effort),
        "detail": detail,
        "resources": {k: v for k, v in dataclasses.asdict(result.resources).items() if v is not None},
        "conditions": dict(result.conditions),
    }


def outcome_from_row(row: Mapping[Any, Any]) -> Outcome:
    """Return the outcome of a row written by `result_columns`."""
    data = dict(row["detail"])
    data |= {name: row[name] for name in _OWN_COLUMNS if row[name] is not None}
    if row["ci_low_us"] is not None:
        data["ci_us"] = (row["ci_low_us"], row["ci_high_us"])
    if row["verification"] is not None:
        data["verification"] = {"how": row["verification"], **data["verification"]}
    return from_json(data)


def result_from_row(row: Mapping[Any, Any]) -> Result:
    """Return the result of a row written by `result_columns`."""
    return Result(
        outcome=outcome_from_row(row),
        resources=Resources(**row["resources"]),
        effort=Effort(compile_s=row["compile_s"], verify_s=row["verify_s"], measure_s=row["measure_s"]),
        conditions=row["conditions"],
    )


def record_from_row(row: Mapping[Any, Any]) -> Record:
    """Return the record of a row of measurement, trial and device."""
    return Record(
        id=row["id"],
        key=TrialKey(
            device=row["key"],
            workload=row["workload"],
            variant=row["variant"],
            revision=row["revision"],
            config=Config(row["config_values"]),
        ),
        purpose=row["purpose"],
        result=result_from_row(row),
        bound_us=row["bound_us"],
        seed=row["seed"],
        run_id=row["run_id"],
        recorded_at=row["recorded_at"],
        stale=row["stale"],
        verdict=Verdict(versus_default=row["versus_default"], comparison=row["comparison"] or {}),
    )


def measurement_row(measurement: NewMeasurement, run_id: str | None) -> dict[str, Any]:
    """Return the columns of table `measurement` except `trial_id` and `recorded_at`.

    `record_from_row` is the inverse.
    """
    verdict = measurement.verdict
    return {
        "run_id": run_id,
        "purpose": measurement.purpose,
        "bound_us": measurement.bound_us,
        "seed": measurement.seed,
        "versus_default": verdict.versus_default,
        "comparison": dict(verdict.comparison) or None,
        **result_columns(measurement.result),
    }
