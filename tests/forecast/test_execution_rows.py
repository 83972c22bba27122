"""Declared execution of kernels that are no products, and the times predicted from it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tunebench import device as devices
from tunebench.bound import Bounds, bound
from tunebench.forecast.execution import predict_us
from tunebench.space import Table
from tunebench.tuning.tunable import find_variants
from tunebench.variant import Costs, Execution, Variant
from tunebench.workload import Traffic
from tunebench.workloads import parse

Array = NDArray[np.float64]

ROWS = (
    "layernorm:rows=8192,cols=4096,dtype=bf16",
    "softmax:rows=8192,cols=4096,dtype=bf16",
    "rmsnorm:rows=4096,cols=8192,dtype=bf16",
    "cross_entropy:rows=4096,cols=32768,dtype=bf16",
    "cross_entropy:rows=4096,cols=50257,dtype=bf16",
    "layernorm:rows=8192,cols=4096,dtype=bf16,direction=backward",
    "softmax:rows=8192,cols=4096,dtype=bf16,direction=backward",
    "reduction:rows=8192,cols=8192,dtype=bf16,expression=x,reduce=sum,axis=rows",
    "reduction:rows=8192,cols=8192,dtype=bf16,expression=x,reduce=sum",
)
OTHERS = (
    "elementwise:rows=8192,cols=8192,dtype=f32,expression=x+y",
    "cross_entropy:rows=4096,cols=5003,dtype=f32,direction=backward",
    "batchnorm_stats:rows=65536,cols=256,dtype=f32",
    "batchnorm_stats:rows=65536,cols=256,dtype=f32,direction=backward",
    "layernorm:rows=16,cols=65536,dtype=f32",
    "softmax:rows=4,cols=131072,dtype=f32",
    "softmax:rows=4,cols=131072,dtype=f32,direction=backward",
    "cross_entropy:rows=8,cols=128256,dtype=f32",
    "rmsnorm:rows=4096,cols=1024,dtype=f32",
    "strided_elementwise:shape=4096x4096,dtype=f32,expression=x+y,operands=x.f32.1_4096+y.f32.4096_1",
    "strided_reduction:shape=4096x4096,dtype=f32,expression=x,operands=x.f32.1_4096,reduce=sum",
    "attention:batch=4,heads=32,heads_k=8,seq_q=2048,head_dim=128,dtype=bf16,causal=true",
    "attention:batch=4,heads=32,heads_k=8,seq_q=2048,head_dim=128,dtype=bf16,causal=true,direction=backward",
    "attention:batch=32,heads=32,heads_k=8,seq_q=1,seq_k=4096,head_dim=128,dtype=bf16,causal=true",
    "attention:batch=1,heads=8,seq_q=1024,head_dim=64,dtype=f32",
)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A variant's configurations, their costs and predicted times."""

    variant: Variant[Any]
    table: Table
    costs: Costs
    us: Array


@functools.cache
def predicted(text: str, name: str = "h100-sxm") -> dict[str, Predicted]:
    """Return the predictions of each variant that supports a workload, by name."""
    workload, device = parse(text), devices.find(name)
    found = {}
    for tunable in find_variants(workload, device, compilable=False)[0]:
        costs = tunable.variant.costs(workload, tunable.table, device)
        bounds = bound(costs, workload.traffic(), device, rows=len(tunable.table))
        us = predict_us(bounds, costs, device, workload.traffic())
        found[tunable.variant.name] = Predicted(tunable.variant, tunable.table, costs, us)
    return found


def best_us(text: str, name: str = "h100-sxm") -> float:
    return min(float(tunable.us.min()) for tunable in predicted(text, name).values())


def peak_us(text: str, name: str = "h100-sxm") -> float:
    """Return the time of the memory traffic at peak bandwidth."""
    traffic = parse(text).traffic()
    return float(traffic.read_bytes + traffic.write_bytes) / (devices.find(name).dram_gb_s * 1e3)


@pytest.mark.parametrize("text", [*ROWS, *OTHERS])
def test_every_variant_declares_its_execution(text: str) -> None:
    workload, device = parse(text), devices.find("h100-sxm")
    for name, tunable in predicted(text).items():
        assert tunable.costs.execution is not None, name
        for field in dataclasses.fields(Execution):
            column = np.asarray(getattr(tunable.costs.execution, field.name), dtype=np.float64)
            assert np.isfinite(column).all(), f"{name}: {field.name}"
            assert (column >= 0).all(), f"{name}: {field.name}"
        # What is expected of a block is no floor.
        rows = len(tunable.table)
        floors = dataclasses.replace(tunable.costs, execution=None)
        with_execution, without = (
            bound(costs, workload.traffic(), device, rows=rows) for costs in (tunable.costs, floors)
        )
        assert (with_execution.us == without.us).all()
        assert (tunable.us >= with_execution.us).all()


@pytest.mark.parametrize("text", ROWS)
@pytest.mark.parametrize("name", ["h100-sxm", "a100-80-sxm"])
def test_few_configurations_of_row_kernels_are_predicted_equal(text: str, name: str) -> None:
    for tunable in predicted(text, name).values():
        equal = int((tunable.us <= 1.001 * tunable.us.min()).sum())
        assert equal <= max(3, 0.04 * len(tunable.us)), tunable.variant.key


@pytest.mark.parametrize("text", [*ROWS, OTHERS[0]])
@pytest.mark.parametrize("name", ["h100-sxm", "a100-80-sxm"])
def test_large_streams_reach_most_of_the_bandwidth(text: str, name: str) -> None:
    assert 0.70 <= peak_us(text, name) / best_us(text, name) <= 0.92


def test_narrow_accesses_are_slower() -> None:
    for text in ROWS[:4]:
        block = predicted(text)["cuda_block"]
        vector = block.table["vector"]
        assert np.median(block.us[vector == 1]) > 1.3 * np.median(block.us[vector == 8])
        assert block.us[vector == 1].min() > 1.005 * block.us.min()


def test_scalar_accesses_with_one_in_flight_are_slower() -> None:
    tunable = predicted("elementwise:rows=8192,cols=8192,dtype=bf16,expression=x+y")["cuda_vector"]
    vector, unroll = tunable.table["vector"], tunable.table["unroll"]
    alone = tunable.us[(vector == 1) & (unroll == 1)]
    assert alone.min() > 1.04 * tunable.us.min()
    assert alone.max() > 1.4 * tunable.us.min()  # in large blocks, which start and end together


def test_one_warp_for_each_row_of_an_sm_is_slow() -> None:
    text = "softmax:rows=132,cols=8192,dtype=bf16"
    block = predicted(text)["cuda_block"]
    one_warp = (block.table["row_threads"] == 32) & (block.table["rows"] == 1)
    assert block.us[one_warp].min() > 1.5 * block.us.min()


def test_odd_rows_cost_more_than_aligned_ones() -> None:
    even, odd = (best_us(f"softmax:rows=8192,cols={cols},dtype=bf16") for cols in (4096, 4097))
    assert odd > 1.002 * even


def test_transposed_operands_go_through_shared_memory() -> None:
    text = (
        "strided_elementwise:shape=4096x4096,dtype=bf16,expression=x+y,operands=x.bf16.1_4096+y.bf16.4096_1"
    )
    variants = predicted(text)
    assert variants["cuda_tiled"].us.min() < 0.7 * variants["cuda_direct"].us.min()


@pytest.mark.parametrize(("strides", "lanes"), [("1_4096", "kept"), ("4096_1", "reduced")])
def test_adjacent_threads_read_adjacent_elements(strides: str, lanes: str) -> None:
    text = f"strided_reduction:shape=4096x4096,dtype=bf16,expression=x,operands=x.bf16.{strides},reduce=sum"
    tunable = predicted(text)["cuda_block"]
    best = tunable.us.argmin()
    # Where a thread reduces all elements of a result, adjacent threads have adjacent results.
    chosen = "kept" if tunable.table["threads"][best] == 1 else tunable.table["lanes"][best]
    assert chosen == lanes


# -- attention ----------------------------------------------------------------------------------------------

# The fastest measured rows, in TFLOP/s without masked scores: FlashAttention 3 on H100 SXM and 2 on A100 SXM.
# Source: library_attention_*.csv and library_encoder_attention_*.csv of ai-dynamo/aiconfigurator.
FASTEST = (
    ("h100-sxm", "heads=16,seq_q=16384,head_dim=128,dtype=bf16,causal=true", 676),
    ("h100-sxm", "heads=16,seq_q=16384,head_dim=256,dtype=bf16,causal=true", 787),
    ("h100-sxm", "heads=16,seq_q=16384,head_dim=64,dtype=bf16", 550),
    ("a100-80-sxm", "heads=48,seq_q=16384,head_dim=128,dtype=bf16,causal=true", 211),
)


@pytest.mark.parametrize(("name", "dimensions", "measured"), FASTEST)
def test_attention_is_about_as_fast_as_libraries(name: str, dimensions: str, measured: float) -> None:
    text = f"attention:batch=1,{dimensions}"
    rate = parse(text).flops() / best_us(text, name) / 1e6
    assert 0.8 <= rate / measured <= 1.25


def test_exponentials_cost_more_if_heads_are_short() -> None:
    rates = []
    for heads, dim in ((32, 64), (16, 128)):
        text = f"attention:batch=1,heads={heads},seq_q=16384,head_dim={dim},dtype=bf16"
        rates.append(parse(text).flops() / best_us(text))
    assert rates == sorted(rates)


def test_warpgroups_that_alternate_are_faster() -> None:
    tunable = predicted("attention:batch=1,heads=16,seq_q=16384,head_dim=128,dtype=bf16")["cuda_wgmma"]
    alternate = tunable.table["pingpong"] == 1
    assert tunable.us[alternate].min() < tunable.us[~alternate & (tunable.table["consumers"] > 1)].min()
    assert tunable.table["consumers"][tunable.us.argmin()] > 1


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80-sxm"])
def test_decoding_reads_the_cache_at_most_of_the_bandwidth(name: str) -> None:
    text = "attention:batch=32,heads=32,heads_k=8,seq_q=1,seq_k=4096,head_dim=128,dtype=bf16,causal=true"
    assert 0.75 <= peak_us(text, name) / best_us(text, name) <= 0.92
    best = min(predicted(text, name).values(), key=lambda tunable: float(tunable.us.min()))
    assert best.table["pack_heads"][best.us.argmin()] == 1  # heads that share keys read them once


def test_one_query_takes_blocks_from_its_keys() -> None:
    text = "attention:batch=1,heads=32,heads_k=8,seq_q=1,seq_k=8192,head_dim=128,dtype=bf16,causal=true"
    tunable = predicted(text)["cuda_mma"]
    whole = tunable.table["split"] == 1
    assert tunable.us[whole].min() > 2 * tunable.us.min()


# -- columns of Execution -----------------------------------------------------------------------------------


def time_of(traffic: Traffic | None = None, blocks: float = 4096.0, **execution: Any) -> float:
    device = devices.find("h100-sxm")
    costs = Costs(blocks=blocks, full_blocks=blocks, threads=256, execution=Execution(**execution))
    traffic = traffic or Traffic(read_bytes=2**24, write_bytes=2**24)
    bounds: Bounds = bound(costs, traffic, device, rows=1)
    return float(predict_us(bounds, costs, device, traffic)[0])


def test_bytes_that_caches_lose_take_bandwidth() -> None:
    assert time_of(memory_bytes=2.0**26) > 1.5 * time_of()


def test_fewer_resident_blocks_hide_less() -> None:
    assert time_of(memory_waits=8, resident_blocks=1) > 2 * time_of(memory_waits=8)
    assert time_of(memory_waits=8, resident_blocks=0) == time_of(memory_waits=8, resident_blocks=64)


def test_pipes_of_a_warp_may_run_one_after_the_other() -> None:
    assert time_of(blocks=132.0, warp_clocks=1e5) > 50


# -- undeclared execution -----------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [2**26, 2**16])
def test_block_size_matters_to_a_vector_sum_without_declarations(elements: int) -> None:
    device, threads = devices.find("h100-sxm"), np.array([32, 64, 128, 256, 512, 1024])
    costs = Costs(blocks=elements / threads, full_blocks=elements // threads, threads=threads)
    traffic = Traffic(read_bytes=8 * elements, write_bytes=4 * elements)
    us = predict_us(bound(costs, traffic, device), costs, device, traffic)
    assert us[-1] > 1.02 * us.min()  # few blocks, whose threads wait together
    assert elements < 2**20 or us[0] > 1.1 * us.min()  # too few warps for an SM
