"""`tunebench tune`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tunebench.cli._option import Database, Json, Problem, StopAtGap, target_device
from tunebench.cli._output import console, emit, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.measure.comparison import Comparison
    from tunebench.tuning import Plan, Progress, Report

__all__ = ["command"]

INTERRUPTED = 130


def command(
    workload: Problem,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, cpu, offline, a described device, or a file. Default: GPU, else CPU."
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="With --device offline: the architecture, such as sm_90.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Distinct configurations to launch; known ones are free.")] = 50,
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

    The same command takes up an interrupted run where it stopped. Ctrl-C ends a run early and keeps all that
    was found.
    """
    from tunebench.errors import TunebenchError
    from tunebench.measure.timing import Protocol
    from tunebench.tuning import Plan, tune
    from tunebench.workloads import parse

    target = _target(device, arch)
    plan = Plan(
        trials=trials,
        sampler=sampler,
        seed=seed,
        variants=tuple(variant or ()),
        variant_files=tuple(str(path) for path in variant_file or ()),
        protocol=Protocol(cache=_cache(cache)),
        offline=device == "offline",
        workers=workers,
        timeout_s=timeout,
        stop_at_gap=stop_at_gap,
        audit=audit,
        finalists=finalists,
        baselines=baselines,
        warm=warm,
        calibrated=calibrated,
    )
    problem = parse(workload) if not variant_file else workload
    if device is None and target.kind == "cpu":
        note = "no GPU here: tuning for the CPU; --device offline --arch sm_90 tunes for an absent one"
        console(stderr=True).print(note)
    with _progress(plan) as watcher:
        report = tune(problem, device=target, db=db, plan=plan, watcher=watcher)
    for violation in report.violations:
        console(stderr=True).print(f"warning: a bound is violated: {violation}", soft_wrap=True)
    emit(as_json, report.to_json(), lambda to: _render(report, to))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.config is None:
        raise TunebenchError("no configuration succeeded; `tunebench show` lists the failures by class")


def _cache(text: str) -> Literal["cold", "warm"]:
    from tunebench.errors import UnknownName

    if text not in ("cold", "warm"):
        raise UnknownName("cache state", text, ("cold", "warm"))
    return "cold" if text == "cold" else "warm"


def _target(device: str | None, arch: str | None) -> Device:
    from tunebench import device as devices
    from tunebench.errors import InputError

    if device == "offline":
        if arch is None:
            known = ", ".join(devices.architectures())
            raise InputError(f"--device offline needs --arch; known: {known}")
        return devices.representative(arch)
    if arch is not None:
        raise InputError("--arch goes with --device offline; a described device has its own")
    return target_device(device, None)


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[Progress], None]]:
    """Show where the run stands on stderr: a live line on a terminal, a plain line now and then elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    to = console(stderr=True)
    if not to.is_terminal:
        yield _plain_lines(to)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    with Bar(*columns, TextColumn("{task.fields[note]}"), console=to, transient=True) as bar:
        task = bar.add_task("search", total=plan.trials, note="starting workers")

        def watch(progress: Progress) -> None:
            bar.update(
                task,
                description=progress.phase,
                total=progress.total,
                completed=progress.done,
                note=_note(progress),
            )

        yield watch


def _plain_lines(to: Console) -> Callable[[Progress], None]:
    shown = (-1, "")

    def watch(progress: Progress) -> None:
        nonlocal shown
        step = (10 * progress.done // max(1, progress.total), progress.phase)
        if step != shown:
            shown = step
            to.print(f"{progress.phase} {progress.done}/{progress.total}: {_note(progress)}", soft_wrap=True)

    return watch


def _note(progress: Progress) -> str:
    parts = [f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(progress.outcomes.items())]
    if progress.masked:
        parts.append(f"{progress.masked} pruned by bound")
    if progress.unlikely:
        parts.append(f"{progress.unlikely} unlikely")
    if progress.elsewhere:
        parts.append(f"{progress.elsewhere} records from elsewhere")
    if progress.cached:
        parts.append(f"{progress.cached} known")
    if progress.best_us is not None:
        parts.append(f"best {_time(progress.best_us)}")
        if progress.bound_us > 0:
            parts.append(f"{progress.best_us / progress.bound_us:.2f}x the bound")
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts) or "starting workers"


def _time(us: float | None) -> str | None:
    if us is None:
        return None
    return f"{us / 1e3:.3f} ms" if us >= 1e4 else f"{us:.2f} us"


def _render(report: Report, to: Console) -> None:
    to.print(f"{report.workload} on {report.device}")
    if report.median_us is None:
        to.print("no configuration succeeded")
    else:
        to.print(f"  variant  {report.variant}")
        to.print(f"  config   {report.config}", soft_wrap=True)
        to.print(table("", ">time", ">best is faster by", "", rows=_comparison(report, report.median_us)))
        for line in (*_ties(report), *_proof(report)):
            to.print(line, soft_wrap=True)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(report.trials.items())) or "none"
    audited = f" ({report.audited} audited)" if report.audited else ""
    to.print(f"  trials   {counts}; {report.masked} pruned by bound{audited}; {report.cached} known before")
    for source in report.warm:
        text = f"{source.records} records of {source.workload} on {source.device}, {source.use}"
        to.print(f"  warm     {source.variant}: {text}", soft_wrap=True)
    if report.unlikely:
        winners = f"{report.unlikely_winners:.2g} of them expected to be faster"
        to.print(f"  unlikely {report.unlikely} configurations passed over, open still; {winners}")
    seconds = ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in report.seconds.items())
    to.print(f"  seconds  {seconds}")
    for reason in report.skipped.values():
        to.print(f"  skipped  {reason}", soft_wrap=True)
    to.print(f"  database {report.database}", soft_wrap=True)


def _comparison(report: Report, best_us: float) -> Iterator[tuple[object, ...]]:
    how = "predicted, not measured" if report.how == "predicted" else "measured"
    ends = report.ci_us or report.interval_us
    interval = f" [{_time(ends[0])}, {_time(ends[1])}]" if ends else ""
    what = f"{how}, the default" if report.is_default else how
    yield f"best ({what})", f"{_time(best_us)}{interval}", None, None
    if report.default_us is not None and not report.is_default:
        yield (
            "default configuration",
            _time(report.default_us),
            f"{report.default_us / best_us:.2f}x",
            _confidence(report.versus.get("default")),
        )
    runner_up = report.versus.get("runner_up")
    if runner_up is not None:
        yield "runner-up", None, f"{runner_up.ratio:.2f}x", _confidence(runner_up)
    for place, baseline in enumerate(report.baselines):
        said = _confidence(report.versus.get("baseline")) if place == 0 else None
        yield baseline.name, _time(baseline.median_us), f"{baseline.median_us / best_us:.2f}x", said
    label = "bound (rates assumed)" if report.assumed else "bound"
    yield label, _time(report.bound_us) if report.bound_us else "none", None, None


def _confidence(versus: Comparison | None) -> str | None:
    if versus is None:
        return None
    interval = f"[{versus.low:.2f}, {versus.high:.2f}]"
    return f"{interval} tie" if versus.tied else f"{interval}, {100 * versus.probability:.1f} % sure"


def _ties(report: Report) -> Iterator[str]:
    if report.ties:
        first = report.ties[0]
        more = f" and {len(report.ties) - 1} more" if len(report.ties) > 1 else ""
        yield f"  ties     within noise: {first.variant} {first.config}{more}"


def _proof(report: Report) -> Iterator[str]:
    """Tell what is proved of the best, of which variants, and what stands in the way."""
    proof = report.certificate
    if proof is None:
        gap = f"; {report.gap:.2f} times the bound" if report.gap is not None else ""
        yield f"  proof    none: the time is predicted{gap}"
        return
    assumed = " (rates assumed)" if report.assumed else ""
    closed = f"{proof.timed} timed, {proof.bounded} closed by bound, {proof.impossible} cannot run"
    if proof.proved:
        yield f"  proof    optimal in its space{assumed}: {closed}"
    else:
        counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in proof.open.items())
        gap = f"gap {proof.gap:.2f}" if proof.gap is not None else "no bound on what is open"
        yield f"  proof    {gap}{assumed}: {proof.open_count} open ({counts}); {closed}"
    left_out = [variant for variant in report.outside if variant not in report.skipped]
    if left_out:
        yield f"  outside  not searched, so nothing is said of: {', '.join(left_out)}"
