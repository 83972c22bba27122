"""Errors of predictions for devices left out, as the tables of docs/predictor.md.

    python -m benchmarks.predict_left_out [--errors FILE] [--data FOLDER]

FILE contains the errors that training writes: each chip is left out of the trees and of the intervals. The
other tables come from the bundled model: boards whose chip was measured on another board; attention with a
sliding window, which is not in the training, on a measured device; whole layers of
experts as the sum of their two grouped products, on measured devices (with rows that were trained on) and on
chips left out; and whole networks (`benchmarks.predict_models`), each device left out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.predict_models import DATA, Row, network_rows
from tunebench import device as devices
from tunebench.forecast.library.kernel import COLUMNS
from tunebench.forecast.library.model import Blend, bundled_model
from tunebench.forecast.library.roofline_model import roofline_times
from tunebench.forecast.library.workload import predict_all
from tunebench.forecast.model_training import data, fit
from tunebench.forecast.model_training.data import MeasuredKernels
from tunebench.workload import Workload
from tunebench.workloads import workload

ERRORS = Path(__file__).resolve().parent / "results" / "predict" / "errors.json"

KERNELS = {
    "bmm": "batched products, f32",
    "linear": "products, f32",
    "elem": "elementwise, f32",
    "softmax": "softmax, f32",
    "ln": "layernorm, f32",
    "bf16 gemm": "products, bf16",
    "fp8 gemm": "products, fp8",
    "layers of experts": "layers of experts, bf16",
    "attention": "attention, bf16",
    "decode attention": "decode attention, bf16",
    "encoder attention": "encoder attention, bf16",
}
"""Kernels and their type, by the first part of a group of rows."""


def main() -> None:
    """Print all tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--errors", type=Path, default=ERRORS, help="errors on devices left out")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured kernels and networks")
    options = parser.parse_args()
    _print_operators(json.loads(options.errors.read_text()))
    if not (options.data / "neusight_models.csv").exists():
        print(f"no measurements in {options.data}")
        return
    _print_boards(options.data)
    _print_windows(options.data)
    _print_layers(options.data)
    _print_networks(list(network_rows(options.data, measured=False, left_out=True)))


def _print_operators(errors: list[dict[str, Any]]) -> None:
    names = ("roofline", "roofline / median utilisation", "trees without roofline features")
    print("| kernels | left out | part | rows | error, % | without host, % | median, % | inside, % |", end="")
    print(f" {' | '.join(names)} |\n{'|---' * 11}|")
    for error in errors:
        kernels, _, part = error["group"].partition(", ")
        cells = [KERNELS[kernels], error["device"], part, f"{error['rows']:,}", f"**{error['percent']:.1f}**"]
        cells += [f"{error['kernel_percent']:.1f}", f"{error['bias_percent']:+.1f}"]
        cells += [
            f"{error['within_percent']:.0f}",
            *(f"{error['others_percent'][name]:.1f}" for name in names),
        ]
        print(f"| {' | '.join(cells)} |")
    means = [np.mean([error[name] for error in errors]) for name in ("percent", "kernel_percent")]
    alternatives = [np.mean([error["others_percent"][name] for error in errors]) for name in names]
    inside = np.array([error["within_percent"] for error in errors])
    rows = np.array([error["rows"] - error["hidden"] for error in errors])
    print(f"\nMean of {len(errors)} lines: {means[0]:.2f} % ({means[1]:.2f} % without the host), ", end="")
    print(", ".join(f"{name} {mean:.1f}" for name, mean in zip(names, alternatives, strict=True)), end="; ")
    print(
        f"inside {inside.mean():.1f} % of lines, {np.average(inside, weights=rows):.1f} % of rows", end="; "
    )
    print(f"{sum(error['below_bound'] for error in errors)} below the roofline of {rows.sum():,}\n")


def _print_boards(folder: Path) -> None:
    """Print the errors for a board whose chip was measured on another board only."""
    print("| kernels | board left out | rows | error, % | median, % | inside, % |\n|---|---|---|---|---|---|")
    tables = data.group_by_device(data.read_public(folder))
    chips = [(table.skill, fit.chip(table.device)) for table in tables]
    for table, chip in zip(tables, chips, strict=True):
        if chips.count(chip) < 2:
            continue
        model = bundled_model().without(table.device.name)
        blend = model.blend(table.skill, fit.table_roofline(table), table.device, table.arithmetic)
        missed = 100 * (blend.us / table.us - 1)
        inside = 100 * np.mean((blend.low_us <= table.us) & (table.us <= blend.high_us))
        print(f"| {table.skill}, {table.arithmetic} | {table.device.name} | {len(missed):,} ", end="")
        print(f"| **{np.abs(missed).mean():.1f}** | {np.median(missed):+.1f} | {inside:.0f} |")
    print()


def _print_windows(folder: Path) -> None:
    """Print the errors of attention with a sliding window, which nothing was fitted to."""
    print("| device | head size | window | prompts | rows | error, % | median, % | inside, % | causal, % |")
    print(f"{'|---' * 9}|")
    for table in data.group_by_device(data.read_windows(folder)):
        figures = dict(zip(COLUMNS[table.family], table.figures.T, strict=True))
        is_window = np.array(COLUMNS[table.family]) == "window"
        blend = _blend(table, table.figures)
        missed = 100 * (blend.us / table.us - 1)
        inside = (blend.low_us <= table.us) & (table.us <= blend.high_us)
        causal = 100 * (_blend(table, np.where(is_window, 0, table.figures)).us / table.us - 1)
        masks = sorted(set(zip(figures["head_dim"], figures["window"], strict=True)))
        longer = figures["seq_q"] > 2 * figures["window"]
        sets = [("all | all | all", longer | True), ("all | all | above two windows", longer)]
        for head_dim, window in masks:
            rows = (figures["head_dim"] == head_dim) & (figures["window"] == window)
            sets.append((f"{head_dim:.0f} | {window:,.0f} | all", rows))
        for name, rows in sets:
            print(
                f"| {table.device.name} | {name} | {rows.sum():,} | **{np.abs(missed[rows]).mean():.1f}** ",
                end="",
            )
            print(f"| {np.median(missed[rows]):+.1f} | {100 * inside[rows].mean():.0f} ", end="")
            print(f"| {np.abs(causal[rows]).mean():.0f} |")
    print()


def _blend(table: MeasuredKernels, figures: NDArray[np.float64]) -> Blend:
    roofline = roofline_times(table.family, table.arithmetic, figures, table.device)
    return bundled_model().blend(table.skill, roofline, table.device, table.arithmetic, proxy=True)


def _print_layers(folder: Path) -> None:
    print("| device | layers | measured: error, % | inside, % | left out: error, % | median, % | inside, % |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(folder.glob("library_moe_*.csv.gz")):
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        device = devices.find(data.DEVICES[rows[0]["device"]])
        us = 1e3 * np.array([float(row["latency_ms"]) for row in rows])
        products = [product for row in rows for product in layer_of_experts(row)]
        without = bundled_model()
        for expert in without.experts["grouped product"]:
            if fit.chip(devices.find(expert.device)) == fit.chip(device):
                without = without.without(expert.device)
        cells = [device.name, f"{len(rows):,}"]
        for model, median in ((None, False), (without, True)):
            predictions = predict_all(products, device, model=model)
            low, time, high = (
                times_us.reshape(-1, 2).sum(axis=1)
                for times_us in (predictions.low_us, predictions.time_us, predictions.high_us)
            )
            missed = 100 * (time / us - 1)
            cells += [f"**{np.abs(missed).mean():.1f}**", *[f"{np.median(missed):+.1f}"] * median]
            cells.append(f"{100 * np.mean((low <= us) & (us <= high)):.0f}")
        print(f"| {' | '.join(cells)} |")
    print()


def layer_of_experts(row: dict[str, str]) -> tuple[Workload, Workload]:
    """Return the two grouped products of a layer of experts: gate and up, and down."""
    parallel, inner = int(row["moe_ep_size"]), int(row["inter_size"]) // int(row["moe_tp_size"])
    usual: dict[str, Any] = {
        "groups": max(1, int(row["num_experts"]) // parallel),
        "m": max(1, round(int(row["num_tokens"]) * int(row["topk"]) / parallel)),
        "dtype": "bf16",
        "skew": "uniform" if row["distribution"] == "balanced" else "zipf",
    }
    hidden = int(row["hidden_size"])
    up = workload("grouped_gemm", **usual, n=max(1, 2 * inner), k=hidden)
    return up, workload("grouped_gemm", **usual, n=hidden, k=max(1, inner))


def _print_networks(rows: list[Row]) -> None:
    print("| device left out | networks | mean error | mean of magnitudes | worst | inside |")
    print("|---|---|---|---|---|---|")
    for name, group in _groups(rows):
        errors = 100 * np.array([row.error for row in group])
        worst, inside = errors[np.abs(errors).argmax()], sum(row.inside for row in group)
        print(f"| {name} | {len(group)} | {errors.mean():+.1f} % | {np.abs(errors).mean():.1f} % ", end="")
        print(f"| {worst:+.1f} % | {inside} |")


def _groups(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys((row.device, row.mode) for row in rows):
        yield ", ".join(name), [row for row in rows if (row.device, row.mode) == name]
    yield "all NVIDIA", [row for row in rows if not row.device.startswith("AMD")]
    yield "all", rows


if __name__ == "__main__":
    main()
