"""Which of two ways of doing the same is the faster where it is done: timed over the first calls."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

__all__ = ["CALLS", "TorchComparison"]

WARM_UP = 2
"""Calls of each way before any is timed."""
ROUNDS = 9
"""Timed calls of each way."""

CALLS = 2 * (WARM_UP + ROUNDS)
"""Calls after which it is decided; on a GPU, as soon as these have been made there."""

Way = Literal["tunebench", "torch"]
_WAYS: tuple[Way, Way] = ("tunebench", "torch")


class TorchComparison:
    """Runs a group by our kernels and by torch in turn, and in the end by whoever took less time.

    Nobody waits for a GPU: its events are read once they have happened. While calls are captured into a CUDA
    graph ours run, unless torch has already won.

    Attributes:
        winner: Who runs it from now on; None as long as that is not known.
        ratio: Median time of torch over ours, once it is known.
    """

    def __init__(self) -> None:
        self.winner: Way | None = None
        self.ratio = 0.0
        self._calls = 0
        self._times: dict[Way, list[Callable[[], float | None]]] = {way: [] for way in _WAYS}
        self._lock = threading.Lock()

    def run(self, device: torch.device, ours: Callable[[], Any], by_torch: Callable[[], Any]) -> Any:
        """Make a call in one of the two ways, and return what it gives."""
        runs: dict[Way, Callable[[], Any]] = {"tunebench": ours, "torch": by_torch}
        if self.winner is not None:
            return runs[self.winner]()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ours()
        with self._lock:
            way, is_timed = _WAYS[self._calls % 2], self._calls >= 2 * WARM_UP
            self._calls += 1
        result, took_us = (_on_stream if device.type == "cuda" else _by_clock)(runs[way])
        if is_timed:
            self._enter(way, took_us)
        return result

    def _enter(self, way: Way, took_us: Callable[[], float | None]) -> None:
        """Note a time, and decide if all are known."""
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


def _by_clock(call: Callable[[], Any]) -> tuple[Any, Callable[[], float | None]]:
    began = time.perf_counter_ns()
    result = call()
    took_us = (time.perf_counter_ns() - began) / 1e3
    return result, lambda: took_us


def _on_stream(call: Callable[[], Any]) -> tuple[Any, Callable[[], float | None]]:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    result = call()
    ended.record()

    def took_us() -> float | None:
        return float(began.elapsed_time(ended)) * 1e3 if ended.query() else None

    return result, took_us
