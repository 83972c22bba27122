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
from tunebench.workloads.operators.attention import HIDDEN_ROW_LSE, Attention

Array = NDArray[Any]

PROBLEMS = (
    "attention:batch=2,heads=2,seq_q=5,head_dim=8,dtype=f32",
    "attention:batch=1,heads=4,seq_q=7,head_dim=16,dtype=f32,seq_k=13,heads_k=2,causal=true",
    "attention:batch=1,heads=6,seq_q=1,head_dim=4,dtype=f32,seq_k=9,heads_k=2",
    "attention:batch=2,heads=4,seq_q=21,head_dim=4,dtype=f32,seq_k=9,heads_k=2,bias=bhqk,scale=1",
    "attention:batch=2,heads=2,seq_q=9,head_dim=4,dtype=f32,seq_k=5,causal=true,bias=hk,align=first",
    "attention:batch=2,heads=3,seq_q=5,head_dim=4,dtype=f32,seq_k=9,causal=true,bias=bqk,window=3",
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
    reference = forward.reference(exact)
    q, k, v = (torch.tensor(exact[name], requires_grad=True) for name in ("q", "k", "v"))
    shared = [part.repeat_interleave(forward.group, dim=1) for part in (k, v)]
    scores = q @ shared[0].transpose(2, 3) * forward.scale
    if forward.causal:
        before = 0 if forward.align == "first" else forward.seq_k - forward.seq_q
        full_mask = torch.ones(scores.shape[2:], dtype=torch.bool)
        seen = full_mask.tril(before) & full_mask.triu(
            1 + before - (forward.window or forward.seq_k + forward.seq_q)
        )
        assert forward.pairs == seen.sum()
        scores = scores.masked_fill(~seen, -torch.inf)
    if forward.has_bias:
        scores = scores + torch.tensor(exact["bias"])
    lse, o = scores.logsumexp(3).clamp(min=HIDDEN_ROW_LSE), torch._safe_softmax(scores, 3) @ shared[1]
    np.testing.assert_allclose(reference["o"].value, o.detach().numpy(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(reference["lse"].value, lse.detach().numpy(), rtol=1e-12)
    assert (reference["o"].value == 0).all(3).any() == ("q" in forward.bias and forward.seq_q > 7)

    backward = attention(f"{text},direction=backward")
    do = np.random.default_rng(1).standard_normal(o.shape)
    o.backward(torch.tensor(do))
    inputs_given = {**exact, "o": reference["o"].value, "lse": reference["lse"].value, "do": do}
    gradients = backward.reference(inputs_given)
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
    values = {
        "dq": scale * (ds @ k),
        "dk": (scale * (ds.swapaxes(2, 3) @ q)).reshape(shape).sum(axis=2),
        "dv": (p.swapaxes(2, 3) @ single["do"]).reshape(shape).sum(axis=2),
    }
    return {name: value.astype(half) for name, value in values.items()}


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


def test_traffic_counts_keys_and_biases_that_some_query_sees() -> None:
    text = "attention:batch=2,heads=4,seq_q=5,head_dim=8,dtype=f32,seq_k=20,causal=true,heads_k=2,bias=hqk"
    for more, keys in (("", 20), (",align=first", 5), (",window=3", 7), (",align=first,window=3", 5)):
        workload = attention(text + more)
        pairs = len({(i, j) for i in range(5) for j in range(*map(int, workload.keys_of(i)))})
        assert workload.traffic().read_bytes == 4 * (2 * 4 * 5 * 8 + 2 * 2 * 2 * keys * 8 + 4 * pairs)
    unbiased = attention("attention:batch=2,heads=4,seq_q=5,head_dim=8,dtype=f32,bias=bk")
    assert unbiased.traffic().read_bytes == 4 * (3 * 2 * 4 * 5 * 8 + 2 * 5)


def test_canonical_text_omits_the_usual_scale_and_mask() -> None:
    text = "attention:batch=1,heads=1,seq_q=4,head_dim=16,dtype=f16"
    assert str(attention(f"{text},scale=0.25,bias=none,align=last,window=0")) == text
    assert str(attention(f"{text},scale=1")) == f"{text},scale=1.0"
    assert attention(f"{text},scale=1").changed(head_dim=64).scale == 1
    assert attention(text).changed(head_dim=64).scale == 0.125


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("heads=6,heads_k=4,seq_q=3", "heads_k=4 must divide heads=6"),
        ("heads=6,seq_q=4,seq_k=3,causal=true", "causal=true needs seq_q=4 up to seq_k=3"),
        ("heads=6,seq_q=4,window=2", "window=2 describe a causal mask"),
        ("heads=6,seq_q=9,seq_k=3,causal=true,align=first,window=6", "less than seq_k=3 plus window=6"),
    ],
)
def test_incompatible_dimensions_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(f"attention:batch=1,head_dim=8,dtype=f16,{text}")
