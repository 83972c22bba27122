"""Race detection in instrumented emulation of Hopper threads, bulk copies and warpgroup products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.kernel_text import Faulty
from tests.emulate.test_emulate_hopper import (
    HELPERS,
    LOAD,
    SET_UP,
    SIGNATURE,
    STORE,
    TO_Y,
    HopperToy,
    X,
    lines,
)
from tests.kernels.kernel_checks import assert_right
from tests.support import needs_compiler
from tests.toy_variants import CONFIG, Toy
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
ALONE = {**SMALLEST, "cluster_m": 1, "cluster_n": 1, "min_blocks": 1, "split_k": 1}
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
    for result in seen[1:]:
        np.testing.assert_array_equal(result.outputs["c"], seen[0].outputs["c"])


@needs_compiler
@pytest.mark.parametrize("values", [ALONE, CLUSTER], ids=["alone", "cluster"])
def test_package_kernel_with_prologue_has_no_race_in_reused_stages(values: dict[str, Any]) -> None:
    # Threads read the stages that copies overwrite: in a cluster, copies of both blocks.
    workload = workloads.parse("gemm:m=192,n=128,k=512,dtype=f16,pre=relu(x)")
    inputs = workload.draw(np.random.default_rng(0))
    seen = watch(VARIANT, workload, Config(values), inputs)  # type: ignore[arg-type]
    assert_right(workload, inputs, seen.outputs)


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
RELEASE = "if (step > 0) release<ClusterTiles<C>::CLUSTER>(place.empty_of(previous));"
FAULTS = {
    "no wait for a full stage": (FULL, ""),
    "no wait for a full stage from the second round on": (FULL, f"if (step < 3) {FULL}"),
    "no wait for an empty stage": (EMPTY, ""),
    "a stage released while it is multiplied": (
        RELEASE,
        "release<ClusterTiles<C>::CLUSTER>(place.empty()); continue;",
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


# Threads access shared memory by ordinary loads or stores; then a copy or a product accesses it.
COPY_TWICE = (
    SET_UP
    + LOAD.replace("COORDINATES", "0, 0")
    + """ACCESS
  if (t == 0) {
    mbarrier_arrive_expect_tx(barrier, 512);
    copy_box_2d(shared, map, 0, 4, barrier);
  }
  mbarrier_wait(barrier, 1);
"""
)
MULTIPLY = """ACCESS
  float d[8][4];
  wgmma_fence();
  wgmma_m64k16<half_t, 64, false, false>(d, matrix_descriptor_128(shared, 0, 1024),
                                         matrix_descriptor_128(shared + 8192, 0, 1024), false);
  wgmma_commit();
  wgmma_wait<0>();
  settle(d);
"""
CROSSINGS = {
    "write, copy": (COPY_TWICE, "reinterpret_cast<float*>(bytes)[t] = x[t];"),
    "read, copy": (COPY_TWICE, "y[t] = floats[t];"),
    "write, product": (
        MULTIPLY,
        "for (int i = t; i < 4096; i += 128) reinterpret_cast<float*>(bytes)[i] = 0;",
    ),
}
# Where the proxy fence is: x[0], so that one executable serves all.
FENCES = {
    "none": 0,
    "before the access": 1,
    "of each thread": 2,
    "of some threads": 3,
    "after the barrier": 4,
}
FENCED = """
  const int fence = int(x[0]);
  if (fence == 1) fence_proxy_async();
  ACCESS
  if (fence == 2 || (fence == 3 && t < 64)) fence_proxy_async();
  __syncthreads();
  if (fence == 4) fence_proxy_async();
"""


@needs_compiler
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_proxy_fence_is_required_between_accesses_of_threads_and_copies_or_products(crossing: str) -> None:
    body, access = CROSSINGS[crossing]
    text = HELPERS + SIGNATURE + body.replace("ACCESS", FENCED.replace("ACCESS", access)) + "\n}"
    variant = HopperToy(text, lines(256), block=128, cluster=1)

    def see_fenced(where: str) -> None:
        x = X.copy()
        x[0] = FENCES[where]
        watch(variant, Toy(n=256), CONFIG, {"x": x, "factor": np.float32(2)})

    see_fenced("of each thread")
    see_fenced("after the barrier")  # by the threads that issue the copy or product
    for where in ("none", "before the access", "of some threads"):
        with pytest.raises(EmulationFailed, match=r"no fence\.proxy\.async between .*copy or product"):
            see_fenced(where)


@needs_compiler
def test_copy_of_what_the_same_launch_wrote_is_refused() -> None:
    body = SET_UP + "const_cast<float*>(x)[t] = 0; __syncthreads();" + LOAD.replace("COORDINATES", "0, 0")
    variant = HopperToy(HELPERS + SIGNATURE + body + "\n}", lines(256), block=128, cluster=1)
    with pytest.raises(EmulationFailed, match=r"same launch wrote to x, byte 0: fence\.proxy\.async\.global"):
        watch(variant, Toy(n=256), CONFIG, {"x": X, "factor": np.float32(2)})


STORED = "wait_for_stores<0>();"
STORE_FAULTS = {
    "no fence": ("fence_proxy_async();\n  __sync", "__sync", r"no fence\.proxy\.async between .*copy"),
    "no barrier": ("__syncthreads();\n  if", "if", "race on shared memory"),
    "written again before the wait": (STORED, f"box[5] = 0; {STORED}", "race on shared memory"),
    "stored twice": ("commit", "store_box_3d(shared, map, 0, 3, 0);\n commit", "race on y"),
}


@needs_compiler
@pytest.mark.parametrize("fault", [None, *STORE_FAULTS])
def test_store_of_box_is_ordered_by_fence_and_wait(fault: str | None) -> None:
    body = STORE.replace("COORDINATES", "0, 0").replace("WAIT", STORED)
    right, wrong, reason = STORE_FAULTS[fault] if fault else ("", "", "")
    assert right in body
    text = HELPERS + SIGNATURE + (body.replace(right, wrong) if fault else body) + "\n}"
    variant = HopperToy(text, lines(256, **TO_Y), block=128, cluster=1)
    inputs = {"x": X, "factor": np.float32(2)}
    if fault:
        with pytest.raises(EmulationFailed, match=reason):
            watch(variant, Toy(n=256), CONFIG, inputs)
    else:
        (launch,) = watch(variant, Toy(n=256), CONFIG, inputs).counts.launches
        assert launch.written_bytes == 512
        assert launch.blocks[0].warp_instructions["cp.async.bulk.tensor"] == 1


SUMS_ACCESSED = {
    "in flight": ("wgmma_wait<1>();", "if (step == 7) sums[0][0][0][0] += 1.0f; wgmma_wait<1>();"),
    "not settled": ("settle(sums[i][0]);", "sums[i][0][0][0] += 1.0f, settle(sums[i][0]);"),
}


@needs_compiler
@pytest.mark.parametrize("when", SUMS_ACCESSED)
def test_access_to_sums_before_settle_is_reported_with_its_line(when: str) -> None:
    with pytest.raises(EmulationFailed, match=r"sums of a product .* before `settle`, line \d+ .*\+= 1\.0f"):
        see(ALONE, "forward", *SUMS_ACCESSED[when])


@needs_compiler
def test_barriers_are_initialised_before_remote_use() -> None:
    whole = "__syncthreads();\n  if constexpr (CLUSTER > 1)", "if constexpr (CLUSTER > 1)"
    with pytest.raises(EmulationFailed, match=r"race on shared memory.*mbarrier_init"):
        see(ALONE, "forward", *whole)
    see(CLUSTER, "forward", *whole)  # the cluster barrier follows
