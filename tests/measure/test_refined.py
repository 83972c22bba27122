"""Lower bounds refined with the registers and shared memory of a binary."""

from __future__ import annotations

import pytest

from tunebench.bound import bound, refine, refined_us
from tunebench.device import described
from tunebench.kernels import variant
from tunebench.outcome import Resources
from tunebench.space import Config
from tunebench.workloads import parse

H100 = described()["h100-sxm"]
SIMT = variant("gemm/cuda_simt")
SMALL = parse("gemm:m=1024,n=1024,k=2048,dtype=f32")
FULL = Resources(registers=255, static_smem_bytes=110_000)
"""An SM holds two such blocks: with one warp each, two of its four partitions stay idle."""


def configurations(text: str) -> list[tuple[Config, float]]:
    workload = parse(text)
    table = SIMT.configs(workload, H100)
    costs = SIMT.costs(workload, table, H100)
    bounds = bound(costs, workload.traffic(), H100, rows=len(table))
    return [(table.config(row), float(bounds.us[row])) for row in range(0, len(table), len(table) // 300)]


def test_resources_of_a_binary_never_lower_the_bound_and_raise_some() -> None:
    raised = 0
    for config, bound_us in configurations(str(SMALL)):
        assert refined_us(SIMT, SMALL, config, H100, Resources()) == pytest.approx(bound_us)
        refined = refined_us(SIMT, SMALL, config, H100, FULL)
        assert refined >= bound_us * (1 - 1e-12)
        raised += refined > 1.05 * bound_us
    assert raised


def test_resources_of_several_kernels_raise_no_bound() -> None:
    """A binary reports the largest usage of its kernels, which may be that of the short kernel."""
    workload = parse("gemm:m=128,n=128,k=65536,dtype=f32")
    split = [
        (config, bound_us)
        for config, bound_us in configurations(str(workload))
        if len(SIMT.launches(workload, config)) > 1
    ]
    assert split
    for config, bound_us in split:
        assert refined_us(SIMT, workload, config, H100, FULL) == pytest.approx(bound_us)


def test_refined_us_equals_refine_for_one_configuration() -> None:
    config, refined = next(
        (config, refined)
        for config, bound_us in configurations(str(SMALL))
        if (refined := refined_us(SIMT, SMALL, config, H100, FULL)) > 1.05 * bound_us
    )
    table = SIMT.configs(SMALL, H100)
    row = table.row(config)
    assert row is not None
    costs = SIMT.costs(SMALL, table.take([row]), H100)
    assert refine(costs, SMALL.traffic(), H100, FULL, rows=1).us[0] == refined
