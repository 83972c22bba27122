"""Tuning the problems of a model together: where it stands, and what became of each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from tunebench.cli._output import console, emit, table
from tunebench.cli._report import time_of
from tunebench.cli._several import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.tuning import Plan, SuiteProgress, SuiteReport, WorkloadResult

__all__ = ["tune_suite"]


def tune_suite(
    suite: str,
    batch: int,
    device: Device | str | None,
    db: str | None,
    plan: Plan,
    trials: int | None,
    *,
    as_json: bool,
) -> None:
    """Tune a suite, and tell what became of it.

    Args:
        suite: Its name, or a file of one.
        batch: Samples that its network runs at once.
        device: Where.
        db: The database.
        plan: How.
        trials: The budget; None is 50 for each problem.
        as_json: Whether to print JSON.
    """
    from tunebench.errors import ClusterLost, TunebenchError
    from tunebench.tuning import default_trials
    from tunebench.tuning import tune_suite as tune

    if trials is None:
        plan = dataclasses.replace(plan, trials=default_trials(suite, batch, plan))
    with _progress(plan.trials) as watcher:
        report = tune(suite, batch=batch, device=device, db=db, plan=plan, watcher=watcher)
    for part in report.parts:
        for violation in part.report.violations if part.report is not None else ():
            console(stderr=True).print(f"warning: a bound is violated: {violation}", soft_wrap=True)
    emit(as_json, report.to_json(), lambda to: _render(report, to))
    if report.stopped is not None:
        raise ClusterLost(f"{report.stopped}; all that was found is kept, the same command goes on")
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if len(report.without) == len(report.parts) and not report.cut_short:
        raise TunebenchError(f"no configuration of any problem succeeded on {report.device}")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[SuiteProgress], None]]:
    """Show where it stands on stderr: a live line on a terminal, a plain line for every turn elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    to = console(stderr=True)
    if not to.is_terminal:
        yield _plain_lines(to)
        return
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=to, transient=True) as bar:
        task = bar.add_task("looking into the problems", total=total)

        def watch(now: SuiteProgress) -> None:
            bar.update(task, completed=now.done, description=f"{_note(now)}; {_turn(now)}")

        yield watch


def _plain_lines(to: Console) -> Callable[[SuiteProgress], None]:
    shown = ("", "", "")

    def watch(now: SuiteProgress) -> None:
        nonlocal shown
        turn = (now.workload, now.progress.phase, now.progress.waiting)
        if turn != shown:
            shown = turn
            to.print(f"{now.done}/{now.total} trials, {_note(now)}; {_turn(now)}", soft_wrap=True)

    return watch


def _note(now: SuiteProgress) -> str:
    predicted = f", {now.predicted} of its problems as predicted" if now.predicted else ""
    return f"model {time_of(now.model_us)}{predicted}"


def _turn(now: SuiteProgress) -> str:
    of = f" {now.progress.done}/{now.progress.total}" if now.progress.phase != "search" else ""
    best = f", best {time_of(now.progress.best_us)}" if now.progress.best_us is not None else ""
    return now.progress.waiting or f"{now.progress.phase}{of} {now.workload}{best}"


def _render(report: SuiteReport, to: Console) -> None:
    to.print(f"{report.suite} on {report.device}", soft_wrap=True)
    header = (">share", ">runs", "workload", ">trials", ">before", ">after", ">faster by", "variant")
    told = [part for part in report.parts if part.after_us is not None]
    if told:
        to.print(table(*header, rows=map(_row, told)))
        faster = f", {report.before_us / report.after_us:.2f}x" if report.after_us else ""
        how = " (predicted)" if report.how == "predicted" else ""
        before, after = time_of(report.before_us), time_of(report.after_us)
        to.print(f"  model    {before} before, {after} after{faster}{how}")
    for part in report.without:
        reason = part.reason or ("no configuration succeeded" if part.state == "failed" else "not come to")
        to.print(f"  {part.state:<8} {part.workload}: {reason}", soft_wrap=True)
    for part in told:
        if part.reason:
            to.print(f"  {part.state:<8} {part.workload}: {part.reason}", soft_wrap=True)
    to.print(f"  trials   {report.trials} of {report.total}{_why_fewer(report)}")
    to.print(f"  seconds  {report.wall_s:.1f}")
    to.print(f"  database {report.database}", soft_wrap=True)


def _row(part: WorkloadResult) -> tuple[object, ...]:
    found = part.report
    assert found is not None
    assert part.after_us is not None
    proved = found.optimality_proof is not None and found.optimality_proof.proved
    return (
        f"{100 * (part.share or 0.0):.1f} %",
        part.count,
        part.workload,
        f"{part.trials}{' (optimal)' if proved else ''}",
        time_of(part.before_us),
        time_of(part.after_us),
        f"{part.before_us / part.after_us:.2f}x" if part.before_us is not None else None,
        f"{found.variant}{' (the default)' if found.is_default else ''}",
    )


def _why_fewer(report: SuiteReport) -> str:
    if report.interrupted:
        return "; interrupted: all that was found is kept, the same command goes on from here"
    if report.cut_short:
        return "; the time was up: the same command goes on from here"
    return "; nothing is left that could be faster" if report.trials < report.total else ""
