"""The picture of a trace graph: lines, paths, loops and who runs them, as well-formed SVG."""

from __future__ import annotations

import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor

from tunebench.training import coexecute
from tunebench.training.coexecution._testing import forced
from tunebench.training.coexecution.picture import trace_graph_svg
from tunebench.training.coexecution.trace_graph import TracedOperation, TraceGraph

SVG = "{http://www.w3.org/2000/svg}"


def _graph(path: Path, *traces: str) -> TraceGraph:
    """Return a graph of traces; each digit is an operation in the line of this number."""
    graph = TraceGraph()
    for trace in traces:
        graph.add(
            TracedOperation(operator="aten::mul.Tensor", attributes="", site=(f"{path}:{number}",))
            for number in trace
        )
    return graph


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(
        "".join(f"line{number} = x < {number}  # & more\n" for number in range(1, 10)), encoding="utf-8"
    )
    return path


def test_lines_show_their_source_and_operations(program: Path) -> None:
    svg = trace_graph_svg(_graph(program, "1223"), title="Step <1>")
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[0] == "Step <1>"
    assert "   2  line2 = x < 2  # & more" in texts
    assert "2 operations: mul \N{MULTIPLICATION SIGN}2" in texts
    assert '<rect width="100%" height="100%" fill="#ffffff"/>' in svg


def test_branches_divide_boxes_and_a_loop_is_a_dashed_edge(program: Path) -> None:
    straight = trace_graph_svg(_graph(program, "12345"))
    branched = trace_graph_svg(_graph(program, "1245", "1345"))
    assert straight.count('stroke="#9aa3ad"') == 1
    assert branched.count('stroke="#9aa3ad"') == 4
    assert "stroke-dasharray" not in branched
    assert trace_graph_svg(_graph(program, "123234")).count("stroke-dasharray") == 1


def test_runners_and_fetches_are_marked(program: Path) -> None:
    graph = _graph(program, "1234")
    svg = trace_graph_svg(
        graph, runners={f"{program}:1": "inductor", f"{program}:2": "eager"}, fetches=[f"{program}:3"]
    )
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"inductor", "eager", "Python reads a value"} <= set(texts)
    assert "Python passes a value" not in texts


def test_operations_of_one_caller_are_told_apart_by_deeper_frames(program: Path) -> None:
    graph = TraceGraph()
    graph.add(
        TracedOperation(
            operator="aten::mul.Tensor", attributes="", site=("train.py:1", f"{program}:{number}")
        )
        for number in range(1, 8)
    )
    assert "line7 = x" in trace_graph_svg(graph)


def test_an_empty_graph_has_a_picture() -> None:
    graph = TraceGraph()
    graph.add([])
    for drawn_graph in (graph, TraceGraph()):
        assert ElementTree.fromstring(trace_graph_svg(drawn_graph)).tag.endswith("svg")


def test_boxes_of_random_graphs_hold_every_line_once_and_do_not_overlap(program: Path) -> None:
    chance = random.Random(5)
    for _ in range(100):
        traces = [
            "".join(chance.choices("123456789", k=chance.randint(1, 9))) for _ in range(chance.randint(1, 5))
        ]
        svg = trace_graph_svg(_graph(program, *traces))
        lines = re.findall(r"> +(\d)  line", svg)
        assert sorted(lines) == sorted(set("".join(traces)))
        boxes = [
            tuple(float(value) for value in match)
            for match in re.findall(
                r'<rect x="([\d.-]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" rx', svg
            )
        ]
        for index, (x, y, width, height) in enumerate(boxes):
            for left, top, wide, high in boxes[:index]:
                assert x + width <= left or left + wide <= x or y + height <= top or top + high <= y


def test_a_report_draws_who_runs_each_line(tmp_path: Path) -> None:
    weight = torch.ones(3)

    @coexecute
    def step(x: Tensor) -> float:
        loss = (x * weight).sum()
        scale = torch.tensor([1.0, 2.0, 3.0])
        weight.mul_(0.5)
        if loss.item() > 2:
            weight.add_(scale)
        return (weight + scale).sum().item()

    with forced():
        for _ in range(4):
            step(torch.ones(3))
    report = coexecute.report(step)
    report.write_svg(tmp_path / "step.svg")
    texts = [element.text for element in ElementTree.parse(tmp_path / "step.svg").iter(f"{SVG}text")]
    assert "TorchScript" in texts
    assert {"Python reads a value", "Python passes a value"} <= set(texts)
    assert any("if loss.item() > 2:" in (text or "") for text in texts)
    assert report.to_svg() in report._repr_html_()


def test_operations_keep_their_call_sites_when_a_path_is_left(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @coexecute
    def step(x: Tensor, scale: bool) -> Tensor:
        loss = layer(x).square().mean()
        if scale:
            loss = loss * loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with forced():
        for iteration in range(6):
            step(torch.ones(2, 3), iteration == 5)
    assert coexecute.report(step).diverged >= 1
    first = step.graph.operations()
    sites = {
        operation.operator: {
            operation_seen.site for operation_seen in first if operation_seen.operator == operation.operator
        }
        for operation in first
    }
    assert len(sites["aten::addmm"]) == len(sites["aten::add_.Tensor"]) == 1
    assert all(site for sites_of_operator in sites.values() for site in sites_of_operator)
