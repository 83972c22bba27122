"""Sums of rows by an index in traced models: their workloads, and results of kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tunebench.torch as served
from tests.support import measured, record_outcome
from tests.torch.compiled_check import Function
from tests.torch.reference_kernels import reference_bindings, reference_kernels
from tests.torch.test_torch_compile import ran
from tunebench.device import local_cpu
from tunebench.dispatch import choose
from tunebench.errors import InputError
from tunebench.kernels import variant as find_variant
from tunebench.kernels.scatter_add.numba_cpu import NumbaCpuScatterAdd
from tunebench.torch.compiler import _kernel_operator
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


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_exclude_results_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another variant, or torch, replaces the fastest kernel if that adds atomically."""
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "some.db"))
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(NumbaCpuScatterAdd, "is_reproducible", lambda self, workload, config: False)
    text, x = CALLS["index_add to zeros"][1], inputs()
    numba = find_variant("scatter_add/numba_cpu").default(parse(text), local_cpu())
    record = functools.partial(record_outcome, tmp_path / "some.db", text, local_cpu())
    record("scatter_add/numba_cpu", numba, measured(1.0))

    def chosen() -> str | None:
        """Return the variant that runs a model, and that dispatch and a compiled call choose."""
        torch._dynamo.reset()
        compiled = served.compile(Function(CALLS["index_add to zeros"][0]))
        with torch.no_grad():
            calls = served.dispatch_report(compiled, *x)
        (variant,) = {call.variant for call in calls if call.function == "scatter_add"} or {None}
        choice = choose(parse(text), local_cpu())
        assert (choice.variant and choice.variant.key) == variant
        assert variant or "depend on the order of atomic additions" in choice.reason
        return variant

    with served.prefer("tunebench"), reference_bindings():
        assert chosen() == "scatter_add/numba_cpu"
        call = _kernel_operator._KernelCall(text, layouts(x), torch.device("cpu"))
        call.results([x[0], x[1]])
        with deterministic():
            assert chosen() is None
            with pytest.raises(InputError, match="depend on the order of atomic additions"):
                call.results([x[0], x[1]])
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match="depend on the order of atomic additions"):
                call.results([x[0], x[1]])
        call.results([x[0], x[1]])
        record("scatter_add/library_cpu", "program=torch", measured(2.0))
        with deterministic():
            assert chosen() == "scatter_add/library_cpu"
        assert chosen() == "scatter_add/numba_cpu"


def layouts(x: list[Tensor]) -> str:
    read = [_kernel_operator.KernelTensor.of(tensor) for tensor in x[:2]]
    return _kernel_operator.layouts_text(read, [_kernel_operator.KernelTensor.of(x[2])])
