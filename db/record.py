"""What the store takes and gives; plain data, so that callers need not import SQLAlchemy to build it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from tunebench.cache_file import RejectedRow
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import CacheState, Effort, Outcome, Resources, Result, from_json, to_json
from tunebench.space import Config

__all__ = [
    "MAX_FAULTS",
    "PURPOSES",
    "RECORDED",
    "Demand",
    "FastestSample",
    "ImportResult",
    "MeasuredSpace",
    "MeasurementBatch",
    "NewMeasurement",
    "Purpose",
    "Record",
    "RunStart",
    "RunSummary",
    "SpaceKey",
    "Stats",
    "TrialKey",
    "TrialOutcome",
    "Verdict",
    "VersusDefault",
    "outcome_from_row",
    "result_columns",
]

Purpose = Literal["search", "finalist", "audit"]
"""Why it was measured: to find a good one; to compare the best; to check a configuration that was pruned."""

RECORDED = "recorded:"
"""How the workload of what another tuner measured begins; no operator is called so."""

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

MAX_FAULTS = 1000
"""Rows that cannot be used of which it is kept why."""


VersusDefault = Literal["itself", "faster", "not faster"]
"""How a configuration stands to its variant's default: it is that, or beats it beyond noise, or does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What comparing a configuration with others has shown.

    Attributes:
        versus_default: How it stands to its variant's default; None if that is not known.
        comparison: With whom it was compared, and the confidence; plain data, empty if with nobody.
    """

    versus_default: VersusDefault | None = None
    comparison: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceKey:
    """One variant for one workload on one device: the trials that a search chooses among.

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
    """Identity of a trial: what must be equal for a result to stand.

    Attributes:
        device: `Device.key`, with the SM count and the power limit in it.
        workload: Canonical text.
        variant: `Variant.key`.
        revision: `Variant.revision` of this configuration: a hash of the source that was compiled.
        config: The point of the variant's space, in the space's order.
    """

    device: str
    workload: str
    variant: str
    revision: str
    config: Config

    @property
    def space(self) -> SpaceKey:
        """Return what it is a trial of."""
        return SpaceKey(device=self.device, workload=self.workload, variant=self.variant)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known when a tuner starts on one workload.

    Attributes:
        device: What it tunes for; its full description is stored.
        workload: Canonical text.
        sampler: Name of the sampler.
        seed: Seed of everything random in the run.
        host: Who drives it (see `tunebench.db.new_owner`): the machine and the process.
        versions: Versions of tunebench, compilers and drivers; of an import, the file it came from.
    """

    device: Device
    workload: str
    sampler: str
    seed: int
    host: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What is known when a tuner ends: configurations that cost nothing, and where the time went.

    Attributes:
        masked: Configurations never run because their bound exceeded the incumbent.
        cached: Configurations whose outcome was known already.
        wall_s: From start to end.
        effort: Sums over the trials of this run; compiling may overlap measuring.
        overhead_s: Wall time in which nothing was compiled, verified or measured.
    """

    masked: int = 0
    cached: int = 0
    wall_s: float = 0.0
    effort: Effort = dataclasses.field(default_factory=Effort)
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What resuming needs of one trial: the outcome its search saw, or else its newest.

    Attributes:
        config: The configuration.
        revision: Of the source it was compiled from; another revision means it must be timed anew.
        outcome: What became of it.
        bound_us: Its bound at the time, if there was one.
        purpose: Why it was measured.
        resources: What its binary uses, if it compiled.
    """

    config: Config
    revision: str
    outcome: Outcome
    bound_us: float | None
    purpose: Purpose
    resources: Resources = Resources()


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestSample:
    """The fastest sample of one run.

    Attributes:
        config: The configuration.
        revision: Of the source it was compiled from.
        cache: Cache state it was timed in; None where that is not told, of a run that was aborted.
        fastest_us: The sample.
        bound_us: Its bound at the time, if there was one.
        resources: What its binary uses.
    """

    config: Config
    revision: str
    cache: CacheState | None
    fastest_us: float
    bound_us: float | None
    resources: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMeasurement:
    """One measurement that was made elsewhere, to be stored with others at once.

    Attributes:
        key: The trial it belongs to.
        result: What became of it.
        purpose: Why it was measured.
        bound_us: Bound of this configuration at the time, if there was one.
        seed: Seed of its inputs.
        recorded_at: When it was recorded there; it is left out if its trial has a later one here. None is
            now, whatever is there.
        verdict: How it compared with others there.
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
    """Measurements of one workload on one device that were made elsewhere.

    Attributes:
        start: The run they are stored under.
        measurements: What to store, oldest first.
    """

    start: RunStart
    measurements: tuple[NewMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What became of a file.

    Attributes:
        file: Its path.
        spaces: What its rows are stored under.
        added: Rows that were not there yet.
        known: Rows that were.
        faults: Rows that cannot be used, the first `MAX_FAULTS` of them.
        refused: How many there are.
    """

    file: Path
    spaces: tuple[SpaceKey, ...]
    added: int
    known: int
    faults: tuple[RejectedRow, ...]
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpace:
    """Where configurations of a variant were run.

    Attributes:
        device: `Device.key`.
        architecture: Its architecture.
        workload: Canonical text.
        variant: `Variant.key`.
        count: How many of its configurations were run there, or failed to; predictions do not count.
    """

    device: str
    architecture: str
    workload: str
    variant: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much of a device's time programs spent on a workload.

    Attributes:
        workload: Canonical text.
        calls: How often it was run.
        time_us: How long it took, all calls together.
        first_noted_at: When it was noted for the first time; None of what is yet to be stored.
        last_noted_at: When it was noted last.

    Raises:
        InputError: unless there are calls and their time is a finite number.
    """

    workload: str
    calls: int
    time_us: float
    first_noted_at: datetime | None = None
    last_noted_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.calls < 1 or not 0 <= self.time_us < math.inf:
            raise InputError(f"{self.workload}: {self.calls} calls in {self.time_us} us cannot be noted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement with everything that was stored of it.

    Attributes:
        id: Ascends in the order of recording.
        key: The trial it belongs to.
        purpose: Why it was measured.
        result: Outcome, resources, effort and conditions.
        bound_us: Bound of this configuration at the time, if there was one.
        seed: Seed of its inputs.
        run_id: The run it came from.
        recorded_at: When it was committed, UTC.
        stale: Whether the variant's source has changed since (see `Store.recheck`).
        verdict: How it compared with others.
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
        """Whether its fastest sample is below the bound it was recorded with: one of the two is wrong."""
        samples_us = getattr(self.result.outcome, "samples_us", ())
        return bool(samples_us) and self.bound_us is not None and min(samples_us) < self.bound_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a database holds.

    Attributes:
        database: Its path, or its URL without password.
        revision: Revision of its schema.
        devices: Keys of the devices.
        workloads: Number of distinct workloads.
        runs: Number of runs.
        trials: Trials with at least one measurement.
        recorded: Those of them that another tuner made and recorded.
        claimed: Trials some tuner is at work on, or died at.
        stale: Trials whose source has changed since.
        outcomes: Number of measurements by class of outcome.
        violations: Measurements whose fastest sample is below the bound they were recorded with.
        effort: Sums over all measurements but those recorded by other tuners.
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


_OWN_COLUMNS = ("kind", "median_us", "predicted_us", "samples_us", "cache", "reason")


def result_columns(result: Result) -> dict[str, Any]:
    """Return a result as columns of `measurement`: what is asked for by query apart, the rest as `detail`."""
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
    """Rebuild an outcome from the columns `result_columns` made."""
    data = dict(row["detail"])
    data |= {name: row[name] for name in _OWN_COLUMNS if row[name] is not None}
    if row["ci_low_us"] is not None:
        data["ci_us"] = (row["ci_low_us"], row["ci_high_us"])
    if row["verification"] is not None:
        data["verification"] = {"how": row["verification"], **data["verification"]}
    return from_json(data)


def result_from_row(row: Mapping[Any, Any]) -> Result:
    """Rebuild a result from the columns `result_columns` made."""
    return Result(
        outcome=outcome_from_row(row),
        resources=Resources(**row["resources"]),
        effort=Effort(compile_s=row["compile_s"], verify_s=row["verify_s"], measure_s=row["measure_s"]),
        conditions=row["conditions"],
    )


def config_from_row(row: Mapping[Any, Any]) -> Config:
    """Rebuild a configuration from a row with `config_values`."""
    return Config(row["config_values"])


def record_from_row(row: Mapping[Any, Any]) -> Record:
    return Record(
        id=row["id"],
        key=TrialKey(
            device=row["key"],
            workload=row["workload"],
            variant=row["variant"],
            revision=row["revision"],
            config=config_from_row(row),
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
