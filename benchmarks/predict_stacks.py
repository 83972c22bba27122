"""Efficiencies of software stacks: learned from published steps, judged on sources that were left out.

    python -m benchmarks.predict_stacks [--data FOLDER] > results/predict/stacks.md

A source is a cluster with its program. The efficiency that judges a source is learned from the other sources
of its population; `tunebench.stack` has those learned from all. Rows: FOLDER/README.md,
`benchmarks/published_steps.toml`.
"""

from __future__ import annotations

import argparse
import csv
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.plan_cluster import gpt
from benchmarks.plan_mixed import MT_NLG
from benchmarks.predict_memory import FILE as GRID
from benchmarks.predict_published import MeasuredStep as MeasuredRow
from benchmarks.predict_published import predicted_step, published_rows, published_sets
from benchmarks.predict_training import DATA, SOURCES, mt_nlg_step, rows
from tunebench import device as devices
from tunebench.stack import PYTORCH, TUNED_MEGATRON, TYPICAL_MEGATRON, Efficiency
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.steps.calibration import MeasuredStep, calibrate
from tunebench.training.steps.step import Parallelism, StepPrediction, predict_step
from tunebench.training.steps.time_range import TimeRange
from tunebench.workloads.networks import NetworkRun

POPULATIONS = {
    "megatron, tuned": TUNED_MEGATRON,
    "megatron, typical": TYPICAL_MEGATRON,
    "PyTorch": PYTORCH,
}

SETS = {
    "DGX": ("megatron, tuned", "DGX Cloud, H100"),
    "NeMo 24.07": ("megatron, tuned", "NeMo, H100"),
    "NeMo 25.02": ("megatron, tuned", "NeMo, B200"),
    "torchtitan 2025": ("PyTorch", "torchtitan, H200"),
    "torchtitan 2024, H100": ("PyTorch", "torchtitan, H100 at 500 W"),
    "torchtitan 2024, A100": ("PyTorch", "torchtitan, A100"),
    "MPT, A100": ("PyTorch", "MPT, A100"),
    "MPT, H100": ("PyTorch", "MPT, H100"),
    "fms-fsdp": ("PyTorch", "fms-fsdp, A100"),
    "GPT-NeoX": ("megatron, typical", "GPT-NeoX"),
    "BLOOM": ("megatron, typical", "Jean Zay"),
}
"""Population and source of each set of `published_steps.toml`, by the first words of its name."""

FILES = {
    "korthikanti_table5.csv": ("megatron, tuned", "Korthikanti et al."),
    "sc21_table1.csv": ("megatron, tuned", "Narayanan et al."),
    "sc21_table2.csv": ("megatron, tuned", "Narayanan et al."),
    "vtrain_multi.csv": ("megatron, typical", "vTrain"),
    "vtrain_single.csv": ("megatron, typical", "vTrain"),
}
"""Population and source of each file of `predict_training`."""

TEXT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

MOST_CHOICES = 40
"""Most measured rows of a part of a source that are tried as the one to calibrate by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRow(MeasuredRow):
    """A published step and its prediction.

    Attributes:
        population: What its efficiency is learned from.
        source: Its source.
        part: File or set of the source.
    """

    population: str
    source: str
    part: str

    @property
    def logarithm(self) -> float:
        """Logarithm of measured over modelled time."""
        return math.log(self.measured_s * 1e6 / self.found.modelled.us)


def stack_rows(folder: Path) -> Iterator[StackRow]:
    """Yield all published steps.

    Args:
        folder: Folder of measured steps.
    """
    for file in SOURCES:
        population, source = FILES[file.file]
        for row in rows(folder, file):
            yield _row(population, source, file.file, row.measured_s, row.found)
    data, sets = published_sets()
    for dataset in sets:
        population, source = next(place for start, place in SETS.items() if dataset["name"].startswith(start))
        for published in published_rows(dataset):
            step = predicted_step(published, data)
            part = dataset["name"] if "stack" in dataset else f"{dataset['name']}, {published['stack']}"
            yield _row(population, source, part, step.measured_s, step.found)
    for nodes, measured_s in MT_NLG.items():
        yield _row(
            "megatron, typical", "MT-NLG", "MT-NLG 530B", measured_s, mt_nlg_step(nodes, "megatron@2022")
        )
    with (folder / GRID).open(newline="", encoding="utf-8") as grid:
        for grid_row in csv.DictReader(grid):
            if grid_row["measured_s"]:
                part = f"{GRID}, {'after' if grid_row['after_numa_fix'] == '1' else 'before'} the NUMA fix"
                measured_s = float(grid_row["measured_s"])
                yield _row("megatron, typical", "Jean Zay", part, measured_s, _grid_step(grid_row))


def _row(population: str, source: str, part: str, measured_s: float, prediction: StepPrediction) -> StackRow:
    return StackRow(population=population, source=source, part=part, measured_s=measured_s, found=prediction)


def _grid_step(row: Mapping[str, str]) -> StepPrediction:
    """Return the prediction of a row of the grid.

    Source of `launch_blocking`: bigscience-workshop/bigscience, `train/tr11-176B-ml/chronicles-prequel.md`:
    runs on 320 GPUs hung without it.
    """
    names = ("layers", "hidden", "heads", "seq", "vocab")
    network = gpt(row["id"], *(int(row[name]) for name in names))
    gpus, copies, microbatch = int(row["gpus"]), int(row["dp"]), int(row["micro_batch"])
    count = int(row["global_batch"]) // (copies * microbatch)
    wide = row["f32_gradients"] == "1"
    run = NetworkRun(
        batch=count * copies * microbatch,
        seq=int(row["seq"]),
        mode="train",
        dtype="bf16" if wide else "f16",
        wide_gradients=wide,
        optimizer="adamw",
        stack="megatron@2022",
        recompute="full",
        launch_blocking=True,
    )
    division = Parallelism(
        data=copies,
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        microbatches=count,
        overlap=False,
        tensor_overlap=False,
        sharding="optimizer",
    )
    device = devices.find("a100-80-sxm")
    cluster = Cluster.of(device, devices=gpus, nodes=gpus // 8, network="6.25:2.7")
    return predict_step(network, device, run, cluster, division)


def learned(listed: Sequence[StackRow], population: str, *, leaving: str = "") -> Efficiency:
    """Return the efficiency of a population, without one source.

    Args:
        listed: All rows.
        population: The population.
        leaving: Source that is left out.
    """
    logarithms: dict[str, list[float]] = {}
    for row in listed:
        if row.population == population and row.source != leaving:
            logarithms.setdefault(row.source, []).append(row.logarithm)
    efficiency = Efficiency.of_sources(logarithms)
    # `tunebench.stack` takes 0 for the mean of tuned runs, which is not different from it.
    return replace(efficiency, mean=0.0) if population == "megatron, tuned" else efficiency


def parts(listed: Sequence[StackRow]) -> dict[str, list[StackRow]]:
    """Return the rows of each file or set."""
    grouped: dict[str, list[StackRow]] = {}
    for row in listed:
        grouped.setdefault(row.part, []).append(row)
    return grouped


# -- tables --------------------------------------------------------------------------------------------------


def print_learned(listed: Sequence[StackRow]) -> None:
    """Print the efficiency of each population from all sources, and the bundled one."""
    print(
        "| population | sources | mean | between sources | within a source | bundled mean, between, within |"
    )
    print("|---|---|---|---|---|---|")
    for population, bundled in POPULATIONS.items():
        logarithms: dict[str, list[float]] = {}
        for row in listed:
            if row.population == population:
                logarithms.setdefault(row.source, []).append(row.logarithm)
        fitted = Efficiency.of_sources(logarithms)
        means = ", ".join(f"{source} {np.mean(values):+.3f}" for source, values in logarithms.items())
        print(
            f"| {population} | {means} | {fitted.mean:.3f} | {fitted.between:.3f} | {fitted.within:.3f} | "
            f"{bundled.mean:.3f}, {bundled.between:.3f}, {bundled.within:.3f} |"
        )


def print_left_out(listed: Sequence[StackRow]) -> None:
    """Print the errors of each part of a source with the efficiency of the other sources."""
    print(
        "| population | source | rows | modelled only: MAPE | in interval | source left out: MAPE | bias | "
        "worst | in interval | learned from |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for part, group in parts(listed).items():
        first = group[0]
        efficiency = learned(listed, first.population, leaving=first.source)
        ratios = np.array([row.found.modelled.us / 1e6 / row.measured_s for row in group])
        before = [_inside(row, row.found.modelled) for row in group]
        times = [row.found.modelled.with_efficiency(efficiency) for row in group]
        errors = np.array(
            [time.us / 1e6 / row.measured_s - 1 for time, row in zip(times, group, strict=True)]
        )
        inside = [_inside(row, time) for time, row in zip(times, group, strict=True)]
        print(
            f"| {first.population} | {part} | {len(group)} | {np.abs(ratios - 1).mean():.1%} | "
            f"{np.mean(before):.0%} | {np.abs(errors).mean():.1%} | {errors.mean():+.1%} | "
            f"{errors[np.abs(errors).argmax()]:+.1%} | {np.mean(inside):.0%} | {efficiency.sources} sources |"
        )


def _inside(row: StackRow, time: TimeRange) -> bool:
    return time.low_us <= row.measured_s * 1e6 <= time.high_us


def print_calibrated(listed: Sequence[StackRow]) -> None:
    """Print the errors on the rest of each part after some of its rows were measured."""
    print(
        "| source | stack | rows | before: MAPE | after 1 row: MAPE, mean of choices | median | in interval "
        "| after 3 rows: MAPE | in interval |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for part, group in parts(listed).items():
        if len(group) < 2:
            continue
        first = group[0]
        # `predict_training` predicts the rows of vTrain as tuned runs.
        population = "megatron, tuned" if first.source == "vTrain" else first.population
        efficiency = learned(listed, population, leaving=first.source)
        before = [
            abs(row.found.modelled.with_efficiency(efficiency).us / 1e6 / row.measured_s - 1) for row in group
        ]
        cells = [_after(group, efficiency, 1)]
        cells += [_after(group, efficiency, 3)] if len(group) > 3 else [("-", "-", "-")]
        (mean, median, inside), (mean3, _, inside3) = cells
        print(
            f"| {part} | {population} | {len(group)} | {np.mean(before):.1%} | {mean} | {median} | {inside} "
            f"| {mean3} | {inside3} |"
        )


def _after(group: Sequence[StackRow], efficiency: Efficiency, count: int) -> tuple[str, str, str]:
    """Return mean and median error on the rest over choices of rows, and the share in the interval."""
    rng = np.random.default_rng(0)
    step = max(1, len(group) // MOST_CHOICES)
    errors, covered = [], []
    for index in range(0, len(group), step):
        others = [other for other in range(len(group)) if other != index]
        chosen = {index, *rng.choice(others, size=count - 1, replace=False).tolist()}
        calibration = calibrate(
            [MeasuredStep(seconds=group[at].measured_s, prediction=group[at].found) for at in sorted(chosen)],
            efficiency=efficiency,
        )
        rest = [row for at, row in enumerate(group) if at not in chosen]
        predictions = [calibration.calibrated(row.found) for row in rest]
        errors.append(
            np.mean(
                [
                    abs(found.time_us / 1e6 / row.measured_s - 1)
                    for found, row in zip(predictions, rest, strict=True)
                ]
            )
        )
        covered.append(
            np.mean([_inside(row, found.time) for found, row in zip(predictions, rest, strict=True)])
        )
    return f"{np.mean(errors):.1%}", f"{np.median(errors):.1%}", f"{np.mean(covered):.0%}"


def main() -> None:
    """Print the page as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured steps")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.exit(message=f"no measured steps in {options.data}\n")
    listed = list(stack_rows(options.data))
    print("# Efficiency of software stacks\n")
    print(TEXT["introduction"])
    print("\n## What was learned\n")
    print_learned(listed)
    print(f"\n## Sources left out\n\n{TEXT['left_out']}")
    print_left_out(listed)
    print(f"\n## Calibrated by rows of the same source\n\n{TEXT['calibrated']}")
    print_calibrated(listed)


if __name__ == "__main__":
    main()
