"""Comparison of tuned kernels with torch inside the model, over the first calls of a group."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

__all__ = ["CALLS", "TorchComparison", "timed"]

WARM_UP = 2
"""Untimed calls of each implementation."""
ROUNDS = 9
"""Timed calls of each implementation."""

CALLS = 2 * (WARM_UP + ROUNDS)
"""Calls after which the winner is known; on a GPU, once the calls have finished."""

Way = Literal["tunebench", "torch"]
_WAYS: tuple[Way, Way] = ("tunebench", "torch")


class TorchComparison:
    """Runs a group by tuned kernels and by torch alternately, then only by the faster of the two.

    It does not wait for the GPU: CUDA events are read after they have happened. Calls captured into a CUDA
    graph run by tuned kernels, unless torch has already won.

    Attributes:
        winner: The faster implementation; None until it is known.
        ratio: Median time of torch divided by the median time of tuned kernels, once it is known.
    """

    def __init__(self) -> None:
        self.winner: Way | None = None
        self.ratio = 0.0
        self._calls = 0
        self._times: dict[Way, list[Callable[[], float | None]]] = {way: [] for way in _WAYS}
        self._lock = threading.Lock()

    def run(self, device: torch.device, ours: Callable[[], Any], by_torch: Callable[[], Any]) -> Any:
        """Run a call by the implementation whose turn it is, and return its result.

        Args:
            device: Device of the call.
            ours: Runs the call by tuned kernels.
            by_torch: Runs the call by torch.
        """
        runs: dict[Way, Callable[[], Any]] = {"tunebench": ours, "torch": by_torch}
        if self.winner is not None:
            return runs[self.winner]()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ours()
        with self._lock:
            way, is_timed = _WAYS[self._calls % 2], self._calls >= 2 * WARM_UP
            self._calls += 1
        result, took_us = timed(device, runs[way])
        if is_timed:
            self._add_time(way, took_us)
        return result

    def _add_time(self, way: Way, took_us: Callable[[], float | None]) -> None:
        """Record a time, and choose the winner once all times are known."""
        with self._lock:
            self._times[way].append(took_us)
            if self.winner is not None or any(len(found) < ROUNDS for found in self._times.values()):
                return
            known = {way: [time() for time in self._times[way][:ROUNDS]] for way in _WAYS}
            if any(us is None for found in known.values() for us in found):
                return
            medians = {way: statistics.median(us for us in known[way] if us is not None) for way in _WAYS}
            self.ratio = medians["torch"] / max(medians["tunebench"], 1e-3)
            self.winner = "tunebench" if self.ratio > 1 else "torch"
            self._times = {way: [] for way in _WAYS}


def timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, Callable[[], float | None]]:
    """Run a call; return its result and a function that returns its microseconds.

    On a CPU it is wall time; on a GPU it is time on the current stream, or None until the call has finished.
    """
    if device.type != "cuda":
        began = time.perf_counter_ns()
        result = call()
        wall_us = (time.perf_counter_ns() - began) / 1e3
        return result, lambda: wall_us
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    end.record()
    return result, lambda: float(start.elapsed_time(end)) * 1e3 if end.query() else None
