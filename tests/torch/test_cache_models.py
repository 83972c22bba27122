"""Compiled models with a cache of keys and values: growing, of constant length, in pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend

import tunebench.torch as served
from tests.torch.reference_kernels import reference_bindings
from tests.torch.test_torch_compile import _record
from tunebench.dispatch import choice
from tunebench.torch.compiler import _group_planner, inductor

HEADS, DIM, PAGE, PAGES = 2, 4, 4, 3
WIDTH, LENGTH = HEADS * DIM, PAGE * PAGES
PRODUCT = f"gemm:m=1,n={3 * WIDTH},k={WIDTH},dtype=f32,trans=nt,epilogue=bias"
ATTENTION = f"attention:batch=1,heads={HEADS},seq_q=1,head_dim={DIM},dtype=f32,seq_k={LENGTH}"


class Layer(nn.Module):
    """Attention of a new token; subclasses store its key and its value."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.view(1, 1, HEADS, DIM).transpose(1, 2) for part in self.product(x).chunk(3, -1)]


class Growing(Layer):
    """The cache is longer by a token after each call."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Return (1, heads, 1, head_dim), and the cache (1, heads, length, head_dim)."""
        q, k, v = self.heads(x)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        return attend(q, keys, values), keys, values


class Constant(Layer):
    """The cache has a constant length, and the token its position."""

    def forward(self, x: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (1, heads, 1, head_dim); the cache (1, heads, length, head_dim) is changed."""
        q, k, v = self.heads(x)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        mask = torch.where(torch.arange(LENGTH) <= position, 0.0, -torch.inf)
        return attend(q, keys, values, mask.view(1, 1, 1, LENGTH))


class Paged(Layer):
    """The pages of a sequence are gathered from a pool (page, heads, tokens, head_dim)."""

    def forward(self, x: Tensor, position: Tensor, table: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (1, heads, 1, head_dim); the pool is changed."""
        q, k, v = self.heads(x)
        at = (table[position // PAGE], slice(None), position % PAGE)
        keys[at], values[at] = k[:, :, 0], v[:, :, 0]
        k, v = (pool.index_select(0, table).transpose(0, 1).flatten(1, 2)[None] for pool in (keys, values))
        return attend(q, k, v, (torch.arange(k.shape[2]) <= position).view(1, 1, 1, -1))


class Planned:
    """Numbers of plans and of bound kernels."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plans, self.kernels = 0, list[str]()
        translate, bind = _group_planner.translate, choice.bind

        def count_plan(*arguments: Any) -> Any:
            self.plans += 1
            return translate(*arguments)

        def count_kernel(workload: Any, *arguments: Any, **named: Any) -> Any:
            self.kernels.append(str(workload))
            return bind(workload, *arguments, **named)

        patch.setattr(_group_planner, "translate", count_plan)
        patch.setattr(choice, "bind", count_kernel)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planned]:
    """Kernels of the product and of attention to a constant number of keys are faster than torch's."""
    monkeypatch.setattr(inductor, "missing_compiler", lambda device: "not in tests")
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "some.db"))
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    for text in (PRODUCT, f"{ATTENTION},bias=k"):
        _record(text, ratio=3.0)
    torch._dynamo.reset()
    # `monkeypatch` would restore the stand-in of `reference_bindings` after its end.
    with reference_bindings(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        yield Planned(patch)


def ran(model: Any, *inputs: Tensor) -> tuple[Any, set[str]]:
    """Return the results of a model, and the workloads that kernels ran."""
    calls: list[Any] = []
    with served.watching(calls.append):
        results = model(*inputs)
    return results, {str(call.workload) for call in calls if call.by == "tunebench"}


def test_growing_cache_has_two_plans_and_one_kernel(planned: Planned) -> None:
    model = Growing()
    compiled, cache = served.compile(model), [torch.randn(1, HEADS, 5, DIM) for _ in "kv"]
    for _ in range(64):
        x = torch.randn(1, 1, WIDTH)
        results, workloads = ran(compiled, x, *cache)
        torch.testing.assert_close(results, model(x, *cache))
        assert workloads == {PRODUCT}
        cache = results[1:]
    assert planned.plans <= 2
    assert set(planned.kernels) == {PRODUCT}
    assert len(planned.kernels) <= 2  # by the planner and by the compiled graph, from one binary


def test_cache_of_constant_length_runs_by_kernels(planned: Planned) -> None:
    model, caches = Constant(), [[torch.randn(1, HEADS, LENGTH, DIM) for _ in "kv"]]
    caches.append([tensor.clone() for tensor in caches[0]])
    compiled = served.compile(model)
    for position in range(LENGTH):
        x = torch.randn(1, 1, WIDTH), torch.tensor([position])
        result, workloads = ran(compiled, *x, *caches[0])
        torch.testing.assert_close(result, model(*x, *caches[1]))
        torch.testing.assert_close(*caches)
        assert workloads == {PRODUCT, f"{ATTENTION},bias=k"}
    assert planned.plans == 1
    assert set(planned.kernels) == {f"{ATTENTION},bias=k", PRODUCT}
    assert len(planned.kernels) <= 4


@pytest.mark.parametrize("grows", [False, True])
def test_paged_cache_is_right(grows: bool, planned: Planned) -> None:
    model, pools = Paged(), [[torch.randn(7, HEADS, PAGE, DIM) for _ in "kv"]]
    pools.append([tensor.clone() for tensor in pools[0]])
    compiled, table = served.compile(model), torch.tensor([5, 0, 3])
    for position in range(LENGTH):
        pages = table[: position // PAGE + 1] if grows else table
        x = torch.randn(1, 1, WIDTH), torch.tensor([position]), pages
        result, workloads = ran(compiled, *x, *pools[0])
        torch.testing.assert_close(result, model(*x, *pools[1]))
        torch.testing.assert_close(*pools)
        assert PRODUCT in workloads
        assert grows or workloads == {PRODUCT, f"{ATTENTION},bias=k"}
    assert planned.plans <= (3 if grows else 1)


@pytest.mark.filterwarnings("ignore:torch runs a graph of step")  # its mask reads a tensor
def test_flex_attention_to_pages_is_right(planned: Planned) -> None:
    """A mask translates places of the pool to places of the sequence, as `PagedAttention` of torch does."""
    logical = torch.full((7 * PAGE,), -1)
    for index, page in enumerate((5, 0, 3)):
        logical[page * PAGE : (page + 1) * PAGE] = torch.arange(index * PAGE, (index + 1) * PAGE)

    @served.compile
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    q, k, v = (torch.randn(1, HEADS, count, DIM) for count in (1, 7 * PAGE, 7 * PAGE))
    for position in map(torch.tensor, (0, 6)):

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor, last: Tensor = position) -> Tensor:
            return (logical[key] >= 0) & (logical[key] <= last)

        mask = create_block_mask(visible, None, None, 1, 7 * PAGE, device="cpu")
        shown = (logical >= 0) & (logical <= position)
        expected = attend(q, k, v, shown.view(1, 1, 1, -1))
        torch.testing.assert_close(step(q, k, v, mask), expected)
