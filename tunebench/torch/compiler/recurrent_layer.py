"""Recurrent layers in traced graphs: dropout between them, and an LSTM as one operation of oneDNN per layer.

torch traces a stack of recurrent layers without the dropout between them, and an LSTM that needs gradients as
the operations of all its time steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from tunebench.errors import InputError

__all__ = ["divide_recurrent_layers", "is_fused", "keep_workspaces", "recurrent_calls", "recurrent_layer"]

_KINDS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def recurrent_calls(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the calls of stacks of recurrent layers in a graph of Dynamo.

    Args:
        graph: The graph, before AOTAutograd.
    """
    return [node for kind in _KINDS for node in graph.graph.find_nodes(op="call_function", target=kind)]


def divide_recurrent_layers(graph: fx.GraphModule) -> None:
    """Replace stacks of recurrent layers in a graph of Dynamo by single layers with dropout between them.

    Args:
        graph: The graph, before AOTAutograd.

    Raises:
        InputError: A stack of packed sequences has dropout between its layers.
    """
    for node in recurrent_calls(graph):
        if not isinstance(node.args[-1], bool) or not isinstance(node.args[3], bool):
            raise InputError("dropout between recurrent layers of packed sequences is not traced")
        node.args = (node.target, *node.args)
        node.target = _layers
    graph.recompile()


def is_fused(graph: fx.GraphModule) -> bool:
    """Return whether a divided graph has LSTM layers, which oneDNN may run as one operation each.

    Args:
        graph: What `divide_recurrent_layers` changed.
    """
    stacks = graph.graph.find_nodes(op="call_function", target=_layers)
    return any(node.args[0] is torch.lstm for node in stacks)


def _layers(
    kind: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    states: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run a stack layer by layer; arguments are those of torch's functions."""
    states = (states,) if isinstance(states, Tensor) else tuple(states)
    directions = 2 if bidirectional else 1
    of_layer = len(params) // layers
    fused = kind is torch.lstm and _onednn_runs(x, states, params)
    x = x.transpose(0, 1) if batch_first else x
    last: list[tuple[Tensor, ...]] = []
    for index in range(layers):
        now = tuple(state[directions * index : directions * (index + 1)] for state in states)
        weights = params[of_layer * index : of_layer * (index + 1)]
        if fused:
            x, *after = _fused_layer(x, now, weights, has_biases, directions)
        else:
            before = now if kind is torch.lstm else now[0]
            x, *after = kind(x, before, weights, has_biases, 1, 0.0, train, bidirectional, False)
        last.append(tuple(after))
        if index < layers - 1:
            x = functional.dropout(x, dropout, train)
    return (
        x.transpose(0, 1) if batch_first else x,
        *(torch.cat(parts) for parts in zip(*last, strict=True)),
    )


def _onednn_runs(x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Return whether eager torch runs an LSTM by oneDNN in f32."""
    return (
        torch._C._get_mkldnn_enabled()
        and all(
            tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in (x, *states, *params)
        )
        and states[0].shape[2] == states[1].shape[2]
        and x.numel() > 0
    )


def _fused_layer(
    x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, directions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of an LSTM by oneDNN, in each direction."""
    x = x.contiguous()
    results = []
    for direction in range(directions):
        count = len(params) // directions
        weights = list(params[direction * count : (direction + 1) * count])
        if not has_biases:
            weights += [x.new_zeros(weights[0].shape[0]) for _ in range(2)]
        before = [state[direction : direction + 1].contiguous() for state in states]
        width = before[0].shape[2]
        results.append(
            torch.ops.aten.mkldnn_rnn_layer.default(
                x, *weights, *before, direction > 0, [], _LSTM, width, 1, has_biases, False, False, True
            )[:3]
        )
    outputs, hidden, cells = zip(*results, strict=True)
    return outputs[0] if directions == 1 else torch.cat(outputs, -1), torch.cat(hidden), torch.cat(cells)


_LSTM = 2
"""oneDNN's number of the kind of layer."""


def recurrent_layer(*args: Any) -> tuple[Tensor, ...]:
    """Run a layer as eager torch does in training, with the workspace that its gradient reads.

    oneDNN's operator returns that workspace only where torch records gradients, which compiled graphs do not.

    Args:
        args: Arguments of ``aten::mkldnn_rnn_layer``.

    Returns:
        Hidden states of all times, the last hidden state, the last cell state, and the workspace.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        results: tuple[Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer.default(*args)
    return results


def keep_workspaces(graph: fx.Graph) -> None:
    """Make the LSTM layers of a joint graph return their workspaces.

    Args:
        graph: The graph that AOTAutograd traced; the workspaces in its `meta` get their true sizes.
    """
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    for node in graph.find_nodes(op="call_function", target=layer):
        workspace = _workspace(node)
        node.target = recurrent_layer
        node.meta["val"] = (*node.meta["val"][:_WORKSPACE], workspace)
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == _WORKSPACE:
                user.meta["val"] = workspace


_WORKSPACE = 3
"""Index of the workspace among the results."""


def _workspace(node: fx.Node) -> Tensor:
    """Return a tensor without data of the size of a layer's workspace, which a run of the layer shows."""
    traced = fx.map_arg(node.args, lambda argument: argument.meta["val"])
    mode = detect_fake_mode(traced)
    assert mode is not None
    with unset_fake_temporarily():
        zeros = tree_map_only(Tensor, lambda value: torch.zeros(value.shape, dtype=value.dtype), traced)
        size_bytes = recurrent_layer(*zeros)[_WORKSPACE].numel()
    with mode:
        return torch.empty(size_bytes, dtype=torch.uint8)
