"""Numerically broken kernels are refused, and accurate ones are not, for every number of terms."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda_cases import WORKLOADS
from tests.measure import broken_numerics as broken
from tests.measure.broken_numerics import BROKEN, BrokenKernel, verdict
from tunebench.binary.compiled import Binary
from tunebench.device import find
from tunebench.kernels import variant
from tunebench.measure import cpu
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured, Outcome, WrongResult
from tunebench.task import Task
from tunebench.workloads import parse

BARELY = {
    "layernorm bf16 mean of squares less squared mean",
    "gemm f32 three products of bf16 parts",
    "gemm tf32 factors rounded to bf16",
    "attention f16 probabilities and ds in bf16",
    "elementwise f16 erf accurate to 2.5e-5",
    "scaled_gemm f16 scales in bf16",
}
"""Kernels whose errors are within 10 times the tolerance: they round to a type nearly as accurate."""


def _name(kernel: BrokenKernel) -> str:
    workload = parse(kernel.workload)
    return f"{workload.operator} {workload.dtype} {kernel.fault}"


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda kernel: f"{kernel.workload}: {kernel.fault}")
def test_broken_kernels_are_refused(kernel: BrokenKernel) -> None:
    found = verdict(max(kernel.errors()))
    assert found == ("refused" if _name(kernel) in BARELY else "refused by more than 10")


def test_every_operator_has_broken_kernels() -> None:
    faults = collections.Counter(parse(kernel.workload).operator for kernel in BROKEN)
    strided = {"strided_elementwise", "strided_reduction"}  # expressions, as elementwise and reduction
    assert set(faults) | strided == set(WORKLOADS)


def _in_sequence(a: Any, b: Any) -> Any:
    """Return a product whose sums are added one product after the other, in f32: the least accurate order."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for p in range(a.shape[1]):
        total += np.outer(a[:, p], b[p])
    return total


@pytest.mark.parametrize("k", [1, 64, 1024, 16384])
def test_sums_in_f32_pass_for_every_number_of_terms(k: int) -> None:
    accurate = BrokenKernel("none", f"gemm:m=24,n=24,k={k},dtype=f32", broken.gemm(_in_sequence))
    for seed in range(3):
        assert max(accurate.errors(seed)) < 0.5


@pytest.mark.parametrize(
    "kernel",
    [
        BrokenKernel("none", f"softmax:{broken._ROWS}f32", broken.softmax(broken.row_max, broken.row_sum)),
        BrokenKernel("none", f"cross_entropy:{broken._ROWS}f16", broken.cross_entropy(broken.stable_lse)),
        BrokenKernel(
            "none",
            f"layernorm:{broken._ROWS}f32",
            broken.layernorm(broken.moments_in(np.float32)),
        ),
        BrokenKernel("none", f"{broken._ATTENTION}f32", broken.attention()),
        BrokenKernel("none", f"{broken._CONV}f32", broken.winograd),
        BrokenKernel(
            "none",
            "reduction:rows=16,cols=65536,dtype=f32,expression=x,reduce=sum",
            broken.reduction(lambda x: broken.summed(x, np.float32)),
        ),
    ],
    ids=lambda kernel: kernel.workload,
)
def test_accurate_algorithms_pass(kernel: BrokenKernel) -> None:
    for seed in range(3):
        assert max(kernel.errors(seed)) <= 1


# -- trials --------------------------------------------------------------------------------------------------


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Outcome]:
    """Return a function that runs a trial of a softmax in NumPy."""
    chosen, device = variant("softmax/numba_cpu"), find("cpu")
    workload = parse("softmax:rows=40,cols=65,dtype=f32")
    monkeypatch.setattr(type(chosen), "arguments", lambda *_: ("x", "y"))
    runner = cpu.CpuRunner(Protocol(cache="warm", min_samples=3, max_samples=3, max_s=0.2), device)
    binary = Binary(key="", language="numba-cpu", target="", payload=b"", entries=("kernel",))

    def run(highest: Any) -> Outcome:
        kernel = broken.softmax(highest, broken.row_sum)

        def call(x: Any, y: Any) -> None:
            y[:] = kernel(workload, {"x": x})["y"]

        monkeypatch.setattr(cpu, "load_numba_cpu", lambda *_: call)
        config = chosen.default(workload, device)
        return runner.run(
            Task(variant=chosen, workload=workload, config=config, device=device, seed=3), binary, None
        )[0]

    return run


def test_trials_read_extreme_inputs_first(trial: Callable[[Any], Outcome]) -> None:
    unstable, stable, again = trial(broken.nothing), trial(broken.row_max), trial(broken.row_max)
    assert isinstance(unstable, WrongResult)
    assert "is nan" in unstable.reason
    for outcome in (stable, again):
        assert isinstance(outcome, Measured)
        assert outcome.verification.detail.startswith("every element, also for extreme inputs; before timing")
