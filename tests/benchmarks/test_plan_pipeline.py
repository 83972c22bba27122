"""Benchmarks of pipelines: kernels of Megatron-LM, when balanced memory pays, and measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import plan_pipeline_gpt3 as gpt3
from benchmarks import plan_pipeline_training as training
from tests.public_data import found
from tunebench import device
from tunebench.workloads.operators.softmax import Softmax

A100 = device.find("a100-80-sxm")


@pytest.mark.parametrize(("size", "dtype", "number"), [(1, "f32", 5), (2, "f16", 1)])
def test_softmax_is_fused_if_a_multiple_of_four_matrices_is_on_a_device(
    size: int, dtype: str, number: int
) -> None:
    case = next(case for case in gpt3.CASES if case.recompute == "selective")
    run = case.stages(gpt3.MODELS["96B"], 8, 4, size, A100).run
    operations = gpt3.MODELS["96B"].operations(replace(run, tensor=4, layers=(10, 20)))
    softmax = [operation for operation in operations if isinstance(operation.workload, Softmax)]
    assert {operation.workload.dtype for operation in softmax} == {dtype}
    assert {operation.part for operation in softmax} == {"attention softmax", "recomputation"}
    mask = [
        operation.workload
        for operation in operations
        if operation.part == "attention softmax" and operation.phase == "forward"
    ]
    assert len(mask) == number + 1  # and dropout


@pytest.mark.slow
def test_balanced_memory_pays_for_96b_without_flash_attention_only() -> None:
    by_name = {case.name: case for case in gpt3.CASES}
    gains = {}
    for name in ("selective", "flash attention"):
        rows = gpt3.outcomes(by_name[name], gpt3.MODELS["96B"], 8, 4, A100, sizes=(1, 2))
        (small, _), (large, balanced) = rows.values()
        assert small.fits
        assert not large.fits
        assert balanced is not None
        assert balanced.fits
        gains[name] = small.step_us / balanced.step_us
    assert 1.2 < gains["selective"] < 1.4
    assert 0.98 < gains["flash attention"] < 1.03


@pytest.mark.slow
def test_measured_interleaved_steps_are_predicted() -> None:
    rows = [row for row in training.measured(found("training")) if row.chunks > 1]
    assert len(rows) >= 2
    for row in rows:
        predicted = training.predict(row, A100)
        assert predicted.interleaved_s < predicted.plain_s
        assert predicted.interleaved_s == pytest.approx(row.step_s, rel=0.2)
