"""Time of a planned step as torch runs it, measured before the caller's first step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tunebench.training.fitting.operation_time import LONG_US, REPEATS, ThreadClock, needs_run

__all__ = ["GraphTimer", "StepTimes", "measured_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of a whole step in microseconds.

    Attributes:
        step_us: Median time of the planned step, with what torch does around its graphs.
        eager_us: Time of the step by eager torch. Its recurrent layers ran between planned steps. The time of
            its other operations, which were measured one by one, is scaled by that of the planned graphs over
            the sum of theirs: the eager step itself may exceed the budget.
    """

    step_us: float
    eager_us: float

    @property
    def overhead(self) -> float:
        """Time of the planned step above that of eager torch, as a fraction of it."""
        return self.step_us / self.eager_us - 1


class GraphTimer:
    """Adds the times of graphs up while their step is measured."""

    def __init__(self) -> None:
        self._clock: ThreadClock | None = None
        self._total_s = 0.0

    def __call__(self, graph: fx.GraphModule, values: list[Any]) -> Any:
        """Run a graph."""
        if self._clock is None:
            return graph(values)
        began_s = self._clock.now_s()
        results = graph(values)
        self._total_s += self._clock.now_s() - began_s
        return results

    def times_us(self, run: Callable[[], None]) -> tuple[float, float]:
        """Return the times of a step and of its graphs in microseconds."""
        self._clock, self._total_s = ThreadClock(), 0.0
        try:
            began_s = self._clock.now_s()
            run()
            return 1e6 * (self._clock.now_s() - began_s), 1e6 * self._total_s
        finally:
            self._clock = None


def measured_step(
    compiled: Callable[..., Any],
    inputs: Sequence[Any],
    changed: Collection[int],
    timer: GraphTimer,
    recurrent_times: Callable[[], Mapping[str, float]],
    *,
    graphs_us: float,
    other_us: float,
    room_bytes: int,
) -> StepTimes | None:
    """Measure a planned step on a processor a few times, with backward pass, and its eager recurrent layers.

    Parameters, gradients, hooks and random numbers of the caller stay as they are: the step reads aliases of
    the inputs, which have gradients of their own, and copies of inputs that it changes.

    Args:
        compiled: The step, as AOTAutograd compiled it.
        inputs: Its inputs.
        changed: Places of the inputs that it changes.
        timer: Timer of its graphs.
        recurrent_times: Measures recurrent layers by eager torch once, by module.
        graphs_us: Sum of the times of the operations and views of the plan, measured one by one.
        other_us: Sum of the times of the eager step's operations outside recurrent layers.
        room_bytes: Bytes of the budget that the step leaves, for copies of inputs.

    Returns:
        The times; none if the runs would take longer than `LONG_US`, if the copies do not fit, or if the
        caller would notice the runs.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if graphs_us * (REPEATS + 1) > LONG_US or not _is_safe(tensors):
        return None
    storages = [tensor.untyped_storage() for tensor in tensors]
    copied = [inputs[place].untyped_storage() for place in changed]
    shared = len({storage._cdata for storage in storages}) < len(storages)
    if any(inputs[place].requires_grad for place in changed):  # a leaf cannot be changed
        return None
    if (copied and shared) or sum(storage.nbytes() for storage in copied) > room_bytes:
        return None
    steps_us: list[float] = []
    ran_us: list[float] = []
    recurrent_us: list[float] = []
    with torch.random.fork_rng(devices=[]), torch._C._DisablePythonDispatcher(), torch.enable_grad():
        _run(compiled, _aliases(inputs, changed))  # allocates, and loads code
        while needs_run(steps_us):
            arguments = _aliases(inputs, changed)
            step_us, graph_us = timer.times_us(lambda arguments=arguments: _run(compiled, arguments))  # type: ignore[misc]
            del arguments
            steps_us.append(step_us)
            ran_us.append(graph_us)
            recurrent_us.append(sum(recurrent_times().values()))
    scale = statistics.median(ran_us) / max(1e-9, graphs_us)
    eager_us = scale * other_us + statistics.median(recurrent_us)
    return StepTimes(step_us=statistics.median(steps_us), eager_us=max(1e-9, eager_us))


def _is_safe(tensors: Sequence[Tensor]) -> bool:
    """Return whether a step on aliases of tensors leaves everything of the caller as it is."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not hooks and all(
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not isinstance(tensor, FakeTensor)
        and not is_traceable_wrapper_subclass(tensor)
        for tensor in tensors
    )


def _aliases(inputs: Sequence[Any], changed: Collection[int]) -> list[Any]:
    """Return leaves with the memory of inputs, and copies of those that a step changes."""

    def alias(place: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = value.detach()
        return (leaf.clone() if place in changed else leaf).requires_grad_(value.requires_grad)

    return [alias(place, value) for place, value in enumerate(inputs)]


def _run(compiled: Callable[..., Any], arguments: list[Any]) -> None:
    """Run a step with its backward pass, and drop its results and gradients."""
    results = tree_leaves(compiled(*arguments))
    outputs = [leaf for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
