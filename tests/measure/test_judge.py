"""The judge's pieces: memory of slots, inputs that no kernel has seen, and the test of saved work."""

from __future__ import annotations

import itertools
import os
import platform
import re
import sys

import numpy as np
import pytest

from tests.executor.conditions_worker import mapping
from tunebench.measure.arena import SlotArena, gives_huge_pages, slot_bytes
from tunebench.measure.comparison import randomization_probability
from tunebench.measure.fresh_inputs import LARGEST_CHANGE, FreshInputs
from tunebench.measure.machine import OutsideClock
from tunebench.measure.sampled import Sampled
from tunebench.measure.verify import InputSet
from tunebench.workloads import parse

SOFTMAX = parse("softmax:rows=40,cols=65,dtype=f16")
LARGE = parse("softmax:rows=1024,cols=2048,dtype=f32")


def collapses_shared_memory() -> bool:
    """Return whether the system replaces pages of shared memory by huge ones."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    is_new = version is not None and tuple(map(int, version.groups())) >= (6, 1)
    return sys.platform == "linux" and is_new and gives_huge_pages()


def test_both_processes_see_the_same_slots() -> None:
    ours = SlotArena(SOFTMAX, 3)
    theirs = SlotArena(SOFTMAX, 3, os.dup(ours.descriptor))
    ours.inputs(2)["x"][:] = 7
    theirs.outputs(1)["y"][:] = 5
    assert (theirs.inputs(2)["x"] == 7).all()
    assert not theirs.inputs(1)["x"].any()
    assert (ours.outputs(1)["y"] == 5).all()
    assert ours.bytes_of(0).size == slot_bytes(SOFTMAX)


@pytest.mark.skipif(not collapses_shared_memory(), reason="needs Linux 6.1 with huge pages")
def test_large_tensors_have_huge_pages_in_both_processes() -> None:
    ours = SlotArena(LARGE, 2)
    theirs = SlotArena(LARGE, 2, os.dup(ours.descriptor))
    for arena in (ours, theirs):
        for array in (arena.inputs(0)["x"], arena.outputs(1)["y"]):
            array[:] = 1
            assert mapping(array.ctypes.data)["huge"]
    small = SlotArena(SOFTMAX, 2)
    small.inputs(0)["x"][:] = 1
    assert not mapping(small.inputs(0)["x"].ctypes.data)["huge"]


def test_memory_of_slots_is_released() -> None:
    arena = SlotArena(LARGE, 2)
    descriptor, address = arena.descriptor, arena.bytes_of(0).ctypes.data
    assert mapping(address)["file"] == "/memfd:tunebench (deleted)"
    del arena
    assert mapping(address)["file"] == ""
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_cannot_be_shrunk_under_the_judge() -> None:
    arena = SlotArena(SOFTMAX, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)


def test_write_past_an_output_is_seen_until_it_is_poisoned_again() -> None:
    arena = SlotArena(SOFTMAX, 2)
    arena.poison(0)
    assert np.isnan(arena.outputs(0)["y"]).all()
    assert arena.overrun(0) is None
    arena.bytes_of(0)[slot_bytes(SOFTMAX) - 65] = 0
    assert arena.overrun(0) == "y"
    arena.poison(0)
    assert arena.overrun(0) is None


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=40,cols=65,dtype=f32",
        "softmax:rows=1,cols=5000,dtype=f32",
        "gemm:m=33,n=48,k=64,dtype=f32,epilogue=bias",
        "layernorm:rows=64,cols=32,dtype=f16",
        "attention:batch=1,heads=2,seq_q=32,seq_k=32,head_dim=16,dtype=f16",
    ],
)
def test_no_row_of_new_inputs_was_there_before(text: str) -> None:
    workload = parse(text)
    fresh = FreshInputs(workload, np.random.default_rng(3))
    arena = SlotArena(workload, 2)
    rows: dict[str, set[bytes]] = {}
    for launch in range(8):
        fresh.write(arena.inputs(launch % 2))
        for name, array in arena.inputs(launch % 2).items():
            new = {row.tobytes() for row in array.reshape(-1, array.shape[-1])}
            assert not new & rows.setdefault(name, set()), name
            rows[name] |= new
            assert abs(float(array.astype(np.float64).mean())) < 1
            assert np.isfinite(array.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "e4m3"])
def test_elements_of_new_inputs_are_new_numbers_of_the_same_magnitude(dtype: str) -> None:
    workload = parse(f"gemm:m=48,n=64,k=64,dtype={dtype}")
    fresh = FreshInputs(workload, np.random.default_rng(3))
    arena = SlotArena(workload, 1)
    numbers = np.concatenate([draw["a"].reshape(-1) for draw in fresh._draws]).astype(np.float64)
    fresh.write(arena.inputs(0))
    new = arena.inputs(0)["a"].reshape(-1).astype(np.float64)
    if dtype == "f32":
        assert np.isin(new, numbers).mean() <= 0.001
    assert np.isfinite(new).all()
    assert abs(new.mean()) < 0.1
    assert 0.8 < new.std() < 1.2


def test_restricted_values_stay_restricted() -> None:
    workload = parse("layernorm:rows=64,cols=32,dtype=f32,direction=backward")
    fresh = FreshInputs(workload, np.random.default_rng(3))
    arena = SlotArena(workload, 1)
    fresh.write(arena.inputs(0))
    assert arena.inputs(0)["rstd"].min() >= 0.5
    assert arena.inputs(0)["rstd"].max() <= 2


def test_indices_and_numbers_stay_as_they_are() -> None:
    workload = parse("grouped_gemm:groups=4,m=64,n=16,k=16,dtype=f32")
    fresh = FreshInputs(workload, np.random.default_rng(3))
    arena = SlotArena(workload, 2)
    for slot in range(2):
        fresh.write(arena.inputs(slot))
    assert (arena.inputs(0)["offsets"] == arena.inputs(1)["offsets"]).all()
    assert arena.inputs(0)["offsets"][-1] == 64


def test_changed_inputs_differ_in_a_small_part() -> None:
    fresh = FreshInputs(SOFTMAX, np.random.default_rng(3))
    arena = SlotArena(SOFTMAX, 2)
    fresh.write(arena.inputs(0))
    for _ in range(20):
        fresh.change(arena.inputs(1), arena.inputs(0))
        share = np.mean(arena.inputs(0)["x"] != arena.inputs(1)["x"])
        assert 0 < share <= LARGEST_CHANGE


def test_inputs_that_are_changed_again_and_again_never_stay_the_same() -> None:
    fresh = FreshInputs(SOFTMAX, np.random.default_rng(3))
    inputs = SlotArena(SOFTMAX, 1).inputs(0)
    fresh.write(inputs)
    for _ in range(1000):
        before = inputs["x"].copy()
        fresh.change(inputs, inputs)
        assert (inputs["x"] != before).any()


def test_probability_of_random_labels_is_exact() -> None:
    smaller, larger = [1.0, 2.0, 3.5], [3.0, 4.0, 5.0, 6.0]
    samples = [*smaller, *larger]
    rank = {us: position for position, us in enumerate(sorted(samples))}
    rank_sum = sum(rank[us] for us in smaller)
    choices = list(itertools.combinations(samples, 3))
    as_small = sum(sum(rank[us] for us in chosen) <= rank_sum for chosen in choices)
    assert randomization_probability(smaller, larger) == pytest.approx(as_small / len(choices))


def test_random_labels_are_rarely_improbable() -> None:
    rng = np.random.default_rng(5)
    drift = np.linspace(1, 3, 40)  # a drift, and one sample in ten that takes five times as long
    probabilities = []
    for _ in range(2000):
        us = drift * rng.choice([1.0, 5.0], 40, p=[0.9, 0.1])
        changed = rng.random(40) < 0.25
        if 0 < changed.sum() < 40:
            probabilities.append(randomization_probability(us[changed].tolist(), us[~changed].tolist()))
    for level in (0.1, 0.01):
        assert np.mean(np.array(probabilities) <= level) <= level + 3 * (level / 2000) ** 0.5


def test_equal_samples_are_no_finding() -> None:
    assert randomization_probability([1.0] * 10, [1.0] * 30) == 1.0


def test_outside_clock_reads_the_waits_of_its_own_thread_only() -> None:
    clock = OutsideClock(2)
    clock.begin([])
    sum(range(100_000))
    times = clock.times([], 1_000_000)
    assert times.wall_us == 1000
    assert times.processor_us == 0
    assert times.run_us <= 1000


def test_what_is_checked_differs_between_runs_with_equal_seeds() -> None:
    workload = parse("gemm:m=4096,n=4096,k=1024,dtype=f32")
    inputs = {t.name: np.zeros(t.shape, np.float32) for t in workload.inputs()}
    checks = [Sampled(InputSet(workload=workload, seed=0, inputs=inputs)) for _ in range(2)]
    places = [[block.place for block in check._blocks] for check in checks]
    assert places[0] != places[1]
