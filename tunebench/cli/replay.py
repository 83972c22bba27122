"""`tunebench replay`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench.cli._option import Json, StopAtGap
from tunebench.cli._output import emit, table
from tunebench.cli._recorded import RecordedDevice, RecordedKernel, RecordedProblem, space_of

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.tuning.replay import Replayed

__all__ = ["command"]


def command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A Kernel Tuner cache file, or one in T4 format.")
    ],
    trials: Annotated[int, typer.Option(min=1, help="Configurations to ask for, failures among them.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Searches to make, with seeds 0, 1, …")] = 1,
    sampler: Annotated[str, typer.Option(help="surrogate, bound, random or tpe.")] = "surrogate",
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A recording of the same kernel on another device; may be repeated."
        ),
    ] = None,
    kernel: RecordedKernel = "",
    device: RecordedDevice = "",
    problem: RecordedProblem = "",
    stop_at_gap: StopAtGap = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Pass over what is unlikely to win, by what was learned.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Search a recorded space as if it were a device, to judge samplers.

    Efficiency is the optimum's time over the best time found so far. The gap is the best time over the
    lowest bound of a configuration that may still be faster; with none, the best is proved. With
    --calibrated, it also tells how much was passed over in the end, and how much of that is expected to be
    faster than the best, and is.
    """
    from tunebench.cache_file import read
    from tunebench.tuning.replay import replay

    space, elsewhere = space_of(file, kernel, device, problem), [read(other) for other in warm or ()]
    optimum_us = space.recording.optimum_us
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        done = replay(
            space,
            trials=trials,
            seed=seed,
            sampler=sampler,
            elsewhere=elsewhere,
            stop_at_gap=stop_at_gap,
            calibrated=calibrated,
        )
        runs.append(_told(done, optimum_us))
    data = {
        "space": space.recording.kernel or file.name,
        "device": space.device.name if space.device is not None else space.recording.device,
        "sampler": sampler,
        "optimum_ms": optimum_us / 1e3,
        "runs": runs,
    }

    def render(to: Console) -> None:
        to.print(f"{data['space']} on {data['device'] or 'a device not told'}, sampler {sampler}")
        counts = list(dict.fromkeys(count for run in runs for count in run["efficiency"]))
        columns = (">seed", ">asked", *(f">after {count}" for count in counts), ">gap", ">open")
        passed_over = _PASSED_OVER if calibrated else {}
        to.print(
            table(*columns, *passed_over.values(), rows=(_cells(run, counts, passed_over) for run in runs))
        )

    emit(as_json, data, render)


_PASSED_OVER = {
    "unlikely": ">unlikely",
    "unlikely_winners": ">expected faster",
    "unlikely_missed": ">really faster",
}
"""What is told of configurations that are unlikely to win, and how a table heads it."""


def _told(done: Replayed, optimum_us: float) -> dict[str, Any]:
    return {
        "seed": done.seed,
        "measured": len(done.best_us),
        "masked": done.masked,
        "efficiency": {str(count): share for count, share in done.efficiency(optimum_us).items()},
        "gap": done.optimality_proof.gap,
        "proved": done.optimality_proof.proved,
        "open": done.optimality_proof.open_count,
        "unlikely": done.passed_over.count,
        "unlikely_winners": round(done.passed_over.winners, 3),
        "unlikely_missed": done.passed_over.missed,
    }


def _cells(run: dict[str, Any], counts: list[str], more: Iterable[str]) -> Iterator[object]:
    yield from (run["seed"], run["measured"])
    for count in counts:
        share = run["efficiency"].get(count)
        yield None if share is None else f"{share:.3f}"
    gap = None if run["gap"] is None else f"{run['gap']:.3f}"
    yield from ("proved" if run["proved"] else gap, run["open"])
    yield from (run[name] for name in more)
