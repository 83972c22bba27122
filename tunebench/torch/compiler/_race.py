"""Race of a graph with tuned kernels against the same graph compiled by torch alone."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["Race", "Raced", "time_in_turn", "timed"]

FEWEST_ROUNDS, MOST_ROUNDS = 3, 41
LONGEST_S = 5.0
"""A race ends after `MOST_ROUNDS`, or after this time and `FEWEST_ROUNDS`."""

Way = Literal["tunebench", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Result of a race.

    Attributes:
        us: Median time of a step by each implementation in microseconds; for training, forward and backward.
        ratio: Median over the rounds of torch's time divided by that of tuned kernels.
    """

    us: Mapping[Way, float]
    ratio: float

    @property
    def winner(self) -> Way:
        """The faster implementation."""
        return "tunebench" if self.ratio > 1 else "torch"

    @property
    def reason(self) -> str:
        """Why the winner runs the graph."""
        return f"in this model torch.compile takes {self.ratio:.2f} times as long"


class Raced:
    """A compiled graph that races against another one at one of its calls, and then runs by the faster.

    The results and effects of that call are those of the faster one alone.

    Args:
        ours: The graph with tuned kernels.
        by_torch: Compiles the graph by torch alone for some arguments, when it races.
        mutated: Places of inputs that the graph changes.
        report: Receives the result.
        after_s: Seconds that the graph must have run before; with 0 it races at its first call.
    """

    def __init__(
        self,
        ours: Callable[..., Any],
        by_torch: Callable[[Sequence[Any]], Callable[..., Any]],
        mutated: Collection[int],
        report: Callable[[Race], None],
        after_s: float = 0.0,
    ) -> None:
        self._ours, self._by_torch = ours, by_torch
        self._mutated, self._report, self._after_s = mutated, report, after_s
        self._winner: Callable[..., Any] | None = None
        self._lock, self._calls = threading.Lock(), itertools.count()
        self._due = math.inf if after_s else 0.0
        """Number of calls before the race."""

    def race_next(self) -> None:
        """Race at the next call."""
        self._due = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph."""
        if self._winner is None:
            if _is_captured(arguments):
                return self._ours(*arguments)
            call = next(self._calls)
            if call == 1 and self._due == math.inf:  # the first call may still compile
                return self._timed(arguments)
            if call < self._due:
                return self._ours(*arguments)
            with self._lock:
                if self._winner is None:
                    self._winner = self._ours = self._won_or_ours(arguments)
        return self._winner(*arguments)

    def _timed(self, arguments: Sequence[Any]) -> Any:
        """Run the graph, and note at which call it will have run long enough."""
        results: list[Any] = []
        taken_us = timed(_device_of(arguments), lambda: results.append(self._ours(*arguments)))
        self._due = min(self._due, 2 + self._after_s * 1e6 / max(taken_us, 1.0))
        return results[0]

    def _won_or_ours(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the faster implementation, or the one with kernels if memory is short for a race."""
        try:
            return self._won(arguments)
        except torch.OutOfMemoryError:
            return self._ours

    def _won(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the faster implementation."""
        device = _device_of(arguments)
        ways: dict[Way, Callable[..., Any]] = {"tunebench": self._ours, "torch": self._by_torch(arguments)}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            calls = {way: self._step(run, arguments) for way, run in ways.items()}
            times = time_in_turn(calls, device, (FEWEST_ROUNDS, MOST_ROUNDS), LONGEST_S)
        race = Race(
            us={way: statistics.median(samples_us) for way, samples_us in times.items()},
            ratio=statistics.median(b / a for a, b in zip(times["tunebench"], times["torch"], strict=True)),
        )
        self._report(race)
        return ways[race.winner]

    def _step(self, run: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], None]:
        """Return a step on copies of changed inputs: forward, and backward if inputs need gradients."""
        copies = [
            argument.detach().clone().requires_grad_(argument.requires_grad)
            if index in self._mutated
            else argument
            for index, argument in enumerate(arguments)
        ]
        needed = [copy for copy in copies if isinstance(copy, Tensor) and copy.requires_grad]

        def step() -> None:
            results = tree_leaves(run(*copies))
            if not torch.is_grad_enabled() or not needed:
                return
            roots = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
            if roots:
                torch.autograd.grad(
                    roots, needed, [torch.ones_like(root) for root in roots], allow_unused=True
                )

        return step


def _device_of(arguments: Sequence[Any]) -> torch.device:
    tensors = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _is_captured(arguments: Sequence[Any]) -> bool:
    is_cuda = any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments)
    return is_cuda and torch.cuda.is_current_stream_capturing()


def time_in_turn(
    calls: Mapping[Any, Callable[[], Any]],
    device: torch.device,
    rounds: tuple[int, int],
    longest_s: float,
    warm_up: int = 1,
) -> dict[Any, list[float]]:
    """Return the times in microseconds of several calls, which alternate.

    Args:
        calls: The calls by name.
        device: Their device.
        rounds: Fewest and most timed runs of each call.
        longest_s: Seconds after which no round starts, except the fewest rounds.
        warm_up: Untimed runs of each call.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    times: dict[Any, list[float]] = {name: [] for name in calls}
    began, done, (fewest, max_rounds) = time.monotonic(), 0, rounds
    while done < fewest or (done < max_rounds and time.monotonic() - began <= longest_s):
        for name, call in calls.items():
            times[name].append(timed(device, call))
        done += 1
    return times


def timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Run a call and return its microseconds: wall time on a CPU, time on the current stream on a GPU."""
    if device.type != "cuda":
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began) / 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
