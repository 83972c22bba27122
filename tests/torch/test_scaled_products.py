"""Products of quantised matrices in traced models: their workloads, and results of kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tunebench.torch as served
from tests.torch.reference_kernels import reference_kernels
from tests.torch.test_torch_compile import ran
from tunebench.device import representative
from tunebench.graph.group import groups
from tunebench.graph.node import Graph
from tunebench.graph.partition_plan import plan_partition
from tunebench.graph.price import Prices
from tunebench.torch.compiler.capture import capture
from tunebench.torch.compiler.translation import Translation
from tunebench.workloads import parse

M, N, K = 24, 48, 128
BF16 = torch.bfloat16


class Linear(nn.Module):
    """A linear layer with quantised weights (N, K), as a function of rows and buffers."""

    def __init__(self, call: Callable[..., Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self._call = call
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self._call(x, **dict(self.named_buffers()))


def _signed(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def _positive(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) / 64 + 0.01).to(dtype)


# The sequences of torchao's quantised tensors (0.18).


def _int8_rows(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    sums = x.reshape(-1, x.shape[-1]) @ weight.t().to(x.dtype)
    return (sums * scale.to(x.dtype).view(-1)).view(*x.shape[:-1], -1) + bias


def _int8_groups(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    grouped = weight.view(N, -1, K // scale.shape[1])
    weights = (grouped.to(x.dtype) - zero[..., None].to(x.dtype)) * scale[..., None]
    return functional.linear(x, weights.view(N, K).to(x.dtype))


def _float8_rows(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return functional.linear(x, (weight.to(torch.float32) * scale).to(x.dtype))


def _integers(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    of_rows = x.abs().amax(1, keepdim=True) / 127
    rows = (x / of_rows).round().clamp(-128, 127).to(torch.int8)
    return ((torch._int_mm(rows, weight.t()) * of_rows.float()) * scale).to(x.dtype)


def _unsigned_integers(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    of_rows = x.abs().amax(1, keepdim=True).float() / 127
    rows = (x / of_rows).round().clamp(-128, 127).to(torch.int8)
    sums = torch._int_mm((rows.to(torch.int32) + 128).to(torch.uint8), weight.t())
    sums = sums - 128 * weight.t().sum(0, keepdim=True, dtype=torch.int32)
    return ((sums.float() * of_rows).to(x.dtype) * scale).to(x.dtype)


def _scaled_mm(x: Tensor, weight: Tensor, scale: Tensor, scale_x: Tensor, bias: Tensor) -> Tensor:
    rows = (x / scale_x).to(torch.float8_e4m3fn)
    return torch._scaled_mm(rows, weight.t(), scale_a=scale_x, scale_b=scale, bias=bias, out_dtype=x.dtype)


def _packed_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.ops.aten._weight_int8pack_mm(x, weight, scale)


def _float8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


SIZES = f"scaled_gemm:m={M},n={N},k={K}"
LAYERS: dict[str, tuple[Callable[[], Linear], str]] = {
    "int8 by row": (
        lambda: Linear(
            _int8_rows, weight=_signed(N, K), scale=_positive(N, 1), bias=torch.randn(N, dtype=BF16)
        ),
        f"{SIZES},dtype=bf16,bias=true",
    ),
    "int8 by group": (
        lambda: Linear(_int8_groups, weight=_signed(N, K), scale=_positive(N, 2), zero=_signed(N, 2)),
        f"{SIZES},dtype=bf16,scales=group,group=64,shift=true",
    ),
    "float8 by row": (
        lambda: Linear(_float8_rows, weight=_float8(N, K), scale=_positive(N, 1)),
        f"{SIZES},dtype=bf16,weight=e4m3",
    ),
    "integers": (
        lambda: Linear(_integers, weight=_signed(N, K), scale=_positive(N)),
        f"{SIZES},dtype=i8",
    ),
    "unsigned integers": (
        lambda: Linear(_unsigned_integers, weight=_signed(N, K), scale=_positive(N)),
        f"{SIZES},dtype=i8",
    ),
    "scaled_mm": (
        lambda: Linear(
            _scaled_mm,
            weight=_float8(N, K),
            scale=_positive(1),
            scale_x=_positive(1),
            bias=torch.randn(N, dtype=BF16),
        ),
        f"{SIZES},dtype=e4m3,scales=tensor,bias=true",
    ),
    "packed int8": (
        lambda: Linear(_packed_int8, weight=_signed(N, K), scale=_positive(N, dtype=BF16)),
        f"{SIZES},dtype=bf16",
    ),
}


COMPILED = ("int8 by row", "unsigned integers", "scaled_mm")
"""Layers that are compiled without --exhaustive, too."""


def rows() -> Tensor:
    return torch.randn(M, K, dtype=BF16)


def products_of(graph: Graph) -> set[str]:
    texts = {text for group in groups(graph) for text in group.workloads}
    return {text for text in texts if text.startswith("scaled_gemm:")}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_one_workload(name: str) -> None:
    make, expected = LAYERS[name]
    (translation,) = capture(make(), [rows()])
    assert products_of(translation.graph) == {expected}
    assert Graph.from_json(translation.graph.to_json()) == translation.graph


@pytest.fixture
def scaled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the nodes of products of quantised matrices expensive for torch, so that kernels run them."""
    original = Prices.torch

    def torch_price(self: Any, index: int) -> Any:
        return dataclasses.replace(original(self, index), us=1e6)

    monkeypatch.setattr(Prices, "torch", torch_price)


@pytest.mark.slow
@pytest.mark.usefixtures("scaled_first")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COMPILED else pytest.mark.exhaustive) for name in LAYERS],
)
def test_kernels_compute_the_layer(name: str) -> None:
    make, expected = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make().eval(), rows()
    compiled = served.compile(layer, check=True)
    with reference_kernels() as workloads, torch.no_grad():
        y, _ = ran(lambda: compiled(x))
        assert parse(expected) in workloads
        eager = layer(x)
    # Eager layers round weights, sums and results to bf16, one after the other.
    torch.testing.assert_close(y, eager, rtol=0.02, atol=0.02 * float(eager.abs().max()))


def texts_of(call: Callable[..., Tensor]) -> str:
    (translation,) = capture(Linear(call), [rows()])
    return " ".join(text for group in groups(translation.graph) for text in group.workloads)


def test_rounding_of_activations_is_an_expression() -> None:
    texts = texts_of(lambda x: (x / 7).round().add(2).clamp(-128, 127).to(torch.int8))
    assert "dtype=i8,expression=min(max(round(x0/7)+2,-128),127)" in texts
    assert "expression=x0*x1,operands=x0.i8.1" in texts_of(lambda x: x.round().clamp(0, 9).to(torch.int8) * x)


NOT_EXACT: dict[str, Callable[..., Tensor]] = {
    "fractions": lambda x: x.clamp(-128, 127).to(torch.int8),
    "decimals": lambda x: x.round(decimals=1).clamp(-128, 127).to(torch.int8),
    "too large": lambda x: x.round().clamp(-128, 128).to(torch.int8),
    "limits with fractions": lambda x: x.round().clamp(-1.5, 1.5).to(torch.int8),
    "arithmetic": lambda x: x.round().clamp(-128, 127).to(torch.int8) + torch.ones(K, dtype=torch.int8),
}


@pytest.mark.parametrize("name", NOT_EXACT)
def test_int8_that_f32_does_not_hold_is_left_to_torch(name: str) -> None:
    (translation,) = capture(Linear(NOT_EXACT[name]), [rows()])
    (written,) = translation.graph.outputs
    last = next(node for node in translation.graph.nodes if written in node.writes)
    assert not last.expression
    assert "int8" in last.reason


def test_shared_sums_and_other_scales_are_left_to_torch() -> None:
    def both(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        sums = x @ weight.t().to(x.dtype)
        return sums, sums * scale

    def by_term(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return functional.linear(x, weight.to(x.dtype) * scale)

    for call, shape in ((both, (N,)), (by_term, (1, K))):
        layer = Linear(call, weight=_signed(N, K), scale=_positive(*shape, dtype=BF16))
        (translation,) = capture(layer, [rows()])
        assert not products_of(translation.graph)


# -- a block of a transformer ------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of Llama with grouped queries, rotated queries and keys, and a gated feed-forward layer."""

    def __init__(self, width: int = 128, heads: int = 4, inner: int = 256) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        sizes = {"q": (width, width), "k": (width, width // 2), "v": (width, width // 2), "o": (width, width)}
        sizes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        self.layers = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.register_buffer("cos", torch.randn(64, self.size))
        self.register_buffer("sin", torch.randn(64, self.size))

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[2]] + torch.cat((-second, first), -1) * self.sin[: x.shape[2]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self.layers[n](y).unflatten(-1, (-1, self.size)).transpose(1, 2) for n in "qkv")
        attended = functional.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.layers["o"](attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.layers["down"](functional.silu(self.layers["gate"](y)) * self.layers["up"](y))


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits by row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", _signed(*linear.weight.shape))
        self.register_buffer("scale", _positive(linear.out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        sums = x.reshape(-1, x.shape[-1]) @ self.weight.t().to(x.dtype)
        return (sums * self.scale.to(x.dtype).view(-1)).view(*x.shape[:-1], -1)


def _captured(block: Block) -> Translation:
    (translation,) = capture(block.to(BF16).eval(), [torch.zeros(1, 32, 128, dtype=BF16)])
    return translation


def _check(translation: Translation, product: str) -> None:
    plan = plan_partition(translation.graph, representative("sm_90"))
    chosen = [text for text in plan.workloads.elements() if text.startswith("scaled_gemm:")]
    assert len(chosen) == 7
    assert all(text.endswith(product) for text in chosen)
    assert plan.coverage >= 0.95


@pytest.mark.slow
def test_block_with_quantised_weights_is_covered() -> None:
    block = Block()
    for name, layer in list(block.layers.items()):
        block.layers[name] = Int8Linear(layer)
    translation = _captured(block)
    _check(translation, "dtype=bf16")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "product"),
    [
        ("Int8WeightOnlyConfig", "dtype=bf16"),
        ("Float8WeightOnlyConfig", "dtype=bf16,weight=e4m3"),
        ("IntxWeightOnlyConfig", "dtype=bf16,scales=group,group=32,shift=true"),
        ("Int8DynamicActivationInt8WeightConfig", "dtype=i8"),
    ],
)
def test_block_of_torchao_is_covered(config: str, product: str) -> None:
    from torchao import quantization

    options: dict[str, Any] = {}
    if config == "IntxWeightOnlyConfig":
        options = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}
    block = Block().to(BF16).eval()
    quantization.quantize_(block, getattr(quantization, config)(**options))
    _check(_captured(block), product)
