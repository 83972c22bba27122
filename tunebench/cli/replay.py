"""`tunebench replay`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._figure import significant
from tunebench.cli._file import require_folder, write_page
from tunebench.cli._option import (
    Json,
    LearnedPruner,
    Metrics,
    Objectives,
    Requirements,
    StopAtGap,
    VariantFiles,
    metrics_of,
    renamed_flag,
)
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import emit, table
from tunebench.cli._recorded import RecordedDevice, RecordedFile, RecordedKernel, RecordedSizes, space_of

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.tuning.replay import ReplayedTrial, ReplayResult, Space

__all__ = ["command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The arguments and options of `tunebench replay`."""

    file: RecordedFile
    trials: Annotated[int, typer.Option(min=1, help="Configurations per search, failures included.")] = 200
    seeds: Annotated[int, typer.Option(min=1, help="Number of searches, with seeds 0, 1, …")] = 1
    sampler: Annotated[
        str,
        typer.Option(
            help="surrogate, bound, random, tpe, nsga2, or that of a package. Default: surrogate; with "
            "several objectives tpe.",
            show_default=False,
        ),
    ] = ""
    warm_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--warm-from",
            metavar="FILE",
            help="Cache file of the same kernel on another device, to warm-start from; repeatable.",
        ),
    ] = None
    kernel: RecordedKernel = ""
    device: RecordedDevice = ""
    problem: RecordedSizes = ""
    objective: Objectives = None
    require: Requirements = None
    metric: Metrics = None
    stop_at_gap: StopAtGap = None
    learned_pruner: LearnedPruner = False
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="HTML page to write of the first search."),
    ] = None
    calibrated: Annotated[
        bool, typer.Option("--calibrated", hidden=True, callback=renamed_flag("--learned-pruner"))
    ] = False
    warm: Annotated[
        list[Path] | None, typer.Option("--warm", hidden=True, callback=renamed_flag("--warm-from"))
    ] = None
    variant_file: VariantFiles = None


@grouped_options("options", ReplayOptions)
def command(
    options: ReplayOptions,
    as_json: Json = False,
) -> None:
    """Search a recorded tuning space instead of a device, to compare samplers.

    Efficiency is the time of the optimum over the best time so far. The gap is the best time over the lowest
    bound of an open configuration; without open configurations, the best is proved optimal. With
    --learned-pruner, the last columns are the configurations postponed at the end, and how many of them are
    expected to be and are faster than the best.
    """
    from tunebench.cache_file import read
    from tunebench.tuning import Plan
    from tunebench.tuning.replay import replay

    plan = Plan(
        sampler=options.sampler,
        objectives=tuple(options.objective or ()),
        require=tuple(options.require or ()),
        metrics=metrics_of(options.metric),
        stop_at_gap=options.stop_at_gap,
        learned_pruner=options.learned_pruner or options.calibrated,
    )
    require_folder(options.report)
    space = space_of(options.file, options.kernel, options.device, options.problem)
    elsewhere = [read(path) for path in (*(options.warm_from or ()), *(options.warm or ()))]
    optimum_us = space.recording.optimum_us
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        done = replay(
            space,
            trials=options.trials,
            seed=seed,
            sampler=plan.sampler,
            elsewhere=elsewhere,
            stop_at_gap=options.stop_at_gap,
            learned_pruner=plan.learned_pruner,
            goal=plan.goal,
        )
        runs.append(_data(done, optimum_us, options.trials))
        if options.report is not None and seed == 0:
            _write_page(options.report, options.file, space, done)
    data = {
        "space": space.recording.kernel or options.file.name,
        "device": space.device.name if space.device is not None else space.recording.device,
        "sampler": plan.sampler,
        "optimum_ms": optimum_us / 1e3,
        "runs": runs,
    }

    def render(to: Console) -> None:
        to.print(f"{data['space']} on {data['device'] or 'an unknown device'}, sampler {plan.sampler}")
        counts = list(dict.fromkeys(count for run in runs for count in run["efficiency"]))
        columns = (">seed", ">trials", *(f">after {count}" for count in counts), ">gap", ">open")
        postponed = _POSTPONED if options.learned_pruner or options.calibrated else {}
        to.print(table(*columns, *postponed.values(), rows=(_cells(run, counts, postponed) for run in runs)))
        if plan.goal.is_asked:
            _print_front(runs[0]["front"], to)

    emit(as_json, data, render)


def _print_front(front: list[dict[str, Any]], to: Console) -> None:
    """Print the Pareto front of the first search, or the best of its only objective."""
    if not front:
        to.print("no configuration has all objectives and satisfies what is required")
        return
    names = list(front[0]["values"])
    cells = ((rank, *map(significant, point["values"].values())) for rank, point in enumerate(front, start=1))
    to.print(f"front of seed 0: {len(front)} of the measured configurations")
    to.print(table(">", *(f">{name}" for name in names), rows=cells))
    for rank, point in enumerate(front, start=1):
        to.print(f"{rank:>2}  {point['config']}", soft_wrap=True)


_POSTPONED = {
    "unlikely": ">postponed",
    "unlikely_winners": ">expected faster",
    "unlikely_missed": ">really faster",
}
"""JSON fields of the learned pruner, and their table headers."""


def _write_page(report: Path, file: Path, space: Space, done: ReplayResult) -> None:
    from tunebench.report import history_page, replay_history

    page = history_page([replay_history(space, done)], database=file.name)
    write_page(report, page)


def _data(done: ReplayResult, optimum_us: float, trials: int) -> dict[str, Any]:
    from tunebench.tuning.replay import CHECKPOINTS

    end = trials if done.exhausted else len(done.best_us)  # a search may stop before its trials are spent
    counts = sorted({*(count for count in CHECKPOINTS if count < end), end})
    return {
        "seed": done.seed,
        "measured": len(done.best_us),
        "masked": done.masked,
        "efficiency": {str(count): share for count, share in done.efficiency(optimum_us, counts).items()},
        "gap": done.optimality_proof.gap,
        "proved": done.optimality_proof.proved,
        "open": done.optimality_proof.open_count,
        "unlikely": done.postponed.count,
        "unlikely_winners": round(done.postponed.winners, 3),
        "unlikely_missed": done.postponed.missed,
        "front": [_front_point(done, trial) for trial in done.front],
    }


def _front_point(done: ReplayResult, trial: ReplayedTrial) -> dict[str, Any]:
    values = done.goal.values(trial.outcome)
    assert values is not None, trial
    named = zip((objective.name for objective in done.goal.chosen), values, strict=True)
    return {"config": str(trial.config), "values": dict(named)}


def _cells(run: dict[str, Any], counts: list[str], more: Iterable[str]) -> Iterator[object]:
    yield from (run["seed"], run["measured"])
    for count in counts:
        share = run["efficiency"].get(count)
        yield None if share is None else f"{share:.3f}"
    gap = None if run["gap"] is None else f"{run['gap']:.3f}"
    yield from ("proved" if run["proved"] else gap, run["open"])
    yield from (run[name] for name in more)
