"""Predicted training steps next to published ones of NVIDIA, PyTorch and MosaicML.

    python -m benchmarks.predict_published

The rows are in `benchmarks/published_steps.toml`, with sources.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunebench import device as devices
from tunebench.stack import find_stack
from tunebench.training.interconnect.cluster import Cluster, links
from tunebench.training.steps.step import Parallelism, StepPrediction, predict_step
from tunebench.workloads.networks import Network, NetworkRun, from_config, network, networks

FILE = Path(__file__).with_suffix("").with_name("published_steps.toml")

VOCABULARY = {"gpt": 51200, "mpt": 50368, "neox": 50432, "bloom": 250880}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured step and its prediction.

    Attributes:
        measured_s: The step, in seconds.
        found: The prediction.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep(MeasuredStep):
    """A published step and its prediction.

    Attributes:
        about: Model, devices and division, as text.
    """

    about: str


def published() -> Iterator[tuple[dict[str, Any], list[PublishedStep]]]:
    """Yield each set of published steps with its predictions."""
    data, sets = published_sets()
    for dataset in sets:
        yield dataset, [predicted_step(row, data) for row in published_rows(dataset)]


def published_sets() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the whole file of published steps, and its sets."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return data, data["set"]


def published_rows(dataset: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a set, each with what all rows share."""
    shared = {key: value for key, value in dataset.items() if key not in ("columns", "rows")}
    return [{**shared, **dict(zip(dataset["columns"], row, strict=True))} for row in dataset["rows"]]


def predicted_step(row: dict[str, Any], data: dict[str, Any]) -> PublishedStep:
    """Return a published step with its prediction.

    Args:
        row: The row (see `published_rows`).
        data: The whole file, for sizes of models.
    """
    device = replace(devices.find(row["device"]), power_limit_w=row.get("power_limit_w"))
    gpus = row["gpus"]
    tensor, pipeline, context = row.get("t", 1), row.get("p", 1), row.get("c", 1)
    copies = gpus // (tensor * pipeline * context)
    megatron = find_stack(row["stack"]).kernels == "megatron"
    recent = row["stack"] != "megatron@2022"
    chunks = row.get("v", 1) if pipeline > 1 else 1
    run = NetworkRun(
        batch=row["batch"],
        seq=row["seq"],
        mode="train",
        dtype=row.get("dtype", "bf16"),
        optimizer="adamw",
        stack=row["stack"],
        flash=recent,
        recompute=row.get("recompute", "none"),
        sequence_parallel=megatron and recent and tensor > 1,
        fp8=row.get("fp8", "none"),
        wide_gradients=row.get("f32_gradients", False),
        attention=row.get("attention", "default"),
        launch_blocking=row.get("launch_blocking", False),
    )
    parallelism = Parallelism(
        data=copies,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        microbatches=row["batch"] // (copies * row["micro"]),
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        user_buffers=megatron and recent,
        overlap=recent,
        tensor_overlap=recent,
        sharding="optimizer" if megatron else "full",
    )
    cluster = Cluster.of(device, devices=gpus, nodes=max(1, gpus // 8), network=_network_link(row))
    transformer = published_network(row["model"], row["seq"], data)
    prediction = predict_step(transformer, device, run, cluster, parallelism)
    measured = row["measured"]
    seconds = measured if row["measured_in"] == "seconds" else row["batch"] * row["seq"] / gpus / measured
    return PublishedStep(about=_about(row), measured_s=seconds, found=prediction)


def _network_link(row: dict[str, Any]) -> str | None:
    """Return the link between nodes, in the form of options; None for the usual one."""
    if "network_gb_s" not in row:
        return None
    return f"{row['network_gb_s']}:{links()['net-200'].latency_us}"


def _about(row: dict[str, Any]) -> str:
    degrees = " ".join(f"{name}{row[name]}" for name in "tpcv" if row.get(name, 1) > 1)
    kinds = [row["stack"] if row["stack"] != "megatron" else "", degrees, f"micro-batch {row['micro']}"]
    if row.get("recompute", "none") != "none":
        kinds.append("recomputed")
    kinds.append("fp8" if row.get("fp8", "none") != "none" else "bf16")
    return f"{row['model']} on {row['gpus']}, seq {row['seq']}: " + ", ".join(filter(None, kinds))


def published_network(name: str, seq: int, data: dict[str, Any]) -> Network:
    """Return a network of a file of published steps.

    Args:
        name: Name of the network.
        seq: Tokens per sequence, the positions of a GPT model.
        data: The whole file, for sizes of models.
    """
    if name in data["llama"]:
        layers, width, heads, keys, inner, vocabulary, *tied = data["llama"][name]
        return from_config(
            name,
            {
                "model_type": "llama",
                "num_hidden_layers": layers,
                "hidden_size": width,
                "num_attention_heads": heads,
                "num_key_value_heads": keys,
                "intermediate_size": inner,
                "vocab_size": vocabulary,
                "tie_word_embeddings": bool(tied),
            },
        )
    if name in networks():
        return network(name)
    layers, width, heads = data["gpt"][name]
    return from_config(
        name,
        {
            "model_type": "gpt2",
            "n_layer": layers,
            "n_embd": width,
            "n_head": heads,
            "n_positions": seq,
            "vocab_size": VOCABULARY[name.partition("-")[0]],
            "activation_function": "gelu",
            **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
        },
    )


def summary(errors: Sequence[float], inside: Sequence[bool]) -> str:
    """Return cells of a Markdown row: number, mean absolute error, bias, worst, share in the interval."""
    values = np.array(errors)
    worst = values[np.abs(values).argmax()]
    return (
        f"{len(values)} | {np.abs(values).mean():.1%} | {values.mean():+.1%} | {worst:+.1%} | "
        f"{np.mean(inside):.0%}"
    )


def print_published() -> None:
    """Print the errors of each set, and each row."""
    sets = list(published())
    print("| steps | rows | MAPE | bias | worst | in interval |\n|---|---|---|---|---|---|")
    for dataset, steps in sets:
        kinds = dict.fromkeys("fp8" in step.about for step in steps)
        for narrow in kinds:
            rows = [step for step in steps if ("fp8" in step.about) == narrow]
            label = f", {'fp8' if narrow else 'bf16'}" if len(kinds) > 1 else ""
            cells = summary([step.error for step in rows], [step.inside for step in rows])
            print(f"| {dataset['name']}{label} | {cells} |")
    print("\n| step | measured, s | predicted, s | error | 90 % interval, s | kernels | waits | bubble |")
    print("|---|---|---|---|---|---|---|---|")
    for _, steps in sets:
        for step in steps:
            times = step.found
            parts = " | ".join(
                f"{part.us / times.time_us:.0%}"
                for part in (times.compute, times.communication, times.bubble)
            )
            print(
                f"| {times.device.name}: {step.about} | {step.measured_s:.2f} | {times.time_us / 1e6:.2f} | "
                f"{step.error:+.1%} | {times.low_us / 1e6:.2f} to {times.high_us / 1e6:.2f} | {parts} |",
                flush=True,
            )


if __name__ == "__main__":
    print_published()
