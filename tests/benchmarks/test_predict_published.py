"""Published training steps: complete rows, and predictions of the smaller ones."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from benchmarks.predict_published import FILE, predicted_step, published_rows
from tunebench import device

DATA = tomllib.loads(FILE.read_text(encoding="utf-8"))
ROWS = [row for dataset in DATA["set"] for row in published_rows(dataset)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['device']}-{row['model']}-{row['gpus']}")
def test_devices_and_batches_are_divided_completely(row: dict[str, Any]) -> None:
    devices_per_copy = row.get("t", 1) * row.get("p", 1) * row.get("c", 1)
    assert row["gpus"] % devices_per_copy == 0
    assert row["batch"] % (row["gpus"] // devices_per_copy * row["micro"]) == 0
    assert row["measured"] > 0
    assert row["device"] in {product.name for product in device.described().values()}


def test_eight_bit_steps_of_small_models_are_predicted_without_a_fit() -> None:
    small = [
        row
        for row in ROWS
        if row["device"] == "h100-sxm"
        and row["stack"] == "megatron"
        and row["gpus"] <= 16
        and row["fp8"] != "none"
    ]
    errors = [predicted_step(row, DATA).error for row in small]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.12
    assert sum(map(abs, errors)) / len(errors) < 0.06
