"""`tunebench check`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench.cli._option import (
    Devices,
    Json,
    ReadDatabase,
    Tolerance,
    VariantFiles,
    Workloads,
    target_device,
)
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import emit, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.reader import Reader
    from tunebench.report import ComparedTime, DatabaseComparison
    from tunebench.workload import Workload

__all__ = ["command"]

INTERRUPTED = 130
TRIALS = 20
"""Default number of trials per workload with --tune, in which those of the baseline are tried first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The arguments and options of `tunebench check`."""

    baseline: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Baseline: a file that --update wrote, an export as JSON Lines, or a database.",
        ),
    ]
    tolerance: Tolerance = 0.05
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Measure the workloads of the baseline on this machine now, instead of reading --db.",
        ),
    ] = False
    trials: Annotated[
        int, typer.Option(min=1, help="Configurations to launch per workload, with --tune.")
    ] = TRIALS
    update: Annotated[
        bool, typer.Option("--update", help="Write the current best records to the baseline file.")
    ] = False
    allow_missing: Annotated[
        bool,
        typer.Option("--allow-missing", help="Accept workloads of the baseline without a current result."),
    ] = False
    workload: Workloads = None
    device: Devices = None
    variant_file: VariantFiles = None
    db: ReadDatabase = None


@grouped_options("options", CheckOptions)
def command(
    options: CheckOptions,
    as_json: Json = False,
) -> None:
    """Compare best times with those of a baseline file; exit with 1 if a workload became slower.

    A regression is slower by more than the tolerance, with confidence intervals that do not overlap. Only
    results of the installed kernel sources count: a workload without any is missing, which is a failure, too.
    """
    from tunebench.report.baseline import open_baseline, write_baseline
    from tunebench.workloads import parse

    if options.tune and (options.db is not None or (options.device and len(options.device) > 1)):
        raise InputError("--tune measures on one device of this machine, in place of --db")
    texts = [str(parse(text)) for text in options.workload or ()]
    new = options.update and "://" not in options.baseline and not Path(options.baseline).exists()
    if new and options.tune:
        raise InputError(
            f"--tune needs a baseline: write {options.baseline} by --update without --tune first"
        )
    comparison: DatabaseComparison | None = None
    with contextlib.ExitStack() as stack:
        before = None if new else stack.enter_context(open_baseline(options.baseline))
        current = stack.enter_context(
            _current(before, options.db, texts, options.device, options.trials if options.tune else None)
        )
        keys = _devices(before, current, options.device)
        if before is not None:
            comparison = _compare(before, current, options.tolerance, texts, keys)
        if options.update:
            count = write_baseline(current, Path(options.baseline), workloads=texts, devices=keys)
    data: dict[str, Any] = {} if comparison is None else _describe(comparison)
    if options.update:
        data |= {"file": options.baseline, "written": count}
    emit(as_json, data, lambda to: _render(to, comparison, data))
    if (
        comparison is not None
        and not options.update
        and (comparison.regressions or (comparison.missing and not options.allow_missing))
    ):
        raise typer.Exit(1)


@contextlib.contextmanager
def _current(
    before: Reader | None,
    db: str | None,
    workloads: Sequence[str],
    device: Sequence[str] | None,
    trials: int | None,
) -> Iterator[Reader]:
    """Yield the database of the current results; with a number of trials, one that is measured now."""
    from tunebench.db.store import open_store

    if before is None or trials is None:
        with open_store(db, read_only=True) as store:
            yield store
        return
    from tunebench.report.baseline import tune_afresh
    from tunebench.tuning import Plan, Progress, show_progress

    with contextlib.ExitStack() as stack:
        with show_progress(trials) as show:
            seen: dict[Workload, int] = {}

            def numbered(workload: Workload, progress: Progress) -> None:
                index = seen.setdefault(workload, len(seen) + 1)
                show(dataclasses.replace(progress, index=index, count=max(index, progress.count)))

            plan = Plan(trials=trials, baselines=False)
            target = target_device(device[0] if device else None, None)
            fresh, reports = stack.enter_context(
                tune_afresh(before, target, plan, workloads=workloads, watcher=numbered)
            )
        if any(report.interrupted for report in reports):
            raise typer.Exit(INTERRUPTED)
        yield fresh


def _devices(before: Reader | None, current: Reader, names: Sequence[str] | None) -> set[str]:
    """Return the keys of the devices to compare: the named ones, or those of both databases."""
    from tunebench.db.exchange import device_keys

    current_devices = {space.device for space in current.spaces()}
    baseline_devices = current_devices if before is None else {space.device for space in before.spaces()}
    if names:
        return {key for name in names for key in device_keys(name, current_devices | baseline_devices)}
    if not current_devices & baseline_devices:
        raise InputError(
            f"the baseline and {current.location} have no device in common: the baseline has "
            f"{_listed(baseline_devices)}, and the database has {_listed(current_devices)}"
        )
    return current_devices & baseline_devices


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "no device"


def _compare(
    before: Reader, current: Reader, tolerance: float, workloads: Sequence[str], devices: set[str]
) -> DatabaseComparison:
    from tunebench.report import compare_databases

    comparison = compare_databases(
        before, current, tolerance=tolerance, workloads=workloads, devices=devices, installed=True
    )
    if not comparison.times and not comparison.missing:
        raise InputError("the baseline has no record of these workloads and devices")
    return comparison


def _describe(comparison: DatabaseComparison) -> dict[str, Any]:
    return {
        "times": [_time(time) for time in comparison.times],
        "regressions": len(comparison.regressions),
        "missing": list(comparison.missing),
        "new": list(comparison.new),
    }


def _time(time: ComparedTime) -> dict[str, Any]:
    return {
        "workload": time.workload,
        "device": time.after_device,
        "kind": time.kind,
        "baseline_us": time.before_us,
        "now_us": time.after_us,
        "slowdown": time.after_us / time.before_us,
        "slowdown_ci": time.slowdown_ci,
        "verdict": time.verdict,
    }


def _render(to: Console, comparison: DatabaseComparison | None, data: dict[str, Any]) -> None:
    from tunebench._figure import duration

    if comparison is not None and comparison.times:
        rows = [
            (
                time.verdict,
                time.workload,
                duration(time.before_us),
                duration(time.after_us),
                f"{time.after_us / time.before_us - 1:+.1%}",
                _interval(time),
                time.after_device,
            )
            for time in comparison.times
        ]
        to.print(
            table(
                "verdict", "workload", ">baseline", ">now", ">change", ">90 % interval", "device", rows=rows
            )
        )
    for text in comparison.missing if comparison is not None else ():
        to.print(f"missing: {text}: no result of the installed kernel sources; tune it", soft_wrap=True)
    for text in comparison.new if comparison is not None else ():
        to.print(f"new: {text}: not in the baseline; --update adds it", soft_wrap=True)
    if comparison is not None:
        to.print(
            f"{len(comparison.times)} compared: {len(comparison.regressions)} regressions, "
            f"{len(comparison.missing)} missing"
        )
    if "file" in data:
        to.print(f"baseline of {data['written']} records written to {data['file']}", soft_wrap=True)


def _interval(time: ComparedTime) -> str:
    between = time.slowdown_ci
    return "-" if between is None else f"[{between[0] - 1:+.1%}, {between[1] - 1:+.1%}]"
