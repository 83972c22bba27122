"""Compiled modules against torch in float64: every order of axes, unused results.

Groups run by the float64 references of their workloads: no test compiles a kernel, and an error is one of
the graph: which memory a kernel reads and writes, and what it computes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tunebench.torch as served  # noqa: E402
from tests.torch.compiled_check import Function, check  # noqa: E402
from tests.torch.reference_kernels import reference_kernels  # noqa: E402

R = torch.randn
CL = torch.channels_last


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


class ConvNextBlock(nn.Module):
    """A residual around a normalisation of channels and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1)
        y = self.down(functional.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class SelfAttention(nn.MultiheadAttention):
    """Attention of an input to itself, with options of `forward`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(32, 4, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, x, x, **self.options)


class MaskedLayer(nn.TransformerEncoderLayer):
    """A transformer layer with masks."""

    def __init__(self, **masks: Tensor) -> None:
        super().__init__(32, 4, 64, 0.0, batch_first=True)
        self.masks = masks

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, **self.masks)


HIDDEN_KEYS = torch.arange(6) > torch.tensor([[5], [3]])
"""Keys that a text of four words lacks."""
LATER = torch.ones(6, 6).triu(1).bool()
"""Keys after each query."""


class SumThenNorm(nn.Module):
    """A sum of images that is read as they are, and normalised with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = (x + y).permute(0, 2, 3, 1)
        return self.mix(self.norm(z)) + z


class SqueezeExcite(nn.Module):
    """Images scaled by a function of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(functional.silu(self.down(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(y)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise rows as language models do: in float32, then rounded."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rotary(q: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of features of heads, which are transposed."""
    q = q.transpose(1, 2)
    first, second = q.chunk(2, -1)
    return q * cosine + torch.cat((-second, first), -1) * sine


def shifted_windows(x: Tensor) -> Tensor:
    """Shift images and split them into windows, as Swin does."""
    b, h, w, c = x.shape
    x = torch.roll(x, (-1, -2), (1, 2)).view(b, h // 2, 2, w // 2, 2, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c) * 2


def one_and_all(x: Tensor) -> Tensor:
    y = x.repeat(2)
    return y[:1] * y + y


def padded_sum(x: Tensor, y: Tensor) -> Tensor:
    return functional.gelu(functional.pad(x, (1, 2, 0, 1)) + y)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def attention(*trained: bool) -> tuple[nn.Module, list[Tensor]]:
    inputs = [R(2, 2, 8, 16).requires_grad_(requires_grad) for requires_grad in trained]
    return Function(functional.scaled_dot_product_attention), inputs


def masked_attention(mask: Tensor, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    """Return attention of 6 queries in 3 heads to 8 keys, with a mask."""
    inputs = [R(2, 3, extent, 16).requires_grad_() for extent in (6, 8, 8)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    return Function(attend), [*inputs, mask]


def hidden(*shape: int) -> Tensor:
    """Return a mask that hides some keys, and all keys of the first query."""
    mask = R(*shape) > -0.5
    mask[..., 0, :] = shape[-2] == 1
    return mask


def indices(*shape: int, end: int, first: int = 0) -> Tensor:
    return torch.randint(first, end, shape)


def messages(x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    """Return a product of both ends of each edge, as graph networks do."""
    return functional.silu(torch.cat([x[edges[0]], x[edges[1]]], -1) @ weight)


def positions(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Add biases of relative positions to scores of heads, as Swin does."""
    return x + table[index.view(-1)].view(4, 4, -1).permute(2, 0, 1).contiguous()


GATHERS: dict[str, Callable[[], tuple[nn.Module, Sequence[Tensor]]]] = {
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 6), nn.Tanh()), [indices(3, 5, end=7)]),
    "embedding by int32": lambda: (nn.Embedding(7, 6), [indices(9, end=7).int()]),
    "embedding of a transposed table": lambda: (
        Function(lambda i, w: functional.embedding(i, w.t()), R(6, 7)),
        [indices(4, end=7)],
    ),
    "sum of embeddings": lambda: (
        Function(lambda i, w, v: (functional.embedding(i, w) + v).sum(1), R(7, 6), R(5, 6)),
        [indices(3, 5, end=7)],
    ),
    "messages along edges": lambda: (Function(messages, R(12, 4)), [R(5, 6), indices(2, 9, end=5)]),
    "relative positions": lambda: (Function(positions, R(7, 3)), [R(3, 4, 4), indices(16, end=7)]),
    "negative indices": lambda: (
        Function(lambda x, i: x[:, i] * 2),
        [R(3, 5, 4), indices(6, first=-5, end=5)],
    ),
    "pairs of indices": lambda: (
        Function(lambda x, i, j: x[:, i, j] + 1),
        [R(3, 5, 4), indices(6, 1, first=-5, end=5), indices(2, end=4)],
    ),
    "indices of separate axes": lambda: (
        Function(lambda x, i, j: x[i, :, j] + 1),
        [R(3, 5, 4), indices(6, end=3), indices(2, 1, end=4)],
    ),
    "rows of a slice by a slice": lambda: (
        Function(lambda x, i: torch.relu(x[1:, 2:][i[1:, 1]])),
        [R(6, 9), indices(4, 3, end=5)],
    ),
    "index_select of columns": lambda: (
        Function(lambda x, i: x.index_select(1, i).exp()),
        [R(3, 5, 4).transpose(0, 2), indices(6, end=5)],
    ),
    "elements by indices along an axis": lambda: (
        Function(lambda x, i: torch.gather(x, 1, i) * 2),
        [R(4, 6), indices(3, 2, end=6)],
    ),
    "rows of a sum": lambda: (
        Function(lambda x, y, i: (x + y)[i] * x[0]),
        [R(5, 4), R(5, 4), indices(3, end=5)],
    ),
    "many rows of a sum": lambda: (
        Function(lambda x, y, i: (x + y)[i] * x[0]),
        [R(5, 4), R(5, 4), indices(30, end=5)],
    ),
    "rows by indices that are computed": lambda: (
        Function(lambda x, y: x[y.argmax(-1)] * y),
        [R(4, 4), R(6, 4)],
    ),
}


def products_of_single(x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.addmm(x, x, weight)
    return torch.where(x > added, x, added * 0.5)


def lower_triangle() -> Tensor:
    indices = torch.arange(6)
    return indices[:, None] > indices


def window_mask() -> Tensor:
    mask = torch.zeros(6, 6)
    mask[:3, 3:] = -100.0
    return mask.roll(1, 0)


CASES: dict[str, Callable[[], tuple[nn.Module, Sequence[Tensor]]]] = {
    "bmm of transposed batches": lambda: (
        Function(lambda a, b: torch.bmm(a.transpose(0, 1), b)),
        [R(32, 4, 64), R(4, 64, 8)],
    ),
    "linear of permuted rows": lambda: (
        Function(lambda x, w, b: functional.linear(x.permute(1, 0, 2), w, b), R(8, 16), R(8)),
        [R(3, 5, 16)],
    ),
    "product of permuted rows": lambda: (
        Function(lambda x, w: x.permute(1, 0, 2) @ w, R(16, 8)),
        [R(3, 5, 16)],
    ),
    "multi-head attention": lambda: (nn.MultiheadAttention(32, 4), [R(6, 2, 32) for _ in range(3)]),
    "experts": lambda: (
        Function(lambda x, w: torch.einsum("bnd,edh->benh", x, w), R(4, 16, 8)),
        [R(2, 6, 16)],
    ),
    "transposed addend": lambda: (
        Function(lambda c, a, b: torch.addmm(c.t(), a, b)),
        [R(8, 6), R(6, 4), R(4, 8)],
    ),
    "transposed batched addend": lambda: (
        Function(lambda c, a, b: torch.baddbmm(c.transpose(0, 1), a, b)),
        [R(6, 3, 8), R(3, 6, 4), R(3, 4, 8)],
    ),
    "sum of permuted": lambda: (Function(lambda x: x.permute(1, 0, 2).sum(-1)), [R(3, 5, 7)]),
    "mean of permuted": lambda: (Function(lambda x: x.permute(1, 0, 2).mean(-1)), [R(3, 5, 7)]),
    "sum over channels-last images": lambda: (
        Function(lambda x: x.sum(0)),
        [R(3, 5, 4, 4).to(memory_format=CL)],
    ),
    "frozen weight of a norm": lambda: (
        nn.Sequential(nn.Linear(64, 64), frozen(nn.LayerNorm(64), "weight")),
        [R(32, 64)],
    ),
    "norm of an input without gradient": lambda: (
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8)),
        [R(32, 64)],
    ),
    "attention with trained k": lambda: attention(False, True, False),
    "attention with trained v": lambda: attention(False, False, True),
    "attention with trained q": lambda: attention(True, False, False),
    "attention aligned with the first key": lambda: (
        Function(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
        [R(2, 3, extent, 16) for extent in (6, 8, 8)],
    ),
    "attention with a scale": lambda: masked_attention(R(6, 8), scale=1.0),
    "attention with a mask of keys": lambda: masked_attention(hidden(2, 1, 1, 8)),
    "attention with a mask of each score": lambda: masked_attention(hidden(2, 3, 6, 8)),
    "attention with an expanded mask": lambda: masked_attention(hidden(2, 1, 6, 8).expand(2, 3, 6, 8)),
    "attention with a bias of heads": lambda: masked_attention(R(1, 3, 6, 8)),
    "attention with a transposed bias": lambda: masked_attention(R(2, 3, 8, 6).transpose(2, 3)),
    "attention with an expanded, transposed bias": lambda: masked_attention(
        R(1, 3, 8, 6).transpose(2, 3).expand(2, 3, 6, 8)
    ),
    "root mean square norm": lambda: (Function(rms_norm, R(16)), [R(2, 5, 16)]),
    "rotary embedding": lambda: (Function(rotary), [R(2, 6, 4, 8), R(6, 8), R(6, 8)]),
    "shifted windows": lambda: (Function(shifted_windows), [R(2, 4, 6, 8)]),
    "padding": lambda: (Function(padded_sum), [R(2, 3, 5), R(2, 4, 8)]),
    "concatenation of a product": lambda: (
        Function(lambda x, y, w: functional.gelu(torch.cat((x @ w, y), 1)), R(8, 6)),
        [R(2, 3, 8), R(2, 2, 6)],
    ),
    "masked softmax": lambda: (
        Function(lambda x, mask: x.masked_fill(mask > 0, -100.0).softmax(-1)),
        [R(2, 3, 8), R(3, 8)],
    ),
    "slices without elements": lambda: (
        Function(lambda x, p: torch.cat([p[:, :4] * x, (p * x)[:, 4:]], 1) + p.exp(), R(3, 4)),
        [R(3, 4)],
    ),
    "products of single elements": lambda: (
        Function(lambda x, p, q: products_of_single(p.unsqueeze(0), q, p), R(1), R(1, 1)),
        [R(1)],
    ),
    "slices with steps": lambda: (
        Function(
            lambda x, p: (
                (p[:, 1::2] * x[:, :4:2] + p[:, ::2].exp()).sum()
                + (p[::2, :, 5::6] * p[2:, :, :2].tanh()).sum()
            ),
            R(4, 4, 12),
        ),
        [R(4, 4, 12)],
    ),
    "slices of one product": lambda: (
        Function(lambda x, w: torch.sigmoid((x @ w)[..., :8]) * torch.tanh((x @ w)[..., 8:]), R(8, 16)),
        [R(3, 8)],
    ),
    "sum over middle axes": lambda: (Function(lambda x, y: (x * y).sum((1, 3))), [R(2, 3, 4, 5), R(3, 1, 5)]),
    "largest of transposed": lambda: (Function(lambda x: (x.transpose(1, 2) * 2).amax(1)), [R(2, 3, 5)]),
    "group norm": lambda: (nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()), [R(2, 8, 5, 5)]),
    "group norm, channels last": lambda: (
        nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()),
        [R(2, 8, 5, 5).to(memory_format=CL).requires_grad_()],  # torch crashes without the gradient
    ),
    "squeeze and excite, channels last": lambda: (
        SqueezeExcite().to(memory_format=CL),
        [R(2, 8, 5, 5).to(memory_format=CL)],
    ),
    "mask that is computed from no input": lambda: (
        Function(lambda x: torch.relu((x + window_mask()).masked_fill(lower_triangle(), -1e4)) * 2),
        [R(3, 6, 6)],
    ),
    "sum with zeros, and a number from a tensor": lambda: (
        Function(lambda x: torch.where(x > 0, torch.full((), 0.5), x + torch.zeros_like(x)) * torch.ones(4)),
        [R(3, 4)],
    ),
    "enlarged images": lambda: (
        Function(lambda x: functional.relu(functional.interpolate(x, scale_factor=2))),
        [R(2, 3, 4, 4)],
    ),
    "pixels from channels": lambda: (Function(lambda x: functional.pixel_shuffle(x, 2) + 1), [R(2, 8, 3, 3)]),
    "repeats": lambda: (Function(lambda x, y: x.repeat(1, 2, 3) * y), [R(2, 3, 4), R(2, 6, 12)]),
    "an element of a fused tensor": lambda: (
        Function(lambda x, p: (x + p).repeat(2)[:1] + (x + p).repeat(2), R(1)),
        [R(1)],
    ),
    "a product and its first row": lambda: (
        Function(lambda x, w: (lambda y: torch.relu(y + y[:1]))(x @ w), R(8, 6)),
        [R(4, 8)],
    ),
    "a tensor and its element": lambda: (Function(one_and_all), [R(6)]),
    "a slice of an input with an offset": lambda: (
        Function(lambda x: x[1:, ::2] * 2 + x[:-1, ::2]),
        [R(5, 6)],
    ),
    "experts in groups": lambda: (
        Function(
            lambda x, w: torch._grouped_mm(
                x.bfloat16(), w.bfloat16().transpose(1, 2), offs=torch.tensor([8, 8, 24], dtype=torch.int32)
            ).to(x.dtype),
            R(3, 16, 32) / 4,
        ),
        [R(24, 32)],
    ),
    "ConvNeXt": lambda: (ConvNextBlock(), [R(2, 8, 6, 6)]),
    "ConvNeXt, channels last": lambda: (
        ConvNextBlock().to(memory_format=CL),
        [R(2, 8, 6, 6).to(memory_format=CL)],
    ),
    **{
        f"convolution over a sequence, {name}": lambda layers=layers, x=x: (
            nn.Sequential(*layers()),
            [x()],
        )
        for name, layers, x in (
            ("of one tap", lambda: [nn.Conv1d(8, 6, 1), nn.ReLU()], lambda: R(2, 8, 9)),
            ("padded", lambda: [nn.Conv1d(8, 6, 3, padding=2), nn.ReLU()], lambda: R(2, 8, 9)),
            ("strided", lambda: [nn.Conv1d(8, 6, 3, 2), nn.ReLU()], lambda: R(2, 8, 9)),
            ("dilated", lambda: [nn.Conv1d(8, 6, 3, dilation=2, bias=False)], lambda: R(2, 8, 9)),
            ("grouped", lambda: [nn.Conv1d(8, 4, 3, groups=4)], lambda: R(2, 8, 9)),
            ("channels last", lambda: [nn.Conv1d(8, 6, 3), nn.ReLU()], lambda: R(2, 9, 8).mT),
            ("batch not outermost", lambda: [nn.Conv1d(8, 6, 3)], lambda: R(8, 2, 9).transpose(0, 1)),
            ("transposed", lambda: [nn.ConvTranspose1d(8, 6, 3, 2, 1, bias=False)], lambda: R(2, 8, 9)),
            (
                "before a norm",
                lambda: [nn.Conv1d(8, 8, 3, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 7, 1)],
                lambda: R(2, 8, 9),
            ),
        )
    },
    "convolution with unequal padding": lambda: (
        nn.Sequential(
            nn.Conv2d(4, 6, (1, 5), padding=(0, 2)), nn.ReLU(), nn.Conv2d(6, 4, (5, 1), padding=(2, 0))
        ),
        [R(2, 4, 7, 8)],
    ),
    "sine and cosine": lambda: (Function(lambda x, y: (x * y.sin()).cos() + y), [R(4, 6), R(6, 4).t()]),
    "clamp by tensors": lambda: (
        Function(lambda x, low, high: torch.clamp(x, low, high)),
        [R(4, 6), torch.tensor(-0.5), torch.linspace(-0.2, 1, 6)],
    ),
    "sum then norm": lambda: (SumThenNorm(), [R(2, 8, 6, 6), R(2, 8, 6, 6)]),
    "sum then norm, channels last": lambda: (
        SumThenNorm(),
        [R(2, 8, 6, 6).to(memory_format=CL), R(2, 8, 6, 6).to(memory_format=CL)],
    ),
    "transformer layer": lambda: (
        nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
        [R(2, 6, 32)],
    ),
    "transformer layer that normalises first": lambda: (
        nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", norm_first=True),
        [R(6, 2, 32)],
    ),
    "transformer layer with a mask of scores": lambda: (MaskedLayer(src_mask=LATER), [R(2, 6, 32)]),
    "transformer layer with a mask of keys": lambda: (
        MaskedLayer(src_key_padding_mask=HIDDEN_KEYS),
        [R(2, 6, 32)],
    ),
    "transformer layer with both masks": lambda: (
        MaskedLayer(src_key_padding_mask=HIDDEN_KEYS, src_mask=LATER),
        [R(2, 6, 32)],
    ),
    "attention that returns weights": lambda: (
        SelfAttention(need_weights=True),
        [R(2, 6, 32)],
    ),
    "attention that returns the weights of heads": lambda: (
        SelfAttention(need_weights=True, average_attn_weights=False, key_padding_mask=HIDDEN_KEYS),
        [R(2, 6, 32)],
    ),
    "norm of 16 bits, whose casts backward repeats": lambda: (
        nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8)).bfloat16(),
        [R(4, 6).bfloat16()],
    ),
    "empty batch beside a full one": lambda: (
        Function(lambda x, y, w: (functional.gelu(x @ w).softmax(-1), functional.gelu(y)), R(6, 8)),
        [R(0, 6), R(3, 4)],
    ),
    "product of no terms": lambda: (
        Function(lambda a, b, w: ((a @ b + 1).relu() @ w, functional.softmax(b, 1)), R(6, 2)),
        [R(4, 0), R(0, 6)],
    ),
    **GATHERS,
}


@pytest.mark.parametrize("activation", ["relu", "relu6", "hardtanh", "hardsigmoid", "hardswish"])
def test_infinite_gradients_stop_where_an_activation_is_constant(activation: str) -> None:
    """The root's gradient at 0 is infinite; times a slope of 0 it would be NaN."""
    torch._dynamo.reset()
    constant = {"hardtanh": 1, "relu": 0}.get(activation, -3)

    def step(x: Tensor) -> Tensor:
        y = getattr(functional, activation)(x)
        return (y - y[0].detach()).abs().sqrt().sum()

    x = torch.tensor([5.0, 7, -4, 0.5, 1, -3]) * (1 if constant == 1 else -1)
    expected, ours = (x.clone().requires_grad_() for _ in range(2))
    step(expected).backward()
    with reference_kernels() as ran, served.prefer("tunebench"):
        served.compile(step)(ours).backward()
    assert ran
    torch.testing.assert_close(ours.grad, expected.grad, equal_nan=True)
    assert expected.grad is not None
    assert expected.grad[0] == 0


def test_mask_that_reads_no_input_is_computed_once() -> None:
    torch._dynamo.reset()
    compiled = served.compile(lambda x: x + window_mask().masked_fill(lower_triangle(), -1e4))
    with reference_kernels(), served.prefer("tunebench"), torch.no_grad():
        compiled(R(3, 6, 6))
    (plan,) = served.plans(compiled)
    assert [node.target for node in plan.graph.nodes] == ["aten.add"]


LIKE_OTHERS = frozenset(
    {
        "ConvNeXt, channels last",
        "attention that returns weights",
        "sum then norm, channels last",
        "transformer layer",
        "transformer layer with a mask of keys",
        "transformer layer with a mask of scores",
    }
)
"""Modules whose gradients are those of another module in another layout, or of a part of another module."""


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_module_agrees_with_float64(
    name: str, training: bool, request: pytest.FixtureRequest
) -> None:
    if training and name in LIKE_OTHERS and not request.config.getoption("--every-sample"):
        pytest.skip("takes --every-sample")
    model, inputs = CASES[name]()
    training_only = name.startswith(("frozen", "attention with"))
    assert check(model.train(training), inputs, training=training or training_only)


HANDWRITTEN: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "a mask of keys": (
        lambda q, k, v, mask: ((q @ k.mT / 4 + mask).softmax(-1) @ v).transpose(1, 2).reshape(2, 6, 48),
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), R(2, 1, 1, 8)],
    ),
    "factors of q and k": (
        lambda q, k, v: ((q * 0.5) @ (k * 0.5).mT).softmax(-1) @ v,
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16)],
    ),
    "hidden scores": (
        lambda q, k, v, m: (
            (torch.einsum("bhid,bhjd->bhij", q, k) * 0.2).masked_fill(m > 0, -1e9).softmax(-1) @ v
        ),
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), R(2, 1, 6, 8)],
    ),
    "scores that are kept": (
        lambda q, k, v, m: torch.where(m > 0, q @ k.mT, -1e9).softmax(-1) @ v,
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), R(6, 8)],
    ),
    "a row without keys": (
        lambda q, k, v, m: torch.where(m > 1, q @ k.mT, -1e9).softmax(-1) @ v,
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), torch.arange(6.0)[:, None] * torch.arange(8)],
    ),
    "two masks and rows without keys": (
        lambda q, k, v, m: (
            (q @ k.mT).masked_fill(m > 2, -1e9).masked_fill(m.flip(1) > 2, -1e9).softmax(-1) @ v
        ),
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), torch.arange(6.0)[:, None] * torch.arange(8)],
    ),
    "one token with a mask": (
        lambda x, w, k, v, m: functional.scaled_dot_product_attention(functional.linear(x, w), k, v, m),
        [R(1, 1, 16), R(16, 16), R(1, 8, 16), R(1, 8, 16), R(1, 1, 8)],
    ),
    "a bias of each item": (
        lambda q, k, v, b: torch.baddbmm(b, q, k.mT, alpha=0.2).softmax(-1).bmm(v),
        [R(6, 5, 16), R(6, 8, 16), R(6, 8, 16), R(6, 1, 8)],
    ),
}


def windows(x: Tensor, positions: Tensor, shifted: Tensor) -> Tensor:
    """Attend within windows, as Swin does: a bias of heads, and a mask of each of four windows."""
    q, k, v = x.unflatten(2, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    scores = ((q * 0.25) @ k.mT + positions).view(2, 4, 3, 9, 9) + shifted[:, None]
    return (scores.view(8, 3, 9, 9).softmax(-1) @ v).transpose(1, 2).flatten(2)


HANDWRITTEN["windows"] = (windows, [R(8, 9, 144), R(3, 9, 9), R(4, 9, 9)])


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_attention_written_by_hand_is_one_operator(name: str) -> None:
    function, inputs = HANDWRITTEN[name]
    operators = check(Function(function), inputs, training=False)
    assert "attention" in operators
    assert "softmax" not in operators


TWO_NUMBERS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "two fills": (
        lambda q, k, v, m: (
            (q @ k.mT).masked_fill(m > 0, -1e9).masked_fill(m.flip(1) > 2, -2e9).softmax(-1) @ v
        ),
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), torch.arange(6.0)[:, None] * torch.arange(8)],
    ),
    "a bias after a fill": (
        lambda q, k, v, m: ((q @ k.mT).masked_fill(m >= 0, -1e9) - 1e9 * (m > 2)).softmax(-1) @ v,
        [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), torch.arange(6.0)[:, None] * torch.arange(8)],
    ),
}


@pytest.mark.parametrize("name", TWO_NUMBERS)
def test_rows_that_hide_their_keys_by_two_numbers_agree_with_float64(name: str) -> None:
    function, inputs = TWO_NUMBERS[name]
    assert "attention" not in check(Function(function), inputs, training=False)


def test_scores_in_half_that_a_float32_number_fills_agree_with_float64() -> None:
    def attends(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ k.mT).float().masked_fill(m > 2, -1e9).softmax(-1).to(q.dtype) @ v

    scores = torch.arange(6.0)[:, None] * torch.arange(8)
    inputs = [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), scores - 30 * (scores < 1)]
    check(Function(attends), [tensor.half() for tensor in inputs], training=False)


def test_attention_whose_probabilities_are_dropped_is_one_operator() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=True)[0]  # type: ignore[no-any-return]

    assert "attention" in check(Attends().eval(), [R(6, 2, 32)], training=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, b: ((q @ k.mT + b) * 0.5).softmax(-1) @ v,
        lambda q, k, v, b: (q @ k.mT - b).softmax(-2) @ v,
        lambda q, k, v, b: (p := (q @ k.mT).softmax(-1), p @ v),
        lambda q, k, v, b: (q @ k.mT * -0.5).softmax(-1) @ v,
        lambda q, k, v, b: torch.where(b > 0, q @ k.mT, -1.0).softmax(-1) @ v,
        lambda q, k, v, b: (q @ k.mT).softmax(-1).transpose(2, 3) @ q,
    ],
)
def test_other_products_around_a_softmax_stay_what_they_are(function: Callable[..., Any]) -> None:
    inputs = [R(2, 3, 6, 16), R(2, 3, 8, 16), R(2, 3, 8, 16), R(6, 8)]
    assert "attention" not in check(Function(function), inputs, training=False)
