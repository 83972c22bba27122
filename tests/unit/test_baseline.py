"""What stands for a library computes the same as the operator says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunebench.measure import baseline
from tunebench.measure.verify import share_of
from tunebench.workloads import parse

EIGHT_BITS = (
    "dtype=i8",
    "dtype=i8,trans=nt",
    "dtype=i8,trans=tt",
    "dtype=e4m3,trans=nt",
    "dtype=e4m3,trans=nt,out=f32",
)


def share(workload: Any, inputs: Any, got: Any) -> float:
    reference = workload.reference({name: v.astype(np.float64) for name, v in inputs.items()})["c"]
    tolerance = workload.tolerance()
    allowed = tolerance.eps_out * np.abs(reference.value) + tolerance.eps_acc * reference.scale
    error = np.abs(np.asarray(got, np.float64).reshape(reference.value.shape) - reference.value)
    return float(share_of(error, allowed).max())


@pytest.mark.parametrize("text", EIGHT_BITS)
def test_numpy_multiplies_8_bits(text: str) -> None:
    workload = parse(f"gemm:m=35,n=45,k=2000,{text}")
    inputs = workload.draw(np.random.default_rng(0))
    call: Any = baseline._numpy(workload, inputs)
    assert share(workload, inputs, call()) <= 1


@pytest.mark.parametrize("text", EIGHT_BITS)
def test_torch_multiplies_8_bits(text: str) -> None:
    torch = pytest.importorskip("torch")
    workload = parse(f"gemm:m=32,n=48,k=64,{text}")
    inputs = workload.draw(np.random.default_rng(0))
    call: Any = baseline._torch_cpu(workload, inputs)
    assert share(workload, inputs, call().to(torch.float64).numpy()) <= 1


@pytest.mark.parametrize(
    "text", ["m=32,n=48,k=64,dtype=e4m3", "m=32,n=48,k=63,dtype=i8", "m=16,n=48,k=64,dtype=i8"]
)
def test_torch_is_no_baseline_for_what_it_lacks(text: str) -> None:
    pytest.importorskip("torch")
    workload = parse(f"gemm:{text}")
    assert baseline._torch_cpu(workload, workload.draw(np.random.default_rng(0))) is None
