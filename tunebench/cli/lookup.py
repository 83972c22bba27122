"""`tunebench lookup`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench._figure import duration, ratio, significant
from tunebench.cli._option import (
    Architecture,
    DeviceName,
    Json,
    ReadDatabase,
    Requirements,
    VariantFiles,
    WorkloadText,
    looked_up_device,
)
from tunebench.cli._output import emit

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.answer import Answer

__all__ = ["command"]

SERVER_S = 10.0
"""Longest wait for a server, in seconds; a program that serves kernels waits less."""


def command(
    workload: WorkloadText,
    device: DeviceName = None,
    arch: Architecture = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help=(
                "Accept only measurements of this workload on this architecture; exit code 3 if "
                "there are none."
            ),
        ),
    ] = False,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:min|max]",
            help="Quantity to optimise among the records of this workload and device, such as energy_j or "
            "GFLOP/s:max. Default: time_us.",
            show_default=False,
        ),
    ] = None,
    require: Requirements = None,
    variant_file: VariantFiles = None,
    db: ReadDatabase = None,
    as_json: Json = False,
) -> None:
    """Look up the best known kernel and parameters for a workload.

    An answer states its source: measured here, imported, measured on the same architecture, inferred from the
    nearest workloads or from other architectures, or predicted. Exit code 3 means that there is none: with
    --strict nothing was measured, or the measured variant is of a file that --variant-file does not name.
    """
    from tunebench.answer import Unmeasured, lookup_workload

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unmeasured)  # the output states it
        chosen_device = looked_up_device(device, arch)
        answer = lookup_workload(
            workload,
            device=chosen_device,
            db=db,
            strict=strict,
            wait_s=SERVER_S,
            objective=objective,
            require=require or (),
        )

    def render(to: Console) -> None:
        to.print(f"{answer.workload} on {answer.device}")
        to.print(f"  variant  {answer.variant}")
        to.print(f"  config   {answer.config}", soft_wrap=True)
        if answer.variant.rpartition("/")[2].startswith("library"):  # others need not be imported
            to.print(f"  calls    {_functions(answer)}", soft_wrap=True)
        source: str = answer.how
        if answer.interval_us is not None:
            low_us, high_us = answer.interval_us
            source += f"; 90 % interval {duration(low_us)} to {duration(high_us)}"
        to.print(f"  time     {duration(answer.expected_us)} ({source})")
        to.print(f"  because  {answer.because}", soft_wrap=True)
        if answer.metrics:
            values = (f"{name} {significant(value)}" for name, value in answer.metrics.items())
            to.print(f"  metrics  {', '.join(values)}", soft_wrap=True)
        if answer.ties:
            reason = "predicted to take the same time" if answer.how == "predicted" else "within noise"
            to.print(f"  ties     {answer.ties} other configuration{'s' * (answer.ties > 1)} {reason}")
        for name, versus in answer.baselines.items():
            beats = "faster beyond noise" if versus.faster else "not significantly faster"
            to.print(f"  speedup over {name}: {ratio(versus.ratio)}x ({beats})")

    emit(as_json, answer.to_json(), render)


def _functions(answer: Answer) -> str:
    """Return the functions of a library that an answer calls."""
    from tunebench.kernels import variant
    from tunebench.variant import LibraryVariant

    library = variant(answer.variant)
    assert isinstance(library, LibraryVariant), library
    return (
        f"{library.calls(answer.config)} ({library.package(answer.config)} {library.version(answer.config)})"
    )
