"""Errors of predicted times on several GPUs: collectives, and training steps of a network.

    python -m benchmarks.predict_parallel [--data FOLDER]

Collectives are those of `tests/data/nccl_tests.toml`. FOLDER contains `neusight_models.csv` with three steps
of gpt2-large on four A100 of one node, and its configuration.

The labels are whole steps of Megatron-LM under Accelerate, in f32 without TF32, with zeroing of gradients
and AdamW; the batch of 4 is that of all devices. dp4 has one sequence on each device, tp4 a fourth of each
layer, pp4_1 nine layers on each device and one micro-batch, so that stages never work at the same time. The
data do not state whether gradient reduction overlaps the backward pass, so both cases are shown.
Source: `scripts/asplos/collect_label_distributed.py` of sitar-lab/NeuSight, and `MegatronEngine.forward` of
huggingface/accelerate.
"""

from __future__ import annotations

import argparse
import csv
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tunebench import device as devices
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.interconnect.collective import collective_us, reaches_of
from tunebench.training.steps.step import Parallelism, StepPrediction, predict_step
from tunebench.workloads.networks import NetworkRun, network

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "predict"

DIVISIONS = {
    "dp4": (Parallelism(data=4), Parallelism(data=4, overlap=False)),
    "tp4": (Parallelism(tensor=4),),
    "pp4_1": (Parallelism(pipeline=4),),
}
"""Parallelism by the name of a label."""


def main() -> None:
    """Print the errors of collectives, and a line per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured networks")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(_collectives())
    if not (options.data / "neusight_models.csv").exists():
        print(f"no measured networks in {options.data}")
        return
    console.print(_steps(options.data))


def _collectives() -> Table:
    curves = tomllib.loads((ROOT / "tests/data/nccl_tests.toml").read_text(encoding="utf-8"))["curve"]
    table = Table(
        "all-reduce on", "times", "mean error", "below 1 MB", "1 to 256 MB", "from 256 MB", "inside"
    )
    for curve in curves:
        over, (low, high) = _over_measured(curve)
        error, size = np.abs(over - 1), np.array(curve["log2_bytes"])
        parts = [error[size < 20], error[(size >= 20) & (size < 28)], error[size >= 28]]
        means = [f"{part.mean():.0%}" if part.size else "" for part in parts]
        inside = ((1 / over >= low) & (1 / over <= high)).mean()
        table.add_row(curve["name"], str(len(over)), f"{error.mean():.0%}", *means, f"{inside:.0%}")
    return table


def _over_measured(curve: dict[str, Any]) -> tuple[Any, tuple[float, float]]:
    """Return ratios of predicted to measured times, and the interval of measured over predicted ones."""
    count = curve.get("gpus", 8 * curve["nodes"])
    product = devices.find(curve["device"])
    cluster = Cluster.of(product, devices=count, nodes=curve["nodes"], link=curve.get("link"))
    sizes, group = 2.0 ** np.array(curve["log2_bytes"]), cluster.group(count)
    return collective_us("all-reduce", sizes, group) / np.array(curve["us"]), reaches_of(group)


def _steps(folder: Path) -> Table:
    with (folder / "neusight_models.csv").open(newline="", encoding="utf-8") as file:
        labels = {row["option"]: float(row["label_ms"]) for row in csv.DictReader(file)}
    table = Table("step", "measured, ms", "predicted, ms", "interval", "error", "compute", "waits", "bubble")
    for name, divisions in DIVISIONS.items():
        for parallelism in divisions:
            prediction = predict_gpt2(folder, parallelism)
            label = labels[name]
            table.add_row(
                f"{name}{'' if parallelism.overlap else ', gradients behind'}",
                f"{label:.1f}",
                f"{prediction.time_us / 1e3:.1f}",
                f"{prediction.low_us / 1e3:.0f} to {prediction.high_us / 1e3:.0f}",
                f"{prediction.time_us / 1e3 / label - 1:+.1%}",
                *(
                    f"{part.us / 1e3:.1f}"
                    for part in (prediction.compute, prediction.communication, prediction.bubble)
                ),
            )
    return table


def predict_gpt2(folder: Path, parallelism: Parallelism) -> StepPrediction:
    """Predict the measured step of gpt2-large with the given parallelism."""
    model = network(str(folder / "neusight_model_configs" / "gpt2_large.json"))
    a100 = devices.find("a100-40-sxm")
    run = NetworkRun(batch=4, seq=1024, mode="train", optimizer="adamw")
    return predict_step(model, a100, run, Cluster.of(a100, devices=4), parallelism)


if __name__ == "__main__":
    main()
