"""Errors of predicted training steps on many GPUs, by file, model and kind of row.

    python -m benchmarks.predict_training [--data FOLDER] [--rows]

Rows are public measurements (FOLDER/README.md); no figure of the prediction is fitted to them. They ran
Megatron-LM or Megatron-DeepSpeed, so kernels are those of the stack `megatron`.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tunebench import device as devices
from tunebench.forecast.parallel.cluster import Cluster, links
from tunebench.forecast.parallel.step import Parallelism, StepPrediction, predict_step
from tunebench.workloads.networks import Network, NetworkRun, from_config

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of measured steps.

    Attributes:
        file: Name.
        measured: Column of the measured time in seconds.
        device: Device.
        network_gb_s: Bandwidth between nodes of each GPU, in one direction.
        tensor_overlap: Whether sums of tensor parallelism run during products.
    """

    file: str
    measured: str
    device: str = "a100-80-sxm"
    network_gb_s: float = 25.0
    tensor_overlap: bool = False


SOURCES = (
    Source(file="korthikanti_table5.csv", measured="measured_s", tensor_overlap=True),
    Source(file="sc21_table1.csv", measured="step_s_from_tflops"),
    Source(file="sc21_table2.csv", measured="step_s_from_tflops"),
    Source(file="vtrain_multi.csv", measured="measured_s", network_gb_s=12.5),
    Source(file="vtrain_single.csv", measured="measured_s", network_gb_s=12.5),
)


FITTED = {"vtrain_single.csv": "h1024-L24-a16"}
"""Model of each file whose rows the host time and its interval were fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured step and its prediction."""

    file: str
    name: str
    model: str
    measured_s: float
    found: StepPrediction

    @property
    def error(self) -> float:
        """Predicted time over the measured one, minus 1."""
        return self.found.time_us / 1e6 / self.measured_s - 1

    @property
    def inside(self) -> bool:
        """Whether the interval contains the measured time."""
        return self.found.low_us <= self.measured_s * 1e6 <= self.found.high_us


def rows(folder: Path, source: Source) -> Iterator[Row]:
    """Yield the rows of a file that one step of a pipeline describes; ZeRO-3 rows are left out."""
    with (folder / source.file).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row.get("schedule") != "zero3":
                found = predicted(row, source)
                measured_s = float(row[source.measured])
                yield Row(
                    file=source.file, name=row["id"], model=row["model"], measured_s=measured_s, found=found
                )


def predicted(row: dict[str, str], source: Source) -> StepPrediction:
    """Predict the step of a row."""
    number = {
        key: int(row[key]) for key in ("tp", "pp", "dp", "seq", "gpus", "gpus_per_node", "global_batch")
    }
    chunks = int(row.get("interleave") or 1)
    if row.get("schedule") == "ptd":
        chunks = 1
    device = devices.find(source.device)
    parallelism = Parallelism(
        data=number["dp"],
        tensor=number["tp"],
        pipeline=number["pp"],
        microbatches=int(row["num_microbatches"]),
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        overlap=False,
        tensor_overlap=source.tensor_overlap,
    )
    run = NetworkRun(
        batch=number["global_batch"],
        seq=number["seq"],
        mode="train",
        dtype="f16",
        optimizer="adamw",
        stack="megatron",
        recompute=row["recompute"],  # type: ignore[arg-type]
        sequence_parallel=row.get("seq_parallel") == "1",
    )
    nodes = -(-number["gpus"] // number["gpus_per_node"])
    latency_us = links()["net-200"].latency_us
    cluster = Cluster.of(
        device, devices=number["gpus"], nodes=nodes, network=f"{source.network_gb_s}:{latency_us}"
    )
    return predict_step(_network(row), device, run, cluster, parallelism)


def _network(row: dict[str, str]) -> Network:
    sizes = {
        "n_layer": row["layers"],
        "n_embd": row["hidden"],
        "n_head": row["heads"],
        "n_positions": row["seq"],
        "vocab_size": row["vocab"],
    }
    return from_config(
        row["model"], {"model_type": "gpt2", **{key: int(value) for key, value in sizes.items()}}
    )


def layer_rows(folder: Path) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Yield each row of table 4: its name, and measured and predicted forward and backward time in ms.

    A layer is the difference between networks of three layers and of two, on the 8 GPUs that share it.
    """
    with (folder / "korthikanti_table4_layer.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            measured = float(row["forward_ms"]), float(row["backward_ms"])
            three, two = _layers(row, 3), _layers(row, 2)
            yield row["experiment"], measured, (three[0] - two[0], three[1] - two[1])


def _layers(row: dict[str, str], layers: int) -> tuple[float, float]:
    """Return the predicted forward and backward time of some layers and their ends, in ms."""
    device = devices.find("a100-80-sxm")
    run = NetworkRun(
        batch=int(row["micro_batch"]),
        seq=int(row["seq"]),
        mode="train",
        dtype="f16",
        stack="megatron",
        recompute=row["recompute"],  # type: ignore[arg-type]
        sequence_parallel=row["seq_parallel"] == "1",
    )
    network = _network({**row, "layers": str(layers), "vocab": "51200", "model": "22B"})
    tensor = int(row["tp"])
    found = predict_step(
        network, device, run, Cluster.of(device, devices=tensor), Parallelism(tensor=tensor)
    ).stages[0]
    forward, backward = found.forward + found.sums_forward, found.backward + found.sums_backward
    return forward.us / 1e3, backward.us / 1e3


def main() -> None:
    """Print a line per file, and with `--rows` a line per row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured steps")
    parser.add_argument("--rows", action="store_true", help="also print each row of the small files")
    parser.add_argument("--file", nargs="*", help="files (default: all)")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.exit(message=f"no measured steps in {options.data}\n")
    console = Console(width=140)
    for source in SOURCES:
        if options.file and source.file not in options.file:
            continue
        found = list(rows(options.data, source))
        console.print(_table(source.file, found))
        if options.rows:
            console.print(_rows_table(found))
    if not options.file:
        console.print(_layers_table(options.data))


def _table(title: str, found: list[Row]) -> Table:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in found:
        groups[row.model].append(row)
    table = Table("model", "rows", "MAPE", "bias", "worst", "in interval", title=title)
    fitted = FITTED.get(found[0].file)
    unused = [("not used for fitting", [row for row in found if row.model != fitted])] if fitted else []
    for name, group in (*groups.items(), *unused, ("all", found)):
        errors = np.array([row.error for row in group])
        worst = errors[np.abs(errors).argmax()]
        inside = np.mean([row.inside for row in group])
        table.add_row(
            name,
            str(len(group)),
            f"{np.abs(errors).mean():.1%}",
            f"{errors.mean():+.1%}",
            f"{worst:+.1%}",
            f"{inside:.0%}",
        )
    return table


def _layers_table(folder: Path) -> Table:
    title = "korthikanti_table4_layer.csv: one layer, ms"
    table = Table(
        "experiment", "forward", "predicted", "error", "backward", "predicted", "error", title=title
    )
    for name, measured, found in layer_rows(folder):
        cells = []
        for measured_ms, found_ms in zip(measured, found, strict=True):
            cells += [f"{measured_ms:.1f}", f"{found_ms:.2f}", f"{found_ms / measured_ms - 1:+.1%}"]
        table.add_row(name, *cells)
    return table


def _rows_table(found: list[Row]) -> Table:
    table = Table("row", "measured, s", "predicted, s", "error", "compute", "waits", "bubble")
    for row in found:
        parts = (row.found.compute, row.found.communication, row.found.bubble)
        table.add_row(
            row.name,
            f"{row.measured_s:.2f}",
            f"{row.found.time_us / 1e6:.2f}",
            f"{row.error:+.1%}",
            *(f"{each.us / 1e6:.2f}" for each in parts),
        )
    return table


if __name__ == "__main__":
    main()
