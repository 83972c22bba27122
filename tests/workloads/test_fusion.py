"""Every fused operator equals the composition of its unfused parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tunebench import kernels
from tunebench.device import local_cpu
from tunebench.workload import Workload
from tunebench.workloads import all_operators, parse

# One workload of each fused operator; tests vary every other dimension of it.
FUSED = {
    "conv2d": "conv2d:n=2,c=3,h=5,w=4,k=6,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias",
    "elementwise": "elementwise:rows=4,cols=5,dtype=f32,"
    "expression=s*gelu(x+b)*min(x+b,y/2)*r,vectors=b,columns=r,scalars=s",
    "gated_gemm": "gated_gemm:m=5,n=4,k=3,dtype=f32,trans=nt",
    "gemm": "gemm:m=5,n=4,k=3,dtype=f16,batch=2,out=f32,epilogue=bias",
    "layernorm": "layernorm:rows=4,cols=5,dtype=f32,prologue=residual",
    "reduction": "reduction:rows=4,cols=5,dtype=f32,"
    "expression=s*square(x-m)*b,vectors=b,columns=m,scalars=s,reduce=mean,then=rsqrt(x+1)",
    "rmsnorm": "rmsnorm:rows=4,cols=5,dtype=f16,prologue=residual",
    "softmax": "softmax:rows=4,cols=5,dtype=bf16,prologue=scale",
}
ALSO = (
    "gemm:m=5,n=4,k=3,dtype=f32,batch=2,epilogue=bias+relu,pre=x*scale+shift",
    "gemm:m=5,n=4,k=3,dtype=f32,trans=tn,act=tanh(x),pre=silu(x-shift)",
    "gemm:m=5,n=4,k=3,dtype=f32,batch=2,trans=tn,pre=gelu(x)",
    "conv2d:n=2,c=3,h=5,w=4,k=6,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+relu,"
    "pre=exp(min(x,0))*scale+shift",
    "conv2d:n=2,c=3,h=5,w=4,k=6,r=3,s=3,stride=2,pad=1,dtype=f32,layout=nchw,pre=sigmoid(x)",
    "softmax:rows=4,cols=5,dtype=f32,prologue=scale,direction=backward",
    "reduction:rows=4,cols=5,dtype=f16,expression=x*r,columns=r,reduce=sum,axis=rows,out=f32",
    "reduction:rows=4,cols=5,dtype=f32,expression=x,reduce=max,axis=rows,then=exp(x)",
)
RENAMED: dict[str, tuple[dict[str, str], ...]] = {
    "gated_gemm": ({"b": "b_gate"}, {"b": "b_up"}, {"gate": "step0", "up": "step1"})
}
"""Names of parts' inputs in the fused workload, where they differ."""


def fused_workloads() -> Iterator[Workload]:
    yield from map(parse, ALSO)
    for text in FUSED.values():
        workload = parse(text)
        dimensions = [name for name in ("epilogue", "prologue") if name in workload.dimensions()]
        if not dimensions:
            yield workload
        for name in dimensions:
            yield from (workload.changed(**{name: value}) for value in workload.choices(name))


def composed(whole: Workload, inputs: Mapping[str, Any]) -> Any:
    """Compute the parts in float64, one after the other, and return the result of the last.

    A part's inputs are those of the fused workload with the same names, or results called step0, step1, ...
    With a prologue or an epilogue, the first input of the second part is the result of the first.
    """
    results: dict[str, Any] = {}
    value: Any = None
    for index, part in enumerate(whole.unfused()):
        values = {**inputs, **results}
        for name, called in RENAMED.get(whole.operator, ({},) * (index + 1))[index].items():
            values[name] = values[called]
        tensors = part.inputs()
        operands = {tensor.name: values[tensor.name] for tensor in tensors if tensor.name in values}
        if index and whole.allowed_changes.fusions:
            operands[tensors[0].name] = value
        shaped = {tensor.name: np.reshape(operands[tensor.name], tensor.shape) for tensor in tensors}
        value = part.reference(shaped)[part.outputs()[0].name].value
        results[f"step{index}"] = value
    return value.reshape(whole.outputs()[0].shape)


@pytest.mark.parametrize("whole", list(fused_workloads()), ids=str)
def test_parts_compute_the_same_as_the_fused_workload(whole: Workload) -> None:
    parts = whole.unfused()
    if not parts:
        defaults = {field.name: field.default for field in dataclasses.fields(whole)}
        assert any(getattr(whole, name) == defaults[name] for name in whole.allowed_changes.fusions)
        return
    drawn = whole.draw(np.random.default_rng(0))
    inputs = {name: np.asarray(value, np.float64) for name, value in drawn.items()}
    expected = whole.reference(inputs)[whole.outputs()[0].name].value
    np.testing.assert_allclose(composed(whole, inputs), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("whole", list(fused_workloads()), ids=str)
def test_parts_are_workloads_that_move_more_bytes(whole: Workload) -> None:
    parts = whole.unfused()
    for part in parts:
        assert parse(str(part)) == part
        assert part.unfused() == () or part.operator == "elementwise" != whole.operator
        assert any(variant.refuses(part, local_cpu()) is None for variant in kernels.variants(part))
    if parts:
        assert sum(part.traffic().total_bytes for part in parts) > whole.traffic().total_bytes
        assert parts[-1].outputs()[0].dtype == whole.outputs()[0].dtype


def test_every_operator_that_fuses_is_listed() -> None:
    fusing = {
        name for name, cls in all_operators().items() if cls.allowed_changes.fusions or "unfused" in vars(cls)
    }
    assert fusing == set(FUSED)


def test_images_whose_channels_lie_across_rows_have_no_parts() -> None:
    assert parse(FUSED["conv2d"].replace("nhwc", "nchw")).unfused() == ()


def test_a_chain_falls_into_its_operations() -> None:
    parts = parse("elementwise:rows=4,cols=6,dtype=f16,expression=gelu(x+b*2)*y,vectors=b,out=f32").unfused()
    common = "elementwise:rows=4,cols=6,dtype=f16"
    assert list(map(str, parts)) == [
        f"{common},expression=x+b*2,vectors=b",
        f"{common},expression=gelu(step0)",
        f"{common},expression=step1*y,out=f32",
    ]
    (first, _) = parse(f"{common},expression=relu(step0*y)").unfused()
    assert str(first) == f"{common},expression=step0*y"
    assert parse(f"{common},expression=relu(x)").unfused() == ()
    # As a separate part, a product with so large a factor would overflow.
    assert parse(f"{common},expression=x*0.001*1e5").unfused() == ()
