"""`tunebench tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunebench.cli._option import Database, Json, OptionalProblem, StopAtGap, target_device
from tunebench.cli._output import console, emit
from tunebench.cli._report import fleet_of, render_all, time_of
from tunebench.cli._several import INTERRUPTED, several
from tunebench.cli._suite import tune_suite

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.tuning import Plan, Progress, Report, Turn

__all__ = ["command"]

TRIALS = 50
"""Of a problem, where the command line does not tell."""


def command(
    workload: OptionalProblem = None,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded", help="In place of --workload: what programs were recorded to run on the device."
        ),
    ] = False,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="In place of --workload: all problems of a model, with one budget that goes where it saves "
            "the model most time. A suite, or a file in the same form.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --suite: samples that its network runs at once. Default: 1.", show_default=False
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="cuda, cuda:1, cpu, offline, a described device, or a file. Default: GPU, else CPU. "
            "With --cluster more than once: devices of its workers."
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="With --device offline: the architecture, such as sm_90. With --cluster: one of its "
            "workers', or all."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Compile and measure on a Ray cluster: ray://HOST:10001, HOST:6379 or auto from one of its "
            "nodes, or local to start one here.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Distinct configurations of a problem to launch; known ones are free. With --suite, of all "
            "problems together. Default: 50, or 50 times the problems.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Begin no configuration of a problem after so many; with --recorded or --suite, of all "
            "together.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="With --recorded: also what is tuned with today's sources already."),
    ] = False,
    sampler: Annotated[str, typer.Option(help="surrogate, bound, random or tpe.")] = "surrogate",
    seed: Annotated[int, typer.Option(help="Seed of the search and of the inputs.")] = 0,
    variant: Annotated[
        list[str] | None, typer.Option(help="Try this variant only; may be given more than once.")
    ] = None,
    variant_file: Annotated[
        list[Path] | None, typer.Option(help="Try the variant of this Python file; likewise.")
    ] = None,
    cache: Annotated[
        str, typer.Option(help="cold: flush caches before each sample; warm: leave them as they are.")
    ] = "cold",
    timeout: Annotated[
        float, typer.Option(help="Seconds that verifying and timing one configuration may take.")
    ] = 60.0,
    workers: Annotated[int, typer.Option(help="Processes that compile; 0 is one for each core.")] = 0,
    stop_at_gap: StopAtGap = None,
    audit: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Run so many of what the bound prunes all the same, to check it: a share of the trials.",
        ),
    ] = 0.02,
    finalists: Annotated[int, typer.Option(help="How many of the best are timed again at the end.")] = 3,
    baselines: Annotated[bool, typer.Option(help="Time NumPy and torch at the end.")] = True,
    warm: Annotated[
        bool, typer.Option(help="Begin with what the database knows of other devices and related problems.")
    ] = True,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Pass over what is unlikely to win, by what was learned.")
    ] = False,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Find the fastest kernel and parameters for a workload, and remember them.

    A size may be a range: gemm:m=1..8192,n=64,k=64,dtype=f16 tunes m = 1, 2, 4 and so on up to 8192, and
    lookup serves every size between. The same command takes up an interrupted run where it stopped. Ctrl-C
    ends a run early and keeps all that was found. With --recorded it tunes what programs ran under
    `tunebench.torch.profile()`, one problem after the other, the most worth it first; with --suite, all
    problems of a model, in turns.
    """
    from tunebench.errors import InputError
    from tunebench.measure.timing import Protocol
    from tunebench.tuning import Plan

    _check_subject(workload, recorded, suite, again=again, cluster=cluster)
    if batch is not None and suite is None:
        raise InputError("--batch goes with --suite; the text of a workload has its sizes")
    here = _target(device, arch) if cluster is None else None
    wanted = [here] if here is not None else _in_cluster(device, arch)
    plan = Plan(
        trials=TRIALS if trials is None else trials,
        sampler=sampler,
        seed=seed,
        variants=tuple(variant or ()),
        variant_files=tuple(str(path) for path in variant_file or ()),
        protocol=Protocol(cache=_cache(cache)),
        offline=device == ["offline"],
        workers=workers,
        timeout_s=timeout,
        stop_at_gap=stop_at_gap,
        audit=audit,
        finalists=finalists,
        baselines=baselines,
        warm=warm,
        calibrated=calibrated,
        cluster=cluster,
        minutes=minutes,
    )
    if device is None and here is not None and here.kind == "cpu":
        note = "no GPU here: tuning for the CPU; --device offline --arch sm_90 tunes for an absent one"
        console(stderr=True).print(note)
    if suite is not None:
        tune_suite(suite, batch or 1, _one(wanted), db, plan, trials, as_json=as_json)
    elif here is not None and workload is None:
        _tune_recorded(here, db, plan, again=again, as_json=as_json)
    elif workload is not None:
        _tune_named(workload, wanted, db, plan, as_json=as_json)


def _check_subject(
    workload: str | None, recorded: bool, suite: str | None, *, again: bool, cluster: str | None
) -> None:
    from tunebench.errors import InputError

    given = [workload is not None, recorded, suite is not None]
    if sum(given) != 1:
        how = "exclude one another" if any(given) else "are all missing"
        raise InputError(
            f"--workload, --recorded and --suite {how}: give a problem, tune what programs were recorded to "
            "run, or name a model's problems"
        )
    if again and not recorded:
        raise InputError("--again goes with --recorded; a workload that is named is tuned in any case")
    if recorded and cluster is not None:
        raise InputError("--recorded tunes on this machine: leave --cluster out, or name a workload")


def _one(wanted: Sequence[Device | str | None]) -> Device | str | None:
    from tunebench.errors import InputError

    if len(wanted) != 1 or wanted == ["all"]:
        raise InputError("a suite is tuned for one device at a time: name it by --device")
    return wanted[0]


def _tune_named(
    workload: str, wanted: Sequence[Device | str | None], db: str | None, plan: Plan, *, as_json: bool
) -> None:
    """Tune one problem, or a family of them."""
    from tunebench.errors import InputError
    from tunebench.tuning import family, is_family, tune, tune_devices
    from tunebench.workloads import parse

    single = len(wanted) == 1 and wanted != ["all"]
    if is_family(workload):
        if not single:
            raise InputError("a range of sizes is tuned for one device at a time: name it by --device")
        several(family(workload), wanted[0], db, plan, as_json=as_json)
        return
    problem = parse(workload) if not plan.variant_files else workload
    with _progress(plan) as watcher:
        if single:
            reports = [tune(problem, device=wanted[0], db=db, plan=plan, watcher=watcher)]
        else:
            reports = tune_devices(problem, devices=wanted, db=db, plan=plan, watcher=watcher)
    for violation in (one for report in reports for one in report.violations):
        console(stderr=True).print(f"warning: a bound is violated: {violation}", soft_wrap=True)
    said = [report.to_json() for report in reports]
    emit(as_json, said[0] if single else said, lambda to: render_all(reports, to))
    _end(reports)


def _end(reports: list[Report]) -> None:
    """Leave with what the exit status is to tell."""
    from tunebench.errors import ClusterLost, TunebenchError

    for report in reports:
        if report.stopped is not None:
            raise ClusterLost(f"{report.stopped}; all that was found is kept, the same command goes on")
    if any(report.interrupted for report in reports):
        raise typer.Exit(INTERRUPTED)
    for report in reports:
        if report.config is None:
            raise TunebenchError(
                f"no configuration succeeded on {report.device}; `tunebench show` lists the failures by class"
            )


def _tune_recorded(target: Device, db: str | None, plan: Plan, *, again: bool, as_json: bool) -> None:
    from tunebench.cli._demand import render
    from tunebench.tuning import tune_recorded

    with _progress(plan) as watcher:

        def watch(turn: Turn, progress: Progress) -> None:
            watcher(progress, f"{turn.place}/{turn.total} {turn.workload} ")

        report = tune_recorded(device=target, db=db, plan=plan, again=again, watcher=watch)
    emit(as_json, report.to_json(), lambda to: render(report, to))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _cache(text: str) -> Literal["cold", "warm"]:
    from tunebench.errors import UnknownName

    if text not in ("cold", "warm"):
        raise UnknownName("cache state", text, ("cold", "warm"))
    return "cold" if text == "cold" else "warm"


def _in_cluster(device: list[str] | None, arch: str | None) -> list[Device | str | None]:
    """Return what is meant of the workers' devices; a file is one of them by its key."""
    from tunebench import datasheet
    from tunebench.cli._option import absent_device
    from tunebench.errors import InputError

    if device and arch is not None:
        raise InputError("--device and --arch exclude each other: a device has its architecture")
    names: list[str | None] = [*device] if device else [arch]
    return [absent_device(name) if name and datasheet.is_file(name) else name for name in names]


def _target(named: list[str] | None, arch: str | None) -> Device:
    from tunebench import device as devices
    from tunebench.errors import InputError

    if named is not None and len(named) > 1:
        raise InputError("several --device need --cluster: this machine tunes for one at a time")
    device = named[0] if named else None
    if device == "offline":
        if arch is None:
            known = ", ".join(devices.architectures())
            raise InputError(f"--device offline needs --arch; known: {known}")
        return devices.representative(arch)
    if arch is not None:
        raise InputError("--arch goes with --device offline; a described device has its own")
    return target_device(device, None)


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[Callable[..., None]]:
    """Show where the run stands on stderr: a live line on a terminal, a plain line now and then elsewhere.

    What it yields is told of the progress, and what of, where there are several runs.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    to = console(stderr=True)
    if not to.is_terminal:
        yield _plain_lines(to)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    with Bar(*columns, TextColumn("{task.fields[note]}"), console=to, transient=True) as bar:
        lines = {"": bar.add_task("search", total=plan.trials, note="starting workers")}

        def watch(progress: Progress, what: str = "") -> None:
            if progress.device not in lines:  # the first device takes the line that is there
                first = lines.pop("", None)
                lines[progress.device] = bar.add_task("search", note="") if first is None else first
            several = f"{progress.device}: " if len(lines) > 1 else ""
            bar.update(
                lines[progress.device],
                description=f"{several}{what}{progress.phase}",
                total=progress.total,
                completed=progress.done,
                note=_note(progress),
            )

        yield watch


def _plain_lines(to: Console) -> Callable[..., None]:
    shown: dict[str, tuple[int, str, str]] = {}

    def watch(progress: Progress, what: str = "") -> None:
        step = (10 * progress.done // max(1, progress.total), what + progress.phase, progress.waiting)
        if step != shown.get(progress.device):
            shown[progress.device] = step
            several = f"{progress.device}: " if len(shown) > 1 else ""
            text = f"{several}{what}{progress.phase} {progress.done}/{progress.total}: {_note(progress)}"
            to.print(text, soft_wrap=True)

    return watch


def _note(progress: Progress) -> str:
    if progress.waiting:
        return progress.waiting
    parts = [f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(progress.outcomes.items())]
    if progress.masked:
        parts.append(f"{progress.masked} pruned by bound")
    if progress.unlikely:
        parts.append(f"{progress.unlikely} unlikely")
    if progress.elsewhere:
        parts.append(f"{progress.elsewhere} records from elsewhere")
    if progress.cached:
        parts.append(f"{progress.cached} known")
    if progress.fleet is not None:
        parts += fleet_of(progress.fleet)
    if progress.best_us is not None:
        parts.append(f"best {time_of(progress.best_us)}")
        if progress.bound_us > 0:
            parts.append(f"{progress.best_us / progress.bound_us:.2f}x the bound")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts) or "starting workers"
