"""The bundled model and the lower bounds, compared with public measurements of its devices.

The host time that the f32 operators include is added to the predictions.
"""

from __future__ import annotations

import csv
import functools
import gzip
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.measured_operators import host_times
from tests.public_data import IS_WHOLE, found
from tunebench import device
from tunebench.forecast import Predictions, predict_all
from tunebench.forecast.model_training.data import BINARY, DEVICES
from tunebench.forecast.model_training.host import NO_HOST, HostTime
from tunebench.workload import Workload
from tunebench.workloads import workload

Host = tuple[NDArray[np.float64], NDArray[np.float64]]

ROWS = 4000
"""Rows drawn from each file."""

OF_ATTENTION = {"attention": 8.0, "decode": 9.0, "encoder": 9.0}
OF_ROWS = {"elem": 5.0, "softmax": 5.0, "ln": 5.0}
ERRORS = {"bmm": 11.0, "linear": 11.0, "bf16": 8.0, "e4m3": 11.0, "experts": 18.0, **OF_ATTENTION, **OF_ROWS}
"""Allowed mean absolute error in per cent, by kind: 1.5 times the largest error of any file, or 5."""


def _operator(row: dict[str, str]) -> tuple[str, Workload, float]:
    kind, us = row["op_group"], 1e3 * float(row["latency_ms"])
    if kind in ("bmm", "linear"):
        m, k, n = (int(float(row[name])) for name in "MNK")
        return kind, workload("gemm", m=m, n=n, k=k, batch=int(row["B"]), dtype="f32"), us
    rows: dict[str, Any] = {"rows": int(row["B"]), "cols": int(float(row["H"])), "dtype": "f32"}
    if kind == "elem":
        rows["expression"] = "x+y" if row["op"] in BINARY else "x"
    names = {"elem": "elementwise", "softmax": "softmax", "ln": "layernorm"}
    return kind, workload(names[kind], **rows), us


def _product(row: dict[str, str]) -> tuple[str, Workload, float]:
    m, n, k = (int(row[name]) for name in "mnk")
    dtype = {"bfloat16": "bf16", "fp8": "e4m3"}[row["gemm_dtype"]]
    return dtype, workload("gemm", m=m, n=n, k=k, dtype=dtype), 1e3 * float(row["latency_ms"])


def _attention(row: dict[str, str]) -> tuple[str, Workload, float] | None:
    if row["kv_cache_dtype"] != "bfloat16" or row.get("window_size", "0") != "0":
        return None
    names = {"batch": "batch_size", "heads": "num_heads", "heads_k": "num_key_value_heads", "seq_q": "isl"}
    sizes = {name: int(row[column]) for name, column in (names | {"head_dim": "head_dim"}).items()}
    return "attention", workload("attention", **sizes, dtype="bf16", causal=True), 1e3 * float(row["latency"])


def _decode(row: dict[str, str]) -> tuple[str, Workload, float]:
    sizes = {name: int(row[column]) for name, column in (HEADS | {"heads_k": "num_key_value_heads"}).items()}
    problem = workload("attention", **sizes, seq_q=1, seq_k=1 + int(row["step"]), dtype="bf16")
    return "decode", problem, 1e3 * float(row["latency_ms"])


def _encoder(row: dict[str, str]) -> tuple[str, Workload, float]:
    sizes = {name: int(row[column]) for name, column in (HEADS | {"seq_q": "isl"}).items()}
    return "encoder", workload("attention", **sizes, dtype="bf16"), 1e3 * float(row["latency_ms"])


def _experts(row: dict[str, str]) -> tuple[str, Workload, float]:
    """Return the first product of a layer of experts with its share of the time, by arithmetic."""
    parallel, rows = int(row["moe_ep_size"]), int(row["num_tokens"]) * int(row["topk"])
    problem = workload(
        "grouped_gemm",
        groups=max(1, int(row["num_experts"]) // parallel),
        m=max(1, round(rows / parallel)),
        n=2 * max(1, int(row["inter_size"]) // int(row["moe_tp_size"])),
        k=int(row["hidden_size"]),
        dtype="bf16",
        skew="uniform" if row["distribution"] == "balanced" else "zipf",
    )
    return "experts", problem, 2 / 3 * 1e3 * float(row["latency_ms"])


HEADS = {"batch": "batch_size", "heads": "num_heads", "head_dim": "head_dim"}
FILES = {
    "neusight_ops": _operator,
    "library_gemm_a100_sxm": _product,
    "library_gemm_h100_sxm": _product,
    "library_gemm_b200_sxm": _product,
    "library_gemm_rtx_pro_6000": _product,
    "library_attention_a100_sxm": _attention,
    "library_attention_h100_sxm": _attention,
    "library_decode_attention_h100_sxm": _decode,
    "library_encoder_attention_h100_sxm": _encoder,
    "library_gemm_gb200": _product,
    "library_moe_gb200": _experts,
}


@functools.cache
def _sample(name: str) -> list[tuple[str, NDArray[Any], NDArray[np.float64], Predictions, Host]]:
    """Return rows drawn from a file, by device: kinds, measured times, predictions and host times."""
    with gzip.open(found(f"predict/{name}.csv.gz"), "rt", encoding="utf-8") as file:
        header, *lines = file
    drawn = np.random.default_rng(0).choice(len(lines), min(ROWS, len(lines)), replace=False)
    host_by_split = host_times()
    by_device: dict[str, list[tuple[str, Workload, float, HostTime]]] = {}
    for row in csv.DictReader([header, *(lines[index] for index in np.sort(drawn))]):
        on = DEVICES[row["device"]]
        host = host_by_split[on, row["op"], row["split"]] if FILES[name] is _operator else NO_HOST
        if made := FILES[name](row):
            by_device.setdefault(on, []).append((*made, host))
    samples = []
    for on, rows in by_device.items():
        kinds, problems, us, hosts = zip(*rows, strict=True)
        floor_us, lead_us = np.array([(host.floor_us, host.lead_us) for host in hosts]).T
        predicted = predict_all(problems, device.find(on))
        samples.append((on, np.array(kinds), np.array(us), predicted, (floor_us, lead_us)))
    return samples


@pytest.mark.parametrize("name", FILES)
def test_no_measured_time_is_below_its_bound(name: str) -> None:
    for on, _, us, predicted, _ in _sample(name):
        below = np.flatnonzero(us < predicted.bound_us)
        assert not len(below), f"{on}: {predicted.workloads[below[0]]} took {us[below[0]]} us"


@pytest.mark.parametrize("name", FILES)
def test_errors_on_measured_devices(name: str) -> None:
    samples = _sample(name)
    kinds = np.concatenate([kind for _, kind, *_ in samples])
    us = np.concatenate([us for _, _, us, *_ in samples])
    predicted, low, high = (
        np.concatenate([np.maximum(floor, lead + getattr(p, field)) for *_, p, (floor, lead) in samples])
        for field in ("time_us", "low_us", "high_us")
    )
    for kind in np.unique(kinds):
        rows = kinds == kind
        percent = 100 * np.mean(np.abs(predicted[rows] / us[rows] - 1))
        allowed = ERRORS[kind] * (1 if IS_WHOLE else 2)  # the mean of a few rows varies
        assert percent < allowed, f"{kind}: {percent:.1f} % of {rows.sum()} rows"
    within = 100 * np.mean((low <= us) & (us <= high))
    assert 85 < within < 97 if IS_WHOLE else within > 70  # nominally 90
