"""Search history of one workload on one device, from the records of a database."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tunebench.db.reader import Reader
from tunebench.db.record import Record, TrialKey
from tunebench.outcome import Effort, first_error, time_us

__all__ = ["ParameterEffect", "SearchHistory", "best_records", "search_histories"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEffect:
    """Effect of one parameter of a variant on time.

    Attributes:
        variant: `Variant.key`.
        name: Name of the parameter.
        importance: Share of the variance of log time that the parameter alone explains, in [0, 1].
        medians_us: Median time of the trials with each value, in microseconds, by value.
    """

    variant: str
    name: str
    importance: float
    medians_us: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHistory:
    """Every record of one workload on one device.

    Attributes:
        workload: Canonical text.
        device: `Device.key`.
        records: The records, oldest first.
        versions: `RunStart.versions` of the newest run.
    """

    workload: str
    device: str
    records: tuple[Record, ...]
    versions: Mapping[str, str]

    @property
    def best(self) -> Record | None:
        """The fastest record that is not known to be no faster than the default; measured before predicted.

        Once finalists were measured, search measurements do not count: the minimum of many is biased low.
        """
        known = best_records(self.records)
        finalists = [record for record in known if record.purpose == "finalist"]
        candidates = finalists or known
        better = (record for record in candidates if record.verdict.versus_default != "not faster")
        return next(better, next(iter(candidates), None))

    @property
    def default(self) -> Record | None:
        """The newest record of the default configuration of the best record's variant."""
        best = self.best
        found = (
            record
            for record in reversed(self.records)
            if record.verdict.versus_default == "itself"
            and best is not None
            and record.key.variant == best.key.variant
            and record.result.outcome.kind == best.result.outcome.kind
        )
        return next(found, None)

    @property
    def baselines(self) -> Mapping[str, Mapping[str, Any]]:
        """Ratios of the times of the default and of libraries to the best: `ratio`, `low`, `high` or None."""
        best = self.best
        comparison = best.verdict.comparison if best is not None else {}
        default = {"default": comparison["default"]} if "default" in comparison else {}
        return {**default, **comparison.get("libraries", {})}

    @property
    def bound_us(self) -> float | None:
        """Lowest lower bound of the configurations that were run or predicted, in microseconds."""
        return min((record.bound_us for record in self.records if record.bound_us), default=None)

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
        found: Counter[tuple[str, str]] = Counter()
        for record in self.records:
            reason = getattr(record.result.outcome, "reason", None)
            if reason is not None:
                found[record.result.outcome.kind, first_error(reason)] += 1
        return [(kind, reason, count) for (kind, reason), count in found.most_common()]

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
    return sorted(chosen.values(), key=lambda found: (found.result.outcome.kind, _us(found)))


def search_histories(
    reader: Reader, *, workloads: Sequence[str] = (), device: str | None = None
) -> list[SearchHistory]:
    """Return the search histories of a database, by workload and device.

    Args:
        reader: The database.
        workloads: Canonical texts; none for all.
        device: `Device.key` of the only device; None for all.
    """
    pairs = {
        (space.workload, space.device): None
        for space in sorted(reader.spaces(), key=lambda space: (space.workload, space.device))
        if (not workloads or space.workload in workloads) and device in (None, space.device)
    }
    found = []
    for workload, key in pairs:
        versions = reader.versions(workload, key)
        records = tuple(reader.history(workload, key))
        found.append(
            SearchHistory(
                workload=workload, device=key, records=records, versions=versions[0] if versions else {}
            )
        )
    return found


def _weight(record: Record) -> tuple[bool, int]:
    return record.purpose == "finalist", record.id


def _us(record: Record) -> float:
    found = time_us(record.result.outcome)
    return math.inf if found is None else found


def _effects(variant: str, records: Sequence[Record]) -> list[ParameterEffect]:
    """Return the effects of the parameters of one variant: one-way analysis of variance of log time."""
    logs = [math.log(_us(record)) for record in records]
    center = fmean(logs)
    total = math.fsum((log - center) ** 2 for log in logs)
    found = []
    for name in records[0].key.config:
        groups: dict[Any, list[float]] = {}
        for record, log in zip(records, logs, strict=True):
            groups.setdefault(record.key.config[name], []).append(log)
        if len(groups) == 1:
            continue
        between = math.fsum(len(group) * (fmean(group) - center) ** 2 for group in groups.values())
        medians_us = {
            str(value): math.exp(median(groups[value])) for value in sorted(groups, key=_numbers_first)
        }
        importance = between / total if total else 0.0
        found.append(
            ParameterEffect(variant=variant, name=name, importance=importance, medians_us=medians_us)
        )
    return sorted(found, key=lambda effect: -effect.importance)


def _numbers_first(value: Any) -> tuple[bool, float, str]:
    if isinstance(value, (int, float)):
        return False, float(value), ""
    return True, 0.0, str(value)
