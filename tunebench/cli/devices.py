"""`tunebench devices`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench import device as _device
from tunebench._figure import significant
from tunebench.cli._option import Json
from tunebench.cli._output import emit, plain, table
from tunebench.device import Device

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["command"]


def command(as_json: Json = False) -> None:
    """List the devices of this machine and the described ones.

    Rates are peak rates at the highest clock; lower bounds use them. A described device does not have to be
    present: tune for it by --arch or --device NAME.
    """
    local = [*_device.local_gpus(), _device.local_cpu()]
    described = list(_device.described().values())
    data = [_row(device, "here") for device in local] + [_row(device, "described") for device in described]

    def render(console: Console) -> None:
        console.print(_table("This machine", local))
        if any(device.assumed for device in local):
            console.print(
                "* assumed rates: this machine does not report its highest clock and memory bandwidth"
            )
        console.print()
        console.print(_table("Described", described))

    emit(as_json, data, render)


def _row(device: Device, source: str) -> dict[str, Any]:
    return {**plain(device), "key": device.key, "known": source, "peak_gflop_s": _peaks(device)}


def _peaks(device: Device) -> dict[str, float]:
    """Return the peak rates at the highest clock in 1e9 FLOP/s, by input type."""
    cycles = device.sm_count * device.max_clock_mhz * 1e6
    rates = {"f32": 2 * device.fma_per_clock, **device.mma_flop_per_clock}
    return {dtype: round(rate * cycles / 1e9, 1) for dtype, rate in rates.items()}


def _table(title: str, devices: list[Device]) -> Any:
    return table(
        "name",
        "architecture",
        ">SMs or cores",
        ">MHz",
        ">GB/s",
        ">L2 MiB",
        ">GiB",
        "peak TFLOP/s",
        title=title,
        rows=(
            (
                device.name + ("*" if device.assumed else ""),
                device.architecture,
                device.sm_count,
                f"{device.max_clock_mhz:.0f}",
                f"{device.dram_gb_s:.0f}",
                f"{device.l2_bytes / 2**20:.0f}",
                f"{device.memory_bytes / 2**30:.0f}" if device.memory_bytes else None,
                ", ".join(f"{dtype} {significant(rate / 1e3, 3)}" for dtype, rate in _peaks(device).items()),
            )
            for device in devices
        ),
    )
