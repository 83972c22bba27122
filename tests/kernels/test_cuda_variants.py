"""Contract of every CUDA C++ variant: right results at odd sizes, code for each architecture, honest costs.

A new variant joins by being in its folder; a new operator needs a line of `cuda_cases.WORKLOADS`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.kernels.cuda_cases import WORKLOADS, cases, half_of_cases
from tests.kernels.kernel_checks import H100
from tests.support import needs_compiler, needs_nvrtc, package_variants
from tunebench import kernels, workloads
from tunebench.binary.cubin import launch_refusal
from tunebench.device import Device, architectures, representative
from tunebench.errors import InputError
from tunebench.testing.variant_contract import check_launches, sample_configs
from tunebench.variant import CudaVariant, Variant
from tunebench.workload import Workload

ATOMIC = re.compile(r"\batomicAdd\(|\bred\.|\batom\.|\bcuda\.atomic\b|\btl\.atomic")
CASES = cases()
FIRST = {case.values[0]: case.values[1] for case in reversed(CASES)}
"""The first workload of each variant."""


def test_atomic_additions_are_declared() -> None:
    """List the files with atomic additions, and the variants that say which configurations have them."""
    folder = Path(kernels.__path__[-1])
    sources = [path for path in folder.rglob("*") if path.suffix in (".cuh", ".py")]
    assert {path.relative_to(folder).as_posix() for path in sources if ATOMIC.search(path.read_text())} == {
        "scatter_add/cuda_atomic.py",
        "attention/attention_backward_mma.cuh",
        "common/ptx_hopper.cuh",  # `add_to_global`, which attention_backward_wgmma.cuh calls
    }
    declared = (
        v.key for v in package_variants(Variant) if type(v).is_reproducible is not Variant.is_reproducible
    )
    assert sorted(declared) == [
        "attention/cuda_mma_backward",
        "attention/cuda_wgmma_backward",
        "scatter_add/cuda_atomic",
    ]


@needs_compiler
@pytest.mark.parametrize(("variant", "workload"), half_of_cases(0))
def test_emulated_results_are_right(
    variant: CudaVariant[Any], workload: Workload, pytestconfig: pytest.Config
) -> None:
    """The first workload of a variant with the default, each other one with its own configuration."""
    count = pytestconfig.getoption("configs")
    configs = sample_configs(variant, workload, H100, count + 1)
    for config in configs[:count] if workload == FIRST[variant] else configs[1:] or configs:
        small = variant.emulation_workload(workload, config)
        checks.assert_right_in_every_order(variant, small, config, sanitize=True)


def binary_cases() -> list[Any]:
    """Return all cases; those on another device or with another type of tensor cores are not `exhaustive`."""
    covered: set[tuple[str, ...]] = set()
    chosen = []
    for case in checks.on_devices(CASES):
        variant, workload, device = case.values
        paths = {(variant.key, device.architecture)}
        paths |= {(variant.key, workload.dtype)} if "mma" in variant.name else set()
        marks = [pytest.mark.exhaustive] if paths <= covered else []
        covered |= paths
        chosen.append(pytest.param(*case.values, id=case.id, marks=marks))
    return chosen


@needs_nvrtc
@pytest.mark.parametrize(("variant", "workload", "device"), binary_cases())
def test_binary_matches_declared_resources(
    variant: CudaVariant[Any], workload: Workload, device: Device
) -> None:
    config = variant.default(workload, device)
    binary = checks.compiled(variant, workload, device)
    launches = variant.launches(workload, config)
    assert len(binary.entries) == len(launches)
    assert launch_refusal(binary, launches, device) is None
    # Declared costs are floors: the compiler may use more, never less.
    costs = checks.costs_of(variant, workload, config, device)
    used_bytes = binary.resources.static_smem_bytes or 0
    used_bytes += max(launch.smem_bytes for launch in launches)
    assert np.all(costs.smem_bytes <= used_bytes)


@pytest.mark.parametrize(("variant", "workload"), CASES)
def test_launches_agree_with_what_is_declared(variant: CudaVariant[Any], workload: Workload) -> None:
    check_launches(variant, workload, H100)
    for config in sample_configs(variant, workload, H100, 20):
        assert "#include" not in variant.source(workload, config)


@pytest.mark.parametrize(("variant", "workload"), CASES)
def test_configurations_that_differ_in_one_parameter_are_different_launches(
    variant: CudaVariant[Any], workload: Workload
) -> None:
    table = variant.configs(workload, H100)

    def launched(row: int) -> tuple[str, Any]:
        config = table.config(row)
        launches = [
            dataclasses.replace(launch, grid=launch.grid_on(H100.sm_count), blocks_per_sm=0)
            for launch in variant.launches(workload, config)
        ]
        return variant.source(workload, config), launches

    for row in random.Random(0).sample(range(len(table)), min(8, len(table))):
        differing = (table.ordinals != table.ordinals[row]).sum(axis=1)
        for neighbour in np.flatnonzero(differing == 1).tolist():
            assert launched(neighbour) != launched(row), (table.config(row), table.config(neighbour))


@pytest.mark.parametrize(("variant", "workload"), CASES)
def test_tiles_account_for_what_is_computed_beyond_the_edges(
    variant: CudaVariant[Any], workload: Workload
) -> None:
    table = variant.configs(workload, H100)
    costs = variant.costs(workload, table, H100)
    for row in random.Random(0).sample(range(len(table)), min(20, len(table))):
        config = table.config(row)
        tiles = variant.tiles(workload, config)
        assert tiles
        if workload.category == "reduction":
            # A block has a tile of rows, or of rows and columns; persistent blocks have several in turn.
            grids = {launch.grid[0] for launch in variant.launches(workload, config)}
            counts = np.cumprod([tiling.count for tiling in tiles])
            assert grids & {min(counts[0], config.get("blocks", counts[0])), *counts}
            continue
        if workload.category == "elementwise":
            (launch,) = variant.launches(workload, config)
            assert math.prod(launch.grid) == math.prod(tiling.count for tiling in tiles)
            continue
        column = costs.mma_flop if np.any(np.asarray(costs.mma_flop)) else 2 * np.asarray(costs.fma)
        executed = float(np.broadcast_to(costs.blocks * column, len(table))[row])
        if variant.name == "cuda_winograd":  # this many times fewer
            executed *= 9 * config["m"] ** 2 / (config["m"] + 2) ** 2
        inside = workload.flops() / np.prod([tiling.used for tiling in tiles])
        # Costs count certain work only, for every split of rows, and of steps among parts.
        if workload.operator == "attention":  # tiles at a causal edge are whole; a softmax is added
            assert executed >= inside * (1 - 1e-9)
        elif workload.operator == "grouped_gemm" or config.get("split", 1) > 1:
            assert executed <= inside * (1 + 1e-9)
        else:
            assert executed == pytest.approx(inside)


@pytest.mark.parametrize("variant", package_variants(CudaVariant), ids=str)
def test_other_architectures_are_refused(variant: CudaVariant[Any]) -> None:
    workload = workloads.parse(WORKLOADS[variant.operator.operator][0])
    for architecture in (name for name in architectures() if name.startswith("sm_")):
        device = representative(architecture)
        fits = variant.minimum_cc <= device.compute_capability <= variant.maximum_cc
        assert fits or variant.refuses(workload, device) is not None


@functools.cache
def dtypes_of(operator: str) -> tuple[str, ...]:
    kinds: tuple[str, ...] = get_args(get_type_hints(workloads.operator(operator))["dtype"])
    return kinds


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("operator", sorted({v.operator.operator for v in package_variants(Variant)}))
def test_some_variant_supports_every_type_and_size(operator: str, architecture: str) -> None:
    device = representative(architecture)
    for text in WORKLOADS[operator]:
        for dtype in dtypes_of(operator):
            head, _, rest = text.partition("dtype=")
            try:
                workload = workloads.parse(
                    f"{head}dtype={dtype}{rest[rest.find(',') :] if ',' in rest else ''}"
                )
            except InputError:  # type, epilogue or result that do not go together
                continue
            serving = [
                variant
                for variant in package_variants(Variant, operator)
                if variant.refuses(workload, device) is None and len(variant.configs(workload, device))
            ]
            assert serving, f"no variant supports {workload} on {architecture}"
