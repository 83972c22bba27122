"""Comparison of two databases, such as of two commits or two devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebench.db.reader import Reader
from tunebench.errors import InputError

__all__ = ["ComparedTime", "DatabaseComparison", "compare_databases"]


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
    def verdict(self) -> str:
        """``"regression"``, ``"improvement"`` or ``"same"``: confidence intervals apart."""
        apart = True
        if self.before_ci_us is not None and self.after_ci_us is not None:
            first, second = self.before_ci_us, self.after_ci_us
            apart = first[1] < second[0] or second[1] < first[0]
        if apart and self.after_us > self.before_us * (1 + self.tolerance):
            return "regression"
        if apart and self.before_us > self.after_us * (1 + self.tolerance):
            return "improvement"
        return "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseComparison:
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

    @property
    def regressions(self) -> tuple[ComparedTime, ...]:
        """Times that are slower beyond the tolerance."""
        return tuple(time for time in self.times if time.verdict == "regression")


_Key = tuple[str, str, str | None, str]
"""Workload, kind, cache state, and the device if both databases have a common one."""


def compare_databases(before: Reader, after: Reader, *, tolerance: float = 0.05) -> DatabaseComparison:
    """Compare the best known times of two databases.

    Devices that are in both databases are compared with themselves. If there is none, each database must have
    one device, and these two are compared.

    Args:
        before: The first database.
        after: The second one.
        tolerance: Ratio of times above 1 that is no regression.

    Raises:
        InputError: the databases share no device, and one of them has several.
    """
    first, second = _answers(before), _answers(after)
    devices = {row["device"] for row in first}, {row["device"] for row in second}
    shared = bool(devices[0] & devices[1])
    if not shared and any(len(found) > 1 for found in devices):
        raise InputError(
            f"expected databases with a common device, or with one device each; {before.location} has "
            f"{', '.join(sorted(devices[0]))} and {after.location} has {', '.join(sorted(devices[1]))}"
        )
    old, new = _fastest(first, shared), _fastest(second, shared)
    times = [_compared(old[key], new[key], tolerance) for key in old.keys() & new.keys()]
    return DatabaseComparison(
        before=str(before.location),
        after=str(after.location),
        times=tuple(sorted(times, key=lambda time: (time.speedup, time.workload))),
        missing=tuple(sorted({key[0] for key in old.keys() - new.keys()})),
        new=tuple(sorted({key[0] for key in new.keys() - old.keys()})),
    )


def _answers(reader: Reader) -> list[Any]:
    return [row for row in reader.answers() if row["time_us"] is not None]


def _fastest(rows: list[Any], shared: bool) -> dict[_Key, Any]:
    found: dict[_Key, Any] = {}
    for row in rows:
        key = (row["workload"], row["kind"], row["cache"], row["device"] if shared else "")
        if key not in found or row["time_us"] < found[key]["time_us"]:
            found[key] = row
    return found


def _compared(old: Any, new: Any, tolerance: float) -> ComparedTime:
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


def _interval(row: Any) -> tuple[float, float] | None:
    return None if row["ci_low_us"] is None else (row["ci_low_us"], row["ci_high_us"])
