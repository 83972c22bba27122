"""Preparation of judged launches: memory that all examinations share, and when sampling ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunebench.device import find
from tunebench.executor._prepared_launches import (
    ARENA_BYTES,
    MEDIAN_ERROR,
    MOST_BYTES,
    LaunchMemory,
    PreparedLaunches,
)
from tunebench.measure.arena import slot_bytes
from tunebench.measure.fresh_inputs import FreshInputs
from tunebench.measure.timing import Protocol, median_interval
from tunebench.workloads import parse


class Process:
    """A measuring process whose launches take no time."""

    spent_us = 0.0

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Return samples of 1 us."""
        return {"us": [1.0] * len(request["slots"])}, 1.0


def memory(text: str, cache: str = "warm") -> LaunchMemory:
    fresh = FreshInputs(parse(text), np.random.default_rng(3))
    return LaunchMemory(fresh, find("cpu"), Protocol(cache=cache))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [8, 1024, 4096])
def test_memory_has_at_least_two_slots_and_no_more_than_needed(rows: int) -> None:
    slots = memory(f"softmax:rows={rows},cols=512,dtype=f32")
    nbytes = slot_bytes(slots.fresh.workload)
    assert slots.arena.slots >= 2
    assert slots.arena.slots * nbytes <= max(2 * nbytes, MOST_BYTES)
    if nbytes < ARENA_BYTES // 4:
        assert slots.arena.slots * nbytes <= ARENA_BYTES


def test_examinations_share_memory_and_launches_have_new_inputs() -> None:
    shared = memory("softmax:rows=40,cols=65,dtype=f32")
    values = set()
    for _ in range(2):
        launches = PreparedLaunches(shared, Process(), np.random.default_rng(5))  # type: ignore[arg-type]
        assert launches.arena is shared.arena
        for slot in launches.prepare(launches.batch):
            values.add(launches.arena.inputs(slot)["x"].tobytes())
            assert np.isnan(launches.arena.outputs(slot)["y"]).all()
    assert len(values) == 2 * launches.batch


@pytest.mark.parametrize(("spread", "most"), [(0.001, 30), (0.05, 100), (1.0, 200)])
def test_sampling_ends_when_the_median_is_known(spread: float, most: int) -> None:
    rng, samples_us = np.random.default_rng(7), list[float]()
    launches = PreparedLaunches(memory("softmax:rows=8,cols=8,dtype=f32"), Process(), rng)  # type: ignore[arg-type]

    def take_batch() -> None:
        # One in ten takes five times as long: the error of the mean stays large.
        samples_us.append(float(rng.normal(100, 100 * spread)) * (5 if rng.random() < 0.1 else 1))

    launches.sample(Protocol(min_samples=30, max_samples=200, max_s=60), samples_us, take_batch)
    median_us, (low_us, high_us) = median_interval(samples_us)
    assert 30 <= len(samples_us) <= most
    assert len(samples_us) == 200 or high_us - low_us <= 2 * MEDIAN_ERROR * median_us
