"""RMS normalisation of models: one operator on every device, however a model writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

import tunebench.torch as served
from tests.torch.reference_kernels import reference_kernels
from tunebench import device as devices
from tunebench.graph import InputSpec, extract
from tunebench.torch.compiler._rms_norm_pattern import fuse_rms_norms


def inference_graph(
    function: Callable[[Tensor, Tensor], Tensor], *tensors: Tensor
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the graph that AOTAutograd makes of a function, and its inputs."""
    kept: list[tuple[fx.GraphModule, list[Tensor]]] = []

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        by_shape = {tuple(tensor.shape): tensor for tensor in tensors}
        kept.append((graph, [by_shape[tuple(given.shape)] for given in inputs]))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep))(*tensors)
    return kept[0]


def cast_before_weight(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def of_two_axes(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.unflatten(-1, (2, -1)), (2, x.shape[-1] // 2), weight.view(2, -1), 1e-5)


def without_weight(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), None, 1e-5) + weight


def squares_of_another(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.relu().pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def of_columns(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x, weight: functional.rms_norm(x, (x.shape[-1],), weight, 1e-5), 1),
        (lambda x, weight: functional.rms_norm(x + x.relu(), (x.shape[-1],), weight, 1e-3) * 2, 1),
        (of_two_axes, 1),
        (squares_of_another, 0),
        (without_weight, 0),
        (of_columns, 0),
        (lambda x, weight: functional.layer_norm(x, (x.shape[-1],), weight, None, 1e-5), 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_graphs_compute_the_same(
    function: Callable[[Tensor, Tensor], Tensor], count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    traced, inputs = inference_graph(function, x, weight)
    assert fuse_rms_norms(traced.graph) == count
    assert sum("fused_rms_norm" in str(node.target) for node in traced.graph.nodes) == count
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(*inputs)[0], function(x, weight))


def test_a_cast_before_the_weight_rounds_once_less() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256, dtype=torch.bfloat16), torch.randn(256, dtype=torch.bfloat16)
    traced, inputs = inference_graph(cast_before_weight, x, weight)
    assert fuse_rms_norms(traced.graph) == 1
    traced.recompile()
    exact = functional.rms_norm(x.double(), (256,), weight.double(), 1e-5)
    ours, theirs = traced(*inputs)[0], cast_before_weight(x, weight)
    assert ours.dtype == theirs.dtype
    assert (ours - exact).abs().mean() < (theirs - exact).abs().mean()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("training", "count"), [(False, 1), (True, 0)])
def test_extracted_models_have_the_operator_of_gpus(training: bool, count: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 32))

    graphs = extract(make, [InputSpec.parse("8x64:bf16")], training=training, device=devices.find("h100-sxm"))
    texts = [text for graph in graphs for node in graph.nodes for text in node.workloads]
    assert texts.count("rmsnorm:rows=8,cols=64,dtype=bf16") == count
    assert any(text.startswith("gemm:") for text in texts)


def test_processors_have_the_operator_too() -> None:
    (graph,) = extract(
        lambda: nn.RMSNorm(64, eps=1e-5), [InputSpec.parse("8x64:f32")], device=devices.local_cpu()
    )
    assert [text for node in graph.nodes for text in node.workloads] == ["rmsnorm:rows=8,cols=64,dtype=f32"]


class Rms(nn.Module):
    """Normalisation as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return cast_before_weight(x, self.weight)


def test_compiled_models_run_it_by_one_kernel() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.Sequential(Rms(), nn.Linear(64, 32)).bfloat16(), torch.randn(8, 64, dtype=torch.bfloat16)
    with torch.no_grad(), reference_kernels() as ran, served.prefer("tunebench"):
        torch.testing.assert_close(served.compile(model)(x), model(x), rtol=0.02, atol=0.02)
    assert "rmsnorm" in {workload.operator for workload in ran}
