"""Attention gradients by torch autograd, the baseline of the backward pass on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunebench.measure.baselines import _attention_backward as backward
from tunebench.measure.baselines import _attention_forward as forward
from tunebench.measure.verify import draw
from tunebench.workloads import parse
from tunebench.workloads.operators.attention import Attention


@pytest.mark.parametrize(
    "text",
    [
        "attention:batch=2,heads=4,seq_q=5,head_dim=8,dtype=f32,seq_k=9,heads_k=2,causal=true",
        "attention:batch=1,heads=2,seq_q=7,head_dim=8,dtype=f32,causal=true",
        "attention:batch=1,heads=2,seq_q=7,head_dim=8,dtype=f32,seq_k=3",
    ],
)
def test_torch_gradients_match_operator_reference(text: str) -> None:
    torch = pytest.importorskip("torch")
    plain, workload = parse(text), parse(f"{text},direction=backward")
    assert isinstance(workload, Attention)
    inputs = draw(plain, 0)
    known = plain.reference(inputs.exact())
    do = np.random.default_rng(1).standard_normal(known["o"].value.shape).astype(np.float32)
    t: dict[str, Any] = {name: torch.tensor(value) for name, value in inputs.inputs.items()}
    call = backward.by_autograd(workload, {**t, "do": torch.tensor(do)})
    with torch.inference_mode():  # same mode as in timing
        call()  # called twice: the graph is retained
        found = call()
    given = {
        **inputs.exact(),
        **{name: known[name].value for name in ("o", "lse")},
        "do": do.astype(np.float64),
    }
    expected = workload.reference(given)
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        np.testing.assert_allclose(gradient.numpy(), expected[name].value, rtol=1e-4, atol=1e-5)


def test_unsupported_by_cudnn_is_refused_at_first_call() -> None:
    torch = pytest.importorskip("torch")
    workload = parse("attention:batch=1,heads=2,seq_q=7,head_dim=8,dtype=f32,direction=backward")
    assert isinstance(workload, Attention)
    t = {name: torch.ones(1, 2, 7, 8) for name in ("q", "k", "v", "do")}  # on the CPU, without cuDNN
    alone = forward.by_cudnn(lambda: torch.nn.functional.scaled_dot_product_attention(t["q"], t["k"], t["v"]))
    for call in (alone, backward.by_autograd(workload, t, cudnn=True)):
        with pytest.raises(RuntimeError, match=r"No (viable|available)"):
            call()
