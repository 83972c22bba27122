"""Times of the operations of a joint graph: predicted for a device, or measured on this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tunebench.device import Device
from tunebench.graph.price import Prices
from tunebench.torch.compiler.inductor import parts_of
from tunebench.torch.compiler.translation import translate

__all__ = ["Times", "clock_s", "eager_times", "measured_times", "predicted_times"]

Times = Callable[[Sequence[fx.Node]], Sequence[float]]
"""Returns the times of calls of a graph in microseconds."""

_OPAQUE = ("aten::_cudnn_rnn_backward",)
"""Operators that read the private state of another operator: made up, it may crash the process."""

REPEATS, MOST_REPEATS = 3, 20
"""Least and most runs of an operation, of which the shortest counts."""

ENOUGH_US = 300.0
"""Time of all runs of an operation, in microseconds, from which `REPEATS` suffice: the first runs of short
ones are not typical, and a recurrent network has hundreds of each kind."""


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
    clock = clock_s(spare_core=not on_gpu)
    samples: list[float] = []
    while len(samples) < REPEATS or (len(samples) < MOST_REPEATS and sum(samples) < ENOUGH_US):
        began = clock()
        try:
            node.target(*args, **kwargs)
        except RuntimeError:
            return None
        if on_gpu:
            torch.cuda.synchronize()
        samples.append((clock() - began) * 1e6)
    return max(0.0, min(samples) - _reading_us(clock))


def clock_s(*, spare_core: bool = True) -> Callable[[], float]:
    """Return a clock in seconds: that of this thread, which does not count other programs, or of the wall.

    Args:
        spare_core: Whether nothing else that is to be counted needs the core of this thread, such as a GPU
            that it waits for, or a copy by another thread.
    """
    return time.thread_time if spare_core and torch.get_num_threads() == 1 else time.perf_counter


def _reading_us(clock: Callable[[], float]) -> float:
    """Return the time of reading a clock, about a third of the time of a small call."""
    return 1e6 * min(-clock() + clock() for _ in range(3))


def _is_traced(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _value(node: fx.Node) -> Any:
    """Return the traced value of a node of AOTAutograd's graph, or of Dynamo's."""
    return node.meta.get("val", node.meta.get("example_value"))


def _described(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    traced = _value(value)
    if not isinstance(traced, Tensor):
        return traced
    return tuple(traced.shape), traced.stride(), traced.dtype, traced.device


def _ones(value: Any) -> Any:
    """Return ones for traced tensors of floating type, and zeros for those of another type."""
    return tree_map_only(Tensor, _made_up, _value(value)) if isinstance(value, fx.Node) else value


def _made_up(traced: Tensor) -> Tensor:
    tensor = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)
    return tensor.fill_(1) if tensor.is_floating_point() else tensor.zero_()


def _bytes(node: fx.Node) -> int:
    """Return the bytes that a call reads and writes."""
    values = [source.meta.get("val") for source in node.all_input_nodes] + [node.meta.get("val")]
    leaves = tree_leaves(values)
    return sum(leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor))


def eager_times(nodes: Sequence[fx.Node]) -> list[float | None]:
    """Return the times of calls with their gradients by eager torch in microseconds, each measured alone.

    Args:
        nodes: Calls of functions in a graph of Dynamo, before AOTAutograd, on tensors of a device in this
            machine.

    Returns:
        A time for each; none if a call cannot run alone.
    """
    with torch.enable_grad():
        return [_eager_us(node) for node in nodes]


def _eager_us(node: fx.Node) -> float | None:
    """Return the time of a call of Dynamo's graph and its gradient on made-up tensors."""

    def trained(value: Any) -> Any:
        return tree_map_only(Tensor, _with_gradient, _value(value)) if _is_traced(value) else value

    args, kwargs = tree_map(trained, (node.args, node.kwargs), is_leaf=_is_traced)
    return _shortest_us(node.target, args, kwargs)


def _with_gradient(traced: Tensor) -> Tensor:
    return _made_up(traced).requires_grad_(traced.requires_grad)


def _shortest_us(call: Any, args: Any, kwargs: Any) -> float | None:
    """Return the shortest time of a few runs of a call and its gradient; none if it cannot run."""
    sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    trained = [source for source in sources if source.requires_grad]
    on_gpu = any(source.is_cuda for source in sources)
    clock = clock_s(spare_core=not on_gpu)
    samples = []
    for _ in range(REPEATS):
        began = clock()
        try:
            results = call(*args, **kwargs)
        except RuntimeError:
            return None
        if on_gpu:
            torch.cuda.synchronize()
        between = clock()
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        resumed = clock()
        if outputs and trained:
            torch.autograd.grad(outputs, trained, gradients, allow_unused=True)
        if on_gpu:
            torch.cuda.synchronize()
        samples.append((between - began + clock() - resumed) * 1e6)
    return min(samples)
