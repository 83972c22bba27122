"""Graphs and groups of models, and compiled models: same outputs and gradients by tuned kernels."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tunebench.torch as served  # noqa: E402
from benchmarks.torch_models import Bert, Gpt2, Resnet, Size  # noqa: E402
from tests.support import measured  # noqa: E402
from tests.torch.reference_kernels import reference_bindings, reference_kernels  # noqa: E402
from tunebench.cli import run as run_cli  # noqa: E402
from tunebench.db import RunStart, TrialKey, Verdict, open_store  # noqa: E402
from tunebench.device import described, local_cpu  # noqa: E402
from tunebench.dispatch import DispatchedCall  # noqa: E402
from tunebench.dispatch.cpu import _start_threads  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.graph import Graph, InputSpec, extract, groups, load_factory  # noqa: E402
from tunebench.kernels import variant as find_variant  # noqa: E402
from tunebench.outcome import Result  # noqa: E402
from tunebench.torch.compiler import _group_planner, _kernel_operator, _race, backend  # noqa: E402
from tunebench.torch.compiler import translation as _translation  # noqa: E402
from tunebench.torch.compiler.backend import Backend, backend_of  # noqa: E402
from tunebench.torch.compiler.capture import capture  # noqa: E402
from tunebench.workloads import parse  # noqa: E402

TINY = Size(layers=1, width=32, heads=2, inner=64, words=50, longest=16)
WORDS = torch.arange(16).view(2, 8)
CL = torch.channels_last


@pytest.fixture(autouse=True)
def _anew(serial_kernels: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Perceptron(nn.Module):
    """A chain with views: a product with an epilogue, and a normalisation of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(functional.relu(self.up(x))))


class Ahead(nn.Module):
    """A chain before a product, whose result is added to the chain's input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.mix(functional.silu(x * self.scale + self.shift))


class Attend(nn.Module):
    """Attention heads that are parts of one tensor and not contiguous."""

    def forward(self, x: Any) -> Any:
        q, k, v = x.view(2, 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# -- graphs of models --------------------------------------------------------------------------------------


def texts(graph: Graph) -> Counter[str]:
    return Counter(
        text for node in graph.nodes for text in node.workloads or filter(None, (node.expression,))
    )


def test_graph_has_workloads_behind_views() -> None:
    (graph,) = (translation.graph for translation in capture(Perceptron(), [torch.zeros(2, 4, 8)]))
    assert texts(graph) == {
        "gemm:m=8,n=16,k=8,dtype=f32,trans=nt,epilogue=bias": 1,
        "relu(x0)": 1,
        "gemm:m=8,n=8,k=16,dtype=f32,trans=nt,epilogue=bias": 1,
        "x0+x1": 1,
        "layernorm:rows=8,cols=8,dtype=f32": 1,
    }
    fused = {group.workloads for group in groups(graph) if len(group.nodes) > 1}
    assert ("gemm:m=8,n=16,k=8,dtype=f32,trans=nt,epilogue=bias+relu",) in fused
    assert ("gemm:m=8,n=8,k=16,dtype=f32,trans=nt,epilogue=bias+residual",) in fused
    assert ("layernorm:rows=8,cols=8,dtype=f32,prologue=residual",) in fused


def test_training_step_has_gradients_and_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    before = copy.deepcopy(model.state_dict())
    forward, backward = (
        translation.graph for translation in capture(model, [torch.zeros(2, 4, 6, 6)], training=True)
    )
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert any("direction=wgrad" in text for text in texts(backward))
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_constant_batch_norm_is_folded_into_the_convolution(layout: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    images = torch.zeros(2, 4, 6, 6)
    if layout == "nhwc":
        model, images = (
            channels_last.to(memory_format=torch.channels_last) for channels_last in (model, images)
        )
    (graph,) = (translation.graph for translation in capture(model, [images]))
    fused = {group.workloads[0] for group in groups(graph) if len(group.nodes) == 3}
    assert fused == {
        "conv2d:n=2,c=4,h=6,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,"
        f"layout={layout},epilogue=scale+bias+relu"
    }


class Join(nn.Module):
    """A convolution of three concatenated images, as in a U-Net's decoder."""

    def __init__(
        self, *tail: nn.Module, sizes: tuple[int, ...] = (4, 3, 2), taps: int = 3, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(sum(sizes), 4, taps, padding=taps // 2, bias=bias)
        self.tail = nn.Sequential(*tail)

    def forward(self, x: Any, y: Any, z: Any) -> Any:
        return self.tail(self.conv(torch.cat([x, y, z], dim=1)))


def parts_of_images(sizes: tuple[int, ...] = (4, 3, 2), extent: int = 6) -> list[Any]:
    return [torch.randn(2, count, extent, extent).contiguous(memory_format=CL) for count in sizes]


def test_convolution_of_concatenated_images_is_a_sum_of_convolutions() -> None:
    model = Join(nn.BatchNorm2d(4), nn.SiLU()).eval().to(memory_format=CL)
    (graph,) = (translation.graph for translation in capture(model, parts_of_images()))
    (joined,) = (group for group in groups(graph) if group.kind == "parted" and len(group.nodes) == 4)
    dimensions = "h=6,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=scale+bias"
    assert len(joined.workloads) == 3
    assert joined.workloads[0] == f"conv2d:n=2,c=4,{dimensions}"
    assert joined.workloads[1] == f"conv2d:n=2,c=3,{dimensions}+residual"
    assert joined.workloads[2].startswith(f"conv2d:n=2,c=2,{dimensions}+residual,act=")
    assert joined.role(1, "residual") == joined.role(0, "y")
    assert joined.role(2, "y") == graph.nodes[-1].writes[0]


@reference_kernels()
def test_parts_of_concatenated_images_run_by_kernels() -> None:
    # With many channels and few filters, the saving exceeds the cost of three kernels.
    model = Join(nn.ReLU(), sizes=(64, 48, 32), taps=1, bias=True).eval().to(memory_format=CL)
    images = parts_of_images((64, 48, 32), 48)
    compiled = served.compile(model)
    with torch.no_grad():
        for _ in range(2):
            y, functions = ran(lambda: compiled(*images))
            torch.testing.assert_close(y, model(*images), rtol=1e-5, atol=1e-5)
            assert functions == {"conv2d": 3}
            model.conv.weight.mul_(2.0)  # derived tensors are computed again


class Reads(nn.Module):
    """Concatenated images with other readers, which must be written."""

    def forward(self, x: Any, w: Any) -> Any:
        joined = torch.cat([x, x], dim=1)
        return functional.conv2d(joined, w) + joined[:, :4]


def test_concatenated_images_with_other_readers_are_written() -> None:
    x = torch.zeros(2, 4, 6, 6).contiguous(memory_format=CL)
    w = torch.zeros(4, 8, 1, 1).contiguous(memory_format=CL)
    (graph,) = (translation.graph for translation in capture(Reads(), [x, w]))
    assert any(node.joins for node in graph.nodes)
    assert not [group for group in groups(graph) if group.kind == "parted"]


def test_copies_of_heads_that_are_not_contiguous_are_counted() -> None:
    (graph,) = (translation.graph for translation in capture(Attend(), [torch.zeros(2, 8, 24)]))
    (node,) = [node for node in graph.nodes if node.workloads]
    assert node.copied >= 3 * 2 * 2 * 8 * 4 * 4


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ((2, 3), "reduction:rows=8,cols=30,dtype=f32,expression=x0,reduce=mean"),
        ((0,), "reduction:rows=2,cols=120,dtype=f32,expression=x0,reduce=mean,axis=rows"),
        ((0, 1, 2, 3), "reduction:rows=1,cols=240,dtype=f32,expression=x0,reduce=mean"),
        ((1,), "strided_reduction:shape=2x30x4,dtype=f32,expression=x0,operands=x0.f32.120_1_30,reduce=mean"),
        (
            (0, 3),
            "strided_reduction:shape=20x2x6,dtype=f32,expression=x0,operands=x0.f32.6_120_1,reduce=mean,axes=2",
        ),
    ],
)
def test_means_over_any_axes_are_reductions(axes: tuple[int, ...], text: str) -> None:
    class Mean(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(axes)

    (graph,) = (translation.graph for translation in capture(Mean(), [torch.zeros(2, 4, 5, 6)]))
    assert list(texts(graph)) == [text]


def test_torch_runs_sums_that_overflow_a_short_type() -> None:
    class Sum(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sum(0)

    (graph,) = (
        translation.graph for translation in capture(Sum(), [torch.zeros(2**23, 2, dtype=torch.half)])
    )
    assert "overflow" in graph.nodes[0].reason
    images = torch.empty(8, 2, 1024, 1024, dtype=torch.half, device="meta", memory_format=CL)
    assert _translation.sums_of_channels(images) == ()
    assert _translation.sums_of_channels(images[:1]) != ()


def test_transposed_convolution_is_a_gradient_plus_a_bias_kernel() -> None:
    model = nn.ConvTranspose2d(8, 4, 3, 2, padding=1, output_padding=1).to(memory_format=CL)
    images = torch.zeros(2, 8, 6, 6).contiguous(memory_format=CL)
    (graph,) = (translation.graph for translation in capture(model, [images]))
    conv = "conv2d:n=2,c=4,h=12,w=12,k=8,r=3,s=3,stride=2,pad=1,dtype=f32,layout=nhwc,direction=dgrad"
    bias = "elementwise:rows=288,cols=4,dtype=f32,expression=t0+t1,vectors=t1"
    assert [node.workloads for node in graph.nodes] == [(conv, bias)]
    _, backward = (translation.graph for translation in capture(model, [images], training=True))
    (gradients,) = groups(backward)
    assert [text.partition(":")[0] for text in gradients.workloads] == ["conv2d", "reduction"]
    weight, bias = backward.nodes[0].writes
    assert {gradients.role(0, "dw"), gradients.role(1, "out")} == {weight, bias}
    assert gradients.role(0, "x") == gradients.role(1, "x0")  # both read the result's gradient


class Asking(nn.Module):
    """A model of two products whose second depends on the numbers of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        y = functional.relu(self.up(x))
        return self.down(y) if y.sum().item() > 0 else functional.gelu(self.down(y))


@pytest.mark.parametrize("training", [False, True])
def test_model_with_a_graph_break_has_the_graphs_of_torch_compile(training: bool) -> None:
    with pytest.warns(UserWarning, match=r"Asking cannot be traced as a whole.* `?Tensor.item\(\)"):
        graphs = [
            translation.graph for translation in capture(Asking(), [torch.zeros(4, 8)], training=training)
        ]
    forward = [graph for graph in graphs if graph.phase != "backward"]
    assert [node.target for node in forward[0].nodes][:2] == ["aten.addmm", "aten.relu"]
    assert [node.target for node in forward[1].nodes] == ["aten.addmm", "aten.gelu"]  # its sum is 0
    assert len(graphs) == (4 if training else 2)


def test_model_that_cannot_be_traced_is_refused() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ValueError("no such input")

    with pytest.raises(InputError, match="Refusing cannot be traced as a whole"):
        capture(Refusing(), [torch.zeros(3)])


class Attends(nn.Module):
    """Attention of an input to itself."""

    def __init__(self, heads: int = 4, *, mask: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout, self.inward = heads, dropout, nn.Linear(32, 96)
        self.register_buffer("mask", torch.ones(8, 8).tril().bool() if mask else None)

    def forward(self, x: Any) -> Any:
        parts = self.inward(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return functional.scaled_dot_product_attention(q, k, v, self.mask, self.dropout)


H100 = described()["h100-sxm"]


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "f16", "flash"),
        ({"dropout": 0.1}, "bf16", "flash"),
        ({"mask": True}, "f16", "efficient"),
        ({"dropout": 0.1}, "f32", "efficient"),
    ],
)
def test_extraction_for_a_gpu_has_the_attention_that_runs_there(
    options: dict[str, Any], dtype: str, expected: str
) -> None:
    graphs = extract(
        lambda: Attends(**options), [InputSpec.parse(f"2x8x32:{dtype}")], training=True, device=H100
    )
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert f"aten._scaled_dot_product_{expected}_attention" in targets
    assert f"aten._scaled_dot_product_{expected}_attention_backward" in targets
    assert not {"aten.bmm", "aten._softmax", "aten.native_dropout"} & set(targets)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("training", [False, True])
def test_recurrent_layers_are_extracted_as_the_operations_of_their_steps(kind: Any, training: bool) -> None:
    graphs = extract(lambda: kind(8, 16), [InputSpec.parse("5x2x8")], training=training, device=H100)
    assert len(graphs) == 1 + training
    targets = Counter(node.target for node in graphs[0].nodes)
    products = sum(targets[name] for name in ("aten.mm", "aten.addmm", "aten.linear"))
    assert products >= 5  # one per time step at least


def test_extraction_for_a_gpu_pads_heads_of_flash_attention() -> None:
    (graph,) = extract(lambda: Attends(heads=16), [InputSpec.parse("2x8x32:f16")], device=H100)
    (attention,) = [text for text in texts(graph) if text.startswith("attention")]
    assert "head_dim=8," in attention


def test_extraction_without_a_device_has_the_attention_of_this_machine() -> None:
    (graph,) = extract(Attends, [InputSpec.parse("2x8x32")])
    assert "aten._scaled_dot_product_flash_attention_for_cpu" in {node.target for node in graph.nodes}


# -- compiled models ---------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, int]]] = {
    "ahead": (Ahead, lambda: torch.randn(2, 4, 8), {"gemm": 1}),
    "activated first": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)
        ).to(memory_format=CL),
        lambda: torch.randn(2, 8, 6, 6).contiguous(memory_format=CL),
        {"conv2d": 2},
    ),
    "attention": (Attend, lambda: torch.randn(2, 8, 24), {"attention": 1}),
    "enlarged": (
        lambda: nn.ConvTranspose2d(8, 4, 2, 2).to(memory_format=CL),
        lambda: torch.randn(2, 8, 6, 6).contiguous(memory_format=CL),
        {"conv2d": 1, "elementwise": 1},
    ),
    "perceptron": (Perceptron, lambda: torch.randn(2, 4, 8), {"gemm": 2, "layernorm": 1}),
    "gpt2": (lambda: Gpt2(TINY), lambda: WORDS, {"gemm": 5, "layernorm": 3, "attention": 1}),
    "resnet": (
        lambda: Resnet(blocks=(1,), width=4, classes=5).to(memory_format=CL),
        lambda: torch.randn(2, 3, 16, 16).contiguous(memory_format=CL),
        {"conv2d": 5, "gemm": 1},
    ),
}


def ran(function: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Run a function with tuned kernels preferred; return its result and its calls by function."""
    calls: list[DispatchedCall] = []
    with served.watching(calls.append), served.prefer("tunebench"):
        result = function()
    assert {call.by for call in calls} == {"tunebench"}, [call.reason for call in calls]
    return result, Counter(call.function for call in calls)


@pytest.mark.parametrize("name", MODELS)
def test_compiled_model_has_the_same_outputs(name: str, request: pytest.FixtureRequest) -> None:
    is_compiled = name == "perceptron" or request.config.getoption("--every-sample")
    make, inputs, counts = MODELS[name]
    model, x = make().eval(), inputs()
    compiled = served.compile(model)
    with nullcontext() if is_compiled else reference_kernels(), torch.no_grad():
        y, functions = ran(lambda: compiled(x))
        expected = copy.deepcopy(model).double()(x if x.dtype == torch.int64 else x.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    assert {key: functions[key] for key in counts} == counts
    (plan,) = served.plans(compiled)
    assert len(plan.chosen) < len(plan.graph.nodes) or name in ("attention", "enlarged")


class Normalised(nn.Module):
    """Batch statistics before an activation, and before a sum and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.more = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=0.25)

    def forward(self, x: Any) -> Any:
        y = functional.relu(self.norm(self.conv(x)))
        return functional.relu(self.last(self.more(y)) + y)


class Norms(nn.Module):
    """The same without convolutions, whose kernels take long to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=0.25)

    def forward(self, x: Any) -> Any:
        y = functional.relu(self.norm(x))
        return functional.relu(self.last(y) + y)


def grown(model: nn.Module, x: Any) -> Any:
    """Run a forward and a backward step with a weighted sum as loss, and return the result."""
    y = model(x)
    (y * torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return y


@reference_kernels()
def test_batch_statistics_run_by_kernels_forward_and_backward() -> None:
    model, x = Norms(), torch.randn(2, 8, 6, 6).contiguous(memory_format=CL).requires_grad_()
    exact = copy.deepcopy(model).double()
    compiled = served.compile(model)
    y, functions = ran(lambda: grown(compiled, x))
    torch.testing.assert_close(y.double(), grown(exact, x.double()), rtol=1e-4, atol=1e-5)
    assert functions["batchnorm_stats"] == 4
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    for ours, theirs in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=1e-5, atol=1e-6)
    forward, backward = served.plans(compiled)
    fused = [group for group in (offer.group for offer in forward.chosen) if len(group.nodes) > 1]
    assert [len(group.nodes) for group in fused] == [2, 3]
    assert all("batchnorm_stats" in group.workloads[0] for group in fused)
    assert [node.target for node in forward.graph.nodes if not (node.workloads or node.expression)] == [
        "aten.add",
        "aten.add",
    ]  # counters of batches
    assert all(node.workloads or node.expression for node in backward.graph.nodes)


class Pooled(nn.Module):
    """A gradient whose layout differs from torch's trace: hardtanh's, of the expanded gradient of a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()

    def forward(self, x: Any) -> Any:
        return self.act(self.norm(self.conv(x))).mean((2, 3))


@reference_kernels()
def test_input_with_another_layout_than_traced_is_copied() -> None:
    model, x = Pooled().to(memory_format=CL), torch.randn(2, 4, 6, 6).contiguous(memory_format=CL)
    exact = copy.deepcopy(model).double()
    compiled = served.compile(model)
    ran(lambda: grown(compiled, x))
    grown(exact, x.double())
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_relu_gradient_is_fused_into_gradient_statistics() -> None:
    model, x = Normalised().to(memory_format=CL), torch.zeros(8, 4, 32, 32).contiguous(memory_format=CL)
    _, backward = (translation.graph for translation in capture(model, [x], training=True))
    fused = [group for group in groups(backward) if "act=relu" in group.workloads[0]]
    assert len(fused) == 2
    for group in fused:
        relu, norm = (backward.nodes[index] for index in group.nodes)
        assert (relu.target, norm.target) == ("aten.threshold_backward", "aten.native_batch_norm_backward")
        assert group.role(0, "dz") == group.role(1, "x0") == relu.writes[0]
        assert [group.role(0, name) for name in ("dy", "y")] == list(relu.reads)


def test_chain_with_statistics_is_not_an_epilogue() -> None:
    model = Normalised().half().to(memory_format=CL)
    model.norm.float(), model.last.float()
    x = torch.zeros(2, 4, 6, 6, dtype=torch.half).contiguous(memory_format=CL)
    forward, backward = (translation.graph for translation in capture(model, [x], training=True))
    for graph in (forward, backward):
        for group in groups(graph):
            kinds = [text.partition(":")[0] for text in group.workloads]
            inside = [graph.nodes[index].target for index in group.nodes]
            if any("batch_norm" in target for target in inside):
                assert kinds == ["batchnorm_stats", "elementwise"]
                assert "vector_dtype=f32" in group.workloads[1]
                assert sum("batch_norm" in target for target in inside) == 1
                read = {group.role(0, name) for name in ("x", "dy")} - {""}
                assert not read & {value for index in group.nodes for value in graph.nodes[index].writes}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.norm.half(), "not f32"),
        (lambda model: model.to(memory_format=torch.contiguous_format), "innermost"),
    ],
)
def test_torch_runs_unsupported_batch_norms(change: Callable[[Any], Any], reason: str) -> None:
    model = Normalised().half().to(memory_format=CL)
    model.norm.float(), model.last.float()
    change(model)
    x = torch.zeros(2, 4, 6, 6, dtype=torch.half).contiguous(
        memory_format=CL if reason == "not f32" else torch.contiguous_format
    )
    (forward, _) = (translation.graph for translation in capture(model, [x], training=True))
    first = next(node for node in forward.nodes if "batch_norm" in node.target)
    assert reason in first.reason
    assert not first.workloads


def test_chain_before_product_runs_as_its_prologue() -> None:
    (graph,) = (translation.graph for translation in capture(Ahead(), [torch.zeros(2, 4, 8)]))
    (whole,) = (group for group in groups(graph) if len(group.nodes) == len(graph.nodes))
    assert whole.workloads == (
        "gemm:m=8,n=8,k=8,dtype=f32,trans=nt,epilogue=bias+residual,pre=silu(x*scale+shift)",
    )
    assert whole.roles["a"] == whole.roles["residual"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_batch_norm_and_relu_run_as_prologue_of_a_convolution(layout: str) -> None:
    model, images = MODELS["activated first"][0](), torch.zeros(2, 8, 6, 6)
    memory_format = CL if layout == "nhwc" else torch.contiguous_format
    model, images = (converted.to(memory_format=memory_format) for converted in (model, images))
    (graph,) = (translation.graph for translation in capture(model, [images]))
    texts = {group.workloads[0] for group in groups(graph) if len(group.nodes) > 1}
    layer = f"conv2d:n=2,c=8,h=6,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout={layout}"
    assert f"{layer},epilogue=bias+relu,pre=relu(x*scale+shift)" in texts


@pytest.mark.slow
def test_compiled_model_has_the_same_gradients() -> None:
    model, x = Perceptron(), torch.randn(2, 4, 8)
    exact = copy.deepcopy(model).double()
    compiled = served.compile(model)

    def step() -> None:
        compiled(x).square().sum().backward()

    _, functions = ran(step)
    exact(x.double()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    assert functions["gemm"] >= 5  # two forward, and at least three gradients
    assert [plan.graph.phase for plan in served.plans(compiled)] == ["forward", "backward"]
    assert all(seconds > 0 for seconds in backend_of(compiled).seconds.values())


def test_kernels_not_known_to_be_faster_do_not_run() -> None:
    model, x = Perceptron(), torch.randn(2, 4, 8)
    calls: list[DispatchedCall] = []
    with served.watching(calls.append), torch.no_grad():
        torch.testing.assert_close(served.compile(model)(x), model(x))
    assert {call.by for call in calls} <= {"torch"}


@reference_kernels()
def test_changed_parameters_are_used() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)).eval()
    model = model.to(memory_format=CL)
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=CL)
    compiled = served.compile(model)
    with torch.no_grad():
        first, _ = ran(lambda: compiled(x))
        model[1].running_var.fill_(4.0)
        model[1].bias.add_(1.0)
        second, _ = ran(lambda: compiled(x))
        torch.testing.assert_close(second, model(x))
    assert not torch.allclose(first, second)


def test_backend_is_registered_by_name() -> None:
    model = Perceptron()
    with torch.no_grad():
        y = torch.compile(model, backend="tunebench")(x := torch.randn(2, 4, 8))
        torch.testing.assert_close(y, model(x))


def test_time_model_times_each_implementation_and_group() -> None:
    model, x = Perceptron().train(), torch.randn(2, 4, 8)
    with served.prefer("tunebench"):
        times = served.time_model(model, x, rounds=2, torch_compile=False)
    assert model.training
    assert set(times.us) == {"eager", "tunebench"}
    assert set(times.ratios) == set(times.ratios_95) == {"eager"}
    low, high = times.ratios_95["eager"]
    assert low <= times.ratios["eager"] <= high
    assert times.first_s["tunebench"] > times.us["tunebench"] / 1e6  # the first step compiles
    assert all(group.us > 0 and group.torch_us > 0 for group in times.groups)
    assert len(times.groups) == 3
    assert json.loads(json.dumps(times.to_json()))["rounds"] == 2
    assert "epilogue=bias+relu" in str(times)
    assert f"[{low:.2f}, {high:.2f}] times as long as tunebench" in str(times)
    with pytest.warns(FutureWarning, match="torch_compile"), pytest.raises(InputError, match="one round"):
        served.time_model(model, x, rounds=0, library=False)
    with pytest.raises(InputError, match="at least one round"):
        served.time_model(model, rounds=2)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("training", [False, True])
def test_inductor_compiles_what_kernels_do_not_run(training: bool, request: pytest.FixtureRequest) -> None:
    if not training and not request.config.getoption("--every-sample"):
        pytest.skip("takes --every-sample")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return functional.gelu(self.mix(self.norm(x).atan())).t().contiguous() @ x

    model, x = Block().train(training), torch.randn(16, 8)
    exact, copies = copy.deepcopy(model).double(), list[Any]()
    compiled = served.compile(model, check=True)
    with reference_kernels() as ran, served.prefer("tunebench"), pytest.MonkeyPatch.context() as patch:
        read = _kernel_operator.KernelTensor.read

        def noted(self: Any, tensor: Any) -> Any:
            copies.append((tensor, read(self, tensor)))
            return copies[-1][1]

        patch.setattr(_kernel_operator.KernelTensor, "read", noted)
        with torch.set_grad_enabled(training):
            y = compiled(x)
            z = exact(x.double())
            if training:
                y.sum().backward()
                z.sum().backward()
            # Inductor allocates the outputs, and calls kernels without torch's dispatcher.
            patch.setattr(_kernel_operator._KernelCall, "results", None)
            torch.testing.assert_close(compiled(x), y)
            exact(x.double())  # changes the running statistics, too
    torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-4)
    assert {workload.operator for workload in ran} >= {"gemm"}
    assert len(copies) >= 3
    # Inductor passed the strides that kernels read.
    assert all(passed.data_ptr() == used.data_ptr() for passed, used in copies[-3:])
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        if training:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs)


@pytest.mark.slow
@pytest.mark.inductor
def test_model_without_groups_is_compiled_to_the_same_code_as_by_torch() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)), torch.randn(4, 8)
    results = []
    for compiled in (torch.compile(model, dynamic=False), served.compile(model, dynamic=False)):
        torch._dynamo.utils.counters.clear()
        results.append(y := compiled(x))
        y.sum().backward()
    assert torch.equal(*results)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 2  # forward and backward


class Slowed:
    """A compiled graph on a clock that each run advances by a fixed time; it doubles its input in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, us: float, clock: list[float]) -> None:
        self.us, self.clock, self.runs = us, clock, 0
        monkeypatch.setattr(_race.time, "perf_counter_ns", lambda: int(clock[0] * 1e3))

    def __call__(self, x: Any) -> Any:
        self.clock[0] += self.us
        self.runs += 1
        return (x.mul_(2.0) + self.us,)


@pytest.mark.parametrize(("ours_us", "torch_us", "winner"), [(2.0, 3.0, "tunebench"), (3.0, 2.0, "torch")])
@pytest.mark.parametrize("calls_before", [0, 5])
def test_race_keeps_the_faster_and_has_no_other_effect(
    ours_us: float, torch_us: float, winner: str, calls_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, races, x = [0.0], list[_race.Race](), torch.ones(3)
    ours, by_torch = (Slowed(monkeypatch, us, clock) for us in (ours_us, torch_us))
    # The second call is timed; after that one, it has to run for this long.
    after_s = (calls_before - 2) * ours_us / 1e6 if calls_before else 0.0
    raced = _race.Raced(ours, lambda arguments: by_torch, {0}, races.append, after_s=after_s)
    for call in range(calls_before):
        assert raced(x)[0].tolist() == [2.0 ** (call + 1) + ours_us] * 3
        assert not by_torch.runs
    x.fill_(1.0)
    assert raced(x)[0].tolist() == [2.0 + min(ours_us, torch_us)] * 3
    assert raced(x)[0].tolist() == [4.0 + min(ours_us, torch_us)] * 3
    (race,) = races
    assert race.winner == winner
    assert race.ratio == pytest.approx(torch_us / ours_us)
    runs = {ours.runs - calls_before, by_torch.runs}
    assert runs == {1 + _race.MOST_ROUNDS, 3 + _race.MOST_ROUNDS}


def test_kernels_stay_where_memory_is_short_for_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: Any) -> Any:
        raise torch.OutOfMemoryError

    races, x, ours = list[_race.Race](), torch.ones(3), Slowed(monkeypatch, 2.0, [0.0])
    raced = _race.Raced(ours, fail, {0}, races.append)
    assert raced(x)[0].tolist() == [4.0] * 3
    assert raced(x)[0].tolist() == [6.0] * 3
    assert (ours.runs, races) == (2, [])


@pytest.mark.parametrize("winner", ["tunebench", "torch"])
def test_model_runs_by_the_winner_of_its_race(winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Perceptron(), torch.randn(2, 4, 8)
    monkeypatch.setattr(_race.Race, "winner", winner)
    compiled = served.compile(model, benchmark=True)
    calls: list[DispatchedCall] = []
    with torch.no_grad(), served.prefer("tunebench"):
        compiled(x)
        with served.watching(calls.append):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert [call.by for call in calls] == [winner] * 3
    if winner == "torch":
        assert "in this model torch.compile takes" in calls[0].reason


def test_backend_by_name_accepts_only_its_option() -> None:
    with torch.no_grad():
        assert backend_by_name({"benchmark": True}).shape == (2, 4, 8)
        with pytest.raises(Exception, match=r"unknown option 'bench'.* Known: benchmark, "):
            backend_by_name({"bench": True})


def backend_by_name(options: dict[str, bool]) -> Any:
    torch._dynamo.reset()
    return torch.compile(Perceptron(), backend="tunebench", options=options)(torch.zeros(2, 4, 8))


def test_timing_a_training_step_leaves_the_model_unchanged() -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 4, 6, 6)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.eval().state_dict())
    times = served.time_model(model, x, rounds=2, torch_compile=False, training=True, benchmark=True)
    assert set(times.us) == {"eager", "tunebench"}
    assert not model.training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(InputError, match="no parameters to train"):
        served.time_model(nn.ReLU(), x, training=True)


def test_time_command_prints_implementations_and_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())\n"
    )
    arguments = [
        "time",
        f"{file}:make",
        "--input",
        "4x8",
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--no-torch-compile",
    ]
    with served.prefer("tunebench"):
        assert run_cli([*arguments, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert set(shown["us"]) == {"eager", "tunebench"}
        assert [group["by"] in ("tunebench", "torch") for group in shown["groups"]] == [True]
        assert run_cli(arguments) == 0
        assert "epilogue=bias+relu" in capsys.readouterr().out
    with pytest.warns(FutureWarning, match="--torch-compile"):
        assert run_cli([*arguments[:4], "--no-library", "--device", "h100-sxm"]) == 2
    capsys.readouterr()
    assert run_cli([*arguments[:2], "--device", "cpu"]) == 2
    assert "--input SHAPE:TYPE" in capsys.readouterr().err
    assert run_cli([*arguments[:4], "--device", "h100-sxm"]) == 2
    assert "not in this machine" in capsys.readouterr().err


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs be planned as if some workload had been tuned here."""
    monkeypatch.setattr(backend, "tried_operators", lambda device: {"gemm"})


def test_nothing_is_planned_where_nothing_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_group_planner, "translate", None)
    made, model, x = Backend("model"), nn.Linear(8, 4), torch.randn(2, 8)
    compiled = torch.compile(model, backend=made)
    compiled(x).sum().backward()
    torch.testing.assert_close(compiled(x), model(x))
    assert made.plans == []
    assert made.skipped == [f"nothing was tuned on {local_cpu().name}"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Use empty caches and an empty database; return a list with an element for each planned graph."""
    planned: list[str] = []
    translate = _group_planner.translate
    monkeypatch.setattr(_group_planner, "translate", lambda *args: planned.append("") or translate(*args))
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "some.db"))
    return planned


def test_a_graph_without_groups_is_planned_again_only_for_new_records(planned: list[str]) -> None:
    def compiled(rows: int) -> int:
        """Return how often the graph was planned."""
        torch._dynamo.reset()
        planned.clear()
        made = Backend("model")
        with torch.no_grad():
            torch.compile(nn.Linear(8, 4), backend=made)(torch.randn(rows, 8))
        assert len(made.skipped) == (0 if planned else 1)
        return len(planned)

    _record("softmax:rows=4,cols=16,dtype=f32")
    assert [compiled(2), compiled(2), compiled(3), compiled(2)] == [1, 0, 1, 0]
    _record("softmax:rows=8,cols=16,dtype=f32")  # of no group of this graph
    assert [compiled(2), compiled(3)] == [0, 0]
    _record("gemm:m=2,n=4,k=8,dtype=f32,trans=nt,epilogue=bias")
    assert [compiled(2), compiled(2), compiled(3)] == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("training", [False, True])
def test_compiled_graphs_with_kernels_are_found_again_until_a_record_of_theirs_changes(
    training: bool, planned: list[str]
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1)), torch.randn(4, 8)

    def compiled() -> tuple[int, list[list[str]], list[Any]]:
        """Return how often the graph was planned, its groups and the results of a step."""
        torch._dynamo.reset()
        planned.clear()
        model.zero_grad()
        run = served.compile(model)
        with torch.set_grad_enabled(training), served.watching(calls.append):
            y = run(x)
            if training:
                y.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if training]
        return len(planned), [list(plan.workloads) for plan in served.plans(run)], [y, *gradients]

    softmax = "softmax:rows=4,cols=16,dtype=f32"
    calls: list[DispatchedCall] = []
    _record(softmax, ratio=2.0)
    _start_threads()  # as real kernels do: torch's thread count is part of the keys of its caches
    with reference_bindings():
        times, groups, first = compiled()
        assert times == (2 if training else 1)
        assert softmax in groups[0]
        assert [call.by for call in calls if str(call.workload) == softmax] == ["tunebench"]
        calls.clear()
        again = compiled()
        assert again[:2] == (0, groups)
        assert [call.by for call in calls if str(call.workload) == softmax] == ["tunebench"]
        torch.testing.assert_close(again[2], first)
        _record("softmax:rows=8,cols=16,dtype=f32", ratio=2.0)  # of no group of this graph
        assert compiled()[0] == 0
        _record("gemm:m=4,n=16,k=8,dtype=f32,trans=nt,epilogue=bias", ratio=2.0)
        times, groups, third = compiled()
        assert times == (2 if training else 1)
        assert any("gemm" in text for text in groups[0])
        torch.testing.assert_close(third, first)
        assert compiled()[0] == 0
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert compiled()[0] == (2 if training else 1)


@pytest.mark.parametrize(("winner", "training"), [("tunebench", False), ("torch", True)])
def test_result_of_a_race_is_remembered(
    winner: str, training: bool, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    softmax, calls, races = "softmax:rows=4,cols=16,dtype=f32", list[DispatchedCall](), list[int]()
    backends = list[Backend]()
    x = torch.randn(4, 16, requires_grad=training)
    _record(softmax, ratio=2.0)
    monkeypatch.setattr(_race.Race, "winner", winner)

    def results(run: Callable[[Any], Any]) -> list[Any]:
        y = run(x)
        return [y, *(torch.autograd.grad(y.square().sum(), x) if training else ())]

    def compiled(**options: Any) -> str:
        """Return by whom the graph runs after a race, if there was one; note whether there was one."""
        torch._dynamo.reset()
        planned.clear()
        calls.clear()
        run, expected = served.compile(nn.Softmax(-1), **options), results(nn.Softmax(-1))
        torch.testing.assert_close(results(run), expected)
        backend_of(run).race_next()
        torch.testing.assert_close(results(run), expected)
        with served.watching(calls.append):
            torch.testing.assert_close(results(run), expected)
        backends.append(backend_of(run))
        races.append(len(backends[-1]._races))
        (by,) = {call.by for call in calls if str(call.workload) == softmax}
        return by

    with reference_bindings(), torch.set_grad_enabled(training):
        assert [compiled(), compiled()] == [winner, winner]
        assert bool(planned) == (winner != "torch")  # without inductor, no compiled graph is found
        if winner == "torch":
            assert "in this model torch.compile takes" in calls[0].reason
        assert compiled(benchmark=False) == "tunebench"
        _record(softmax, ratio=3.0)
        assert compiled() == winner
        torch.use_deterministic_algorithms(True)
        try:
            _record(softmax, ratio=4.0)
            assert compiled() == "tunebench"
        finally:
            torch.use_deterministic_algorithms(False)
    assert races == [1, 0, 0, 1, 0]
    if not training:  # torch itself keeps graphs of training
        torch._dynamo.reset()
        gc.collect()
        assert not any(made._races for made in backends)


def test_plans_in_a_folder_that_others_may_write_are_not_read(planned: list[str], tmp_path: Path) -> None:
    _record("softmax:rows=4,cols=16,dtype=f32")
    with torch.no_grad():
        torch.compile(nn.Linear(8, 4), backend=Backend("model"))(torch.randn(2, 8))
    (path,) = (tmp_path / "cache" / "plans").glob("*.json")
    path.chmod(0o666)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(nn.Linear(8, 4), backend=Backend("model"))(torch.randn(2, 8))
    assert len(planned) == 2


def _record(text: str, ratio: float = 0.0) -> None:
    """Record a measurement of a workload's default; with a ratio, torch takes that many times as long."""
    workload, device = parse(text), local_cpu()
    numba = find_variant(f"{workload.operator}/numba_cpu")
    config = numba.default(workload, device)
    revision = numba.revision(workload, config)
    key = TrialKey(device=device.key, workload=text, variant=numba.key, revision=revision, config=config)
    versus = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "probability": 0.99}
    verdict = Verdict(versus_default="itself", comparison={"libraries": {"torch": versus}}) if ratio else None
    with open_store(os.environ["TUNEBENCH_DB"]) as store:
        store.begin_run(RunStart(device=device, workload=text, sampler="bound", seed=0))
        store.record(key, Result(outcome=measured(3.0)), bound_us=0.1, purpose="finalist", verdict=verdict)


def test_sizes_that_depend_on_data_are_left_to_torch(tuned: None) -> None:
    def rows(x: Any) -> Any:
        return x[x[:, 0].nonzero()[:, 0]].relu() + 1

    made, x = Backend("rows"), torch.eye(3)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(UserWarning, match="torch runs a graph of rows: sizes that depend on data"),
    ):
        assert torch.equal(torch.compile(rows, backend=made)(x), rows(x))
    assert made.plans == []
    assert made.skipped == ["sizes that depend on data"]


def test_compile_is_a_decorator_and_its_plan_has_a_line_per_group(tuned: None) -> None:
    @served.compile(dynamic=False)
    def step(x: Any) -> Any:
        return functional.dropout(functional.gelu(x), 0.5)

    step(torch.randn(4, 8))
    head, *lines = str(served.plans(step)[0]).splitlines()
    assert head.startswith("step inference on ")
    assert head.endswith("us by torch, proven optimal under the forecast")
    assert " 0.0 us" not in head
    assert "gelu: elementwise:rows=4,cols=8,dtype=f32,expression=gelu(x0)" in lines[0]
    assert "rand_like: no operator of tunebench" in lines[1]


def test_plans_of_a_model_that_was_not_compiled_are_refused() -> None:
    with pytest.raises(InputError, match="compile returned"):
        served.plans(Perceptron())


# -- extract -----------------------------------------------------------------------------------------------

FILE = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def nothing():
    return 3

def broken():
    raise RuntimeError("no weights")

class Asking(nn.Linear):
    def forward(self, x):
        y = super().forward(x).relu()
        return y + 1 if y.sum().item() > 0 else y.sigmoid()

def asking():
    return Asking(8, 8)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_model.py"
    path.write_text(FILE)
    return path


def test_extract_reads_the_graph_it_wrote(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["extract", f"{file}:make", "--input", "4x8:f16", "--device", "h100-sxm", "--out", str(out)]
    assert run_cli(command) == 0
    shown = capsys.readouterr().out
    assert "epilogue=bias+gelu" in shown
    assert "proven optimal" in shown
    graph = out / "sequential.inference.json"
    assert run_cli(["extract", str(graph), "--device", "a100-80-sxm", "--json"]) == 0
    (extracted,) = json.loads(capsys.readouterr().out)
    assert extracted["device"] == "a100-80-sxm"
    suite = (out / "sequential.toml").read_text()
    capsys.readouterr()
    assert run_cli([*command, "--training"]) == 0
    assert (out / "sequential.toml").read_text() == suite
    assert (out / "sequential.training.toml").read_text() != suite
    assert "replaced" not in capsys.readouterr().out
    assert run_cli([*command, "--training"]) == 0
    assert f"replaced {out / 'sequential.training.toml'}" in capsys.readouterr().out


def test_extract_writes_each_graph_of_a_model_with_a_graph_break(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["extract", f"{file}:asking", "--input", "4x8", "--device", "h100-sxm", "--out", str(out)]
    with pytest.warns(UserWarning, match=r"its 2 graphs are those of torch.compile: .*item\(\)"):
        assert run_cli(command) == 0
    assert "Asking, inference.2, on h100-sxm: 1 operations" in capsys.readouterr().out
    names = {"asking.inference.1.json", "asking.inference.2.json", "asking.toml"}
    assert {path.name for path in out.iterdir()} == names


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        ("make", [], "add --input SHAPE:TYPE"),
        ("make", ["--input", "4by8"], "is not SHAPE:TYPE"),
        ("make", ["--input", "4x0"], "is empty"),
        ("make", ["--input", "4x8:f32:channels_last"], "needs 4 axes"),
        ("make", ["--input", "4x9"], "RuntimeError: a and b must have same reduction dim"),
        ("make", ["--input", "4x8", "--dtype", "i64"], "parameters must be f32, f16 or bf16"),
        ("nothing", ["--input", "4x8"], "got int"),
        ("broken", ["--input", "4x8"], "no weights"),
        ("absent", ["--input", "4x8"], "has no function absent"),
    ],
)
def test_extract_reports_errors_in_one_line(
    function: str, options: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["extract", f"{file}:{function}", *options, "--device", "h100-sxm"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_missing_model_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist: expected FILE.py:FUNCTION"):
        load_factory(f"{tmp_path / 'absent.py'}:make")
    with pytest.raises(InputError, match=r"is not FILE\.py:FUNCTION"):
        load_factory("model.py")


@pytest.mark.parametrize("training", [False, True])
def test_exported_program_is_extracted(training: bool) -> None:
    inputs = (torch.zeros(2, 4, 8),)
    (graph, *_) = extract(
        lambda: torch.export.export(Perceptron(), inputs), [InputSpec.parse("2x4x8")], training=training
    )
    (expected, *_) = (translation.graph for translation in capture(Perceptron(), inputs, training=training))
    assert texts(graph) == texts(expected)


@pytest.mark.parametrize("training", [False, True])
def test_model_without_memory_is_extracted_and_stays_on_meta(training: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
    on_meta, expected = (
        extract(
            lambda model_or_tensor=model_or_tensor: model_or_tensor,
            [InputSpec.parse("2x4x6x6")],
            training=training,
        )
        for model_or_tensor in (model, nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)))
    )
    assert list(map(texts, on_meta)) == list(map(texts, expected))
    assert all(model_or_tensor.is_meta for model_or_tensor in (*model.parameters(), *model.buffers()))


def test_parameters_get_type_and_layout_of_the_inputs() -> None:
    (graph,) = extract(lambda: nn.Conv2d(4, 8, 1), [InputSpec.parse("2x4x6x6:bf16:channels_last")])
    assert list(texts(graph)) == [
        "conv2d:n=2,c=4,h=6,w=6,k=8,r=1,s=1,stride=1,pad=0,dtype=bf16,layout=nhwc,epilogue=bias"
    ]


def test_graph_of_bert() -> None:
    (graph,) = (translation.graph for translation in capture(Bert(TINY), [WORDS]))
    assert sum(text.startswith("gemm") for text in texts(graph).elements()) == 5
