"""Calls of torch that are answered with a library: its own tensors, and its functions in compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import tunebench.torch as served
from tests.support import measured, record_outcome
from tests.torch.test_saved_models import QUICK_PACKAGE
from tunebench import dispatch
from tunebench import variant as variants
from tunebench.db import RunStart, TrialKey, Verdict, open_store
from tunebench.device import find, local_cpu
from tunebench.kernels import variant as find_variant
from tunebench.kernels.common import library, library_gpu
from tunebench.outcome import Result
from tunebench.torch.compiler import _group_planner, _kernel_operator, inductor
from tunebench.torch.compiler.saving import save
from tunebench.torch.functional import custom_op
from tunebench.torch.functional.linear import GEMM
from tunebench.workloads import parse

pytestmark = pytest.mark.torch

LINEAR = "gemm:m=7,n=5,k=6,dtype=f32,trans=nt,epilogue=bias"
RESIDUAL = "gemm:m=128,n=128,k=128,dtype=f32,trans=nt,epilogue=bias+residual"
CONV = "conv2d:n=2,c=3,h=7,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias"
ATTENTION = "attention:batch=2,heads=3,seq_q=9,head_dim=8,dtype=f32"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "a.db"))
    dispatch.forget()
    yield
    dispatch.forget()


def record(tmp_path: Path, workload: str, program: str) -> str:
    """Record a library as the best for a workload, and return its key."""
    variant = f"{workload.partition(':')[0]}/library_cpu"
    record_outcome(tmp_path / "a.db", workload, local_cpu(), variant, f"program={program}", measured(1.0))
    return variant


def record_faster(tmp_path: Path) -> None:
    """Record that oneDNN computes the layer `LINEAR` in half of the time that torch takes."""
    workload, variant = parse(LINEAR), find_variant("gemm/library_cpu")
    config = variant.space.parse("program=onednn")
    revision, device = variant.revision(workload, config), local_cpu()
    key = TrialKey(device=device.key, workload=LINEAR, variant=variant.key, revision=revision, config=config)
    versus = {"ratio": 2.0, "low": 1.9, "high": 2.1, "probability": 0.99}
    verdict = Verdict(versus_default="itself", comparison={"libraries": {"torch": versus}})
    with open_store(tmp_path / "a.db") as store:
        store.begin_run(RunStart(device=device, workload=LINEAR, sampler="bound", seed=0))
        result = Result(outcome=measured(3.0))
        store.record(key, result, bound_us=0.1, purpose="finalist", verdict=verdict)
    dispatch.forget()


@contextmanager
def only(variant: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a kernel writes into memory, or if another variant runs."""

    def fail(*arguments: object) -> None:
        raise AssertionError("a result is copied")

    calls: list[dispatch.DispatchedCall] = []
    with monkeypatch.context() as patch, served.prefer("tunebench"), served.watching(calls.append):
        patch.setattr(custom_op, "launch", fail)
        patch.setattr(_kernel_operator, "launch", fail)
        yield
    assert [call.variant for call in calls] == [variant]


def test_linear_layer_returns_the_tensor_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias = torch.randn(7, 6), torch.randn(5, 6), torch.randn(5)
    with only(record(tmp_path, LINEAR, "onednn"), monkeypatch):
        y = served.linear(x, w, bias)
    torch.testing.assert_close(y, nn.functional.linear(x, w, bias))


def test_gradients_flow_through_the_result_of_a_library(tmp_path: Path) -> None:
    x, w, bias = (torch.randn(*shape, requires_grad=True) for shape in ((7, 6), (5, 6), (5,)))
    record(tmp_path, LINEAR, "onednn")
    dy = torch.randn(7, 5)
    with served.prefer("tunebench"):
        y = served.linear(x, w, bias)
        gradients = torch.autograd.grad(y, (x, w, bias), dy)
    expected = torch.autograd.grad(nn.functional.linear(x, w, bias), (x, w, bias), dy)
    for gradient, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, exact)
    y.detach().add_(1)  # no inference tensor, which could not be changed here


@pytest.mark.parametrize("program", ["torch", "onednn"])
def test_convolution_returns_the_tensor_of_the_library(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias = torch.randn(2, 3, 7, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
    x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
    with only(record(tmp_path, CONV, program), monkeypatch):
        y = served.conv2d(x, w, bias, padding=1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, nn.functional.conv2d(x, w, bias, padding=1))


def test_program_of_numpy_returns_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    with only(record(tmp_path, ATTENTION, "numpy"), monkeypatch):
        o = served.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(o, nn.functional.scaled_dot_product_attention(q, k, v))


BF16 = "gemm:m=7,n=5,k=6,dtype=bf16,trans=nt,epilogue=bias"


def test_layer_on_a_gpu_calls_its_library_and_returns_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are the host's, which the dispatcher takes for those of a GPU."""
    gpu = find("h200-sxm")
    for module in (library, library_gpu, variants):
        monkeypatch.setattr(module, "installed_version", {"torch": "9.9.9+cu130"}.get)
    monkeypatch.setattr(custom_op, "device_of", lambda device: (gpu, 0))
    monkeypatch.setattr(custom_op, "_dispatch_cache", {})
    monkeypatch.setattr(GEMM, "_dispatchers", {})
    record_outcome(tmp_path / "a.db", BF16, gpu, "gemm/library_gpu", "program=torch_addmm", measured(1.0))
    x, w, bias = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((7, 6), (5, 6), (5,)))
    with only("gemm/library_gpu", monkeypatch):
        y = served.linear(x, w, bias)
    torch.testing.assert_close(y, nn.functional.linear(x, w, bias))


class Residual(nn.Module):
    """A layer whose input is added to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x


COMPILED = {
    "_linear_pointwise.default": (LINEAR, lambda: nn.Linear(6, 5), (7, 6)),
    "_linear_pointwise.binary": (RESIDUAL, Residual, (128, 128)),
    "_convolution_pointwise.default": (CONV, lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 7, 6)),
}


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("primitive", COMPILED)
def test_compiled_model_calls_the_library_by_itself(
    primitive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import run_and_get_code

    workload, layer, shape = COMPILED[primitive]
    model, x = layer(), torch.randn(shape)
    if x.dim() == 4:
        model, x = (part.to(memory_format=torch.channels_last) for part in (model, x))
    variant = record(tmp_path, workload, "onednn")
    compiled = served.compile(model)
    with torch.no_grad():
        with served.prefer("tunebench"):
            y, sources = run_and_get_code(compiled, x)
        code = "".join(sources)
        assert f"torch.ops.mkldnn.{primitive}(" in code
        assert "tunebench.kernel" not in code
        with only(variant, monkeypatch):
            again = compiled(x)
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(again, y)
        assert y.stride() == model(x).stride()


class Products(nn.Module):
    """A layer, and the product of its result and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ z.t()


@pytest.mark.slow
@pytest.mark.inductor
def test_saved_model_calls_the_library_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_OPTIONS", {**save._OPTIONS, **QUICK_PACKAGE})
    record(tmp_path, LINEAR, "onednn")
    record(tmp_path, "gemm:m=7,n=7,k=5,dtype=f32,trans=nt", "onednn")
    model, inputs = Products().eval(), (torch.randn(7, 6), torch.randn(7, 5))
    with torch.no_grad(), served.prefer("tunebench"):
        served.save(model, tmp_path / "model.tb", inputs)
        loaded = served.load(tmp_path / "model.tb", model)
        torch.testing.assert_close(loaded(*inputs), model(*inputs))
    groups = {group["workloads"][0]: group for plan in loaded.plans for group in plan["groups"]}
    assert (groups[LINEAR]["by"], groups[LINEAR]["variant"]) == ("tunebench", "gemm/library_cpu")
    product = groups["gemm:m=7,n=7,k=5,dtype=f32,trans=nt"]
    assert (product["by"], product["reason"]) == (
        "torch",
        "gemm/library_cpu can be saved with constant weights only",
    )


@pytest.mark.slow
@pytest.mark.inductor
def test_remembered_plan_reports_calls_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    record_faster(tmp_path)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.GELU()), torch.randn(7, 6)  # inductor runs the gelu
    translate = _group_planner.translate
    planned: list[str] = []
    monkeypatch.setattr(_group_planner, "translate", lambda *args: planned.append("") or translate(*args))
    for times in (1, 0):
        torch._dynamo.reset()
        planned.clear()
        calls: list[dispatch.DispatchedCall] = []
        compiled = served.compile(model)
        with torch.no_grad(), served.watching(calls.append):
            torch.testing.assert_close(compiled(x), model(x))
        assert len(planned) == times
        assert [(call.variant, call.by) for call in calls] == [("gemm/library_cpu", "tunebench")]


class Decoder(nn.Module):
    """A layer, attention to a cache that grows by the results, and the layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (7, 5), and the cache, longer by 7 rows."""
        y = self.layer(x)
        cache = torch.cat((cache, y))
        attended = torch.softmax(y @ cache.t(), -1) @ cache
        return self.layer(torch.cat((attended, x[:, :1]), 1)).relu(), cache


def test_layers_of_constant_size_run_by_libraries_for_all_lengths_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "missing_compiler", lambda device: "not in tests")
    record_faster(tmp_path)
    torch._dynamo.reset()
    model, lengths = Decoder(), 40
    translate, planned = _group_planner.translate, list[str]()
    monkeypatch.setattr(_group_planner, "translate", lambda *args: planned.append("") or translate(*args))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled, cache = served.compile(model), torch.randn(3, 5)
    for _ in range(lengths):
        x, calls = torch.randn(7, 6), list[dispatch.DispatchedCall]()
        with torch.no_grad(), served.watching(calls.append):
            results, expected = compiled(x, cache), model(x, cache)
        torch.testing.assert_close(results, expected)
        assert [(str(call.workload), call.by) for call in calls] == [(LINEAR, "tunebench")] * 2
        cache = results[1].clamp(-2, 2)
    assert len(planned) == torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 2
    calls.clear()
    with torch.no_grad(), served.prefer("torch"), served.watching(calls.append):  # excludes that graph
        torch.testing.assert_close(compiled(x, cache), model(x, cache))
    assert not calls
