"""`tunebench bound`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench.cli._option import Json, VariantFiles, renamed_flag
from tunebench.cli._output import emit, table
from tunebench.cli._recorded import (
    OptionalRecordedFile,
    RecordedDevice,
    RecordedKernel,
    RecordedSizes,
    space_of,
)
from tunebench.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from tunebench.tuning.replay import Space

__all__ = ["command"]


def command(
    file: OptionalRecordedFile = None,
    kernel: RecordedKernel = "",
    device: RecordedDevice = "",
    problem: RecordedSizes = "",
    variant_file: VariantFiles = None,
    as_json: Json = False,
    replay: Annotated[
        Path | None, typer.Option("--replay", hidden=True, callback=renamed_flag("the argument FILE"))
    ] = None,
) -> None:
    """Compare the lower bound with the times of a recorded tuning space.

    Without a description of the kernel and the device there is no lower bound; `described` is then 0.
    """
    path = file or replay
    if path is None:
        raise InputError("name the recorded tuning space by the argument FILE")
    space = space_of(path, kernel, device, problem)
    data = _figures(space)

    def render(to: Console) -> None:
        recording = space.recording
        to.print(f"{recording.kernel or path.name} on {recording.device or 'an unnamed device'}")
        if space.bounds is None:
            to.print(f"  {data['rows']} configurations, no lower bound: {space.missing}")
            return
        to.print(f"  configurations  {data['rows']}, {data['failed']} failed")
        to.print(f"  violations      {data['violations']} (configurations faster than their lower bound)")
        to.print(f"  bound / time    {data['bound_over_best']:.3f} at the optimum")
        to.print(f"  pruned          {100 * data['pruned_share']:.1f} % once the optimum is known")
        to.print(
            table(
                *("floor", ">binds", ">bound / time at the optimum", ">pruned by it alone"),
                rows=_floors(data),
            )
        )

    emit(as_json, data, render)


def _figures(space: Space) -> dict[str, Any]:
    import numpy as np

    recording, bounds = space.recording, space.bounds
    timed = np.isfinite(recording.times_us)
    figures: dict[str, Any] = {
        "kernel": recording.kernel,
        "device": space.device.name if space.device is not None else recording.device,
        "rows": int(timed.sum()),
        "failed": int((~timed).sum()),
        "described": 0,
        "violations": 0,
        "pruned_share": 0.0,
        "bound_over_best": None,
        "multiply_adds": {},
        "floors": {},
    }
    plain = space.multiply_adds_us
    if bounds is not None and plain is not None:
        best = int(np.nanargmin(recording.times_us))
        binding = bounds.binding[timed]

        def alone(floor: NDArray[np.float64]) -> dict[str, float]:
            return {
                "over_best": float(floor[best] / recording.optimum_us),
                "pruned_share": float((floor[timed] > recording.optimum_us).mean()),
            }

        figures |= {
            "described": int(timed.sum()),
            "violations": int((bounds.us[timed] > recording.fastest_us[timed]).sum()),
            "pruned_share": float((bounds.us[timed] > recording.optimum_us).mean()),
            "bound_over_best": float(bounds.us[best] / recording.optimum_us),
            "multiply_adds": alone(plain),
            "floors": {
                name: {**alone(floor), "binds_share": float((binding == name).mean())}
                for name, floor in bounds.floors.items()
            },
        }
    return figures


def _floors(data: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row per resource, highest first, and one for evenly shared multiply-adds."""
    ordered = sorted(data["floors"].items(), key=lambda item: -item[1]["over_best"])
    named = [(name, f"{100 * floor['binds_share']:.1f} %", floor) for name, floor in ordered]
    return [
        (name, binds, f"{floor['over_best']:.3f}", f"{100 * floor['pruned_share']:.1f} %")
        for name, binds, floor in [*named, ("multiply-adds shared evenly", "", data["multiply_adds"])]
    ]
