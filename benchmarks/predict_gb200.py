"""Errors of predictions for GB200, which the predictor was not trained on: products and attention.

    python -m benchmarks.predict_gb200 [--data FOLDER]

FOLDER contains `library_*_gb200.csv.gz` (its licence names the source). The device is described as B200.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tunebench import device as devices
from tunebench.forecast import predict_all
from tunebench.workload import Workload
from tunebench.workloads import workload

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "predict"


def product(row: Mapping[str, str]) -> Workload:
    """Return the product of a row, in bf16 or e4m3."""
    dtype = {"bfloat16": "bf16", "fp8": "e4m3"}[row["gemm_dtype"]]
    return workload("gemm", m=int(row["m"]), n=int(row["n"]), k=int(row["k"]), dtype=dtype)


def decode(row: Mapping[str, str]) -> Workload:
    """Return attention of one new query per sequence."""
    heads = {"heads": int(row["num_heads"]), "heads_k": int(row["num_key_value_heads"])}
    return _attention(row, **heads, seq_q=1, seq_k=1 + int(row["step"]))


def encoder(row: Mapping[str, str]) -> Workload:
    """Return attention without a mask."""
    return _attention(row, heads=int(row["num_heads"]), seq_q=int(row["isl"]))


def _attention(row: Mapping[str, str], **sizes: int) -> Workload:
    batch, head_dim = int(row["batch_size"]), int(row["head_dim"])
    return workload("attention", batch=batch, head_dim=head_dim, dtype="bf16", **sizes)


FILES: dict[str, Callable[[Mapping[str, str]], Workload]] = {
    "library_gemm_gb200": product,
    "library_decode_attention_gb200": decode,
    "library_encoder_attention_gb200": encoder,
}


def main() -> None:
    """Print a line of errors for each file and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured kernels")
    folder = parser.parse_args().data
    for name, of_row in FILES.items():
        with gzip.open(folder / f"{name}.csv.gz", "rt", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        found = predict_all(map(of_row, rows), devices.find("b200"))
        us = 1e3 * np.array([float(row["latency_ms"]) for row in rows])
        dtypes = np.array([one.dtype for one in found.workloads])
        for dtype in dict.fromkeys(dtypes):
            kept = dtypes == dtype
            missed = 100 * (found.time_us[kept] / us[kept] - 1)
            inside = 100 * np.mean((found.low_us <= us)[kept] & (us <= found.high_us)[kept])
            print(
                f"{name}, {dtype}: {kept.sum()} rows, error {np.abs(missed).mean():.1f} %, "
                f"median {np.median(missed):+.1f} %, inside the interval {inside:.0f} %"
            )


if __name__ == "__main__":
    main()
