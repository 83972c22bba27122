"""Calls of flex_attention: their workloads, the results of kernels, and what is left to torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import tunebench.torch as served
from tests.torch.reference_kernels import reference_kernels
from tests.torch.test_torch_compile import ran
from tunebench.graph.node import Node
from tunebench.torch.compiler.capture import capture
from tunebench.workloads import parse

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = "attention:batch=2,heads=4,seq_q=40,head_dim=16,dtype=f32"
Function = Callable[..., Tensor]


class Flex(nn.Module):
    """Attention with a mask and a function of scores; blocks are computed in each step or once."""

    def __init__(self, mask: Function | None, score: Function | None, *, ahead: bool = False) -> None:
        super().__init__()
        self.mask, self.score = mask, score
        self.blocks = create_block_mask(mask, None, None, 40, 40, device="cpu") if mask and ahead else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = self.blocks
        if blocks is None and self.mask is not None:
            blocks = create_block_mask(self.mask, None, None, q.shape[2], k.shape[2], device=q.device)
        options = {"score_mod": self.score, "block_mask": blocks, "enable_gqa": q.shape[1] != k.shape[1]}
        return flex_attention(q, k, v, **options)


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 9)


def _prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) | (k < 7)


def _documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 13 == k // 13) & (q >= k)


def _by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + h) % 4 >= k % 4


def _alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (k - q) * 0.3 / (h + 1.0)


def _relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2 * score - (q - k).abs() / 8


def _hidden(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q >= k, score, -math.inf)


def _soft_cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20 * torch.tanh(score / 20)


def _negative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return -1 * score


CALLS: dict[str, tuple[Function | None, Function | None, str]] = {
    "plain": (None, None, SIZES),
    "causal": (_causal, None, f"{SIZES},causal=true"),
    "window": (_window, None, f"{SIZES},causal=true,window=9"),
    "prefix": (_prefix, None, f"{SIZES},bias=qk"),
    "documents": (_documents, None, f"{SIZES},bias=qk"),
    "mask by head": (_by_head, None, f"{SIZES},bias=hqk"),
    "alibi": (None, _alibi, f"{SIZES},bias=hqk"),
    "alibi and causal": (_causal, _alibi, f"{SIZES},bias=hqk"),
    "relative": (None, _relative, f"{SIZES},bias=qk,scale=0.5"),
    "hidden scores": (None, _hidden, f"{SIZES},causal=true"),
}


def tensors(dtype: torch.dtype = torch.float32, keys: int = 4) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, heads, 40, 16, dtype=dtype) for heads in (4, keys, keys))


def call_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Node:
    (translation,) = capture(model, inputs)
    (node,) = [node for node in translation.graph.nodes if "flex_attention" in node.name]
    return node


QUICK = ("window", "alibi", "hidden scores")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in CALLS]
)
def test_call_is_one_workload(name: str) -> None:
    mask, score, expected = CALLS[name]
    node = call_of(Flex(mask, score), tensors())
    assert node.workloads == (expected,)
    assert {tensor.name for tensor in parse(expected).inputs()} <= node.roles.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", pytest.param("relative", marks=pytest.mark.exhaustive)])
def test_kernels_compute_the_call(name: str) -> None:
    mask, score, expected = CALLS[name]
    torch.manual_seed(0)
    model, inputs = Flex(mask, score), tensors()
    compiled = served.compile(model)
    with reference_kernels() as workloads, torch.no_grad():
        y, _ = ran(lambda: compiled(*inputs))
        assert parse(expected) in workloads
        eager = model(*inputs)
    torch.testing.assert_close(y, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "score", "reason"),
    [
        (None, _soft_cap, "scores in tanh"),
        (None, _negative, "changes its sign"),
        (None, lambda s, b, h, q, k: s + s, "scores in add"),
        (None, lambda s, b, h, q, k: torch.where(q >= k, s, -1.0), "scores in where"),
    ],
)
def test_other_functions_are_left_to_torch(mask: Any, score: Any, reason: str) -> None:
    node = call_of(Flex(mask, score), tensors())
    assert not node.workloads
    assert reason in node.reason


def test_bias_that_rounding_changes_is_left_to_torch() -> None:
    assert "bf16 does not hold" in call_of(Flex(None, _alibi), tensors(torch.bfloat16)).reason


def test_tensors_of_the_model_are_left_to_torch() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    assert "tensors of the model" in call_of(Flex(None, score), tensors()).reason


def test_blocks_from_outside_are_named_but_left_to_torch() -> None:
    """The blocks may hide keys that the function shows, and their values are not known."""
    node = call_of(Flex(_causal, None, ahead=True), tensors())
    assert node.workloads == (f"{SIZES},causal=true",)
    assert "q" not in node.roles


@pytest.mark.exhaustive
def test_grouped_queries_share_heads() -> None:
    node = call_of(Flex(_causal, None), tensors(keys=2))
    assert node.workloads == (f"{SIZES},heads_k=2,causal=true",)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["window", "mask by head"])
def test_bias_is_the_mask_of_torch(name: str) -> None:
    mask, _, expected = CALLS[name]
    assert mask is not None
    shown = create_mask(mask, 1, 4, 40, 40, device="cpu")
    workload: Any = parse(expected)
    if workload.causal:
        first, end = workload.keys_of(torch.arange(40).numpy())
        place = torch.arange(40)
        assert torch.equal(
            shown[0, 0], (place >= torch.tensor(first)[:, None]) & (place < torch.tensor(end)[:, None])
        )
        return
    (translation,) = capture(Flex(mask, None), tensors())
    (source,) = [node for name, node in translation.sources.items() if name.startswith("_bias")]
    bias = getattr(source.graph.owning_module, str(source.target))
    assert torch.equal((bias == 0).expand(shown.shape), shown)
    assert torch.isneginf(bias[bias != 0]).all()
