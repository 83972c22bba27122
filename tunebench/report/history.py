"""Search history of one workload on one device, from the records of a database."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from tunebench import device as known_devices
from tunebench._dataframe import Tabular, columns_of
from tunebench.db.figures import BaselineComparison, Figures
from tunebench.db.goal_record import completed_record, goal_records, stored_goal
from tunebench.db.reader import MOST_ANSWERS, Reader
from tunebench.db.record import Record, RunSummary, TrialKey, default_record, figures_of
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.objective import TIME, TIME_ONLY, Goal, quantities_of
from tunebench.outcome import FAILURES, Effort, Measured, Outcome, Predicted, first_error, time_us
from tunebench.report.lower_bound import shown_bound_us, shown_ratio
from tunebench.workload import Workload
from tunebench.workloads import parse

if TYPE_CHECKING:
    from tunebench.report.best_kernel import BestKernel

__all__ = [
    "ParameterEffect",
    "SearchHistory",
    "best_records",
    "record_us",
    "search_histories",
    "search_history",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEffect:
    """Effect of one parameter of a variant on time.

    Attributes:
        variant: `Variant.key`.
        name: Name of the parameter.
        importance: Share of the variance of log time that the parameter alone explains, in [0, 1].
        medians_us: Median time of the trials with each value, in microseconds, by value.
        times_us: Times of the trials with each value, in microseconds, by value.
    """

    variant: str
    name: str
    importance: float
    medians_us: Mapping[str, float]
    times_us: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHistory(Tabular):
    """Every record of one workload on one device.

    Attributes:
        workload: Canonical text.
        device: `Device.key`.
        records: The records, oldest first.
        versions: `RunStart.versions` of the newest run.
        runs: Summary of each finished run, newest first.
        described: The device; None if its description has another form.
        answers: Ids of the records that `lookup` may return, best first; a replayed search has none.
        optimum_us: Least time of a recorded tuning space that replaced the device, in microseconds.
        kernel: What is known of the best configuration (`tunebench.report.with_best_kernels`).
        goal: Objectives, requirements and metrics of the newest run.
    """

    workload: str
    device: str
    records: tuple[Record, ...]
    versions: Mapping[str, str]
    runs: tuple[RunSummary, ...] = ()
    described: Device | None = None
    answers: tuple[int, ...] = ()
    optimum_us: float | None = None
    kernel: BestKernel | None = None
    goal: Goal = TIME_ONLY

    def _columns(self) -> dict[str, list[object]]:
        return columns_of(_row(trial, record) for trial, record in enumerate(self.records, start=1))

    @property
    def best(self) -> Record | None:
        """The record that `lookup` returns, or else the fastest measured one that was not verified."""
        if self.answers:
            return next((record for record in self.records if record.id == self.answers[0]), None)
        unverified = (
            record
            for record in self.records
            if isinstance(record.result.outcome, Measured)
            and record.result.outcome.verification.how == "not verified"
        )
        return min(unverified, key=record_us, default=None)

    @property
    def completed(self) -> list[Record]:
        """The records of the kind and cache state of the best, with the metrics of the goal, oldest first."""
        kinds = [record.result.outcome.kind for record in self.records]
        other: type[Outcome] = Predicted if Measured.kind in kinds else Measured
        best = self.best
        cache = getattr(best.result.outcome, "cache", None) if best is not None else None
        return [
            completed_record(record, self.goal)
            for record in self.records
            if not isinstance(record.result.outcome, other)
            and getattr(record.result.outcome, "cache", cache) in (cache, None)
        ]

    @property
    def front(self) -> list[Record]:
        """The best of the goal, or its Pareto front, the best of the first objective first."""
        return goal_records(self.completed, self.goal)

    @property
    def figures(self) -> Figures:
        """Comparison of the best with the default and with baselines; empty without a best."""
        best = self.best
        return Figures() if best is None else figures_of(best, self.records)

    @property
    def default(self) -> Record | None:
        """The newest record of the default configuration of the best record's variant."""
        return None if self.best is None else default_record(self.best, self.records)

    @property
    def baselines(self) -> Mapping[str, BaselineComparison]:
        """Comparison of the best with the default, as `default`, and with each baseline."""
        figures = self.figures
        default = {} if figures.default is None else {"default": figures.default}
        return {**default, **figures.baselines}

    @property
    def library_ratios(self) -> Mapping[str, float]:
        """Speedup of the best over each baseline, by name, the fastest baseline first."""
        return {name: versus.ratio for name, versus in self.figures.baselines.items()}

    @property
    def library_times_us(self) -> Mapping[str, float]:
        """Time of each baseline in the rounds of the best, in microseconds, the fastest first."""
        times = {name: versus.time_us for name, versus in self.figures.baselines.items()}
        return {name: us for name, us in times.items() if us is not None}

    @property
    def speedup(self) -> float | None:
        """Speedup of the best over the default; 1 for the default."""
        best = self.best
        is_default = best is not None and best.verdict.versus_default == "itself"
        return self.figures.speedup_over_default(is_default=is_default)

    @property
    def bound_ratio(self) -> float | None:
        """Best time divided by `bound_us`; at least 1 at measured rates, which a kernel may beat."""
        best_us = record_us(self.best) if self.best is not None else None
        return shown_ratio(best_us, self.bound_us, assumed=self._has_assumed_rates)

    @property
    def bound_us(self) -> float | None:
        """Lower bound of all configurations of the search, in microseconds.

        If no finalist states it, as in records of earlier versions, it is the lowest bound of the trials.
        None if that rests on assumed rates of the device.
        """
        least_us = min((record.bound_us for record in self.records if record.bound_us), default=None)
        return shown_bound_us(self.figures.bound_us, least_us, assumed=self._has_assumed_rates)

    @property
    def _has_assumed_rates(self) -> bool:
        return self.described is not None and self.described.assumed

    @property
    def overhead_s(self) -> float:
        """Wall time of the finished runs without compilation, verification or measurement, in seconds."""
        return math.fsum(run.overhead_s for run in self.runs)

    @property
    def effort(self) -> Effort:
        """Compilation, verification and measurement of all records."""
        efforts = [record.result.effort for record in self.records]
        return Effort(
            compile_s=math.fsum(effort.compile_s for effort in efforts),
            verify_s=math.fsum(effort.verify_s for effort in efforts),
            measure_s=math.fsum(effort.measure_s for effort in efforts),
        )

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Number of records of each outcome class."""
        return Counter(record.result.outcome.kind for record in self.records)

    @property
    def failures(self) -> list[tuple[str, str, int]]:
        """Outcome class, reason and number of each failure, most frequent first."""
        counts: Counter[tuple[str, str]] = Counter()
        for record in self.records:
            reason = getattr(record.result.outcome, "reason", None)
            if reason is not None:
                counts[record.result.outcome.kind, first_error(reason)] += 1
        return [(kind, reason, count) for (kind, reason), count in counts.most_common()]

    @property
    def effects(self) -> list[ParameterEffect]:
        """Effect of each parameter with several values, most important first within its variant."""
        by_variant: dict[str, list[Record]] = {}
        for record in best_records(self.records):
            by_variant.setdefault(record.key.variant, []).append(record)
        return [effect for variant, group in by_variant.items() for effect in _effects(variant, group)]


def best_records(records: Iterable[Record]) -> list[Record]:
    """Return one record with a time per trial, measured before predicted, then fastest first.

    A finalist measurement replaces search measurements of its trial, and a newer one an older one.

    Args:
        records: The records.
    """
    chosen: dict[TrialKey, Record] = {}
    for record in records:
        if time_us(record.result.outcome) is not None:
            before = chosen.get(record.key)
            if before is None or _weight(record) >= _weight(before):
                chosen[record.key] = record
    return sorted(chosen.values(), key=lambda record: (record.result.outcome.kind, record_us(record)))


def search_histories(
    reader: Reader,
    *,
    workloads: Collection[str] = (),
    devices: Collection[str] = (),
    goal: Goal | None = None,
) -> list[SearchHistory]:
    """Return the search histories of a database, by workload and device.

    Args:
        reader: The database.
        workloads: Canonical texts; none for all.
        devices: `Device.key` of each device; none for all.
        goal: Objectives of the reports. Default: those of the newest run of each workload.
    """
    pairs = {
        (space.workload, space.device): None
        for space in sorted(reader.spaces(), key=lambda space: (space.workload, space.device))
        if (not workloads or space.workload in workloads) and (not devices or space.device in devices)
    }
    described = reader.descriptors()
    histories = []
    for workload, key in pairs:
        versions = reader.versions(workload, key)
        histories.append(
            SearchHistory(
                workload=workload,
                device=key,
                records=tuple(reader.history(workload, key)),
                versions=versions[0] if versions else {},
                runs=tuple(reader.run_summaries(workload, key)),
                described=_device(described.get(key)),
                answers=tuple(answer.id for answer in reader.best(workload, key, limit=MOST_ANSWERS)),
                goal=goal if goal is not None else stored_goal(reader.run_options(workload, key)),
            )
        )
    return histories


def search_history(
    workload: Workload | str, *, device: Device | str | None = None, db: str | Path | None = None
) -> SearchHistory:
    """Return the search history of one workload on one device; `to_pandas` returns its trials.

    Args:
        workload: The workload, or its text.
        device: A device or its name (see `tunebench.device.find`). Default: the first GPU, else the CPU.
        db: Path or URL of the database. Default: the user's database.

    Raises:
        InputError: if the database has no record of them, or an argument is invalid.
        DatabaseError: if the database cannot be read.
    """
    text = str(parse(workload)) if isinstance(workload, str) else str(workload)
    key = (device if isinstance(device, Device) else known_devices.find(device)).key
    with open_store(db, read_only=True) as store:
        histories = search_histories(store, workloads=[text], devices=[key])
        if not histories:
            raise InputError(f"{store.location} has no record of {text} on {key}: tune it first")
    return histories[0]


def _device(descriptor: Mapping[str, Any] | None) -> Device | None:
    try:
        return Device(**descriptor) if descriptor is not None else None
    except TypeError:  # written by another version
        return None


def _row(trial: int, record: Record) -> dict[str, object]:
    outcome = record.result.outcome
    return {
        "trial": trial,
        "variant": record.key.variant,
        "outcome": outcome.kind,
        "purpose": record.purpose,
        "time_us": time_us(outcome),
        "bound_us": record.bound_us,
        "reason": first_error(outcome.reason) if isinstance(outcome, FAILURES) else None,
        "registers": record.result.resources.registers,
        "spill_bytes": record.result.resources.spill_bytes,
        **asdict(record.result.effort),
        "stale": record.stale,
        "recorded_at": record.recorded_at,
        **{f"metric.{name}": value for name, value in quantities_of(outcome).items() if name != TIME},
        **{f"config.{name}": value for name, value in record.key.config.items()},
    }


def _weight(record: Record) -> tuple[bool, int]:
    return record.purpose == "finalist", record.id


def record_us(record: Record) -> float:
    """Return the time of a record in microseconds; infinite without one."""
    us = time_us(record.result.outcome)
    return math.inf if us is None else us


def _effects(variant: str, records: Sequence[Record]) -> list[ParameterEffect]:
    """Return the effects of the parameters of one variant: one-way analysis of variance of log time."""
    logs = [math.log(record_us(record)) for record in records]
    center = fmean(logs)
    total = math.fsum((log - center) ** 2 for log in logs)
    effects = []
    for name in records[0].key.config:
        groups: dict[Any, list[float]] = {}
        for record, log in zip(records, logs, strict=True):
            groups.setdefault(record.key.config[name], []).append(log)
        if len(groups) == 1:
            continue
        between = math.fsum(len(group) * (fmean(group) - center) ** 2 for group in groups.values())
        ordered = sorted(groups, key=_numbers_first)
        effects.append(
            ParameterEffect(
                variant=variant,
                name=name,
                importance=between / total if total else 0.0,
                medians_us={str(value): math.exp(median(groups[value])) for value in ordered},
                times_us={str(value): tuple(map(math.exp, groups[value])) for value in ordered},
            )
        )
    return sorted(effects, key=lambda effect: -effect.importance)


def _numbers_first(value: Any) -> tuple[bool, float, str]:
    if isinstance(value, (int, float)):
        return False, float(value), ""
    return True, 0.0, str(value)
