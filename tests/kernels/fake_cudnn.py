"""A stand-in for `cudnn` of nvidia-cudnn-frontend that computes graphs on tensors of the processor.

Steps must come in the order that the package requires. Which arguments its operations take is checked by the
package itself, where it is installed.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tunebench.kernels.common import cudnn_graph

__all__ = ["PLANS", "install", "log"]

PLANS = 3
log: list[int] = []
"""Rank of each executed plan."""
handles: set[int] = set()
excluded: list[str] = []
"""Names of numerical notes of the last graph."""

data_type = enum.Enum("data_type", ["FLOAT", "HALF", "BFLOAT16"])
heur_mode = enum.Enum("heur_mode", ["A", "FALLBACK"])
numerical_note = enum.Enum("numerical_note", ["DOWN_CONVERT_INPUTS", "TENSOR_CORE"])
diagonal_alignment = enum.Enum("diagonal_alignment", ["TOP_LEFT", "BOTTOM_RIGHT"])


class Node:
    """A tensor of a graph: an input, or a function of others."""

    def __init__(self, value: Callable[[dict[Node, Any]], Any]) -> None:
        self.value, self.properties = value, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def set_property(value: Any) -> Node:
            self.properties[name.removeprefix("set_")] = value
            return self

        return set_property


def create_handle() -> int:
    handles.add(len(handles) + 1)
    return len(handles)


def destroy_handle(handle: int) -> None:
    handles.discard(handle)


def set_stream(handle: int, stream: int) -> None:
    assert (handle in handles, stream) == (True, 7)


class pygraph:  # noqa: N801 (the package's name)
    """A graph; `steps` are those taken."""

    def __init__(self, *, intermediate_data_type: Any, compute_data_type: Any, handle: Any) -> None:
        assert (intermediate_data_type, compute_data_type) == (data_type.FLOAT, data_type.FLOAT)
        self.handle, self.steps = handle, list[str]()
        excluded.clear()

    def tensor(self, *, dim: list[int], stride: list[int], data_type: Any, name: str) -> Node:
        node = Node(lambda pack: pack[node].float())
        node.properties = {"dim": dim, "stride": stride, "data_type": data_type}
        return node

    def conv_fprop(
        self,
        *,
        image: Node,
        weight: Node,
        pre_padding: list[int],
        post_padding: list[int],
        stride: list[int],
        dilation: list[int],
    ) -> Node:
        assert pre_padding == post_padding

        def value(pack: dict[Node, Any]) -> Any:
            x, w = image.value(pack), weight.value(pack)
            return torch.conv2d(x, w, None, stride, pre_padding, dilation, x.shape[1] // w.shape[1])

        return Node(value)

    def sdpa(
        self,
        *,
        q: Node,
        k: Node,
        v: Node,
        attn_scale: float,
        generate_stats: bool,
        diagonal_alignment: Any = None,
        diagonal_band_right_bound: int | None = None,
    ) -> tuple[Node, Node]:
        assert generate_stats
        assert (diagonal_alignment is None) == (diagonal_band_right_bound is None)

        def scores(pack: dict[Node, Any]) -> Any:
            queries, keys = q.value(pack), k.value(pack)
            s = attn_scale * queries @ _of_heads(keys, queries).transpose(-2, -1)
            if diagonal_alignment is not None:
                offset = s.shape[-1] - s.shape[-2] if diagonal_alignment.name == "BOTTOM_RIGHT" else 0
                hidden = torch.ones(s.shape[-2:]).triu(offset + (diagonal_band_right_bound or 0) + 1).bool()
                s = s.masked_fill(hidden, -torch.inf)
            return s

        o = Node(lambda pack: scores(pack).softmax(-1) @ _of_heads(v.value(pack), q.value(pack)))
        return o, Node(lambda pack: scores(pack).logsumexp(-1, keepdim=True))

    def mul(self, *, a: Node, b: Node) -> Node:
        return Node(lambda pack: a.value(pack) * b.value(pack))

    def add(self, *, a: Node, b: Node) -> Node:
        return Node(lambda pack: a.value(pack) + b.value(pack))

    def relu(self, *, input: Node) -> Node:  # noqa: A002 (the package's name)
        return Node(lambda pack: input.value(pack).relu())

    def gelu(self, *, input: Node) -> Node:  # noqa: A002
        return Node(lambda pack: torch.nn.functional.gelu(input.value(pack)))

    def swish(self, *, input: Node) -> Node:  # noqa: A002
        return Node(lambda pack: torch.nn.functional.silu(input.value(pack)))

    def validate(self) -> None:
        self.steps.append("validate")

    def build_operation_graph(self) -> None:
        assert self.steps == ["validate"]
        self.steps.append("build")

    def create_execution_plans(self, heuristics: list[Any]) -> None:
        assert self.steps == ["validate", "build"]
        assert heuristics
        self.steps.append("plans")

    def deselect_workspace_greater_than(self, workspace_limit: int) -> None:
        assert self.steps[-1] == "plans"
        assert workspace_limit > 0

    def deselect_numeric_notes(self, notes: list[Any]) -> None:
        assert self.steps[-1] == "plans"
        excluded.extend(note.name for note in notes)

    def check_support(self) -> None:
        assert self.steps[-1] == "plans"
        self.steps.append("supported")

    def get_execution_plan_count(self) -> int:
        return PLANS

    def build_plan_at_index(self, index: int) -> None:
        assert self.steps[-1] == "supported"
        assert index < PLANS
        self.steps.append(f"plan {index}")

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return 64 * index

    def execute_plan_at_index(self, tensor_dict: Any, workspace: Any, *, index: int, handle: Any) -> None:
        assert self.steps[-1] == f"plan {index}"
        assert handle == self.handle
        assert workspace.numel() >= 64 * index
        for node, tensor in tensor_dict.items():
            assert (list(tensor.shape), list(tensor.stride())) == (
                node.properties["dim"],
                node.properties["stride"],
            )
            if node.properties.get("output"):
                tensor.copy_(node.value(tensor_dict))
        log.append(index)


def _of_heads(keys: Any, queries: Any) -> Any:
    return keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans import this module in place of `cudnn`, on torch's stream 7 of a device of the processor."""
    monkeypatch.setitem(sys.modules, "cudnn", sys.modules[__name__])
    monkeypatch.setattr(cudnn_graph, "_current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cudnn_graph, "_stream_of", lambda device: 7)
    log.clear()
