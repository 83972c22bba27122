"""Declared costs of CUDA C++ variants never exceed what emulation counts, and no thread of theirs races.

The bound rests on `Costs` being floors (docs/bound.md). Here every access, multiply-add, matrix instruction
and special function of a miniature is counted, block by block, and held against what is declared for it.
`--configs 20` takes more configurations of each variant than the suite has time for.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_cuda_variants import assert_right, cases, needs_compiler

from tunebench.compile.counts import Counts, Work
from tunebench.compile.emulate import watch
from tunebench.device import representative
from tunebench.space import Table
from tunebench.variant import Costs, CudaVariant
from tunebench.workload import Workload

DEVICE = representative("sm_90")
COUNTED = ("fma", "sfu", "smem_traffic_bytes", "fill_bytes", "instructions", "mma_flop")


def rows(variant: CudaVariant[Any], workload: Workload, count: int) -> Table:
    """Return the default configuration and others, `count` in all, the same ones in every run."""
    table = variant.configs(workload, DEVICE)
    default = table.row(variant.default(workload, DEVICE))
    drawn = random.Random(f"costs {workload}").sample(range(len(table)), min(count, len(table)))
    return table.take(np.array(list(dict.fromkeys([default, *drawn]))[:count]))


def excesses(costs: Costs, counts: Counts) -> Iterator[str]:
    """Say of each figure that is more than what was counted by how much."""
    declared = {
        name: float(np.broadcast_to(getattr(costs, name), 1)[0])
        for name in (*COUNTED, "blocks", "full_blocks", "threads", "smem_bytes")
    }
    known = {
        "blocks": len(counts.blocks),
        "full_blocks": len(counts.blocks),
        "threads": max(launch.threads for launch in counts.launches),
        "smem_bytes": max(launch.smem_bytes for launch in counts.launches),
    }
    for name, most in known.items():
        if declared[name] > most:
            yield f"{name}: {declared[name]:g} are declared, {most} there are"
    for name in COUNTED:
        by_block = sorted((figure(block, name, costs.mma_dtype) for block in counts.blocks), reverse=True)
        total, full = sum(by_block), min(int(declared["full_blocks"]), len(by_block))
        of_all, least = declared[name] * declared["blocks"], by_block[full - 1]
        if of_all > total * (1 + 1e-12):  # blocks may be a fraction
            yield f"{name}: {of_all:g} are declared for all blocks, {total} counted"
        if full and declared[name] > least:
            yield f"{name}: {declared[name]:g} are declared for each of {full} blocks, one has {least}"


def figure(block: Work, name: str, mma_dtype: str | None) -> int:
    return block.mma_flop.get(str(mma_dtype), 0) if name == "mma_flop" else int(getattr(block, name))


@needs_compiler
@pytest.mark.parametrize(("variant", "workload"), cases())
def test_costs_are_floors_and_nothing_races(
    variant: CudaVariant[Any], workload: Workload, pytestconfig: pytest.Config
) -> None:
    table = rows(variant, workload, per_case(variant, pytestconfig.getoption("configs")))
    for row in range(len(table)):
        config = table.config(row)
        small = variant.miniature(workload, config)
        inputs = small.draw(np.random.default_rng(0))
        seen = watch(variant, small, config, inputs)
        assert_right(seen.outputs, small, inputs, f"{variant.key} {small} {config}")
        costs = variant.costs(small, table.take(np.array([row])), DEVICE)
        assert not list(excesses(costs, seen.counts)), f"{variant.key} {small} {config}"


def per_case(variant: CudaVariant[Any], per_variant: int) -> int:
    """Share the configurations of a variant among its workloads."""
    return -(-per_variant // workloads_of()[variant.key])


@functools.cache
def workloads_of() -> dict[str, int]:
    found: dict[str, int] = {}
    for case in cases():
        key = case.values[0].key
        found[key] = found.get(key, 0) + 1
    return found
