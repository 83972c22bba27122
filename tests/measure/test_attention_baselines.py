"""Attention gradients by torch autograd, the baseline of the backward pass on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunebench.libraries import _attention_backward as backward
from tunebench.libraries import _attention_forward as forward
from tunebench.measure.verify import draw
from tunebench.workloads import parse
from tunebench.workloads.operators.attention import Attention


@pytest.mark.parametrize(
    "text",
    [
        "attention:batch=2,heads=4,seq_q=5,head_dim=8,dtype=f32,seq_k=9,heads_k=2,causal=true",
        "attention:batch=1,heads=2,seq_q=7,head_dim=8,dtype=f32,causal=true",
        "attention:batch=1,heads=2,seq_q=7,head_dim=8,dtype=f32,seq_k=3",
        "attention:batch=2,heads=4,seq_q=17,head_dim=8,dtype=f32,seq_k=9,heads_k=2,bias=bqk,scale=1",
        "attention:batch=2,heads=2,seq_q=7,head_dim=8,dtype=f32,seq_k=5,causal=true,align=first",
        "attention:batch=2,heads=2,seq_q=5,head_dim=8,dtype=f32,seq_k=8,causal=true,bias=hk,window=3",
    ],
)
def test_torch_gradients_match_operator_reference(text: str) -> None:
    torch = pytest.importorskip("torch")
    plain, workload = parse(text), parse(f"{text},direction=backward")
    assert isinstance(workload, Attention)
    inputs = draw(plain, 0)
    outputs = plain.reference(inputs.exact())
    do = np.random.default_rng(1).standard_normal(outputs["o"].value.shape).astype(np.float32)
    t: dict[str, Any] = {name: torch.tensor(value) for name, value in inputs.inputs.items()}
    call = backward.by_autograd(workload, {**t, "do": torch.tensor(do)})
    with torch.inference_mode():  # same mode as in timing
        call()  # called twice: the graph is retained
        results = call()
    operands = {
        **inputs.exact(),
        **{name: outputs[name].value for name in ("o", "lse")},
        "do": do.astype(np.float64),
    }
    expected = workload.reference(operands)
    single = {name: torch.tensor(value.astype(np.float32)) for name, value in operands.items()}
    by_name = {"autograd": results, "CPU": backward.by_torch(workload, single)["torch"]()}
    by_name["NumPy"] = tuple(map(torch.tensor, backward.by_numpy(workload, inputs_of(single))))
    for by, gradients in by_name.items():
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            if by == "CPU" and workload.group > 1 and name != "dq":
                continue  # torch's function sums no gradients of heads that share keys
            value = expected[name].value
            np.testing.assert_allclose(gradient.numpy(), value, rtol=1e-4, atol=1e-5, err_msg=f"{by} {name}")
    o = [forward.by_torch(plain, t)["torch"](), torch.tensor(forward.by_numpy(plain, inputs_of(t))[0])]
    for value in o:
        np.testing.assert_allclose(value.numpy(), outputs["o"].value, rtol=1e-4, atol=1e-5)


def inputs_of(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_unsupported_by_cudnn_is_refused_at_first_call() -> None:
    torch = pytest.importorskip("torch")
    workload = parse("attention:batch=1,heads=2,seq_q=7,head_dim=8,dtype=f32,direction=backward")
    assert isinstance(workload, Attention)
    t = {name: torch.ones(1, 2, 7, 8) for name in ("q", "k", "v", "do")}  # on the CPU, without cuDNN
    alone = forward.by_cudnn(lambda: torch.nn.functional.scaled_dot_product_attention(t["q"], t["k"], t["v"]))
    for call in (alone, backward.by_autograd(workload, t, cudnn=True)):
        with pytest.raises(RuntimeError, match=r"No (viable|available)"):
            call()
