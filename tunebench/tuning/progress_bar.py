"""The progress of tuning on stderr or in a notebook: one renderer for all kinds of tuning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tunebench._console import console, is_quiet, is_verbose, printable
from tunebench._figure import significant
from tunebench.tuning.report_text import pool_parts, time_of

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.tuning.workload_report import Progress, ProgressCallback

__all__ = ["show_progress"]


@contextlib.contextmanager
def show_progress(total: int | None = None) -> Iterator[ProgressCallback]:
    """Show the progress of tuning: one live line per device, otherwise a plain line now and then.

    Lines are live on a terminal, and in a notebook with `ipywidgets`. On the command line,
    `-q` shows none, and `-v` a line per trial.

        with tunebench.show_progress() as watcher:
            report = tunebench.tune("gemm:m=64,n=64,k=64,dtype=f32", watcher=watcher)

    Args:
        total: Trials of the first phase; None if unknown.

    Yields:
        The progress callback.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    to = console(stderr=True)
    if is_quiet():
        yield lambda progress: None
        return
    live = find_spec("ipywidgets") is not None if to.is_jupyter else to.is_terminal
    if is_verbose() or not live:
        yield _plain_lines(console(stderr=not to.is_jupyter, notebook=False))
        return
    step = TextColumn("{task.description}", markup=False)
    noted = TextColumn("{task.fields[note]}", markup=False)
    with Bar(step, BarColumn(bar_width=20), MofNCompleteColumn(), noted, console=to, transient=True) as bar:
        lines = {"": bar.add_task("search", total=total, note="starting workers")}

        def show(progress: Progress) -> None:
            if progress.device not in lines:  # the first device takes over the initial line
                first = lines.pop("", None)
                lines[progress.device] = bar.add_task("search", note="") if first is None else first
            description, done, total = _step(progress, several=len(lines) > 1)
            line = lines[progress.device]
            description, note = printable(description), printable(_note(progress))
            bar.update(line, description=description, completed=done, total=total, note=note)

        yield show


def _plain_lines(to: Console) -> ProgressCallback:
    """Return a callback that prints a line for each new phase and each tenth of it, or for each trial."""
    shown: dict[str, tuple[object, ...]] = {}

    def show(progress: Progress) -> None:
        tenth = 0 if progress.trials_total else 10 * progress.done // max(1, progress.total)
        if is_verbose():
            tenth = progress.trials_done or progress.done
        step = (tenth, progress.index, progress.workload, progress.phase, progress.waiting)
        if step != shown.get(progress.device):
            shown[progress.device] = step
            description, done, total = _step(progress, several=len(shown) > 1)
            latest = f"{progress.latest}; " if is_verbose() and progress.latest else ""
            to.print(f"{description} {done}/{total}: {latest}{_note(progress)}", soft_wrap=True)

    return show


def _step(progress: Progress, *, several: bool) -> tuple[str, int, int]:
    """Return a description of the current step, and the finished and total trials."""
    device = f"{progress.device}: " if several else ""
    if progress.trials_total:  # a suite: trials of all workloads
        part = f" {progress.done}/{progress.total}" if progress.phase != "search" else ""
        return (
            f"{device}{progress.phase}{part} {progress.workload}",
            progress.trials_done,
            progress.trials_total,
        )
    position = f"{progress.index}/{progress.count} {progress.workload} " if progress.count else ""
    return f"{device}{position}{progress.phase}", progress.done, progress.total


def _note(progress: Progress) -> str:
    if progress.waiting:
        return progress.waiting
    parts = []
    if progress.trials_total:
        predicted = f" ({progress.predicted} of {progress.count} predicted)" if progress.predicted else ""
        parts.append(f"model {time_of(progress.model_us)}{predicted}")
    parts += [f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(progress.outcomes.items())]
    if progress.masked:
        parts.append(f"{progress.masked} pruned by bound")
    if progress.unlikely:
        parts.append(f"{progress.unlikely} unlikely")
    if progress.elsewhere:
        parts.append(f"{progress.elsewhere} warm-start records")
    if progress.cached:
        parts.append(f"{progress.cached} known")
    if progress.pool is not None:
        parts += pool_parts(progress.pool)
    if progress.best_us is not None:
        parts.append(f"best {time_of(progress.best_us)}")
        if progress.bound_us > 0:
            parts.append(f"{significant(progress.best_us / progress.bound_us, 3)}x the bound")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts) or "starting workers"
