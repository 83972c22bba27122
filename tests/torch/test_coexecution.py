"""`coexecute`: traces, their graph, and steps that equal eager mode."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor, nn

from tunebench.errors import InputError
from tunebench.torch import coexecute
from tunebench.torch.coexecution.trace_graph import TracedOperation, TraceGraph


def _trace(names: str) -> list[TracedOperation]:
    return [TracedOperation(operator=name, attributes="", site=("program.py:1",)) for name in names]


def test_merging_traces_is_idempotent_and_independent_of_their_order() -> None:
    traces = [_trace("abcd"), _trace("abxd"), _trace("abcbcd"), _trace("")]
    graphs = []
    for order in itertools.permutations(traces):
        graph = TraceGraph()
        assert [graph.add(trace) for trace in order].count(True) >= 1
        assert not any(graph.add(trace) for trace in order)
        graphs.append(graph)
    assert all(graph == graphs[0] and graph.blocks() == graphs[0].blocks() for graph in graphs)
    halves = [TraceGraph(), TraceGraph()]
    for trace, half in zip(traces, itertools.cycle(halves)):
        half.add(trace)
    assert halves[0].merged(halves[1]) == halves[1].merged(halves[0]) == graphs[0]


def test_a_branch_divides_basic_blocks() -> None:
    graph = TraceGraph()
    graph.add(_trace("abcd"))
    assert [len(block.operations) for block in graph.blocks()] == [0, 4, 0]
    graph.add(_trace("abxd"))
    blocks = graph.blocks()
    assert sorted("".join(each.operator for each in block.operations) for block in blocks) == [
        "", "", "ab", "c", "d", "x",
    ]  # fmt: skip
    assert [operation.operator for operation in graph.branches()] == ["b"]


def test_blocks_of_random_graphs_hold_every_operation_once() -> None:
    chance = random.Random(3)
    for _ in range(200):
        graph = TraceGraph()
        for _ in range(chance.randint(1, 5)):
            graph.add(_trace("".join(chance.choices("abcde", k=chance.randint(0, 6)))))
        held = [operation for block in graph.blocks() for operation in block.operations]
        assert len(held) == len(set(held))
        assert set(held) == graph.operations()


def test_a_step_is_traced_with_backward_and_optimizer() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @coexecute
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        step(torch.ones(4, 3))
    report = coexecute.report(step)
    assert report.iterations == report.traced + report.coexecuted + report.diverged == 3
    names = {operation.operator.split(".")[0] for operation in step.graph.operations()}
    assert {"aten::addmm", "aten::mm", "aten::add_"} <= names
    assert "test_coexecution.py" in next(iter(step.graph.operations())).site[0]
    assert "3" in str(report)


def test_a_with_block_is_an_iteration() -> None:
    iteration = coexecute()
    for _ in range(2):
        with iteration:
            assert (torch.ones(2) + 1).sum().item() == 4
    assert coexecute.report(iteration).iterations == 2


def test_a_method_is_a_step() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.total = torch.zeros(())

        @coexecute
        def step(self, x: float) -> float:
            self.total += x
            return self.total.item()

    trainer = Trainer()
    assert [trainer.step(1.0), trainer.step(2.0)] == [1.0, 3.0]
    assert coexecute.report(trainer.step).iterations == 2


def test_a_step_that_is_no_function_is_refused() -> None:
    with pytest.raises(InputError, match="function"):
        coexecute(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="@coexecute"):
        coexecute.report(print)
