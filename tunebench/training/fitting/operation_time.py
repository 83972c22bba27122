"""Times of the operations of a joint graph: predicted for a device, or measured on this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from tunebench.device import Device
from tunebench.graph.price import Prices
from tunebench.torch.compiler.inductor import parts_of
from tunebench.torch.compiler.translation import translate

__all__ = ["Times", "measured_times", "predicted_times"]

Times = Callable[[Sequence[fx.Node]], Sequence[float]]
"""Returns the times of calls of a graph in microseconds."""

_OPAQUE = ("aten::_cudnn_rnn_backward",)
"""Operators that read the private state of another operator: made up, it may crash the process."""

REPEATS = 3
"""Runs of an operation of which the shortest counts."""


def predicted_times(module: fx.GraphModule, device: Device) -> Times:
    """Return the predicted times of the operations of a step by torch on a device.

    A measured time in the database replaces a predicted one.

    Args:
        module: The joint graph, with the descriptions of AOTAutograd.
        device: The device; it need not be in this machine.
    """

    def times(nodes: Sequence[fx.Node]) -> list[float]:
        time_us_of: dict[str, float] = {}
        prices: Prices | None = None
        for phase, part in parts_of(module).items():
            graph = translate(part.graph, "step", phase).graph
            prices = Prices(graph, device, "torch")
            time_us_of |= {node.name: prices.torch(index).us for index, node in enumerate(graph.nodes)}
        assert prices is not None
        return [
            time_us_of[node.name] if node.name in time_us_of else prices.copy_us(_bytes(node))
            for node in nodes
        ]

    return times


def measured_times(nodes: Sequence[fx.Node]) -> list[float]:
    """Return the times of operations that are measured alone; equal ones are measured once.

    An operation that cannot run alone, because its kernel expects other types than torch traced or the state
    of another operation, counts by its bytes at the mean rate of the others.

    Args:
        nodes: Calls of a graph, on tensors of a device in this machine.
    """
    time_us_of: dict[Any, float | None] = {}
    times_us = []
    threads = torch.get_num_threads()
    for node in nodes:
        key = (node.target, repr(tree_map(_described, (node.args, node.kwargs), is_leaf=_is_traced)))
        if key not in time_us_of:
            time_us_of[key] = _measured_us(node)
        times_us.append(time_us_of[key])
    if torch.get_num_threads() != threads:  # Numba's kernels may share torch's OpenMP runtime
        torch.set_num_threads(threads)
    rated = [(us, _bytes(node)) for us, node in zip(times_us, nodes, strict=True) if us is not None]
    us_per_byte = sum(us for us, _ in rated) / max(1, sum(nbytes for _, nbytes in rated))
    return [
        us_per_byte * _bytes(node) if us is None else us for us, node in zip(times_us, nodes, strict=True)
    ]


def _measured_us(node: fx.Node) -> float | None:
    """Return the shortest time of a few runs of a call; none if it cannot run."""
    if getattr(node.target, "_schema", None) is not None and node.target._schema.name in _OPAQUE:
        return None
    args, kwargs = tree_map(_ones, (node.args, node.kwargs), is_leaf=_is_traced)
    leaves = tree_leaves((args, kwargs))
    on_gpu = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
    samples = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        try:
            node.target(*args, **kwargs)
        except RuntimeError:
            return None
        if on_gpu:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - began) * 1e6)
    return min(samples)


def _is_traced(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _described(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    traced = value.meta.get("val")
    if not isinstance(traced, Tensor):
        return traced
    return tuple(traced.shape), traced.stride(), traced.dtype, traced.device


def _ones(value: Any) -> Any:
    """Return ones for a traced tensor of floating type, and zeros for one of another type."""
    if not isinstance(value, fx.Node):
        return value
    traced = value.meta.get("val")
    if not isinstance(traced, Tensor):
        return traced
    tensor = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)
    return tensor.fill_(1) if tensor.is_floating_point() else tensor.zero_()


def _bytes(node: fx.Node) -> int:
    """Return the bytes that a call reads and writes."""
    values = [source.meta.get("val") for source in node.all_input_nodes] + [node.meta.get("val")]
    leaves = tree_leaves(values)
    return sum(leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor))
