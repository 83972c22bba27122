"""Samples of one configuration on a GPU: cache flush, latency cover, batches, and clock checks.

A sample is the time between two events around the launches of one run. Before it, either memory larger than
the last-level cache is read (cold, see `_cache_flush`), or the same launches run without being timed (warm).
Both keep the device busy while the host enqueues the timed work: otherwise the device would wait for the
host, and that wait would be timed. With a warm cache, runs of a few microseconds are timed in batches; within
a batch the cache cannot be flushed. The clock is read after the host has enqueued a sample and before the
device has finished it: an idle device has another clock.

Source: batches and discarding of samples at a low clock follow NVBench (NVIDIA, "NVBench: benchmark
options"), which flushes by overwriting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tunebench._figure import significant
from tunebench.measure._cache_flush import Flush
from tunebench.measure._clock import Clock

__all__ = ["Launcher", "Sampler", "Timing", "skipped_reason"]

SHORT_US = 20.0
"""Runs shorter than this, in microseconds, are near the resolution of events: batched, or noted if cold."""
BATCH_US = 400.0
"""Duration of a batch of short runs, in microseconds."""
MOST_IN_BATCH = 1000
SLOWER_ALONE = 3.0
"""A run alone may take this many times its time in a batch, plus `ALONE_US` for its launch."""
ALONE_US = 10.0
RESOLUTION_US = 0.5
"""Source: CUDA Driver API, cuEventElapsedTime: "a resolution of approximately 0.5 microseconds"."""
LOWEST_CLOCK = 0.75
"""Samples taken below this fraction of the highest clock are discarded."""
RECOVERY_S = 0.05
"""Pause if heat or power lowers the clock; a clock that is low without a reason needs work, not rest."""
MOST_DISCARDED = 20
"""Maximum number of discarded samples per configuration; later samples at a low clock are kept and noted."""
MOST_COVERS = 64
"""Maximum number of repetitions of the work that keeps the device busy while the host enqueues."""


class Timing(NamedTuple):
    """Duration of work.

    Attributes:
        device_us: Time between the events around it, on the device.
        host_us: Time to enqueue it, events included, on the host.
    """

    device_us: float
    host_us: float


class Launcher(Protocol):
    """Operations that a sampler needs of a device; see `tunebench.measure._gpu.Gpu` for each method."""

    def launch(self, launches: Sequence[Any]) -> None:
        """Enqueue launches."""

    def graph(self, launches: Sequence[Any], count: int) -> Any:
        """Capture launches `count` times in a graph."""

    def replay(self, graph: Any) -> None:
        """Enqueue a graph."""

    def read(self, address: int, nbytes: int) -> None:
        """Enqueue reading memory."""

    def time(
        self, before: Callable[[], None], work: Callable[[], None], during: Callable[[], None]
    ) -> Timing:
        """Time work on the device."""


class Sampler:
    """Samples of one run, which consists of one or several launches.

    Args:
        gpu: The device.
        clock: Clocks of that GPU.
        launches: One run.
        flush: Memory to read before each sample; None leaves the cache warm.
        max_clock_mhz: Highest clock of the device.
        poison: Enqueues overwriting everything that the run writes.

    Attributes:
        skipped_work: Why the times of batches are false, or None.
    """

    def __init__(
        self,
        gpu: Launcher,
        clock: Clock,
        launches: tuple[Any, ...],
        *,
        flush: Flush | None,
        max_clock_mhz: float,
        poison: Callable[[], None] = lambda: None,
    ) -> None:
        self._gpu, self._clock = gpu, clock
        self._lowest_mhz = LOWEST_CLOCK * max_clock_mhz
        self._clocks_mhz: list[float] = []
        self._throttled_by: set[str] = set()
        self._discarded = self._slow = 0
        self._runs, self._poison = 1, poison
        self._flush = flush
        self._mhz: float | None = None
        self._reasons: frozenset[str] = frozenset()
        self.skipped_work: str | None = None
        self._work: Callable[[], None] = lambda: gpu.launch(launches)
        if flush is None:
            self._before = self._work
            cover = first = gpu.time(self._then_poison, self._work, _nothing)
            if first.device_us < SHORT_US:
                self._runs = min(MOST_IN_BATCH, math.ceil(BATCH_US / max(first.device_us, RESOLUTION_US)))
                graph = gpu.graph(launches, self._runs)
                alone_us = first.device_us
                self._before = self._work = lambda: gpu.replay(graph)
                cover = first = gpu.time(self._then_poison, self._work, _nothing)
                self.skipped_work = skipped_reason(alone_us, first.device_us / self._runs)
        else:
            self._before = lambda: gpu.read(flush.address, flush.nbytes)
            # The first read of a process also loads its kernel.
            cover = gpu.time(self._before, self._before, _nothing)
            first = gpu.time(self._before, self._work, _nothing)
        needed = 2 * first.host_us / max(cover.device_us, RESOLUTION_US)
        self._covers = max(1, min(MOST_COVERS, math.ceil(needed)))

    def _cover(self) -> None:
        cold = self._flush is not None
        if cold:  # before the flush, which writes the poisoned outputs back and removes them from the cache
            self._poison()
        for _ in range(self._covers):
            self._before()
        if not cold:  # after the untimed runs, whose results a run must not find
            self._poison()

    def _then_poison(self) -> None:
        self._before()
        self._poison()

    def sample_us(self) -> float:
        """Return the time of one run in microseconds, taken at a sufficient clock if possible."""
        while True:
            sample = self._gpu.time(self._cover, self._work, self._read_clock).device_us / self._runs
            mhz, reasons = self._mhz, self._reasons
            self._throttled_by |= reasons
            slow = mhz is not None and mhz < self._lowest_mhz
            if not slow or self._discarded >= MOST_DISCARDED:
                break
            self._discarded += 1
            if reasons:
                time.sleep(RECOVERY_S)
        self._slow += slow
        if mhz is not None:
            self._clocks_mhz.append(mhz)
        return sample

    def _read_clock(self) -> None:
        self._mhz, self._reasons = self._clock.sm_mhz(), self._clock.throttled_by()

    def conditions(self, samples_us: tuple[float, ...]) -> dict[str, Any]:
        """Return the conditions of the samples: flush, clocks, throttling, power, resolution, batches.

        Args:
            samples_us: The samples, in microseconds.
        """
        facts: dict[str, Any] = self._clock.surroundings()
        if self._flush is not None:
            facts["flushed_by"] = str(self._flush)
        if self._clocks_mhz:
            facts["clock_mhz"] = statistics.median(self._clocks_mhz)
            facts["lowest_clock_mhz"] = min(self._clocks_mhz)
        if self._throttled_by:
            facts["throttled_by"] = sorted(self._throttled_by)
        if self._discarded:
            facts["discarded_samples"] = self._discarded
        if self._slow:
            facts["samples_at_low_clock"] = self._slow
        if self._runs > 1:
            facts["runs_in_a_sample"] = self._runs
        elif statistics.median(samples_us) < SHORT_US:
            facts["resolution_us"] = RESOLUTION_US
        return facts


def skipped_reason(alone_us: float, in_batch_us: float) -> str | None:
    """Return why a run is implausibly faster in a batch than alone, or None."""
    if alone_us <= SLOWER_ALONE * in_batch_us + ALONE_US:
        return None
    return (
        f"a run takes {significant(alone_us, 3)} us on poisoned outputs, but {significant(in_batch_us, 3)} "
        "us in a batch of runs: only the first of a batch does the work"
    )


def _nothing() -> None:
    """Enqueue nothing."""
