"""Comparison of two databases, such as of two commits, or of two devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench._dataframe import Tabular, columns_of
from tunebench.db.figures import answer_order
from tunebench.db.reader import Reader
from tunebench.db.record import SpaceKey
from tunebench.db.staleness import installed_revision
from tunebench.device import Device
from tunebench.errors import ConfigError, InputError
from tunebench.space import Config

__all__ = ["ComparedTime", "DatabaseComparison", "best_answers", "compare_databases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTime:
    """Best known time of a workload in two databases.

    Attributes:
        workload: Canonical text.
        before_device: `Device.key` in the first database.
        after_device: `Device.key` in the second one.
        kind: ``"measured"`` or ``"predicted"``, the same in both.
        before_us: Best time in the first database, in microseconds.
        after_us: Best time in the second one.
        before_ci_us: 95 % confidence interval of the first time; None for a prediction.
        after_ci_us: That of the second time.
        tolerance: Ratio of times above 1 that is no regression, such as 0.05.
    """

    workload: str
    before_device: str
    after_device: str
    kind: str
    before_us: float
    after_us: float
    before_ci_us: tuple[float, float] | None
    after_ci_us: tuple[float, float] | None
    tolerance: float

    @property
    def speedup(self) -> float:
        """First time over the second one; higher is better."""
        return self.before_us / self.after_us

    @property
    def slowdown_ci(self) -> tuple[float, float] | None:
        """Confidence interval of the second time over the first one, 90 % or more; None for predictions.

        Both medians are within their 95 % intervals with a probability of at least 90 % (Bonferroni).
        """
        if self.before_ci_us is None or self.after_ci_us is None:
            return None
        return self.after_ci_us[0] / self.before_ci_us[1], self.after_ci_us[1] / self.before_ci_us[0]

    @property
    def verdict(self) -> str:
        """``"regression"``, ``"improvement"`` or ``"same"``: significant and beyond the tolerance."""
        between = self.slowdown_ci
        apart = between is None or not between[0] <= 1 <= between[1]
        if apart and self.after_us > self.before_us * (1 + self.tolerance):
            return "regression"
        if apart and self.before_us > self.after_us * (1 + self.tolerance):
            return "improvement"
        return "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseComparison(Tabular):
    """Workloads with a time in both databases, and those of only one.

    Attributes:
        before: Name of the first database.
        after: Name of the second one.
        times: Compared times, slowdowns first.
        missing: Workloads of the first database without a comparable time in the second one.
        new: Workloads of the second database without a comparable time in the first one.
    """

    before: str
    after: str
    times: tuple[ComparedTime, ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]

    def _columns(self) -> dict[str, list[object]]:
        names = ("workload", "before_device", "after_device", "kind", "before_us", "after_us")
        return columns_of(
            {name: getattr(time, name) for name in (*names, "speedup", "verdict")} for time in self.times
        )

    @property
    def regressions(self) -> tuple[ComparedTime, ...]:
        """Times that are slower beyond the tolerance."""
        return tuple(time for time in self.times if time.verdict == "regression")


AnswerKey = tuple[str, str, str | None, str]
"""Workload, kind, cache state, and the device; an empty device if devices are not distinguished."""


def compare_databases(
    before: Reader,
    after: Reader,
    *,
    tolerance: float = 0.05,
    workloads: Collection[str] = (),
    devices: Collection[str] = (),
    installed: bool = False,
    pair: tuple[str, str] | None = None,
) -> DatabaseComparison:
    """Compare the best known times of two databases, or of two devices of one database.

    Devices that are in both databases are compared with themselves. If there is none, each database must have
    one device, and these two are compared.

    Args:
        before: The first database.
        after: The second one; it may be the same.
        tolerance: Ratio of times above 1 that is no regression.
        workloads: Canonical texts of the only workloads; empty for all.
        devices: Keys of the only devices, each compared with itself; empty for all.
        installed: Whether to leave out results of the second database whose source differs from that of the
            installed variants.
        pair: Key of the only device of each database, to compare two devices; None as above.

    Raises:
        InputError: the databases share no device, and one of them has several.
    """
    of_first, of_second = (devices, devices) if pair is None else ((pair[0],), (pair[1],))
    first, second = _answers(before, workloads, of_first), _answers(after, workloads, of_second)
    keys_of = {row["device"] for row in first}, {row["device"] for row in second}
    shared = pair is None and (bool(devices) or bool(keys_of[0] & keys_of[1]))
    if not shared and any(len(keys) > 1 for keys in keys_of):
        raise InputError(
            f"expected databases with a common device, or with one device each; {before.location} has "
            f"{', '.join(sorted(keys_of[0]))} and {after.location} has {', '.join(sorted(keys_of[1]))}"
        )
    if installed:
        second = _installed(after, second)
    old, new = _fastest(first, shared=shared), _fastest(second, shared=shared)
    times = [_compared(old[key], new[key], tolerance) for key in old.keys() & new.keys()]
    return DatabaseComparison(
        before=_name(before, pair and pair[0]),
        after=_name(after, pair and pair[1]),
        times=tuple(sorted(times, key=lambda time: (time.speedup, time.workload))),
        missing=tuple(sorted({key[0] for key in old.keys() - new.keys()})),
        new=tuple(sorted({key[0] for key in new.keys() - old.keys()})),
    )


def best_answers(
    reader: Reader, *, workloads: Collection[str] = (), devices: Collection[str] = ()
) -> list[Mapping[str, Any]]:
    """Return the row of the fastest current answer for each workload, device, cache state and kind of time.

    Args:
        reader: The database.
        workloads: Canonical texts of the only workloads; empty for all.
        devices: Keys of the only devices; empty for all.
    """
    answers = _fastest(_installed(reader, _answers(reader, workloads, devices)), shared=True)
    return [row for _, row in sorted(answers.items(), key=lambda item: str(item[0]))]


def _name(reader: Reader, device: str | None) -> str:
    return str(reader.location) if device is None else f"{device} of {reader.location}"


def _answers(
    reader: Reader, workloads: Collection[str] = (), devices: Collection[str] = ()
) -> list[Mapping[str, Any]]:
    return [
        row
        for row in reader.answers()
        if row["time_us"] is not None
        and (not workloads or row["workload"] in workloads)
        and (not devices or row["device"] in devices)
    ]


def _installed(reader: Reader, rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows with the source of the installed variants; without the variant, those not stale."""
    devices = {key: Device(**fields) for key, fields in reader.descriptors().items()}

    def is_current(row: Mapping[str, Any]) -> bool:
        space = SpaceKey(device=row["device"], workload=row["workload"], variant=row["variant"])
        revision = installed_revision(space, devices[row["device"]])
        if revision is None:
            return not row["stale"]
        try:
            return bool(revision(Config(row["config_values"])) == row["revision"])
        except ConfigError:
            return False

    return [row for row in rows if is_current(row)]


def _fastest(rows: list[Mapping[str, Any]], *, shared: bool) -> dict[AnswerKey, Mapping[str, Any]]:
    fastest: dict[AnswerKey, Mapping[str, Any]] = {}
    for row in rows:
        key = (row["workload"], row["kind"], row["cache"], row["device"] if shared else "")
        if key not in fastest or answer_order(row) < answer_order(fastest[key]):
            fastest[key] = row
    return fastest


def _compared(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> ComparedTime:
    return ComparedTime(
        workload=old["workload"],
        before_device=old["device"],
        after_device=new["device"],
        kind=old["kind"],
        before_us=old["time_us"],
        after_us=new["time_us"],
        before_ci_us=_interval(old),
        after_ci_us=_interval(new),
        tolerance=tolerance,
    )


def _interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    return None if row["ci_low_us"] is None else (row["ci_low_us"], row["ci_high_us"])
