"""ONNX models: functions of torch against onnx's own test cases, graphs against those of the torch model."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")
pytest.importorskip("onnx", reason="onnx is not installed: install tunebench[onnx]")

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tunebench import cli, device
from tunebench.errors import InputError
from tunebench.graph import Graph, InputSpec, extract, extract_onnx, plan_partition
from tunebench.torch.onnx import _functions
from tunebench.torch.onnx.model import load_onnx

H100 = device.find("h100-sxm")


# -- functions ---------------------------------------------------------------------------------------------

EXCEPTIONS = {
    "test_attention_3d_causal_bf16": "rounded to bf16 at other places",
    "test_attention_4d_causal_bf16": "rounded to bf16 at other places",
    "test_celu_bfloat16": "rounded to bf16 at other places",
    "test_gather_elements_negative_indices": "negative indices",
    "test_scatter_elements_with_negative_indices": "negative indices",
    "test_top_k_same_values": "another one of equal elements",
    "test_top_k_same_values_2d": "another one of equal elements",
    "test_top_k_same_values_largest": "another one of equal elements",
}
"""Cases of onnx whose results differ, and why."""

CASES = 3
"""Cases of each operator that run."""

EXTRA = ("Attention", "Conv", "Resize")
"""Operators with many attributes, of which all cases run."""


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Any]]:
    """Return onnx's test cases of single nodes, by operator."""
    from onnx.backend.test.case.node import collect_testcases

    by_operator = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of onnx, which overflows small types on purpose
        collected = collect_testcases(None)
    for case in collected:
        if len(case.model.graph.node) > 1 or case.name in EXCEPTIONS:
            continue
        if any(isinstance(value, list | None) for value in case.data_sets[0][0]):  # sequences and options
            continue
        inputs = map(_array, case.data_sets[0][0])
        if all(
            value.dtype.isbuiltin == 1 and value.dtype.kind in "biuf" for value in inputs
        ):  # a type of NumPy
            by_operator[case.model.graph.node[0].op_type].append(case)
    return by_operator


def _without_known_inputs(case: Any, path: Path) -> dict[str, Any]:
    """Write the model of a case, with what decides shapes as constants, and return its other inputs."""
    model, (node,) = onnx.ModelProto(), case.model.graph.node
    model.CopyFrom(case.model)
    inputs = dict(
        zip((value.name for value in model.graph.input), map(_array, case.data_sets[0][0]), strict=True)
    )
    known = {node.input[i] for i in _functions.FUNCTIONS[node.op_type].numeric if i < len(node.input)}
    for value in model.graph.input:
        for extent, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True):
            extent.dim_value = size
        if value.name in known:
            model.graph.initializer.append(numpy_helper.from_array(inputs[value.name], value.name))
    onnx.save(model, path)
    return {name: value for name, value in inputs.items() if name not in known}


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else numpy.asarray(value)


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value.copy())


@pytest.mark.slow
@pytest.mark.parametrize("operator", sorted(_functions.FUNCTIONS))
def test_function_has_the_results_of_onnx(operator: str, cases: dict[str, list[Any]], tmp_path: Path) -> None:
    compared, refused = 0, list[tuple[str, str]]()
    for case in cases[operator][: None if operator in EXTRA else CASES]:
        inputs = _without_known_inputs(case, tmp_path / "case.onnx")
        try:
            model = load_onnx(tmp_path / "case.onnx")
        except InputError as error:
            unsupported = "which torch lacks" in str(error) or "does not infer" in str(error)
            refused += [] if unsupported else [(case.name, str(error))]
            continue
        if "onnx_node" in str(model.module.graph):  # attributes that torch lacks: an opaque node
            continue
        results = model.module(*map(_tensor, inputs.values()))
        for result, expected in zip(results, case.data_sets[0][1], strict=False):
            got = (result.double() if result.is_floating_point() else result).numpy()
            numpy.testing.assert_allclose(
                got, _array(expected).astype(got.dtype), 1e-3, 1e-4, err_msg=case.name, strict=True
            )
        compared += 1
    assert not refused
    assert compared or operator == "LayerNormalization"  # whose cases have three results


# -- round trips -------------------------------------------------------------------------------------------


class Block(nn.Module):  # type: ignore[misc]
    """A transformer block and a classifier of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, tokens, width))
        return self.head((x + self.down(nn.functional.gelu(self.up(self.last(x)))))[:, 0])


def _classifier() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3, stride=2)),
        *(nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10), nn.Softmax(-1)),
    )


def _workloads(graphs: tuple[Graph, ...]) -> Any:
    (graph,) = graphs
    return plan_partition(graph, H100).workloads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "opset", "dynamic"),
    [(Block, (2, 8, 64), 23, True), (_classifier, (2, 3, 16, 16), 18, False)],
)
def test_exported_model_has_the_workloads_of_torch(
    make: Any, shape: tuple[int, ...], opset: int, dynamic: bool, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    path, model = tmp_path / "model.onnx", make().eval()
    axes = ({0: torch.export.Dim("batch")},) if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            model, (torch.zeros(shape),), path, opset_version=opset, dynamic_shapes=axes, verbose=False
        )
    graphs = extract_onnx(path, {"batch": shape[0]} if dynamic else None, device=H100)
    assert _workloads(graphs) == _workloads(extract(lambda: model, [InputSpec(shape)], device=H100))


# -- files -------------------------------------------------------------------------------------------------


def _save(path: Path, nodes: list[Any], inputs: dict[str, Any], weights: dict[str, Any], result: Any) -> str:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
    tensors = [numpy_helper.from_array(numpy.asarray(array), name) for name, array in weights.items()]
    results = [helper.make_tensor_value_info("result", TensorProto.FLOAT, result)]
    graph = helper.make_graph(nodes, "g", values, results, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return str(path)


@pytest.fixture
def product(tmp_path: Path) -> str:
    """Write a product with a bias, a determinant that torch has no function for, and two dynamic axes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], "/up/MatMul"),
        helper.make_node("Add", ["xw", "b"], ["sums"], "/up/Add"),
        helper.make_node("Det", ["squares"], ["det"], "/tail/Det"),
        helper.make_node("Shape", ["sums"], ["shape"], "/tail/Shape"),
        helper.make_node("Gather", ["shape", "first"], ["rows"], "/tail/Gather"),
        helper.make_node("Expand", ["det", "rows"], ["wide"], "/tail/Expand"),
        helper.make_node("Unsqueeze", ["wide", "last"], ["column"], "/tail/Unsqueeze"),
        helper.make_node("Add", ["sums", "column"], ["result"], "/tail/Add"),
    ]
    inputs = {"x": ["batch", 64], "squares": [None, 3, 3]}
    weights = {
        "w": numpy.zeros((64, 32), "float32"),
        "b": numpy.zeros(32, "float32"),
        "first": numpy.array([0]),
        "last": numpy.array([1]),
    }
    return _save(tmp_path / "product.onnx", nodes, inputs, weights, ["batch", 32])


def test_node_that_torch_lacks_is_left_to_torch_by_its_name(product: str) -> None:
    (graph,) = extract_onnx(product, {"batch": 16, "squares.0": 1}, device=H100)
    assert dict(_workloads((graph,))).keys() >= {"gemm:m=16,n=32,k=64,dtype=f32,trans=nt,epilogue=bias"}
    (left,) = [node for node in graph.nodes if node.target == "tunebench.onnx_node"]
    assert left.reason == "ONNX node Det /tail/Det: no function of torch"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], r"has dynamic axes: add --size batch=N --size squares\.0=N"),
        (["batch=2", "squares.0=1", "time=2"], "no dynamic axis 'time'; its dynamic axes: batch, squares.0"),
        (["batch=0"], "expected NAME=N with N of 1 or more"),
    ],
)
def test_sizes_are_checked(
    product: str, sizes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [text for size in sizes for text in ("--size", size)]
    assert cli.run(["extract", product, *options, "--device", "h100-sxm"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_extract_reads_an_onnx_file(product: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--size", "batch=16", "--size", "squares.0=1")
    assert cli.run(["extract", product, *sizes, "--device", "h100-sxm", "--json"]) == 0
    assert "gemm:m=16,n=32,k=64" in capsys.readouterr().out


def test_results_of_unknown_shape_are_refused_by_name(tmp_path: Path) -> None:
    nodes = [helper.make_node("Compress", ["x", "keep"], ["result"], "/select")]
    path = _save(tmp_path / "c.onnx", nodes, {"x": [4, 4]}, {"keep": numpy.array([True, False])}, None)
    with pytest.raises(InputError, match=r"node /select \(Compress\) has no function of torch .* infer"):
        extract_onnx(path)


def test_file_that_is_not_onnx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(InputError, match=r"text\.onnx"):
        extract_onnx(tmp_path / "text.onnx")
    with pytest.raises(InputError, match="is not a file"):
        extract_onnx(tmp_path / "absent.onnx")
