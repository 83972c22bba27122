"""`tunebench compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._figure import significant
from tunebench.cli._model import ModelRequest
from tunebench.cli._option import Gpus, Json, VariantFiles, Workloads, gpus, renamed_flag
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import duration, emit, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.forecast.comparison import ComparedDevice
    from tunebench.forecast.network import NetworkPrediction
    from tunebench.training.cluster.generation import Generation
    from tunebench.training.steps.step import StepPrediction

__all__ = ["command"]


@grouped_options("model", ModelRequest)
def command(
    invocation: typer.Context,
    workload: Workloads = None,
    device: Gpus = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="A=PRICE,…", help="Price of one device per hour: a=2.5,b=4.", show_default=False
        ),
    ] = None,
    model: ModelRequest | None = None,
    variant_file: VariantFiles = None,
    as_json: Json = False,
    devices: Annotated[
        str | None, typer.Option("--devices", hidden=True, callback=renamed_flag("--device"))
    ] = None,
) -> None:
    """Compare GPUs, present or not, by predicted time, throughput and cost of the same work.

    The work is a model, or workloads one after the other. Prices are for one device and hour, in any
    currency; with them the table has the cost of a million tokens, images or runs.
    """
    from tunebench.forecast.comparison import with_prices

    if bool(workload) == (model is not None):
        raise InputError("give the work to compare: either --model NAME or --workload TEXT")
    typed = [*(device or ()), *filter(None, (devices or "").split(","))]
    chosen = gpus(typed or None)
    if model is not None:
        unit, predicted = model.unit, [_of_model(model, device) for device in chosen]
    else:
        unit, predicted = "runs", [_of_workloads(workload or [], device) for device in chosen]
    names = {name: device.name for name, device in zip(typed, chosen, strict=False)}
    prices = _prices(price, names)
    source = invocation.get_parameter_source("price")
    if source is not None and source.name != "COMMANDLINE":  # a table of a file, with more devices
        prices = {
            name: prices[name]
            for name in prices
            if name in {compared_device.device.name for compared_device in predicted}
        }
    compared = with_prices(predicted, prices)
    emit(
        as_json,
        [_describe(compared_device, compared[0], unit) for compared_device in compared],
        _render(compared, unit),
    )


def _of_model(model: ModelRequest, device: Device) -> ComparedDevice:
    from tunebench.forecast.comparison import ComparedDevice

    prediction: Generation | NetworkPrediction | StepPrediction
    if model.generate:
        prediction = model.predict_generation(device)
    else:
        prediction = model.predict(device)
        model.warn_if_too_large(prediction)
    return ComparedDevice(
        device=device,
        time_us=prediction.time_us,
        low_us=prediction.low_us,
        high_us=prediction.high_us,
        items=model.items,
        devices=model.devices,
    )


def _of_workloads(texts: Sequence[str], device: Device) -> ComparedDevice:
    """Return the sum of workloads; interval ends add up, so errors are assumed fully correlated."""
    from tunebench.forecast.comparison import ComparedDevice
    from tunebench.forecast.library import predict_fitting
    from tunebench.workloads import parse

    predictions = predict_fitting([parse(text) for text in texts], device)
    time_us, low_us, high_us = (
        float(column.sum()) for column in (predictions.time_us, predictions.low_us, predictions.high_us)
    )
    return ComparedDevice(device=device, time_us=time_us, low_us=low_us, high_us=high_us, items=1)


def _prices(text: str | None, names: Mapping[str, str]) -> dict[str, float]:
    """Parse ``a=2.5,b=4``, with devices as typed or by any name."""
    from tunebench._device import product_name

    prices: dict[str, float] = {}
    for item in filter(None, (text or "").split(",")):
        name, _, value = item.rpartition("=")
        try:
            prices[names.get(name) or (name if name in names.values() else product_name(name))] = float(value)
        except ValueError:
            raise InputError(f"--price must have the form device=price, got {item!r}") from None
    return prices


def _describe(compared: ComparedDevice, first: ComparedDevice, unit: str) -> dict[str, Any]:
    return {
        "device": compared.device.key,
        "devices": compared.devices,
        "time_us": compared.time_us,
        "low_us": compared.low_us,
        "high_us": compared.high_us,
        f"{unit}_per_s": compared.items_per_s,
        "speedup": compared.speedup(first),
        "price_per_hour": compared.price_per_hour,
        f"cost_per_million_{unit}": compared.cost_per_million(),
        f"cost_per_million_{unit}_low": compared.cost_per_million(compared.low_us),
        f"cost_per_million_{unit}_high": compared.cost_per_million(compared.high_us),
    }


def _render(compared: Sequence[ComparedDevice], unit: str) -> Any:
    def render(to: Console) -> None:
        columns = ["device", ">time", ">90 % interval", f">{unit} per second", ">speedup over first"]
        costs = any(compared_device.price_per_hour is not None for compared_device in compared)
        columns += [">price per hour", f">cost per million {unit}", ">90 % interval"] if costs else []
        to.print(
            table(*columns, rows=(_row(compared_device, compared[0], costs) for compared_device in compared))
        )

    return render


def _row(compared: ComparedDevice, first: ComparedDevice, costs: bool) -> list[object]:
    count = f"{compared.devices} x " if compared.devices > 1 else ""
    row: list[object] = [
        *(count + compared.device.name, duration(compared.time_us)),
        *(
            f"{duration(compared.low_us)} to {duration(compared.high_us)}",
            significant(compared.items_per_s, 5),
        ),
        f"{compared.speedup(first):.2f}x",
    ]
    if not costs:
        return row
    if compared.price_per_hour is None:
        return [*row, None, None, None]
    times_us = (compared.time_us, compared.low_us, compared.high_us)
    cost, low, high = (significant(compared.cost_per_million(us) or 0.0) for us in times_us)
    return [*row, significant(compared.price_per_hour, 6), cost, f"{low} to {high}"]
