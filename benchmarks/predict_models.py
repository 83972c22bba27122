"""Errors of predicted times of whole networks on single devices.

    python -m benchmarks.predict_models [--measured | --left-out] [--data FOLDER]

FOLDER contains `neusight_models.csv` and the configurations it names; rows of several GPUs are skipped. With
--measured, times are sums of measured operator times instead of predictions: this tests the lists of
operations separately from the predictor. With --left-out, each device is predicted without any measurement
of that device.

The labels are f32 without TF32, PyTorch 2.1, eager attention; training is a forward and a backward pass with
gradient accumulation, without the forward pass of the loss and without an optimizer.
Source: `neusight/Tracing/trace.py` of sitar-lab/NeuSight.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measured_operators import Measured
from tunebench import device as devices
from tunebench.forecast.library.model import bundled_model
from tunebench.forecast.network import HOST_US, interval_widths, predict_operations
from tunebench.workloads.networks import NetworkRun, Operation, network

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "predict"

DEVICES = {
    "AMD_Instinct_MI100": "mi100",
    "AMD_Instinct_MI210": "mi210",
    "AMD_Instinct_MI250": "mi210",  # PyTorch sees each of its two dies as a device, equal to an MI210
    "NVIDIA_A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA_A100-SXM4-40GB": "a100-40-sxm",
    "NVIDIA_A100_80GB_PCIe": "a100-80-pcie",
    "NVIDIA_H100_80GB_HBM3": "h100-sxm",
    "NVIDIA_L4": "l4",
    "Tesla_P100-PCIE-16GB": "p100-pcie",
    "Tesla_P4": "p4",
    "Tesla_T4": "t4",
    "Tesla_V100-PCIE-32GB": "v100-pcie",
}
"""Names of devices in tunebench by their name in the file."""

OPTIONS = {"": False, "fusion": True}
"""Whether a row's network is compiled, by option; other options use several GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured network: times in milliseconds; no interval for sums of measured operators."""

    device: str
    model: str
    mode: str
    option: str
    seq: int
    batch: int
    label_ms: float
    time_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """Error of the prediction relative to the measurement."""
        return self.time_ms / self.label_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the interval contains the measurement."""
        return self.low_ms <= self.label_ms <= self.high_ms


def main() -> None:
    """Print a line per network, and the errors by device and by mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", action="store_true", help="sum measured times of operators")
    parser.add_argument("--left-out", action="store_true", help="forget what was learned of each device")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured networks")
    options = parser.parse_args()
    if not (options.data / "neusight_models.csv").exists():
        print(f"no measured networks in {options.data}")
        return
    rows = list(network_rows(options.data, measured=options.measured, left_out=options.left_out))
    console = Console(width=120)
    console.print(_table(rows, intervals=not options.measured))
    console.print(_summary(rows, intervals=not options.measured))


def operations(folder: Path, row: dict[str, str]) -> tuple[Operation, ...]:
    """Return the operations that the time of a row includes.

    Args:
        folder: Folder of the configurations.
        row: The row, by column name.
    """
    trains = row["mode"] == "train"
    run = NetworkRun(
        batch=int(row["batch"]),
        seq=int(row["seq"]),
        mode="train" if trains else "infer",
        fused=OPTIONS[row["option"]],
        accumulate=trains,
    )
    model = network(str(folder / "neusight_model_configs" / f"{row['model']}.json"))
    return tuple(
        operation
        for operation in model.operations(run)
        if (operation.part, operation.phase) != ("loss", "forward")
    )


def network_rows(folder: Path, *, measured: bool, left_out: bool = False) -> Iterator[Row]:
    """Yield each measured network with its time as a sum of measured operators, or as predicted."""
    measured_operators = Measured.read(folder / "neusight_ops.csv.gz") if measured else {}
    with (folder / "neusight_models.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["option"] in OPTIONS]
    for row in rows:
        listed = operations(folder, row)
        if measured:
            name = row["device"].replace("_MI250", "_MI210").replace("_", " ")
            if name not in measured_operators:
                continue
            time = low = high = sum(measured_operators[name].of(operation) for operation in listed)
        else:
            time, low, high = (us / 1e3 for us in _predicted_us(listed, DEVICES[row["device"]], left_out))
        yield Row(
            **{name: row[name] for name in ("device", "model", "mode", "option")},
            seq=int(row["seq"]),
            batch=int(row["batch"]),
            label_ms=float(row["label_ms"]),
            time_ms=time,
            low_ms=low,
            high_ms=high,
        )


def _predicted_us(listed: tuple[Operation, ...], name: str, left_out: bool) -> tuple[float, float, float]:
    """Return the predicted time of operations and the ends of its interval, in microseconds."""
    model = bundled_model().without(name) if left_out else None
    times = predict_operations(listed, devices.find(name), model=model)
    busy = sum(operation_time.time_us for operation_time in times)
    time = max(busy, HOST_US * sum(operation_time.operation.count for operation_time in times))
    less, more = interval_widths(times)
    return time, max(sum(operation_time.bound_us for operation_time in times), time - less), time + more


def _table(rows: list[Row], *, intervals: bool) -> Table:
    table = Table("device", "network", "mode", "seq", "batch", "measured, ms", "predicted, ms", "error")
    if intervals:
        table.add_column("interval, ms")
    for row in rows:
        cells = [
            *(row.device, row.model, f"{row.mode} {row.option}".strip(), str(row.seq), str(row.batch)),
            *(f"{row.label_ms:.1f}", f"{row.time_ms:.1f}", f"{row.error:+.1%}"),
        ]
        if intervals:
            cells.append(f"{row.low_ms:.0f} to {row.high_ms:.0f}{'' if row.inside else ' (misses)'}")
        table.add_row(*cells)
    return table


def _summary(rows: list[Row], *, intervals: bool) -> Table:
    table = Table("device, mode", "networks", "mean error", "mean of magnitudes", "worst")
    if intervals:
        table.add_column("inside the interval")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.device} {row.mode}", []).append(row)
    groups["all"] = rows
    for name, group in groups.items():
        errors = np.array([row.error for row in group])
        worst = errors[np.abs(errors).argmax()]
        mean, size = f"{errors.mean():+.1%}", f"{np.abs(errors).mean():.1%}"
        cells = [name, str(len(group)), mean, size, f"{worst:+.1%}"]
        if intervals:
            cells.append(f"{sum(row.inside for row in group)} of {len(group)}")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
