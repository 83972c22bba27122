"""Layernorm and rmsnorm kernels with configurations that the contract tests may miss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import A100, H100
from tests.support import needs_compiler, needs_numba_cuda, needs_nvrtc
from tunebench import kernels
from tunebench.device import local_cpu
from tunebench.emulate.emulator import watch
from tunebench.emulate.numba_simulator import simulate
from tunebench.space import Config
from tunebench.variant import CudaVariant, NumbaCudaVariant
from tunebench.workload import Workload
from tunebench.workloads import parse


def cuda(key: str) -> CudaVariant[Any]:
    variant = kernels.variant(key)
    assert isinstance(variant, CudaVariant)
    return variant


def point(variant: CudaVariant[Any], workload: Workload, text: str) -> Config:
    """Return a configuration, which must be valid."""
    config = variant.space.parse(text)
    assert variant.configs(workload, H100).row(config) is not None
    return config


BACKWARD = [
    "sums=registers,reads=2,row_threads=16,rows=2,vector=4,unroll=1,blocks=8",
    "sums=shared,reads=2,row_threads=64,rows=1,vector=2,unroll=2,blocks=8",
    "sums=apart,reads=1,row_threads=32,rows=4,vector=4,unroll=1,blocks=8",
]


@needs_compiler
@pytest.mark.parametrize("config", BACKWARD)
def test_persistent_gradients_do_not_depend_on_block_order(config: str) -> None:
    """For every storage of sums over rows: blocks have several iterations, the last of which lacks rows."""
    workload = parse("layernorm:rows=37,cols=260,dtype=f16,direction=backward")
    variant = cuda("layernorm/cuda_backward")
    chosen = point(variant, workload, config)
    checks.assert_order_does_not_matter(variant, workload, chosen, seed=1)
    inputs = workload.draw(np.random.default_rng(0))
    checks.assert_right(workload, inputs, watch(variant, workload, chosen, inputs).outputs)


@needs_compiler
def test_a_long_row_is_merged_from_parts_of_unlike_means() -> None:
    """The row drifts, so that sums of squares of the whole row would cancel."""
    workload, variant = parse("layernorm:rows=2,cols=4104,dtype=f32,stats=true"), cuda("layernorm/cuda_split")
    config = point(variant, workload, "threads=64,parts=64,vector=1,unroll=1")
    inputs = workload.draw(np.random.default_rng(1))
    inputs["x"] += np.linspace(-300, 300, 4104, dtype=np.float32) + np.float32(5000)
    checks.assert_emulates_right(variant, workload, config, inputs, sanitize=True)


@needs_nvrtc
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("layernorm/cuda_block", "layernorm:rows=8,cols=16384,dtype=f32,prologue=bias+residual"),
        ("rmsnorm/cuda_block", "rmsnorm:rows=8,cols=24576,dtype=f16,prologue=residual"),
        ("layernorm/cuda_backward", "layernorm:rows=800,cols=4096,dtype=f16,direction=backward"),
        ("rmsnorm/cuda_backward", "rmsnorm:rows=800,cols=16384,dtype=f32,direction=backward"),
    ],
)
def test_defaults_of_long_rows_do_not_spill(key: str, text: str) -> None:
    checks.compiled(cuda(key), parse(text), A100)


@needs_numba_cuda
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("layernorm:rows=3,cols=37,dtype=f32", {"threads": 16, "rows": 2, "passes": 2}),
        ("rmsnorm:rows=3,cols=37,dtype=f32", {"threads": 32, "rows": 2}),
    ],
)
def test_numba_cuda_simulates_correctly_without_a_sum(text: str, config: dict[str, int]) -> None:
    workload = parse(text)
    variant = kernels.variant(f"{workload.operator}/numba_cuda")
    assert isinstance(variant, NumbaCudaVariant)
    inputs = workload.draw(np.random.default_rng(2))
    checks.assert_right(workload, inputs, simulate(variant, workload, Config(config), inputs))


@pytest.mark.parametrize("operator", ["layernorm", "rmsnorm"])
def test_each_direction_has_separate_variants(operator: str) -> None:
    def serving(more: str, cpu: bool = False) -> set[str]:
        workload, device = (
            parse(f"{operator}:rows=64,cols=4096,dtype=f16{more}"),
            local_cpu() if cpu else H100,
        )
        return {v.name for v in kernels.variants(operator) if v.refuses(workload, device) is None}

    assert serving("") == {"cuda_block", "cuda_split", "numba_cuda"}
    assert serving(",direction=backward") == {"cuda_backward"}
    assert serving("", cpu=True) == {"numba_cpu"}
    assert serving(",direction=backward", cpu=True) == {"numba_cpu_backward"}


def test_split_variant_takes_few_long_rows_only() -> None:
    variant = cuda("rmsnorm/cuda_split")
    for text in ("rows=1,cols=2048", "rows=64,cols=1048576", "rows=528,cols=40001"):
        assert variant.refuses(parse(f"rmsnorm:{text},dtype=f16"), H100) is None
    for text in ("rows=1,cols=2047", "rows=529,cols=1048576"):
        assert "needs rows of 2048 or more elements" in str(
            variant.refuses(parse(f"rmsnorm:{text},dtype=f16"), H100)
        )
