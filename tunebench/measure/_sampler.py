"""Samples of one configuration on a GPU: the flush, the cover, batches, and the clock.

A sample is the time between two events around the launches of one run. Before it the last-level cache is
overwritten (cold), or the same launches run without being timed (warm). Either keeps the device busy while
the host enqueues what is timed: otherwise the device would wait for the host, and the wait would be timed.
Runs of a few microseconds are timed in batches where the cache may be warm; a batch cannot be flushed.

Source: the rules follow NVBench (NVIDIA, "NVBench: benchmark options"): the flush, the batches, and the
discarding of samples taken at a low clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tunebench.measure._clock import Clock

__all__ = ["FLUSHED_CACHES", "Flush", "Launcher", "Sampler", "Timing"]

FLUSHED_CACHES = 2
"""Times the last-level cache that is overwritten before a cold sample."""

SHORT_US = 20.0
"""Runs shorter than this are near the resolution of events: batched if the cache is warm, noted if cold."""
BATCH_US = 400.0
"""How long a batch of short runs takes."""
MOST_IN_BATCH = 1000
RESOLUTION_US = 0.5
"""Source: CUDA Driver API, cuEventElapsedTime: "a resolution of approximately 0.5 microseconds"."""
LOWEST_CLOCK = 0.75
"""Samples taken below this share of the highest clock are discarded."""
RECOVERY_S = 0.05
"""Pause for a clock that heat or power holds down; one that is low without a reason needs work, not rest."""
MOST_DISCARDED = 20
"""So many samples of one configuration are discarded; then the clock is taken as it is, and that is told."""
MOST_COVERS = 64
"""Most repetitions of what keeps the device busy while the host enqueues."""


class Flush(NamedTuple):
    """Memory to overwrite before each sample, larger than the last-level cache."""

    address: int
    nbytes: int


class Timing(NamedTuple):
    """How long work took.

    Attributes:
        device_us: Between the events around it, on the device.
        host_us: To enqueue it, events included, on the host.
    """

    device_us: float
    host_us: float


class Launcher(Protocol):
    """What can be asked of a device; `tunebench.measure._gpu.Gpu` says what each method does."""

    def launch(self, launches: Sequence[Any]) -> None:
        """Enqueue launches."""

    def graph(self, launches: Sequence[Any], count: int) -> Any:
        """Record launches `count` times over."""

    def replay(self, graph: Any) -> None:
        """Enqueue a graph."""

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Enqueue filling memory."""

    def time(self, before: Callable[[], None], work: Callable[[], None]) -> Timing:
        """Time work on the device."""


class Sampler:
    """Takes samples of one run, made of one or several launches.

    Args:
        gpu: Where it runs.
        clock: Clocks of that GPU.
        launches: One run.
        flush: What to overwrite before each sample; None leaves the cache warm.
        max_clock_mhz: Highest clock of the device.
    """

    def __init__(
        self,
        gpu: Launcher,
        clock: Clock,
        launches: tuple[Any, ...],
        *,
        flush: Flush | None,
        max_clock_mhz: float,
    ) -> None:
        self._gpu, self._clock = gpu, clock
        self._lowest_mhz = LOWEST_CLOCK * max_clock_mhz
        self._clocks_mhz: list[float] = []
        self._throttled_by: set[str] = set()
        self._discarded = self._slow = 0
        self._runs = 1
        self._work: Callable[[], None] = lambda: gpu.launch(launches)
        if flush is None:
            self._before = self._work
            cover = first = gpu.time(self._before, self._work)
            if first.device_us < SHORT_US:
                self._runs = min(MOST_IN_BATCH, math.ceil(BATCH_US / max(first.device_us, RESOLUTION_US)))
                graph = gpu.graph(launches, self._runs)
                self._before = self._work = lambda: gpu.replay(graph)
                cover = first = gpu.time(self._before, self._work)
        else:
            self._before = lambda: gpu.fill(flush.address, 0, flush.nbytes)
            cover = gpu.time(_nothing, self._before)
            first = gpu.time(self._before, self._work)
        needed = 2 * first.host_us / max(cover.device_us, RESOLUTION_US)
        self._covers = max(1, min(MOST_COVERS, math.ceil(needed)))

    def _cover(self) -> None:
        for _ in range(self._covers):
            self._before()

    def sample_us(self) -> float:
        """Return the time of one run, in microseconds, taken at a sufficient clock if the device has one."""
        while True:
            sample = self._gpu.time(self._cover, self._work).device_us / self._runs
            mhz, reasons = self._clock.sm_mhz(), self._clock.throttled_by()
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

    def conditions(self, samples_us: tuple[float, ...]) -> dict[str, Any]:
        """Return what else is to be known: clocks, what held them down, power, resolution, batches."""
        facts: dict[str, Any] = self._clock.surroundings()
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


def _nothing() -> None:
    """Enqueue nothing."""
