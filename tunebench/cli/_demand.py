"""What `tunebench tune --recorded` prints for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunebench.cli._output import table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.tuning import DemandReport

__all__ = ["render"]


def render(report: DemandReport, to: Console) -> None:
    """Print what became of the recorded problems, and how much of the recorded time is covered."""
    to.print(f"recorded on {report.device}", soft_wrap=True)
    tuned = report.of("tuned")
    if tuned:
        header = (">recorded", ">share", ">calls", "tuned now", ">best", "variant")
        to.print(table(*header, rows=_rows(report)))
    for line in _counts(report):
        to.print(line, soft_wrap=True)
    to.print(f"  covered  {100 * report.covered:.1f} % of {_time(report.time_us)} recorded")
    to.print(f"  database {report.database}", soft_wrap=True)


def _rows(report: DemandReport) -> Iterator[tuple[object, ...]]:
    for item in report.of("tuned"):
        found = item.report
        assert found is not None
        is_default = " (the default)" if found.is_default else ""
        share = f"{100 * item.time_us / report.time_us:.1f} %" if report.time_us else None
        best = _time(found.median_us) if found.median_us is not None else None
        yield _time(item.time_us), share, item.calls, item.workload, best, f"{found.variant}{is_default}"


def _counts(report: DemandReport) -> Iterator[str]:
    known, left = report.of("known"), report.of("left")
    if known:
        yield f"  known    {len(known)} tuned already with today's sources; --again tunes them, too"
    for item in report.of("unsuited"):
        yield f"  unsuited {item.workload}: {item.reason}"
    if left:
        yield f"  left     {len(left)}; the same command goes on with them"


def _time(us: float) -> str:
    """Return a time for people; those of programs may be long."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= 10 * size:
            return f"{us / size:.2f} {unit}"
    return f"{us:.2f} us"
