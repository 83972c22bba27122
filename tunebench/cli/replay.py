"""`tunebench replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._option import Json
from tunebench.cli._output import emit, table
from tunebench.cli._recorded import RecordedDevice, RecordedKernel, RecordedProblem, space_of

if TYPE_CHECKING:
    from rich.console import Console

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
    as_json: Json = False,
) -> None:
    """Search a recorded space as if it were a device, to judge samplers.

    Efficiency is the optimum's time over the best time found so far.
    """
    from tunebench.recording import read
    from tunebench.tuning.replay import replay

    space, elsewhere = space_of(file, kernel, device, problem), [read(other) for other in warm or ()]
    optimum_us = space.recording.optimum_us
    runs = []
    for seed in range(seeds):
        done = replay(space, trials=trials, seed=seed, sampler=sampler, elsewhere=elsewhere)
        told = {str(count): share for count, share in done.efficiency(optimum_us).items()}
        measured = len(done.best_us)
        runs.append({"seed": seed, "measured": measured, "masked": done.masked, "efficiency": told})
    data = {
        "space": space.recording.kernel or file.name,
        "device": space.device.name if space.device is not None else space.recording.device,
        "sampler": sampler,
        "optimum_ms": optimum_us / 1e3,
        "runs": runs,
    }

    def render(to: Console) -> None:
        to.print(f"{data['space']} on {data['device'] or 'a device not told'}, sampler {sampler}")
        counts = list(dict.fromkeys(count for run in runs for count in run["efficiency"]))  # type: ignore[attr-defined]
        rows = [
            (run["seed"], run["measured"], *(f"{run['efficiency'][count]:.3f}" for count in counts))  # type: ignore[index]
            for run in runs
        ]
        to.print(table(">seed", ">asked", *(f">after {count}" for count in counts), rows=rows))

    emit(as_json, data, render)
