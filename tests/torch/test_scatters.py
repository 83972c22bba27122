"""Sums of rows by an index in traced models: their workloads, and results of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tunebench.torch as served
from tests.torch.compiled_check import Function
from tests.torch.reference_kernels import reference_kernels
from tests.torch.test_torch_compile import ran
from tunebench.torch.compiler.capture import capture
from tunebench.workloads import parse

ROWS, COLS, BINS = 9, 6, 5
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
gradient = torch.ops.aten.embedding_dense_backward


def by_row(index: Tensor) -> Tensor:
    return index[:, None].expand(ROWS, COLS)


def with_zeros(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(BINS, COLS).index_put((index,), x, accumulate=True)


SIZES = f"scatter_add:rows={ROWS},cols={COLS},bins={BINS},dtype=f32"
CALLS: dict[str, tuple[Call, str]] = {
    "gradient of an embedding": (lambda x, i, y: gradient(x, i, BINS, -1, False), SIZES),
    "gradient with padding": (
        lambda x, i, y: gradient(x.view(3, 3, COLS), i.view(3, 3), BINS, 2, False),
        f"{SIZES},skipped=2",
    ),
    "index_add": (lambda x, i, y: y.index_add(0, i.int(), x), f"{SIZES},index=i32,base=true"),
    "index_add to zeros": (lambda x, i, y: torch.zeros_like(y).index_add(0, i, x), SIZES),
    "index_put": (lambda x, i, y: with_zeros(x, i - 1), f"{SIZES},wraps=true"),
    "scatter_add": (lambda x, i, y: y.scatter_add(0, by_row(i), x), f"{SIZES},base=true"),
}
LEFT: dict[str, tuple[Call, str]] = {
    "frequencies": (lambda x, i, y: gradient(x, i, BINS, -1, True), "frequency"),
    "a factor": (lambda x, i, y: y.index_add(0, i, x, alpha=2), "a factor"),
    "another axis": (lambda x, i, y: y.t().contiguous().index_add(1, i, x.t()), "another axis"),
    "an index of elements": (lambda x, i, y: y.scatter_add(0, by_row(i).contiguous(), x), "each element"),
    "fewer columns": (lambda x, i, y: y.scatter_add(0, by_row(i)[:, :3], x[:, :3]), "each element"),
    "two indices": (lambda x, i, y: y.index_put((i, i), x[:, 0], accumulate=True), "several indices"),
    "rows that are replaced": (lambda x, i, y: y.index_put((i,), x), "not added"),
    "broadcast rows": (lambda x, i, y: y.index_put((i,), x[:, :1], accumulate=True), "broadcast"),
    "sums of double": (lambda x, i, y: y.double().index_add(0, i, x.double()), "rows of type"),
}


def inputs() -> list[Tensor]:
    return [torch.randn(ROWS, COLS), torch.tensor([4, 2, 2, 0, 4, 4, 2, 3, 0]), torch.randn(BINS, COLS)]


@pytest.mark.parametrize("name", CALLS)
def test_call_is_one_workload(name: str) -> None:
    call, expected = CALLS[name]
    (translation,) = capture(Function(call), inputs())
    workloads = [text for node in translation.graph.nodes for text in node.workloads]
    assert workloads == [expected]


@pytest.mark.parametrize("name", LEFT)
def test_other_call_is_left_to_torch(name: str) -> None:
    call, reason = LEFT[name]
    (translation,) = capture(Function(call), inputs())
    assert not any(node.workloads for node in translation.graph.nodes)
    assert any(reason in node.reason for node in translation.graph.nodes)


@pytest.mark.slow
def test_kernels_add_the_rows() -> None:
    def every(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        return functional.relu(torch.cat([call(x, index, y) for call, _ in CALLS.values()]))

    x, compiled = inputs(), served.compile(Function(every), check=True)
    with reference_kernels() as workloads, served.prefer("tunebench"), torch.no_grad():
        result, _ = ran(lambda: compiled(*x))
    assert {parse(text) for _, text in CALLS.values()} <= workloads
    torch.testing.assert_close(result, every(*x), rtol=1e-5, atol=1e-6)
