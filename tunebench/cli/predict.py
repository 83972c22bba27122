"""`tunebench predict`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._console import is_quiet, is_verbose
from tunebench.cli._model import ModelRequest
from tunebench.cli._model_report import describe_generation, describe_model, render_generation, render_model
from tunebench.cli._option import Architecture, Gpus, Json, VariantFiles, Workloads, gpus
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import console, duration, emit, plain, printable, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.forecast import Prediction
    from tunebench.forecast.table import TableResult

__all__ = ["command"]

INTERRUPTED = 130
SHOWN = 10
"""Most rejected rows whose reason is printed; the output file has all of them."""


@grouped_options("model", ModelRequest)
def command(
    workload: Workloads = None,
    device: Gpus = None,
    arch: Architecture = None,
    workloads: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", help="CSV file with a workload per row; needs --out.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="CSV file to write, with the predictions as added columns.",
            show_default=False,
        ),
    ] = None,
    model: ModelRequest | None = None,
    variant_file: VariantFiles = None,
    as_json: Json = False,
) -> None:
    """Predict the time of a workload or a model on GPUs, present or not.

    The time is that of the library kernels that a framework would choose, with a 90 % prediction interval.
    Nothing is run. A GPU that is not released yet can be described by a file of ten lines.
    With --data, --tensor or --pipeline a model is divided among several devices. With --generate a model
    reads prompts and generates tokens.
    """
    if [bool(workload), workloads is not None, model is not None].count(True) != 1:
        raise InputError("give what to predict, one of: --workload TEXT, --workloads FILE.csv, --model NAME")
    if (workloads is None) != (out is None):
        raise InputError("--workloads FILE.csv needs --out OUT.csv, and the other way round")
    devices = gpus(device, arch)
    if model is not None:
        _predict_model(model, devices, as_json)
    elif workloads is not None and out is not None:
        if len(devices) != 1:
            raise InputError("--workloads needs exactly one --device: write a file per device")
        _predict_table(workloads, devices[0], out, as_json)
    else:
        _predict_workloads(workload or [], devices, as_json)


def _predict_model(model: ModelRequest, devices: Sequence[Device], as_json: bool) -> None:
    if model.generate:
        _predict_generation(model, devices, as_json)
        return
    predictions = [model.predict(device) for device in devices]
    for prediction in predictions:
        model.warn_if_too_large(prediction)

    def render(to: Console) -> None:
        for prediction in predictions:
            render_model(model, prediction, to)

    emit(as_json, [describe_model(model, prediction) for prediction in predictions], render)


def _predict_generation(model: ModelRequest, devices: Sequence[Device], as_json: bool) -> None:
    generations = [model.predict_generation(device) for device in devices]

    def render(to: Console) -> None:
        for generation in generations:
            render_generation(model, generation, to)

    emit(as_json, [describe_generation(model, generation) for generation in generations], render)


# -- workloads ---------------------------------------------------------------------------------------------


def _predict_workloads(texts: Sequence[str], devices: Sequence[Device], as_json: bool) -> None:
    from tunebench.forecast.library import predict_fitting
    from tunebench.workloads import parse

    problems = [parse(text) for text in texts]
    predictions = [prediction for device in devices for prediction in predict_fitting(problems, device)]
    emit(as_json, [_describe(prediction) for prediction in predictions], lambda to: _render(to, predictions))


def _describe(prediction: Prediction) -> dict[str, Any]:
    return {**plain(prediction), "device": prediction.device.key, "utilisation": prediction.utilisation}


def _render(to: Console, predictions: Sequence[Prediction]) -> None:
    rows = (
        (
            *(
                duration(prediction.time_us),
                f"{duration(prediction.low_us)} to {duration(prediction.high_us)}",
                duration(prediction.bound_us),
            ),
            *(
                f"{prediction.utilisation:.0%}",
                prediction.binding,
                prediction.basis,
                prediction.device.name,
                prediction.workload,
            ),
        )
        for prediction in predictions
    )
    headers = (
        ">predicted",
        ">90 % interval",
        ">lower bound",
        ">share of peak",
        "limited by",
        "basis",
        "device",
    )
    to.print(table(*headers, "workload", rows=rows))
    for reason in dict.fromkeys(prediction.because for prediction in predictions if prediction.because):
        to.print(reason, soft_wrap=True)


# -- tables ------------------------------------------------------------------------------------------------


def _predict_table(source: Path, device: Device, out: Path, as_json: bool) -> None:
    from tunebench.forecast.table import predict_table

    with _progress(source.name) as watcher:
        result = predict_table(source, device, out, watcher=watcher)
    data = {
        "out": str(out),
        "device": device.key,
        "rows": result.rows,
        "refused": result.rejected,
        "interrupted": result.interrupted,
        "faults": plain(result.faults),
    }
    emit(as_json, data, lambda to: to.print(_summary(result, device, out), soft_wrap=True))
    err = console(stderr=True)
    for fault in result.faults[:SHOWN]:
        err.print(f"{source}, {fault}", soft_wrap=True)
    if result.rejected > SHOWN:
        err.print(f"{source}: and {result.rejected - SHOWN} more, see column error", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.rejected:
        raise InputError(f"{result.rejected} of {result.rows} rows could not be predicted, see column error")


def _summary(result: TableResult, device: Device, out: Path) -> str:
    stopped = " (interrupted; the rows predicted so far)" if result.interrupted else ""
    return f"{result.rows - result.rejected} of {result.rows} rows predicted on {device.name}: {out}{stopped}"


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[TableResult, float], None]]:
    """Show the progress of a table on stderr if that is a terminal."""
    to = console(stderr=True)
    if is_verbose():
        yield lambda result, share: to.print(f"{label}: {share:.0%}, {result.rows} rows", soft_wrap=True)
        return
    if is_quiet() or not to.is_terminal:
        yield lambda result, share: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[rows]} rows"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=to, transient=True) as bar:
        task = bar.add_task(printable(label), total=1.0, rows=0)
        yield lambda result, share: bar.update(task, completed=share, rows=result.rows)
