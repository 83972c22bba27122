"""Times of products at the power limit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tunebench import device as devices
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.forecast.library import predict_all
from tunebench.forecast.library.power import (
    MEASURED_AT_LIMIT,
    dynamic_power_w,
    slowdown,
    slowdown_beyond_measured,
    slowdown_from_blend,
)
from tunebench.forecast.network import attention_of, predict_network, predict_operations
from tunebench.workloads import parse
from tunebench.workloads.networks import NetworkRun, Operation, network

H100, A100 = devices.find("h100-sxm"), devices.find("a100-80-sxm")

LARGE = parse("gemm:m=8192,n=8192,k=8192,dtype=bf16")
SMALL = parse("gemm:m=64,n=4096,k=4096,dtype=bf16")


def limited(device: Device, watts: float) -> Device:
    return dataclasses.replace(device, power_limit_w=watts)


def test_power_is_that_of_the_limit_after_the_longer_time() -> None:
    rates = np.array([1e8, 6e8, 9e8])  # FLOP per microsecond: 100, 600 and 900 TFLOP/s
    longer = slowdown(H100, "bf16", rates)
    left_w = dynamic_power_w(H100)
    assert left_w is not None
    assert H100.mma_pj_per_ghz2 is not None
    assert longer[0] == 1.0
    clocks_ghz = H100.max_clock_mhz / 1e3 / longer
    watts = H100.mma_pj_per_ghz2 * clocks_ghz**2 * rates / longer / 1e6
    assert watts[0] < left_w
    assert watts[1:] == pytest.approx([watts[1], left_w])
    assert watts[2] == pytest.approx(left_w)


def test_lower_limit_makes_large_products_longer_and_small_ones_not() -> None:
    times = {
        watts: predict_all([LARGE, SMALL], limited(H100, watts), sustained=True).time_us
        for watts in (350, 500, 700)
    }
    assert times[350][0] > times[500][0] > times[700][0]
    assert times[350][1] == times[700][1]


def test_short_measurement_is_longer_where_the_limit_is_below_that_of_measured_boards() -> None:
    """Expect the product of `benchmarks.predict_sustained` on H100 PCIe within 12 % of what is published."""
    usual, low = (predict_all([LARGE, SMALL], device).time_us for device in (H100, limited(H100, 350)))
    (sustained, _) = predict_all([LARGE, SMALL], limited(H100, 350), sustained=True).time_us
    assert usual[0] < low[0] < sustained
    assert low[1] == usual[1]
    assert predict_all([LARGE], limited(H100, 900)).time_us == pytest.approx(usual[:1])
    (pcie,) = predict_all([LARGE], devices.find("h100-pcie")).time_us
    assert pcie == pytest.approx(2 * 8192**3 / 493e6, rel=0.12)
    rates = np.array([8e8])
    unknown = slowdown_beyond_measured(limited(H100, 350), "bf16", rates, {"mine": 1.0})
    assert unknown == pytest.approx(slowdown(limited(H100, 350), "bf16", rates))


def test_limit_of_the_product_is_the_default() -> None:
    assert H100.power_limit_w is None
    same = predict_all([LARGE], limited(H100, 700), sustained=True).time_us
    assert predict_all([LARGE], H100, sustained=True).time_us == pytest.approx(same)


def test_device_measured_at_its_limit_keeps_its_times() -> None:
    assert A100.name in MEASURED_AT_LIMIT
    assert predict_all([LARGE], A100, sustained=True).time_us == pytest.approx(
        predict_all([LARGE], A100).time_us
    )
    weights = {A100.name: 1.0}
    rates = np.array([2.5e8])
    assert slowdown_from_blend(A100, "bf16", rates, weights) == pytest.approx([1.0])
    assert slowdown_from_blend(limited(A100, 250), "bf16", rates, weights) > 1.1


@pytest.mark.parametrize("name", ["v100-sxm2", "mi300x", "gh200"])
def test_devices_without_energy_or_limit_keep_their_times(name: str) -> None:
    device = devices.find(name)
    assert dynamic_power_w(device) is None
    assert slowdown(device, "f16", np.array([1e9])) == pytest.approx([1.0])


def test_8_bit_operations_need_half_the_power() -> None:
    rates = np.array([8e8])
    assert slowdown(H100, "e4m3", 2 * rates) == pytest.approx(slowdown(H100, "bf16", rates))


def test_networks_run_at_the_power_limit() -> None:
    run = NetworkRun(batch=4, seq=1024, mode="train", dtype="bf16", stack="megatron")
    full, low = (predict_network(network("gpt3-6.7b"), limited(H100, watts), run) for watts in (700, 400))
    assert 1.05 < low.time_us / full.time_us < 1.4
    single = run.__class__(batch=4, seq=1024, mode="train", dtype="f32")
    assert predict_network(network("gpt2"), H100, single).time_us == pytest.approx(
        predict_network(network("gpt2"), limited(H100, 700), single).time_us
    )


@pytest.mark.parametrize("sustained", [False, True])
def test_attention_takes_longer_at_a_low_limit(sustained: bool) -> None:
    """Expect no change on measured boards and B300, and a little more time on L40S."""
    workload = parse("attention:batch=8,heads=32,seq_q=2048,head_dim=128,dtype=bf16")
    l40s = devices.find("l40s")
    for device, least, most in ((l40s, 1.02, 1.15), (H100, 1, 1), (A100, 1, 1), (devices.find("b300"), 1, 1)):
        limits = (device, dataclasses.replace(device, power_limit_w=10 * (device.tdp_w or 0)))
        low, high = (predict_all([workload], limit, sustained=sustained).time_us[0] for limit in limits)
        assert least <= low / high <= most


LONG = "attention:batch=4,heads=16,seq_q=4096,head_dim=128,dtype=bf16,causal=true"


def relative(device: Device, name: str, text: str = LONG) -> float:
    """Return the time of an implementation of attention over that of the default one."""
    operations = [Operation(workload=parse(text), part="attention")]
    (usual,) = predict_operations(operations, device)
    (other,) = predict_operations(operations, device, attention=name)
    return other.each_us / usual.each_us


def test_attention_of_pytorch_is_that_of_flash_attention_2_on_hopper() -> None:
    """Expect 1.5 to 2 times FlashAttention-3 for long prompts, as published, and less for short ones."""
    eager, megatron = (NetworkRun(batch=1, seq=64, stack=stack) for stack in ("eager", "megatron"))
    assert attention_of(eager, H100) == "flash-attention-2"
    assert attention_of(megatron, H100) == attention_of(eager, A100) == "default"
    assert 1.5 < relative(H100, "flash-attention-2") < 2.0
    assert 0.9 < relative(H100, "flash-attention-2", LONG.replace("4096", "512")) < 1.5
    assert relative(A100, "flash-attention-2") == pytest.approx(1.0)


@pytest.mark.parametrize(("causal", "published"), [("true", 602 / 529), ("false", 646 / 600)])
def test_cudnn_on_hopper_is_as_published(causal: str, published: float) -> None:
    """Expect the ratio of figure 5 of FlashAttention-3, 2024, for heads of 128."""
    text = f"attention:batch=2,heads=16,seq_q=8192,head_dim=128,dtype=f16,causal={causal}"
    assert relative(H100, "cudnn", text) == pytest.approx(published, rel=0.08)


def test_triton_takes_longer_than_flash_attention_2() -> None:
    """Expect 1.3 to 2.5 times, as in FlashAttention-2, 2023, section 4.1, and no change while decoding."""
    for device in (A100, H100):
        assert 1.3 < relative(device, "triton") / relative(device, "flash-attention-2") < 2.5
    decode = "attention:batch=4,heads=16,seq_q=1,seq_k=4096,head_dim=128,dtype=bf16"
    assert relative(H100, "triton", decode) == 1.0


def test_attention_that_a_device_cannot_run_is_refused() -> None:
    with pytest.raises(InputError, match=r"capability 9\.x.* has 8\.0; use flash-attention-2"):
        relative(A100, "flash-attention-3")
    with pytest.raises(UnknownName, match="flash-attention-2"):
        relative(A100, "paged")
