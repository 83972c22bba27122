"""Errors of predicted training steps on many GPUs, by file, model and kind of row.

    python -m benchmarks.predict_training [--data FOLDER] [--only PART …] > results/predict/training.md

Rows are public measurements (FOLDER/README.md, `benchmarks/published_steps.toml`). Only the host time of
`vtrain_single.csv` is fitted, to one of its models.
"""

from __future__ import annotations

import argparse
import csv
import functools
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.plan_cluster import gpt, print_measured
from benchmarks.plan_mixed import MT_NLG
from benchmarks.predict_models import Row as ModelRow
from benchmarks.predict_models import network_rows
from benchmarks.predict_published import MeasuredStep, print_published, summary
from tunebench import device as devices
from tunebench.forecast.network import MEGATRON_HOST_US
from tunebench.training.cluster import ClusterSearch, TrainingCluster, TrainingJob
from tunebench.training.interconnect.cluster import Cluster, links
from tunebench.training.steps.step import Parallelism, StepPrediction, predict_step
from tunebench.workloads.networks import Network, NetworkRun, from_config

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "training"

TEXT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of measured steps.

    Attributes:
        file: Name.
        measured: Column of the measured time in seconds.
        device: Device.
        network_gb_s: Bandwidth between nodes of each GPU, in one direction.
        tensor_overlap: Whether sums of tensor parallelism run during products.
        elsewhere: Errors published for other models of performance.
    """

    file: str
    measured: str
    device: str = "a100-80-sxm"
    network_gb_s: float = 25.0
    tensor_overlap: bool = False
    elsewhere: str = ""


SOURCES = (
    Source(
        file="korthikanti_table5.csv",
        measured="measured_s",
        tensor_overlap=True,
        elsewhere="Calculon 3.65 %, its constants are tuned to it",
    ),
    Source(file="sc21_table1.csv", measured="step_s_from_tflops", elsewhere="Calculon 10 to 39 %"),
    Source(file="sc21_table2.csv", measured="step_s_from_tflops", elsewhere="Calculon 10 to 39 %"),
    Source(file="vtrain_multi.csv", measured="measured_s", network_gb_s=12.5, elsewhere="vTrain 14.7 %"),
    Source(file="vtrain_single.csv", measured="measured_s", network_gb_s=12.5, elsewhere="vTrain 8.4 %"),
)

SMALL = 12
"""Most rows of a file that are listed."""

FITTED = {"vtrain_single.csv": "h1024-L24-a16"}
"""Model of each file whose rows the host time and its interval were fitted to."""

HOSTS_US = (46.0, MEGATRON_HOST_US, 60.0)
"""Host times per launch between which steps are interpolated for cross-validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(MeasuredStep):
    """A measured step of a file and its prediction."""

    file: str
    name: str
    model: str


def rows(folder: Path, source: Source, *, zero3: bool = False) -> Iterator[Row]:
    """Yield the rows of a file, either those of ZeRO-3 or all others."""
    with (folder / source.file).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row.get("schedule") == "zero3") == zero3:
                prediction = predicted(row, source)
                measured_s = float(row[source.measured])
                yield Row(
                    file=source.file,
                    name=row["id"],
                    model=row["model"],
                    measured_s=measured_s,
                    found=prediction,
                )


def predicted(row: dict[str, str], source: Source, **changed: object) -> StepPrediction:
    """Predict the step of a row, with other values of `Parallelism` if given."""
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
        sharding="full" if row.get("schedule") == "zero3" else "none",
        gathering="lists" if row.get("schedule") == "zero3" else "ahead",
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
    return predict_step(_network(row), device, run, cluster, replace(parallelism, **changed))  # type: ignore[arg-type]


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
    prediction = predict_step(
        network, device, run, Cluster.of(device, devices=tensor), Parallelism(tensor=tensor)
    ).stages[0]
    forward, backward = (
        prediction.forward + prediction.sums_forward,
        prediction.backward + prediction.sums_backward,
    )
    return forward.us / 1e3, backward.us / 1e3


@functools.cache
def _listed(folder: Path, source: Source) -> tuple[Row, ...]:
    return tuple(rows(folder, source))


# -- parts of the page ---------------------------------------------------------------------------------------


def print_files(folder: Path) -> None:
    """Print the errors of each file, split into rows used for fitting and rows not."""
    rows_of = {source: _listed(folder, source) for source in SOURCES}
    _header("file", "rows", "MAPE", "bias", "worst", "in interval", "other models")
    for source, listed in rows_of.items():
        fitted = FITTED.get(source.file)
        for label, group in (
            (f"{source.file}, nothing fitted", [row for row in listed if row.model != fitted]),
            (f"{source.file}, model used for fitting", [row for row in listed if row.model == fitted]),
        ):
            if group:
                print(f"| {label} | {_summary(group)} | {source.elsewhere} |")
    for source, listed in rows_of.items():
        print(f"\n## {source.file}\n")
        _print_models(listed)
        if len(listed) <= SMALL:
            _print_rows(listed)
    print("\n## vtrain_multi.csv: rows with errors above 12 %")
    multi = next(listed for source, listed in rows_of.items() if source.file == "vtrain_multi.csv")
    _print_rows([row for row in multi if abs(row.error) > 0.12])
    print(f"\n{TEXT['multi']}")


def _header(*columns: str) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def _summary(listed: Sequence[Row]) -> str:
    return summary([row.error for row in listed], [row.inside for row in listed])


def _print_models(listed: Sequence[Row]) -> None:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in listed:
        groups[row.model].append(row)
    _header("model", "rows", "MAPE", "bias", "worst", "in interval")
    for name, group in (*groups.items(), ("all", listed)):
        print(f"| {name} | {_summary(group)} |")


def _print_rows(listed: Sequence[Row]) -> None:
    print()
    _header("row", "measured, s", "predicted, s", "error", "kernels", "waits", "bubble")
    for row in listed:
        parts = (row.found.compute, row.found.communication, row.found.bubble)
        cells = " | ".join(f"{part.us / 1e6:.2f}" for part in parts)
        print(
            f"| {row.name} | {row.measured_s:.2f} | {row.found.time_us / 1e6:.2f} | {row.error:+.1%} | "
            f"{cells} |"
        )


def print_cross_validation(folder: Path) -> None:
    """Print the errors of each model of one node if host time and interval are fitted to the others."""
    source = SOURCES[-1]
    times: list[list[float]] = []
    for host_us in HOSTS_US:
        if host_us == MEGATRON_HOST_US:
            listed = _listed(folder, source)
        else:
            with mock.patch("tunebench.forecast.network.MEGATRON_HOST_US", host_us):
                listed = tuple(rows(folder, source))
        times.append([row.found.time_us / 1e6 for row in listed])
    measured = np.array([row.measured_s for row in listed])
    models = np.array([row.model for row in listed])
    grid = np.linspace(HOSTS_US[0], HOSTS_US[-1], 57)
    at = np.array([[np.interp(us, HOSTS_US, row_times) for us in grid] for row_times in np.transpose(times)])
    bound = at[:, -1] > 1.02 * at[:, 0]  # limited by the host
    _header(
        "model left out",
        "host time per launch, us",
        "MAPE",
        "bias",
        "in interval, width fitted to the others",
    )
    inside_all = []
    for name in dict.fromkeys(models):
        out = models == name
        errors = np.abs(at[~out & bound] / measured[~out & bound, None] - 1)
        best = int(np.median(errors, axis=0).argmin())
        error = at[:, best] / measured - 1
        width = np.quantile(np.abs(error[~out]), 0.9)
        inside = np.abs(error[out]) <= width
        inside_all.append(inside)
        print(
            f"| {name} | {grid[best]:.1f} | {np.abs(error[out]).mean():.1%} | {error[out].mean():+.1%} | "
            f"{inside.mean():.0%} |"
        )
    print(f"| all | | | | {np.concatenate(inside_all).mean():.0%} |")


def print_layers(folder: Path) -> None:
    """Print the passes of one layer."""
    _header("experiment", "forward", "predicted", "error", "backward", "predicted", "error")
    for name, measured, predicted_parts in layer_rows(folder):
        cells = [
            f"{measured_ms:.1f} | {found_ms:.2f} | {found_ms / measured_ms - 1:+.1%}"
            for measured_ms, found_ms in zip(measured, predicted_parts, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def print_weak_scaling(folder: Path) -> None:
    """Print the range of predicted steps over all settings that are not published and fit the memory."""
    _header(
        "model",
        "GPUs",
        "t, p, d",
        "measured, s",
        "fastest",
        "10 %",
        "median",
        "slowest",
        "plans",
        "measured is faster than",
    )
    with (folder / "h100_weak_scaling.csv").open(newline="", encoding="utf-8") as file:
        listed = list(csv.DictReader(file))
    for row in listed:
        sizes = [int(row[name]) for name in ("layers", "hidden", "heads", "seq", "vocab")]
        job = TrainingJob(
            network=gpt(row["model"], *sizes),
            batch=int(row["global_batch"]),
            seq=int(row["seq"]),
            user_buffers=True,
            wide_gradients=True,
        )
        fixed = {"tensor": row["tp"], "pipeline": row["pp"], "data": row["dp"], "context": "1"}
        search = ClusterSearch(job, TrainingCluster.parse(f"{row['gpus']} x h100-sxm"), fixed=fixed)
        fitting = [
            plan for plan in search.plans if search.memory.of(plan).needed <= search.machine.limit_bytes
        ]
        times = np.sort([search.priced(plan).step.time_us / 1e6 for plan in fitting])
        measured_s = float(row["step_s_from_tflops"])
        cells = " | ".join(f"{np.quantile(times, at):.2f}" for at in (0.0, 0.1, 0.5, 1.0))
        print(
            f"| {row['model']} | {row['gpus']} | {row['tp']}, {row['pp']}, {row['dp']} | {measured_s:.2f} | "
            f"{cells} | {len(times)} | {np.mean(times > measured_s):.0%} |",
            flush=True,
        )


def print_zero3(folder: Path) -> None:
    """Print measured steps of DeepSpeed's ZeRO-3 with what its collectives were."""
    _header(
        "GPUs",
        "micro-batch",
        "measured, s",
        "a layer ahead, s",
        "ratio",
        "by lists, s",
        "ratio",
        "kernels",
        "collectives and copies",
    )
    source = SOURCES[2]
    with (folder / source.file).open(newline="", encoding="utf-8") as file:
        listed = [row for row in csv.DictReader(file) if row["schedule"] == "zero3"]
    for row in listed:
        measured_s = float(row[source.measured])
        gathered_ahead, lists = predicted(row, source, gathering="ahead"), predicted(row, source)
        cells = [
            f"{prediction.time_us / 1e6:.1f} | {prediction.time_us / 1e6 / measured_s:.2f}"
            for prediction in (gathered_ahead, lists)
        ]
        print(
            f"| {row['gpus']} | {row['micro_batch']} | {measured_s:.1f} | {' | '.join(cells)} | "
            f"{lists.compute.us / 1e6:.1f} | {lists.communication.us / 1e6:.1f} |"
        )


def mt_nlg_step(nodes: int, stack: str) -> StepPrediction:
    """Return the prediction of a step of MT-NLG 530B.

    Args:
        nodes: Nodes of 8 A100, a multiple of 35.
        stack: Software that runs it.
    """
    copies = nodes * 8 // 280
    division = Parallelism(
        data=copies,
        tensor=8,
        pipeline=35,
        microbatches=1920 // copies,
        overlap=False,
        tensor_overlap=False,
        sharding="optimizer",
    )
    run = NetworkRun(
        batch=1920,
        seq=2048,
        mode="train",
        dtype="bf16",
        optimizer="adamw",
        stack=stack,
        recompute="full",
    )
    device = devices.find("a100-80-sxm")
    cluster = Cluster.of(device, devices=nodes * 8, nodes=nodes)
    return predict_step(gpt("530B", 105, 20480, 128, 2048, 51200), device, run, cluster, division)


def print_mt_nlg() -> None:
    """Print the steps of MT-NLG 530B and what the prediction consists of."""
    _header(
        "nodes",
        "measured, s",
        "predicted, s",
        "ratio",
        "kernels",
        "tensor parallelism",
        "gradients",
        "sends",
        "bubble",
    )
    for nodes, measured_s in MT_NLG.items():
        prediction = mt_nlg_step(nodes, "megatron")
        gradients_s = sum(stage.gradients.us for stage in prediction.stages) / 35 / 1e6
        sends_s = prediction.sends.us / 1e6
        tensor_s = prediction.communication.us / 1e6 - gradients_s - sends_s
        cells = " | ".join(
            f"{seconds:.1f}"
            for seconds in (
                prediction.compute.us / 1e6,
                tensor_s,
                gradients_s,
                sends_s,
                prediction.bubble.us / 1e6,
            )
        )
        found_s = prediction.time_us / 1e6
        print(f"| {nodes} | {measured_s:.1f} | {found_s:.1f} | {found_s / measured_s:.2f} | {cells} |")


def print_stacks(folder: Path) -> None:
    """Print the errors of whole models in f32 on single GPUs, by stack and mode."""
    groups: dict[tuple[str, str], list[ModelRow]] = defaultdict(list)
    for row in network_rows(folder.parent / "predict", measured=False):
        groups["compiled" if row.option else "eager", row.mode].append(row)
    _header("stack", "mode", "rows", "MAPE", "bias", "worst", "in interval")
    for (stack, mode), listed in sorted(groups.items()):
        cells = summary([row.error for row in listed], [row.inside for row in listed])
        print(f"| {stack} | {'training' if mode == 'train' else 'inference'} | {cells} |")


def print_host_bound() -> None:
    """Print steps of a small model with and without CUDA graphs, by stack."""
    _header(
        "stack",
        "micro-batch",
        "kernels launched",
        "of the device, ms",
        "of the host, ms",
        "step, ms",
        "with CUDA graphs, ms",
    )
    device, network = devices.find("a100-80-sxm"), gpt("350M", 24, 1024, 16, 1024, 50257)
    for stack in ("eager", "compiled", "megatron"):
        for batch in (1, 8):
            run = NetworkRun(
                batch=batch, seq=1024, mode="train", dtype="bf16", optimizer="adamw", stack=stack
            )  # type: ignore[arg-type]
            parallelism = Parallelism(microbatches=1)
            cluster = Cluster.of(device, devices=1)
            plain, graph = (
                predict_step(network, device, variant_run, cluster, parallelism)
                for variant_run in (run, replace(run, cuda_graphs=True))
            )
            kernels = plain.stages[0].kernels
            print(
                f"| {stack} | {batch} | {kernels.launches} | {kernels.device_us / 1e3:.1f} | "
                f"{kernels.host_us / 1e3:.1f} | {plain.time_us / 1e3:.1f} | {graph.time_us / 1e3:.1f} |"
            )


PARTS: dict[str, Callable[[Path], None]] = {
    "files": print_files,
    "cross-validation": print_cross_validation,
    "layers": print_layers,
    "published": lambda folder: print_published(),
    "weak": print_weak_scaling,
    "zero3": print_zero3,
    "mt-nlg": lambda folder: print_mt_nlg(),
    "stacks": print_stacks,
    "host": lambda folder: print_host_bound(),
    "choice": print_measured,
}
"""Parts of the page; their titles and explanations are in `predict_training.toml`."""


def main() -> None:
    """Print the page as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured steps")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=tuple(PARTS), help="parts to print")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.exit(message=f"no measured steps in {options.data}\n")
    print(f"# Predicted training steps against public measurements\n\n{TEXT['introduction']}")
    for name in options.only:
        about = TEXT["part"][name]
        print(f"\n## {about['title']}\n")
        if "about" in about:
            print(f"{about['about']}\n")
        PARTS[name](options.data)


if __name__ == "__main__":
    main()
