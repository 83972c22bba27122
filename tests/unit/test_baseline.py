"""What stands for a library computes the same as the operator says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_cases import Toy

from tunebench.measure import baseline, libraries
from tunebench.measure.verify import InputSet, worst_error
from tunebench.workload import Workload
from tunebench.workloads import parse

EIGHT_BITS = (
    "dtype=i8",
    "dtype=i8,trans=nt",
    "dtype=i8,trans=tt",
    "dtype=e4m3,trans=nt",
    "dtype=e4m3,trans=nt,out=f32",
)


PROBLEMS = (
    *(f"gemm:m=35,n=45,k=200,{text}" for text in EIGHT_BITS),
    *(f"gemm:m=32,n=48,k=64,{text}" for text in EIGHT_BITS),
    "gemm:m=7,n=9,k=33,dtype=f32,trans=tt,batch=2,epilogue=bias+relu",
    "gemm:m=7,n=9,k=33,dtype=bf16,trans=nt,epilogue=bias",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nhwc,groups=2,epilogue=bias+residual+relu",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nchw,dilation=2,epilogue=bias",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nhwc,direction=dgrad",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nchw,direction=wgrad",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=scale+bias+residual+relu",
    "attention:batch=2,heads=4,seq_q=9,head_dim=8,dtype=f32,seq_k=13,heads_k=2,causal=true,direction=backward",
    "attention:batch=1,heads=2,seq_q=33,head_dim=16,dtype=f32,causal=true,direction=backward",
    "attention:batch=1,heads=2,seq_q=33,head_dim=16,dtype=bf16,direction=backward",
    "softmax:rows=5,cols=33,dtype=f32,prologue=scale+mask",
    "layernorm:rows=5,cols=33,dtype=f32",
)


def worst(workload: Workload, inputs: Any, got: Any) -> float:
    """Return the largest error of what a library returned, as a share of what is allowed."""
    found = dict(
        zip((t.name for t in workload.outputs()), got if isinstance(got, tuple) else (got,), strict=True)
    )
    references = InputSet(workload=workload, seed=0, inputs=inputs).references
    outputs = {
        name: np.asarray(found[name], np.float64).reshape(r.value.shape) for name, r in references.items()
    }
    return worst_error(workload, outputs, references)


@pytest.mark.parametrize("text", PROBLEMS)
def test_numpy_computes_what_the_operator_says(text: str) -> None:
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(0))
    call = libraries.numpy_call(workload, inputs)
    if call is not None:
        assert worst(workload, inputs, call()) <= 1


@pytest.mark.parametrize("text", PROBLEMS)
def test_torch_computes_what_the_operator_says(text: str) -> None:
    torch = pytest.importorskip("torch")
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(0))
    for call in baseline.torch_cpu(workload, inputs).values():
        found: Any = call()
        parts = found if isinstance(found, tuple) else (found,)
        plain = tuple(_as_stored(torch, workload, part) for part in parts)
        assert worst(workload, inputs, plain) <= 1


def _as_stored(torch: Any, workload: Any, part: Any) -> Any:
    """Return an output in the order of memory: torch sees nhwc tensors with channels second."""
    nhwc = part.dim() == 4 and getattr(workload, "layout", "nchw") == "nhwc"
    return (part.permute(0, 2, 3, 1) if nhwc else part).to(torch.float64).numpy()


def test_an_operator_without_a_module_has_no_libraries() -> None:
    toy = Toy(n=3)
    assert libraries.numpy_call(toy, {}) is None
    assert libraries.torch_calls(toy, {}) == {}


@pytest.mark.parametrize(
    "text", ["m=32,n=48,k=64,dtype=e4m3", "m=32,n=48,k=63,dtype=i8", "m=16,n=48,k=64,dtype=i8"]
)
def test_torch_is_no_baseline_for_what_it_lacks(text: str) -> None:
    pytest.importorskip("torch")
    workload = parse(f"gemm:{text}")
    assert baseline.torch_cpu(workload, workload.draw(np.random.default_rng(0))) == {}
