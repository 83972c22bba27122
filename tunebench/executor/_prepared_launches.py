"""Launches that a judge prepares: on inputs that are new to the measuring process, with caches in one state.

Finalists and baselines run under these conditions, so that their times are comparable: inputs in the same
shared memory, written by the judge while the measuring process is stopped, and caches that the judge flushed
(docs/decisions/0106-baselines-are-timed-by-the-judge.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.executor._judged_process import JudgedProcess, Wrong
from tunebench.measure.arena import SlotArena, slot_bytes
from tunebench.measure.fresh_inputs import FreshInputs
from tunebench.measure.timing import Protocol, median_interval

if TYPE_CHECKING:
    import numpy

__all__ = ["LaunchMemory", "PreparedLaunches", "launch_request", "samples_of"]

ARENA_BYTES = 32 << 20
"""Memory for slots; there are at least four in `MOST_BYTES`, and two however large the workload."""
MOST_BYTES = 128 << 20
MOST_SLOTS = 256
MOST_IN_BATCH = 8

FLUSHED_CACHES = 2
"""Bytes read before a batch with cold caches, as a multiple of the last-level cache."""

MEDIAN_ERROR = 0.02
"""Half of the interval of the median, relative to it, at which sampling stops: four rounds halve it."""


class LaunchMemory:
    """Memory for the launches of a workload, in all its examinations.

    Args:
        fresh: Inputs of the workload.
        device: The device of the measuring process.
        protocol: State of the caches before a launch.

    Attributes:
        fresh: Inputs of the workload.
        arena: Slots, which the measuring process shares.
        flushed: What is read to flush the caches; empty on a GPU, where the measuring process flushes them.
    """

    def __init__(self, fresh: FreshInputs, device: Device, protocol: Protocol) -> None:
        self.fresh = fresh
        nbytes = slot_bytes(fresh.workload)
        slots = max(2, min(4, MOST_BYTES // nbytes), ARENA_BYTES // nbytes)
        self.arena = SlotArena(fresh.workload, min(MOST_SLOTS, slots))
        flushes = device.kind == "cpu" and protocol.cache == "cold"
        self.flushed = np.ones(FLUSHED_CACHES * device.l2_bytes // 8 if flushes else 0)


class PreparedLaunches:
    """Launches of a measuring process on slots of shared memory.

    Args:
        memory: The memory.
        process: The measuring process.
        rng: All choices; secret.

    Attributes:
        arena: The slots.
        batch: Number of timed launches for which inputs are prepared and caches flushed at once.
        flushes: Whether the judge flushes the caches.
    """

    def __init__(self, memory: LaunchMemory, process: JudgedProcess, rng: numpy.random.Generator) -> None:
        self._fresh, self._process, self._rng = memory.fresh, process, rng
        self.arena, self._flushed = memory.arena, memory.flushed
        self.batch = min(MOST_IN_BATCH, self.arena.slots)
        self.flushes = self._flushed.size > 0
        self._latest: int | None = None

    def open(self) -> None:
        """Hand over the memory, and wait until the measuring process has loaded what it is to run."""
        for slot in range(self.arena.slots):
            self._fresh.write_fixed(self.arena.inputs(slot))
        self._process.open(self.arena)

    def prepare(self, count: int, changed: Sequence[bool] | None = None) -> list[int]:
        """Write the inputs of launches, and poison their outputs.

        Args:
            count: Number of launches.
            changed: Which of them differ little from the launch before; None is none of them.

        Returns:
            The slot of each launch.
        """
        slots = [int(slot) for slot in self._rng.permutation(self.arena.slots)[:count]]
        for position, slot in enumerate(slots):
            inputs = self.arena.inputs(slot)
            if changed is not None and changed[position] and self._latest is not None:
                before = inputs if self._latest == slot else self.arena.inputs(self._latest)
                self._fresh.change(inputs, before)
            else:
                self._fresh.write(inputs)
            self.arena.poison(slot)
            self._latest = slot
        return slots

    def run(
        self, slots: Sequence[int], do: str, *, repeats: int = 1, flush: bool = True
    ) -> tuple[dict[str, Any], float]:
        """Flush the caches, and run launches.

        Args:
            slots: From `prepare`.
            do: ``"time"`` returns their samples; ``"launch"`` runs them alone.
            repeats: Number of launches on each slot.
            flush: Whether to flush.

        Returns:
            The reply, and the time by the judge's clock, in microseconds.
        """
        if flush:
            self._flushed.sum()
        return self._process.ask(launch_request(slots, repeats, do))

    def sample(
        self,
        protocol: Protocol,
        samples_us: Sequence[float],
        take_batch: Callable[[], object],
        is_enough: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take batches of samples until their median is known, or the protocol's time is over.

        Args:
            protocol: Number of samples, and time.
            samples_us: The samples so far, in microseconds.
            take_batch: Adds samples of a batch to them.
            is_enough: Another condition of the end.
        """
        began_s, ran_us = time.thread_time(), self._process.spent_us
        while len(samples_us) < protocol.max_samples:
            take_batch()
            spent_s = time.thread_time() - began_s + (self._process.spent_us - ran_us) / 1e6
            if len(samples_us) < protocol.min_samples or not is_enough():
                continue
            if spent_s >= protocol.max_s or _is_settled(samples_us):
                return


def _is_settled(samples_us: Sequence[float]) -> bool:
    """Return whether the interval of the median is narrow; unlike a mean, outliers hardly widen it."""
    median_us, (low_us, high_us) = median_interval(samples_us)
    return high_us - low_us <= 2 * MEDIAN_ERROR * median_us


def launch_request(slots: Sequence[int], repeats: int = 1, do: str = "launch") -> dict[str, Any]:
    """Return the request for launches on slots."""
    return {"do": do, "slots": slots, "repeats": repeats}


def samples_of(reply: Mapping[str, Any], count: int) -> list[float]:
    """Return the samples of a reply, in microseconds.

    Args:
        reply: The reply.
        count: Number of timed launches.

    Raises:
        Wrong: There are not as many samples.
    """
    samples_us = reply.get("us")
    if (
        not isinstance(samples_us, list)
        or len(samples_us) != count
        or not all(isinstance(us, float) and us < float("inf") for us in samples_us)
    ):
        raise Wrong(f"the process that runs the kernel did not return {count} samples")
    return samples_us
