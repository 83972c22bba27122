"""Race detection in instrumented emulation of Hopper threads, bulk copies and warpgroup products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.kernel_text import Faulty
from tests.support import needs_compiler
from tunebench import kernels, workloads
from tunebench.device import representative
from tunebench.emulate.emulator import ORDERS, EmulationFailed, Order, Watched, watch
from tunebench.space import Config

VARIANT = kernels.variant("gemm/cuda_wgmma")
WORKLOAD = workloads.parse("gemm:m=192,n=128,k=512,dtype=f16")
SMALLEST = {
    "bm": 64,
    "bn": 64,
    "bk": 64,
    "stages": 3,
    "consumers": 1,
    "pingpong": 0,
    "staged": 1,
    "group_m": 1,
}
ALONE = {**SMALLEST, "cluster_m": 1, "cluster_n": 1, "min_blocks": 1}
PINGPONG = {**ALONE, "consumers": 2, "pingpong": 1}
CLUSTER = {**ALONE, "cluster_n": 2}


def see(values: dict[str, Any], order: Order = "forward", right: str = " ", wrong: str = " ") -> Watched:
    """Emulate a configuration of the kernel with an injected fault."""
    inputs = WORKLOAD.draw(np.random.default_rng(0))
    faulty: Any = Faulty(VARIANT, right, wrong)  # type: ignore[arg-type]
    config = VARIANT.space.check(Config(values), workload=WORKLOAD, device=representative("sm_90"))
    return watch(faulty, WORKLOAD, config, inputs, order=order)


@needs_compiler
@pytest.mark.parametrize("values", [ALONE, PINGPONG, CLUSTER], ids=["alone", "pingpong", "cluster"])
def test_package_kernel_has_no_race_in_any_order(values: dict[str, Any]) -> None:
    seen = [see(values, order) for order in ORDERS]
    for other in seen[1:]:
        np.testing.assert_array_equal(other.outputs["c"], seen[0].outputs["c"])


@needs_compiler
def test_copies_and_products_are_counted() -> None:
    work = see(ALONE).counts.total
    assert work.mma_flop == {"f16": WORKLOAD.flops()}
    products = 3 * 2 * 512 // 16
    assert work.warp_instructions["wgmma.m64n64k16.f16"] == 4 * products
    assert work.warp_instructions["cp.async.bulk.tensor"] == 3 * 2 * 2 * 8
    assert work.fill_bytes == 3 * 2 * (64 + 64) * 512 * 2
    shared = see(CLUSTER).counts
    assert shared.total.mma_flop == work.mma_flop
    # Two blocks share the same rows of a: each copies half of them.
    assert shared.total.fill_bytes == 3 * (64 + 2 * 64) * 512 * 2


FULL, EMPTY = "mbarrier_wait(place.full(), place.parity);", "mbarrier_wait(place.empty(), place.parity ^ 1);"
RELEASE = "if (step > 0) release<Tiles<C>::CLUSTER>(place.empty_of(previous));"
FAULTS = {
    "no wait for a full stage": (FULL, ""),
    "no wait for a full stage from the second round on": (FULL, f"if (step < 3) {FULL}"),
    "no wait for an empty stage": (EMPTY, ""),
    "a stage released while it is multiplied": (
        RELEASE,
        "release<Tiles<C>::CLUSTER>(place.empty()); continue;",
    ),
    "no wait for products": ("wgmma_wait<1>();\n    " + RELEASE, RELEASE + "\n wgmma_wait<1>();"),
    "no wait for products from the fifth step on": ("wgmma_wait<1>();", "if (step < 4) wgmma_wait<1>();"),
    "no barrier of the warp where results are gathered": (
        "__syncwarp();\n    // Not unrolled",
        "// Not unrolled",
    ),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("values", [ALONE, CLUSTER], ids=["alone", "cluster"])
def test_injected_fault_is_found_in_both_orders(fault: str, values: dict[str, Any]) -> None:
    orders: tuple[Order, ...] = ("forward", "reverse")
    for order in orders:
        with pytest.raises(EmulationFailed, match=r"race on shared memory|have arrived in this phase"):
            see(values, order, *FAULTS[fault])


@needs_compiler
def test_barriers_are_initialised_before_remote_use() -> None:
    whole = "__syncthreads();\n  if constexpr (CLUSTER > 1)", "if constexpr (CLUSTER > 1)"
    with pytest.raises(EmulationFailed, match=r"race on shared memory.*mbarrier_init"):
        see(ALONE, "forward", *whole)
    see(CLUSTER, "forward", *whole)  # the cluster barrier follows
