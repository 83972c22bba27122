"""Operator attention: its reference compared with torch in float64, its tolerance with arithmetic in f16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.measure.verify import draw, worst_error
from tunebench.workloads import parse
from tunebench.workloads.operators.attention import Attention

Array = NDArray[Any]

PROBLEMS = (
    "attention:batch=2,heads=2,seq_q=5,head_dim=8,dtype=f32",
    "attention:batch=1,heads=4,seq_q=7,head_dim=16,dtype=f32,seq_k=13,heads_k=2,causal=true",
    "attention:batch=1,heads=6,seq_q=1,head_dim=4,dtype=f32,seq_k=9,heads_k=2",
)


def attention(text: str) -> Attention:
    workload = parse(text)
    assert isinstance(workload, Attention)
    return workload


@pytest.mark.parametrize("text", PROBLEMS)
def test_the_reference_is_what_torch_computes_and_differentiates(text: str) -> None:
    torch = pytest.importorskip("torch")
    forward = attention(text)
    exact = draw(forward, 0).exact()
    found = forward.reference(exact)
    q, k, v = (torch.tensor(exact[name], requires_grad=True) for name in ("q", "k", "v"))
    shared = [part.repeat_interleave(forward.group, dim=1) for part in (k, v)]
    scores = q @ shared[0].transpose(2, 3) * forward.scale
    if forward.causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + forward.seq_k - forward.seq_q)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse, o = scores.logsumexp(3), scores.softmax(3) @ shared[1]
    np.testing.assert_allclose(found["o"].value, o.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(found["lse"].value, lse.detach().numpy(), rtol=1e-12)

    backward = attention(f"{text},direction=backward")
    do = np.random.default_rng(1).standard_normal(o.shape)
    o.backward(torch.tensor(do))
    given = {**exact, "o": found["o"].value, "lse": found["lse"].value, "do": do}
    gradients = backward.reference(given)
    for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
        np.testing.assert_allclose(gradients[name].value, tensor.grad.numpy(), rtol=1e-9, atol=1e-12)


def _in_half(workload: Attention, t: Mapping[str, Array], *, all_keys: bool = True) -> dict[str, Array]:
    """Emulate a kernel: products of rounded factors summed in f32, probabilities rounded."""
    half = numpy_dtype(workload.dtype)
    single = {name: value.astype(np.float32) for name, value in t.items()}
    q = single["q"]
    k, v = (np.repeat(single[name], workload.group, axis=1) for name in ("k", "v"))
    scores = q @ k.swapaxes(2, 3) * np.float32(workload.scale)
    hidden = np.triu(np.ones(scores.shape[2:], bool), 1 + workload.seq_k - workload.seq_q)
    scores[..., hidden & workload.causal] = -np.inf
    if not all_keys:
        scores[..., -1] = -np.inf
    if workload.direction == "forward":
        top = scores.max(axis=3, keepdims=True)
        e = np.exp(scores - top)
        total = e.sum(axis=3, keepdims=True)
        o = e.astype(half).astype(np.float32) @ v / total
        return {"o": o.astype(half), "lse": (top + np.log(total))[..., 0]}
    p = np.exp(scores - single["lse"][..., None])
    d = (single["do"] * single["o"]).sum(axis=3, keepdims=True)
    ds = p * (single["do"] @ v.swapaxes(2, 3) - d)
    p, ds = (part.astype(half).astype(np.float32) for part in (p, ds))
    scale = np.float32(workload.scale)
    shape = (workload.batch, workload.heads_k, workload.group, workload.seq_k, workload.head_dim)
    found = {
        "dq": scale * (ds @ k),
        "dk": (scale * (ds.swapaxes(2, 3) @ q)).reshape(shape).sum(axis=2),
        "dv": (p.swapaxes(2, 3) @ single["do"]).reshape(shape).sum(axis=2),
    }
    return {name: value.astype(half) for name, value in found.items()}


HALVES = (
    "attention:batch=1,heads=2,seq_q=65,head_dim=64,dtype=f16,causal=true",
    "attention:batch=1,heads=4,seq_q=33,head_dim=80,dtype=bf16,seq_k=129,heads_k=2",
    "attention:batch=1,heads=2,seq_q=65,head_dim=64,dtype=f16,seq_k=97,causal=true,direction=backward",
    "attention:batch=1,heads=4,seq_q=33,head_dim=32,dtype=bf16,heads_k=2,direction=backward",
)


@pytest.mark.parametrize("text", HALVES)
@pytest.mark.parametrize("seed", range(3))
def test_the_tolerance_lets_rounded_probabilities_pass_and_no_key_be_missed(text: str, seed: int) -> None:
    inputs = draw(attention(text), seed)
    workload = inputs.workload
    assert isinstance(workload, Attention)
    right, wrong = (_in_half(workload, inputs.inputs, all_keys=all_keys) for all_keys in (True, False))
    assert 0.02 < worst_error(workload, right, inputs.references) <= 1
    assert worst_error(workload, wrong, inputs.references) > 5


def test_causal_counts_the_pairs_that_are_seen() -> None:
    workload = attention("attention:batch=3,heads=2,seq_q=5,head_dim=8,dtype=f16,seq_k=9,causal=true")
    seen = sum(j <= i + 4 for i in range(5) for j in range(9))
    assert workload.pairs == seen
    assert workload.flops() == 4 * 3 * 2 * seen * 8
    assert workload.changed(direction="backward").flops() == 10 * 3 * 2 * seen * 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heads=6,heads_k=4,seq_q=3", "heads_k=4 must divide heads=6"),
        ("heads=6,seq_q=4,seq_k=3,causal=true", "causal=true needs seq_q=4 up to seq_k=3"),
    ],
)
def test_incompatible_dimensions_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(f"attention:batch=1,head_dim=8,dtype=f16,{text}")
