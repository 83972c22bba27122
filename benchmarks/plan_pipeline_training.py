"""Predicted steps of pipelines beside measured ones.

    python -m benchmarks.plan_pipeline_training [--data FOLDER] [--out FILE.md]

Measured: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
2021 (step times computed from rounded TFLOP/s); Korthikanti et al., "Reducing activation recomputation in
large transformer models", 2022, table 5; VIA-Research/vTrain, `ground_truth_multi` (Megatron-DeepSpeed,
1F1B). All on A100 80 GB in nodes of 8, f16, NVLink 3, one 200 Gb/s adapter per GPU (vTrain: 100 Gb/s).

A step is the simulated schedule with the predicted costs of its stages, then the all-reduce of gradients
among copies (16 bits each, not overlapped), of the shared embedding, and the optimizer. Nothing is fitted to
these rows; the host time per launch is fitted to other rows of vTrain, on one node.
`python -m benchmarks.predict_training` predicts these rows and others, with intervals.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.plan_pipeline_gpt3 import gpt3
from tunebench import device
from tunebench.device import Device
from tunebench.training.interconnect.cluster import Cluster, ProcessGroup, find_link
from tunebench.training.interconnect.collective import collective_us
from tunebench.training.pipeline import PredictedStages
from tunebench.training.schedules import interleaved_1f1b, one_f_one_b, simulate_pipeline

__all__ = ["Measured", "Predicted", "measured", "predict"]

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "training"
OUT = Path(__file__).parent / "results" / "plan_pipeline" / "training.md"
GRADIENT_BYTES = 2
PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured step.

    Attributes:
        source: File of the row.
        name: Name of the row.
        layers, hidden, heads, seq, vocabulary: Sizes of the model.
        tensor, ranks, data: Division among devices.
        chunks: Stages of each rank.
        size: Sequences in a micro-batch.
        microbatches: Micro-batches of a step.
        sequence_parallel: Whether tokens are divided too.
        recompute: Activation recomputation in the backward pass.
        step_s: Time of the step.
    """

    source: str
    name: str
    layers: int
    hidden: int
    heads: int
    seq: int
    vocabulary: int
    tensor: int
    ranks: int
    data: int
    chunks: int
    size: int
    microbatches: int
    sequence_parallel: bool
    recompute: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A predicted step, in seconds.

    Attributes:
        interleaved_s: With the measured number of stages on each rank.
        plain_s: With one stage on each rank (1F1B).
        bubble: Idle share of ranks in the first one.
    """

    interleaved_s: float
    plain_s: float
    bubble: float


def measured(folder: Path) -> Iterator[Measured]:
    """Yield the rows with several ranks whose schedule is stated."""
    files = ("sc21_table1.csv", "sc21_table2.csv", "korthikanti_table5.csv", "vtrain_multi.csv")
    for file in files:
        with (folder / file).open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                chunks = row.get("interleave", "1")
                if int(row["pp"]) > 1 and chunks:
                    yield _measured(file, row, int(chunks))


def _measured(file: str, row: dict[str, str], chunks: int) -> Measured:
    return Measured(
        source=file,
        name=row["id"],
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        seq=int(row["seq"]),
        vocabulary=int(row["vocab"]),
        tensor=int(row["tp"]),
        ranks=int(row["pp"]),
        data=int(row["dp"]),
        chunks=chunks,
        size=int(row["micro_batch"]),
        microbatches=int(row["num_microbatches"]),
        sequence_parallel=row.get("seq_parallel") == "1",
        recompute=row["recompute"],
        step_s=float(row.get("measured_s") or row["step_s_from_tflops"]),
    )


def stages_of(row: Measured, on: Device) -> PredictedStages:
    """Return the stages of a row. Copies of a rank are neighbours, so that fewer ranks share a node."""
    network = gpt3(row.name, row.layers, row.hidden, row.heads, row.vocabulary)
    together = max(row.tensor, PER_NODE // row.data)
    return PredictedStages(
        network=network,
        device=on,
        cluster=Cluster(
            inside=find_link("nvlink3"),
            between=find_link(_adapter(row)),
            devices_per_node=together,
            nodes=-(-row.ranks * row.tensor // together),
        ),
        ranks=row.ranks,
        tensor=row.tensor,
        microbatch=row.size,
        seq=row.seq,
        tensor_overlap=row.source.startswith("korthikanti"),
        recompute=row.recompute,  # type: ignore[arg-type]
        sequence_parallel=row.sequence_parallel,
    )


def _adapter(row: Measured) -> str:
    return "12.5:2.7" if row.source.startswith("vtrain") else "25:2.7"


def predict(row: Measured, on: Device) -> Predicted:
    """Return the predicted step of a row, with its schedule and with 1F1B."""
    stages = stages_of(row, on)
    plain_s, bubble = _step(row, stages, 1)
    if row.chunks == 1:
        return Predicted(interleaved_s=plain_s, plain_s=plain_s, bubble=bubble)
    interleaved_s, bubble = _step(row, stages, row.chunks)
    return Predicted(interleaved_s=interleaved_s, plain_s=plain_s, bubble=bubble)


def _step(row: Measured, stages: PredictedStages, chunks: int) -> tuple[float, float]:
    """Return the time of a step in seconds, and its bubble."""
    schedule = (
        interleaved_1f1b(row.ranks, row.microbatches, chunks)
        if chunks > 1
        else one_f_one_b(row.ranks, row.microbatches)
    )
    simulation = simulate_pipeline(schedule, stages.costs(schedule.placement))
    after_us = stages.optimizer_us(schedule.placement) + _gradients_us(row, stages)
    return (simulation.step_us + after_us) / 1e6, simulation.bubble


def _gradients_us(row: Measured, stages: PredictedStages) -> float:
    """Return the time of the all-reduces of gradients among copies, and of the shared embedding."""
    inside, between = stages.cluster.inside, stages.cluster.between
    nodes = -(-row.tensor * row.data * row.ranks // PER_NODE)
    cluster = Cluster(inside=inside, between=between, devices_per_node=PER_NODE, nodes=nodes)
    max_parameters = max(stage.parameters for stage in stages.predicted(row.ranks))
    copies = cluster.group(row.data, stride=row.tensor)
    link = between if nodes > 1 else inside
    embedding_group = ProcessGroup(local=2, nodes=1, inside=link, between=link)
    embedding = row.vocabulary * row.hidden // row.tensor
    return float(
        collective_us("all-reduce", max_parameters * GRADIENT_BYTES, copies)
        + collective_us("all-reduce", embedding * GRADIENT_BYTES, embedding_group)
    )


def report(folder: Path) -> Iterator[str]:
    """Yield the lines of the report."""
    on = device.find("a100-80-sxm")
    pairs_all = [(row, predict(row, on)) for row in measured(folder)]
    yield "# Predicted and measured steps of pipelines\n"
    yield "`python -m benchmarks.plan_pipeline_training`; predictions for the A100 80 GB SXM.\n"
    for paragraph in (__doc__ or "").strip().split("\n\n")[2:]:
        yield " ".join(paragraph.split("\n")) + "\n"
    yield "| rows | number | mean absolute error | mean error | largest |"
    yield "|---|---|---|---|---|"
    groups = (
        ("all", pairs_all),
        ("several stages on each rank, as measured", [pair for pair in pairs_all if pair[0].chunks > 1]),
        ("one stage on each rank, Megatron-LM", [pair for pair in pairs_all if _is_megatron(pair[0])]),
        (
            "one stage on each rank, vTrain",
            [pair for pair in pairs_all if pair[0].source.startswith("vtrain")],
        ),
    )
    for name, pairs in groups:
        yield _errors(name, [_error(row, prediction.interleaved_s) for row, prediction in pairs])
    several = groups[1][1]
    yield _errors(
        "several stages measured, predicted with one",
        [_error(row, prediction.plain_s) for row, prediction in several],
    )
    yield ""
    yield from MISSING
    columns = (
        *("row", "model", "tensor", "ranks", "copies", "stages per rank", "micro-batch", "number"),
        *("recomputation", "measured, s", "predicted, s", "error", "bubble", "with 1F1B, s"),
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row, prediction in pairs_all:
        sizes = (row.tensor, row.ranks, row.data, row.chunks, row.size, row.microbatches)
        cells = (
            *(row.name, f"{row.layers} x {row.hidden}", *map(str, sizes), row.recompute),
            *(
                f"{row.step_s:.2f}",
                f"{prediction.interleaved_s:.2f}",
                f"{_error(row, prediction.interleaved_s):+.1%}",
            ),
            *(f"{prediction.bubble:.1%}", f"{prediction.plain_s:.2f}"),
        )
        yield f"| {' | '.join(cells)} |"


def _is_megatron(row: Measured) -> bool:
    return row.chunks == 1 and not row.source.startswith("vtrain")


def _error(row: Measured, predicted_s: float) -> float:
    return predicted_s / row.step_s - 1


def _errors(name: str, errors: Sequence[float]) -> str:
    absolute = np.abs(errors)
    return (
        f"| {name} | {len(errors)} | {absolute.mean():.1%} | {np.mean(errors):+.1%} | {absolute.max():.1%} |"
    )


MISSING = (
    "Not modelled: sends that block the passes, collectives that slow kernels, loading of data. Only "
    "Korthikanti et al. overlap sums of tensor parallelism with gradients of weights. Rows of ZeRO and rows "
    "that do not state the stages per rank are left out.\n",
)


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured steps")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write")
    chosen = parser.parse_args()
    if not (chosen.data / "sc21_table1.csv").exists():
        print(f"no measured steps in {chosen.data}")
        return
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    lines = list(report(chosen.data))
    chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
