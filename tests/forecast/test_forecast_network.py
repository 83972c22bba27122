"""Times of whole networks: sums of predictions, and sums of measured operators against measured networks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.public_data import IS_WHOLE, found
from tunebench import device
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast import Predictions, predict_all
from tunebench.forecast import network as of_network
from tunebench.forecast.network import (
    DISPATCH_US,
    EAGER_HOST_US,
    HOST_US,
    LIST_ERROR,
    LOOP_LAUNCH_US,
    MEGATRON_HOST_US,
    host_launches,
    interval_widths,
    predict_network,
    predict_operations,
)
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.networks import NetworkRun, Operation, network

H100 = device.find("h100-sxm")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_parts_and_phases_add_up_to_the_whole(dtype: str) -> None:
    run = NetworkRun(batch=4, seq=512, mode="train", dtype=dtype, optimizer="adamw")  # type: ignore[arg-type]
    prediction = predict_network(network("gpt2-large"), H100, run)
    assert 0 < prediction.bound_us <= prediction.low_us <= prediction.time_us <= prediction.high_us
    assert not prediction.waits_for_host
    assert (prediction.items, prediction.items_per_s) == (2048, pytest.approx(2048e6 / prediction.time_us))
    for lines in (prediction.parts(), prediction.phases()):
        modelled_us = prediction.time_us - prediction.software_us
        assert sum(line.time_us for line in lines) == pytest.approx(modelled_us)
        assert sum(line.share for line in lines) == pytest.approx(1.0)
        assert sum(line.launches for line in lines) == prediction.launches
    assert {line.part for line in prediction.phases()} == {"forward", "backward", "optimizer"}


def test_items_of_a_network_without_sequences_are_images() -> None:
    assert predict_network(network("resnet50"), H100, NetworkRun(batch=8, dtype="f16")).items == 8


def test_alike_workloads_are_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Workload] = []

    def recorded(workloads: Iterable[Workload], on: Device, **settings: Any) -> Predictions:
        asked.extend(listed := tuple(workloads))
        return predict_all(listed, on, **settings)

    monkeypatch.setattr(of_network, "predict_all", recorded)
    prediction = predict_network(network("gpt2"), H100, NetworkRun(batch=4, seq=512, mode="train"))
    assert len(asked) == len(set(asked)) < len(prediction.operations) < prediction.launches


def test_a_small_network_waits_for_the_host() -> None:
    run = NetworkRun(batch=1, seq=8)
    prediction = predict_network(network("gpt2"), H100, run)
    assert prediction.waits_for_host
    assert prediction.time_us == prediction.host_us == pytest.approx(EAGER_HOST_US * prediction.launches)
    compiled = predict_network(network("gpt2"), H100, NetworkRun(batch=1, seq=8, stack="compiled"))
    assert compiled.host_us == pytest.approx(HOST_US * compiled.launches)
    trained = predict_network(network("gpt2"), H100, NetworkRun(batch=1, seq=8, mode="train"))
    assert trained.host_us == pytest.approx(HOST_US * trained.launches)
    graph = predict_network(network("gpt2"), H100, run, host_us_per_launch=0.0)
    assert graph.time_us == graph.device_us < prediction.time_us


@pytest.mark.parametrize(
    ("name", "product", "batch", "published_ms"),
    [
        ("resnet50", "a100-80-sxm", 1, 6.531),
        ("resnet50", "a100-80-sxm", 4, 6.657),
        ("resnet50", "v100-sxm2", 1, 6.484),
        ("resnet50", "t4", 1, 6.031),
        ("resnet50", "rtx-3090", 1, 8.2),
        ("vit-base-16", "a100-80-sxm", 1, 9.325),
        ("vit-base-16", "v100-sxm2", 1, 10.495),
    ],
)
def test_eager_inference_of_small_batches_takes_the_host_as_long_as_published(
    name: str, product: str, batch: int, published_ms: float
) -> None:
    """Source: huggingface/transformers, `perf_torch_compile.md`; jjblogs.com/threads/217728 (RTX 3090)."""
    prediction = predict_network(network(name), device.find(product), NetworkRun(batch=batch))
    assert prediction.waits_for_host
    assert prediction.low_us <= published_ms * 1e3 <= prediction.high_us
    assert prediction.time_us == pytest.approx(published_ms * 1e3, rel=0.25)


def test_launches_in_a_loop_take_the_host_less_time() -> None:
    small = parse("elementwise:rows=64,cols=64,dtype=f32,expression=x")
    listed = [
        Operation(workload=small, part="a", count=6),
        Operation(workload=small, part="b", count=6, loop=3),
    ]
    times = predict_operations(listed, H100)
    assert host_launches(times[:1]) == 6
    host_us = MEGATRON_HOST_US * host_launches(times[1:])
    assert host_us == pytest.approx(2 * (MEGATRON_HOST_US + 2 * LOOP_LAUNCH_US))
    with pytest.raises(InputError, match="multiple of loop=4"):
        Operation(workload=small, part="b", count=6, loop=4)


def test_an_operation_that_the_device_waits_for_takes_the_launch_by_the_host_too() -> None:
    small = parse("elementwise:rows=64,cols=64,dtype=f32,expression=x")
    queued, alone = predict_operations(
        [Operation(workload=small, part="a"), Operation(workload=small, part="a", alone=True)], H100
    )
    assert queued.each_us == queued.alone.time_us < 6
    assert alone.each_us == pytest.approx(queued.each_us + DISPATCH_US[False])
    assert predict_operations([], H100) == ()


def test_interval_of_a_sum_is_between_linear_and_root_sum_of_squares() -> None:
    work = [parse(f"gemm:m=4096,n=4096,k={k},dtype=f32") for k in (4096, 8192)]
    times = predict_operations([Operation(workload=workload, part="a", count=3) for workload in work], H100)
    widths = [time.time_us - time.low_us for time in times]
    lists = LIST_ERROR * sum(time.time_us for time in times)
    assert interval_widths(times, together=1.0)[0] == pytest.approx(math.hypot(sum(widths), lists))
    assert interval_widths(times, together=0.0)[0] == pytest.approx(math.hypot(*widths, lists))
    assert (
        interval_widths(times, together=0.0)[0]
        < interval_widths(times)[0]
        < interval_widths(times, together=1.0)[0]
    )


def test_sums_of_measured_operators_match_measured_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum operators of V100 and P100, the devices with measured times of these networks' own products."""
    folder = found("predict/neusight_ops.csv.gz").parent
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    from benchmarks.measured_operators import Measured
    from benchmarks.predict_models import network_rows

    by_device = Measured.read(folder / "neusight_ops.csv.gz")
    assert {"Tesla V100-PCIE-32GB", "Tesla P100-PCIE-16GB"} <= set(by_device)
    if not IS_WHOLE:
        pytest.skip("the operators of these networks are only in the whole set")
    rows = [
        row
        for row in network_rows(folder, measured=True)
        if row.device.startswith(("Tesla_V100", "Tesla_P100"))
    ]
    errors = np.array([row.error for row in rows])
    assert len(errors) == 18
    assert np.abs(errors).mean() < 0.03
    assert np.abs(errors).max() < 0.08
    assert {row.mode for row in rows} == {"inf", "train"}


@pytest.mark.parametrize("on", ["h100-sxm", "b200", "a100-80-sxm", "rtx-4090", "l40s", "h20"])
def test_grouped_products_in_networks_are_near_products_of_the_same_rows(on: str) -> None:
    rows, sizes = 4096, "n=4096,k=4096,dtype=bf16,trans=nt"

    def us(workload: str) -> float:
        (timed,) = predict_operations([Operation(workload=parse(workload), part="experts")], device.find(on))
        assert timed.low_us <= timed.time_us <= timed.high_us
        return timed.time_us

    times = [us(f"grouped_gemm:groups={groups},m={rows},{sizes}") for groups in (1, 2, 4, 8, 16)]
    whole = us(f"gemm:m={rows},{sizes}")
    assert 0.8 * whole < min(times)
    assert max(times[:3]) < 1.75 * whole
    assert all(more > 0.95 * fewer for fewer, more in pairwise(times))


def test_a_batch_that_is_too_large_is_named() -> None:
    """Not a size of one of the workloads; errors that a smaller batch does not repair stay as they are."""
    model = network("llama-2-7b")
    with pytest.raises(InputError, match=r"llama-2-7b cannot run a batch of 100000 .* smaller batch"):
        predict_network(model, H100, NetworkRun(batch=100_000, seq=2048))
    with pytest.raises(InputError, match="positions") as caught:
        predict_network(network("gpt2"), H100, NetworkRun(batch=8, seq=4096))
    assert "--batch" not in str(caught.value)
