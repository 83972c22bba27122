"""Published times of kernels: plausible rows, and how far predictions are off."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.published_kernels import (
    PublishedKernel,
    compared,
    cublas_products,
    fastest_published,
    published_rates,
    size_regime,
)
from tests.public_data import found
from tunebench.bound import dram_us

RATES = list(published_rates())


def peak_us(published: PublishedKernel) -> float:
    """Return the time of the operations at the peak rate, and of the memory traffic that L2 cannot hold."""
    device, workload = published.device, published.workload
    rate = device.mma_flop_per_clock[workload.dtype] * device.sm_count * device.max_clock_mhz
    return max(workload.flops() / rate, dram_us(workload.traffic(), device, published.cache))


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row.kernels}-{row.workload}")
def test_no_published_kernel_is_faster_than_its_device(row: PublishedKernel) -> None:
    assert row.measured_us >= peak_us(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "limit", "covered"),
    [("attention", 0.15, 0.88), ("grouped_gemm", 0.1, 1.0), ("gemm", 0.18, 0.77)],
)
def test_error_of_the_configuration_predicted_best(operator: str, limit: float, covered: float) -> None:
    rows = fastest_published(compared(row) for row in RATES if row.workload.operator == operator)
    assert np.abs(np.array([row.factor for row in rows]) - 1).mean() < limit
    assert np.mean([row.is_covered for row in rows]) >= covered


def test_products_are_drawn_from_each_range_of_rows() -> None:
    rows = list(cublas_products(found("predict")))
    assert len(rows) == len(set(map(str, rows)))
    assert {size_regime(row.workload) for row in rows} == {
        "products, m <= 64",
        "products, m < 1024",
        "products, m >= 1024",
    }
