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
        unit, found = model.unit, [_of_model(model, device) for device in chosen]
    else:
        unit, found = "runs", [_of_workloads(workload or [], device) for device in chosen]
    names = {name: device.name for name, device in zip(typed, chosen, strict=False)}
    prices = _prices(price, names)
    source = invocation.get_parameter_source("price")
    if source is not None and source.name != "COMMANDLINE":  # a table of a file, with more devices
        prices = {name: prices[name] for name in prices if name in {each.device.name for each in found}}
    compared = with_prices(found, prices)
    emit(as_json, [_describe(each, compared[0], unit) for each in compared], _render(compared, unit))


def _of_model(model: ModelRequest, device: Device) -> ComparedDevice:
    from tunebench.forecast.comparison import ComparedDevice

    found = model.predict(device)
    model.warn_if_too_large(found)
    return ComparedDevice(
        device=device,
        time_us=found.time_us,
        low_us=found.low_us,
        high_us=found.high_us,
        items=model.items,
        devices=model.devices,
    )


def _of_workloads(texts: Sequence[str], device: Device) -> ComparedDevice:
    """Return the sum of workloads; interval ends add up, so errors are assumed fully correlated."""
    from tunebench.forecast.comparison import ComparedDevice
    from tunebench.forecast.library import predict_fitting
    from tunebench.workloads import parse

    found = predict_fitting([parse(text) for text in texts], device)
    time_us, low_us, high_us = (float(each.sum()) for each in (found.time_us, found.low_us, found.high_us))
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


def _describe(each: ComparedDevice, first: ComparedDevice, unit: str) -> dict[str, Any]:
    return {
        "device": each.device.key,
        "devices": each.devices,
        "time_us": each.time_us,
        "low_us": each.low_us,
        "high_us": each.high_us,
        f"{unit}_per_s": each.items_per_s,
        "speedup": each.speedup(first),
        "price_per_hour": each.price_per_hour,
        f"cost_per_million_{unit}": each.cost_per_million(),
        f"cost_per_million_{unit}_low": each.cost_per_million(each.low_us),
        f"cost_per_million_{unit}_high": each.cost_per_million(each.high_us),
    }


def _render(compared: Sequence[ComparedDevice], unit: str) -> Any:
    def render(to: Console) -> None:
        columns = ["device", ">time", ">90 % interval", f">{unit} per second", ">speedup over first"]
        costs = any(each.price_per_hour is not None for each in compared)
        columns += [">price per hour", f">cost per million {unit}", ">90 % interval"] if costs else []
        to.print(table(*columns, rows=(_row(each, compared[0], costs) for each in compared)))

    return render


def _row(each: ComparedDevice, first: ComparedDevice, costs: bool) -> list[object]:
    count = f"{each.devices} x " if each.devices > 1 else ""
    row: list[object] = [
        *(count + each.device.name, duration(each.time_us)),
        *(f"{duration(each.low_us)} to {duration(each.high_us)}", significant(each.items_per_s, 5)),
        f"{each.speedup(first):.2f}x",
    ]
    if not costs:
        return row
    if each.price_per_hour is None:
        return [*row, None, None, None]
    times_us = (each.time_us, each.low_us, each.high_us)
    cost, low, high = (significant(each.cost_per_million(us) or 0.0) for us in times_us)
    return [*row, significant(each.price_per_hour, 6), cost, f"{low} to {high}"]
