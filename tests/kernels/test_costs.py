"""Declared costs of CUDA C++ variants never exceed the counts of emulation, and no threads race.

Lower bounds depend on `Costs` being floors (docs/bound.md). Here every access, multiply-add, matrix
instruction and special function is counted, block by block, and compared with the declared cost. `--configs
20` checks more configurations of each variant than the suite has time for.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda_cases import cases, half_of_cases
from tests.kernels.kernel_checks import assert_right
from tests.support import needs_compiler
from tunebench.device import Device, representative
from tunebench.emulate.counts import Counts, LaunchCounts, WorkCounts
from tunebench.emulate.emulator import SM_COUNT, watch
from tunebench.space import Table
from tunebench.variant import Costs, CudaVariant, Launch, ceil_div
from tunebench.workload import Workload

LARGE = representative("sm_90")
SMALL = dataclasses.replace(LARGE, sm_count=20)
"""A device with few SMs, so that small workloads give each SM some work."""
COUNTED = ("fma", "sfu", "smem_traffic_bytes", "fill_bytes", "accesses", "instructions", "mma_flop")


def drawn(variant: CudaVariant[Any], workload: Workload, count: int) -> Iterator[tuple[Table, Device]]:
    """Yield `count` configurations, one table each, the same ones in every run; some are the default."""
    generator = random.Random(f"costs {variant.key} {workload}")
    for turn in range(first := generator.randrange(3), first + count):
        device = SMALL if turn % 2 else LARGE
        table = variant.configs(workload, device)
        default = table.row(variant.default(workload, device))
        yield table.take(np.array([generator.randrange(len(table)) if turn % 3 else default])), device


def excesses(costs: Costs, counts: Counts, staying: int = 0) -> Iterator[str]:
    """Yield a message for each declared figure that exceeds its count.

    `staying` is the number of persistent blocks that share the declared blocks, or 0.
    """
    declared = {
        name: float(np.broadcast_to(getattr(costs, name), 1)[0])
        for name in (*COUNTED, "blocks", "full_blocks", "threads", "smem_bytes")
    }
    counted = {
        "threads": max(launch.threads for launch in counts.launches),
        "smem_bytes": max(launch.smem_bytes for launch in counts.launches),
    }
    for name, count in counted.items():
        if declared[name] > count:
            yield f"{name}: {declared[name]:g} are declared, {count} there are"
    for name in COUNTED:
        by_block = sorted((figure(block, name, costs.mma_dtype) for block in counts.blocks), reverse=True)
        of_all, of_one, total = declared[name] * declared["blocks"], declared[name], sum(by_block)
        if of_all > total * (1 + 1e-12):  # blocks may be a fraction
            yield f"{name}: {of_all:g} are declared for all blocks, {total} counted"
        full = int(declared["full_blocks"])
        if staying or full > len(by_block):  # the busiest block has its share of them
            full, of_one = min(full, 1), of_one * ceil_div(full, staying or len(by_block))
        if full and of_one > by_block[full - 1]:
            yield f"{name}: {of_one:g} are declared for each of {full} blocks, one has {by_block[full - 1]}"


def figure(block: WorkCounts, name: str, mma_dtype: str | None) -> int:
    return block.mma_flop.get(str(mma_dtype), 0) if name == "mma_flop" else int(getattr(block, name))


AT_ONCE = dict.fromkeys(("fma_latency", "mma_latency", "smem_latency", "l1_latency", "l2_latency"), 0.0)
"""Latencies of a device on which nothing takes time."""


def chains(
    variant: CudaVariant[Any], workload: Workload, table: Table, device: Device, counts: Counts
) -> Iterator[str]:
    """Yield a message for each declared chain longer than the work of the busiest thread, or warp, per sum.

    Dependencies are not traced, but a chain of multiply-adds belongs to one thread, a chain of products to
    one warp, and all of its sums are equally long. On a device where one of them takes a clock and nothing
    else takes time, `chain_clocks` is the number of links.
    """

    def clocks(**latencies: float) -> float:
        slow = dataclasses.replace(device, **{**AT_ONCE, **latencies})
        return float(np.broadcast_to(variant.costs(workload, table, slow).chain_clocks, 1)[0])

    for name in ("fma_latency", "mma_latency"):
        length = clocks(**{name: 1.0}) - clocks()
        longest_chain = max(longest(launch, table.config(0), name) for launch in counts.launches)
        if length > longest_chain * (1 + 1e-12):
            yield f"{name}: {length:g} are declared one after the other, {longest_chain:g} there are"


def longest(launch: LaunchCounts, config: Mapping[str, Any], name: str) -> float:
    """Return the most multiply-adds per sum of a thread, or products per sum of a warp, over all blocks."""
    if name == "fma_latency":
        of_thread = max(block.longest_fma for block in launch.blocks)
        return of_thread / (config.get("tm", 1) * config.get("tn", 1))
    products = max(
        sum(count for key, count in block.warp_instructions.items() if key.startswith("mma."))
        for block in launch.blocks
    )
    tiles = config.get("bm", 16) // 16 * (config.get("bn", 8) // 8)  # of all warps; each has the same number
    return products / max(1, tiles)


EXCESSIVE = [
    ({"fma": 10}, ()),
    ({"fma": 11}, ("fma: 22 are declared for all blocks, 20 counted", "fma: 11 are declared for each of 2")),
    ({"fma": 10, "blocks": 2.1}, ("fma: 21 are declared for all blocks",)),
    (
        {"fma": 12, "blocks": 1.5, "full_blocks": 1},
        ("fma: 12 are declared for each of 1 blocks, one has 10",),
    ),
    ({"fma": 5, "blocks": 4, "full_blocks": 4}, ()),  # two blocks take two turns each
    ({"fma": 5, "blocks": 4, "full_blocks": 5}, ("fma: 15 are declared for each of 1 blocks, one has 10",)),
    ({"mma_flop": 4096, "mma_dtype": "f16"}, ()),
    ({"mma_flop": 4096, "mma_dtype": "bf16"}, ("mma_flop: 8192", "mma_flop: 4096")),
    ({"instructions": 7}, ("instructions: 14", "instructions: 7")),
    ({"threads": 65}, ("threads: 65 are declared, 64 there are",)),
    ({"smem_bytes": 33}, ("smem_bytes: 33 are declared, 32 there are",)),
    ({"accesses": 9}, ("accesses: 18 are declared", "accesses: 9 are declared for each of 2 blocks")),
]


@pytest.mark.parametrize(("declared", "texts"), EXCESSIVE)
def test_declared_costs_above_the_count_are_reported(
    declared: dict[str, Any], texts: tuple[str, ...]
) -> None:
    block = WorkCounts(fma=10, accesses=8, warp_instructions={"f32": 5, "mma.m16n8k16.f16": 1})
    launch = LaunchCounts(threads=64, smem_bytes=32, read_bytes=0, written_bytes=0, blocks=(block, block))
    costs = Costs(**{"blocks": 2, "full_blocks": 2, "threads": 64, **declared})
    reported = list(excesses(costs, Counts(launches=(launch,))))
    assert len(reported) == len(texts)
    assert all(text.startswith(start) for text, start in zip(reported, texts, strict=True)), reported


@needs_compiler
@pytest.mark.parametrize(("variant", "workload"), half_of_cases(1))
def test_costs_are_floors_and_nothing_races(
    variant: CudaVariant[Any], workload: Workload, pytestconfig: pytest.Config
) -> None:
    for table, device in drawn(variant, workload, per_case(variant, pytestconfig.getoption("configs"))):
        config = table.config(0)
        inputs = workload.draw(np.random.default_rng(0))
        seen = watch(variant, workload, config, inputs)
        case = f"{variant.key} {workload} {config} on {device.sm_count} SMs"
        assert_right(workload, inputs, seen.outputs, case)
        staying = blocks_that_stay(variant.launches(workload, config))
        assert not list(excesses(variant.costs(workload, table, device), seen.counts, staying)), case
        assert not list(chains(variant, workload, table, device, seen.counts)), case


def blocks_that_stay(launches: tuple[Launch, ...]) -> int:
    """Return the number of persistent blocks in emulation, or 0 if each block has its own tile."""
    return max(launch.grid_on(SM_COUNT)[0] if launch.blocks_per_sm else 0 for launch in launches)


def per_case(variant: CudaVariant[Any], per_variant: int) -> int:
    """Return the configurations per workload, dividing those of a variant among its workloads."""
    return -(-per_variant // workloads_of()[variant.key])


@functools.cache
def workloads_of() -> dict[str, int]:
    workload_counts: dict[str, int] = {}
    for case in cases():
        key = case.values[0].key
        workload_counts[key] = workload_counts.get(key, 0) + 1
    return workload_counts
