"""Times of the operations of a joint graph: predicted for a device, or measured on this one."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tunebench.device import Device
from tunebench.graph.price import Prices
from tunebench.torch.compiler.inductor import parts_of
from tunebench.torch.compiler.translation import translate

__all__ = [
    "EagerCall",
    "ThreadClock",
    "Times",
    "around_us",
    "eager_times",
    "measured_times",
    "needs_run",
    "predicted_times",
]

Times = Callable[[Sequence[fx.Node]], Sequence[float]]
"""Returns the times of calls of a graph in microseconds."""

EagerCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, and its positional and keyword arguments, which may be nodes of a graph."""

_OPAQUE = ("aten::_cudnn_rnn_backward",)
"""Operators that read the private state of another operator: made up, it may crash the process."""

REPEATS, MOST_REPEATS = 3, 9
"""Least and most runs of calls, of which the median counts."""

ENOUGH_US, LONG_US = 1e5, 1e6
"""Time of all runs in microseconds from which `REPEATS` suffice, and from which one does."""

_CACHE_BYTES = 1 << 22
"""Bytes whose writing leaves little of torch's code and data in the caches of a core."""

_STEP_OF_CALL = 3.0
"""Time that torch needs around a compiled step, over the time of a small eager step without caches."""


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


def measured_times(nodes: Sequence[fx.Node], room_bytes: float = math.inf) -> list[float]:
    """Return the times of calls that are measured in the order of their graph, as they run in a planned step.

    The calls run as generated code with a clock between them, on made-up inputs: with the caches, the
    allocations and the Python code of a step. Runs of consecutive calls are divided where their tensors take
    more memory than there is.

    A call that cannot run, because its kernel expects other types than torch traced or the state of another
    operation, counts by its bytes at the mean rate of the others.

    Args:
        nodes: Calls of a graph in its order, on tensors of a device in this machine.
        room_bytes: Bytes for the tensors of the calls; a single call may take more.
    """
    threads = torch.get_num_threads()
    # torch compiles with its dispatcher in Python, which adds some microseconds to each call.
    with torch._C._DisablePythonDispatcher():
        times_us = [time_us for part in _parts(nodes, room_bytes) for time_us in _part_us(part)]
    if torch.get_num_threads() != threads:  # Numba's kernels may share torch's OpenMP runtime
        torch.set_num_threads(threads)
    rated = [(us, _bytes(node)) for us, node in zip(times_us, nodes, strict=True) if us is not None]
    us_per_byte = sum(us for us, _ in rated) / max(1, sum(nbytes for _, nbytes in rated))
    return [
        us_per_byte * _bytes(node) if us is None else us for us, node in zip(times_us, nodes, strict=True)
    ]


def _parts(nodes: Sequence[fx.Node], room_bytes: float) -> Iterator[list[fx.Node]]:
    """Divide calls into runs of consecutive ones whose tensors fit."""
    last = {storage: index for index, node in enumerate(nodes) for storage in _storages(node)}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last |= dict.fromkeys(_storages(source), index)
    part: list[fx.Node] = []
    known: dict[Any, int] = {}
    input_bytes = live_bytes = 0
    for index, node in enumerate(nodes):
        inputs = {key: size for source in node.all_input_nodes for key, size in _storages(source).items()}
        results = _storages(node)
        new_bytes = _new_bytes(inputs | results, known)
        if part and input_bytes + live_bytes + new_bytes > room_bytes:
            yield part
            part, known, input_bytes, live_bytes = [], {}, 0, 0
        part.append(node)
        input_bytes += _new_bytes(inputs, known)  # from the start of the run to its end
        known |= dict.fromkeys(inputs.keys() - known.keys(), 0)
        live_bytes += _new_bytes(results, known)
        for key, size in results.items():
            known.setdefault(key, size)
        for key in inputs | results:
            if last[key] == index:
                live_bytes -= known[key]
                known[key] = 0
    if part:
        yield part


def _new_bytes(storages: Mapping[Any, int], known: Mapping[Any, int]) -> int:
    return sum(size for key, size in storages.items() if key not in known)


def _storages(node: fx.Node) -> dict[Any, int]:
    """Return the bytes of the memory of a traced value, by memory."""
    leaves = (leaf for leaf in tree_leaves(_value(node)) if isinstance(leaf, Tensor))
    storages = (leaf.untyped_storage() for leaf in leaves if leaf.layout == torch.strided)
    return {storage._cdata: int(storage.nbytes()) for storage in storages}


def _part_us(nodes: Sequence[fx.Node]) -> list[float | None]:
    """Return the times of consecutive calls; none for those that cannot run."""
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    inputs = [source for source in sources if source not in set(nodes)]
    leaves = tree_leaves([_value(node) for node in [*nodes, *inputs]])
    on_gpu = any(isinstance(leaf, Tensor) and leaf.device.type == "cuda" for leaf in leaves)
    clock = ThreadClock()
    reads_s: list[float] = []

    def read() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        reads_s.append(clock.now_s())

    refused = {node for node in nodes if getattr(_schema(node), "name", None) in _OPAQUE}
    run = _timed(nodes, inputs, refused, read)
    runs_us: list[list[float]] = []
    while needs_run([sum(run_us) for run_us in runs_us]):
        values = [_ones(source) for source in inputs]
        reads_s.clear()
        try:
            run(values)
        except (RuntimeError, IndexError):
            failed = nodes[len(reads_s) - 1]
            if failed in refused:  # its made-up results do not fit the memory
                raise
            refused.add(failed)
            run = _timed(nodes, inputs, refused, read)
            runs_us.clear()
            continue
        runs_us.append(_between_us(reads_s))
    reads_s.clear()
    for _ in range(9):
        read()
    reading_us = statistics.median(_between_us(reads_s))
    times_us = [max(0.0, statistics.median(samples) - reading_us) for samples in zip(*runs_us, strict=True)]
    # The sum of medians is less than the median of sums.
    total_us = statistics.median(map(sum, runs_us)) - reading_us * len(nodes)
    scale = max(0.0, total_us) / max(1e-9, sum(times_us))
    return [
        None if node in refused else scale * time_us for node, time_us in zip(nodes, times_us, strict=True)
    ]


def needs_run(totals_us: Sequence[float]) -> bool:
    """Return whether calls that took some times are run again."""
    runs, total_us = len(totals_us), sum(totals_us)
    return total_us < LONG_US and (runs < REPEATS or (runs < MOST_REPEATS and total_us < ENOUGH_US))


def _between_us(reads_s: Sequence[float]) -> list[float]:
    return [1e6 * (end - began) for began, end in itertools.pairwise(reads_s)]


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _timed(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    refused: Collection[fx.Node],
    read: Callable[[], None],
) -> Callable[[list[Any]], Any]:
    """Return generated code that makes calls and reads a clock before, between and after them.

    Args:
        nodes: The calls.
        inputs: Nodes of their inputs.
        refused: Calls that return made-up tensors instead.
        read: Reads the clock.
    """
    graph = fx.Graph()
    new = {source: graph.placeholder(f"input_{index}") for index, source in enumerate(inputs)}
    graph.call_function(read)
    for node in nodes:
        if node in refused:
            new[node] = graph.call_function(_maker(node))
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.call_function(read)
    graph.output(())
    graph.set_codegen(_BoxedCodeGen())
    forward: Callable[[list[Any]], Any] = fx.GraphModule({}, graph).forward
    return forward


def _maker(node: fx.Node) -> Callable[[], Any]:
    def made_up() -> Any:
        return _ones(node)

    return made_up


class ThreadClock:
    """Wall time without the waits of this thread for a processor, which other programs used.

    The clock runs while the thread sleeps, or waits for a device, another thread or a file. Where the system
    does not count waits for a processor, it is a clock of wall time.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def now_s(self) -> float:
        """Return the time in seconds; only differences have a meaning."""
        waited_ns = self._waited_ns()
        while True:  # the thread may wait between the two readings
            wall_s, before_ns, waited_ns = time.perf_counter(), waited_ns, self._waited_ns()
            if waited_ns == before_ns:
                return wall_s - waited_ns / 1e9

    def _waited_ns(self) -> int:
        if self._file is None:
            return 0
        # Source: Documentation/scheduler/sched-stats.rst: time running, time waiting, number of slices.
        return int(os.pread(self._file, 64, 0).split()[1])


def _is_traced(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _value(node: fx.Node) -> Any:
    """Return the traced value of a node of AOTAutograd's graph, or of Dynamo's."""
    return node.meta.get("val", node.meta.get("example_value"))


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


def eager_times(calls: Sequence[EagerCall], *, once: bool = False) -> list[float | None]:
    """Return the times of calls with their gradients by eager torch in microseconds, each measured alone.

    Args:
        calls: Calls of functions in a graph of Dynamo, before AOTAutograd, on tensors of a device in this
            machine.
        once: Whether to run each call once, without the code and data of an earlier run in the caches.

    Returns:
        A time for each; none if a call cannot run alone.
    """
    with torch._C._DisablePythonDispatcher(), torch.enable_grad():
        return [_eager_us(call, once=once) for call in calls]


def _eager_us(call: EagerCall, *, once: bool) -> float | None:
    """Return the time of a call of Dynamo's graph and its gradient on made-up tensors."""

    def trained(value: Any) -> Any:
        return tree_map_only(Tensor, _with_gradient, _value(value)) if _is_traced(value) else value

    function, *arguments = call
    args, kwargs = tree_map(trained, arguments, is_leaf=_is_traced)
    return _median_us(function, args, kwargs, once=once)


def _with_gradient(traced: Tensor) -> Tensor:
    return _made_up(traced).requires_grad_(traced.requires_grad)


def _median_us(call: Any, args: Any, kwargs: Any, *, once: bool) -> float | None:
    """Return the median time of a few runs of a call and its gradient; none if it cannot run."""
    sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    trained = [source for source in sources if source.requires_grad]
    on_gpu = any(source.is_cuda for source in sources)
    clock = ThreadClock()
    samples: list[float] = []
    while not samples or (not once and needs_run(samples)):
        for source in trained:
            source.grad = None
        began = clock.now_s()
        try:
            results = call(*args, **kwargs)
        except RuntimeError:
            return None
        if on_gpu:
            torch.cuda.synchronize()
        between = clock.now_s()
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        resumed = clock.now_s()
        if outputs and trained:
            torch.autograd.backward(outputs, gradients)  # copies gradients as a step does
        if on_gpu:
            torch.cuda.synchronize()
        samples.append((between - began + clock.now_s() - resumed) * 1e6)
    return statistics.median(samples)


def around_us() -> float:
    """Return the time that torch needs around a compiled step on a processor, in microseconds.

    It is Python code that the operations of a step leave nothing of in the caches. It is estimated by that of
    a small eager step, which is measured as often without caches.
    """
    weight = torch.ones(8, 8, requires_grad=True)
    samples = []
    clock = ThreadClock()
    with torch._C._DisablePythonDispatcher(), torch.enable_grad():
        for _ in range(MOST_REPEATS):
            torch.empty(_CACHE_BYTES, dtype=torch.uint8).fill_(1)
            began = clock.now_s()
            x = weight
            for _ in range(_LAYERS):
                x = functional.gelu(functional.linear(x, weight))
            torch.autograd.grad(x.square().mean(), weight)
            samples.append(1e6 * (clock.now_s() - began))
    return _STEP_OF_CALL * statistics.median(samples)


_LAYERS = 4
