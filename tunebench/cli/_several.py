"""Tuning one problem after the other: where it stands, and what was found for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from tunebench.cli._output import console, emit, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.tuning import Plan, Progress, Report
    from tunebench.workload import Workload

__all__ = ["INTERRUPTED", "several"]

INTERRUPTED = 130


def several(
    problems: Sequence[Workload], device: Device | str | None, db: str | None, plan: Plan, *, as_json: bool
) -> None:
    """Tune problems one after the other, and tell what was found for each."""
    from tunebench.tuning import tune_all

    reports: list[Report] = []
    with _progress(len(problems), reports) as watcher:
        for report in tune_all(problems, device=device, db=db, plan=plan, watcher=watcher):
            reports.append(report)
    emit(as_json, [report.to_json() for report in reports], lambda to: _render(reports, len(problems), to))
    if reports and reports[-1].interrupted:
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _progress(total: int, done: list[Report]) -> Iterator[Callable[[Workload, Progress], None]]:
    """Show on stderr which problem is at work: a live line on a terminal, a plain line for each elsewhere."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    to = console(stderr=True)
    if not to.is_terminal:
        shown: set[str] = set()

        def tell(problem: Workload, progress: Progress) -> None:
            if str(problem) not in shown:
                shown.add(str(problem))
                to.print(f"{len(shown)}/{total}: {problem}", soft_wrap=True)

        yield tell
        return
    with Bar(TextColumn("{task.description}"), BarColumn(bar_width=20), console=to, transient=True) as bar:
        task = bar.add_task("starting workers", total=total)

        def watch(problem: Workload, progress: Progress) -> None:
            share = progress.done / progress.total if progress.total else 0.0
            text = f"{len(done) + 1}/{total} {problem}: {progress.phase} {progress.done}/{progress.total}"
            bar.update(task, description=text, completed=len(done) + share)

        yield watch


def _render(reports: Sequence[Report], total: int, to: Console) -> None:
    rows = [
        (
            report.workload,
            _time(report.median_us),
            _ratio(report.default_us, report.median_us),
            "default" if report.is_default else report.variant,
        )
        for report in reports
    ]
    to.print(table("workload", ">best", ">default takes", "", rows=rows))
    if len(reports) < total or any(report.interrupted for report in reports):
        to.print(f"{total - len(reports)} of {total} were not begun; the same command goes on from here")


def _time(us: float | None) -> str:
    return "none succeeded" if us is None else f"{us:.2f} us"


def _ratio(other_us: float | None, best_us: float | None) -> str | None:
    return None if other_us is None or best_us is None else f"{other_us / best_us:.2f}x"
