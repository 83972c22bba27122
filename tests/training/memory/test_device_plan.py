"""Plans that fit a device with its allocator, the largest batch, and budgets as text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan_memory_reference import chain_step
from tunebench import device
from tunebench.errors import InputError
from tunebench.training.memory import (
    HostLink,
    PlanEffort,
    TrainingStep,
    budget_bytes,
    device_use,
    largest_batch,
    least_budget,
    lower_bound_us,
    plan_memory,
    plan_on_device,
    simulate,
    size_text,
    step_at,
    unplanned,
)

MIB = 1 << 20
T4, CPU = device.find("t4"), device.find("cpu")
EFFORT = PlanEffort(exact_operations=0, rounds=2, relaxed_size=0)

STEP = chain_step(16, size_bytes=7 * MIB)
"""A segment of 20 MiB holds two tensors of 7 MiB, and leaves 6 MiB unused."""


def test_a_plan_for_a_gpu_leaves_room_for_fragmentation() -> None:
    budget = 14 * 7 * MIB
    requested = plan_memory(STEP, budget, effort=EFFORT)
    assert not device_use(STEP, requested.schedule, T4, budget).fits
    plan, use = plan_on_device(STEP, budget, T4, effort=EFFORT)
    assert use.allocator is not None
    assert use.fits
    assert plan.simulation.peak_bytes < requested.simulation.peak_bytes
    assert use.allocator.reserved_bytes <= budget == plan.budget_bytes
    assert plan.lower_us == lower_bound_us(STEP, budget)
    assert use.simulation == plan.simulation


def test_expandable_segments_leave_more_of_the_budget_to_tensors() -> None:
    budget = 14 * 7 * MIB
    fixed, _ = plan_on_device(STEP, budget, T4, effort=EFFORT)
    plan, use = plan_on_device(STEP, budget, T4, effort=EFFORT, expandable_segments=True)
    assert use.fits
    assert plan.simulation.step_us < fixed.simulation.step_us


@pytest.mark.parametrize("expandable", [False, True])
def test_plans_of_both_kinds_are_as_fast_as_those_of_one_kind_in_segments(expandable: bool) -> None:
    step = chain_step(10, size_bytes=7 * MIB, link=HostLink(to_host_gb_s=3500, to_device_gb_s=3500))
    fitting = 0
    for tensors in range(5, 12):
        plans = [
            plan_on_device(form, tensors * 7 * MIB, T4, effort=EFFORT, expandable_segments=expandable)
            for form in (step.without_link(), step.without_recomputation(), step)
        ]
        *alone, both = [plan.simulation.step_us if use.fits else math.inf for plan, use in plans]
        assert both <= min(alone)
        fitting += both < math.inf
    assert fitting > 3


def test_a_plan_for_a_processor_counts_requested_bytes() -> None:
    plan, use = plan_on_device(STEP, 14 * 7 * MIB, CPU, effort=EFFORT)
    assert plan == plan_memory(STEP, 14 * 7 * MIB, effort=EFFORT)
    assert (use.fits, use.allocator) == (True, None)


def test_without_a_plan_that_fits_the_first_one_is_returned_with_what_it_takes() -> None:
    least = least_budget(STEP, effort=EFFORT).budget_bytes
    plan, use = plan_on_device(STEP, least, T4, effort=EFFORT)
    assert plan.simulation.peak_bytes <= least
    assert not use.fits
    assert use.allocator is not None
    assert use.allocator.reserved_bytes > least
    with pytest.raises(InputError, match="no plan of this step fits"):
        plan_on_device(STEP, MIB, T4, effort=EFFORT)


@given(st.integers(0, 5000), st.integers(1, 3000))
def test_the_largest_batch_is_found_from_any_start_with_few_attempts(limit: int, start: int) -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest_batch(fits, start) == limit
    assert len(tried) <= 40
    coarse = largest_batch(fits, start, resolution=0.05)
    assert 0.95 * limit - 1 <= coarse <= limit


def test_memory_that_does_not_grow_with_the_batch_is_refused() -> None:
    with pytest.raises(InputError, match="does not grow with the batch"):
        largest_batch(lambda batch: True, 8)


def test_sizes_and_times_of_a_step_are_read_off_a_line() -> None:
    def at(batch: int) -> TrainingStep:
        step = chain_step(3, size_bytes=100 * batch)
        return replace(
            step, operations=tuple(replace(operation, time_us=5 + batch) for operation in step.operations)
        )

    assert step_at(at(4), at(8), 0) == at(4)
    assert step_at(at(4), at(8), 2.5) == at(14)
    assert step_at(at(4), at(8), -0.75) == at(1)
    assert step_at(at(4), chain_step(4), 1) is None
    renamed = replace(at(8), operations=(replace(at(8).operations[0], name="other"), *at(8).operations[1:]))
    assert step_at(at(4), renamed, 1) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("500mb", 500 * 10**6),
        ("1.5kB", 1500),
        ("2TiB", 2 * 2**40),
        ("7B", 7),
        (123, 123),
        ("80%", 800),
        ("100%", 1000),
    ],
)
def test_budgets_are_sizes_or_shares(text: str | int, size: int) -> None:
    assert budget_bytes(text, 1000) == size


@pytest.mark.parametrize(
    "text", ["", "12", "0GB", "0%", "-3GB", "24XB", "GB", "1e9", "nan", "٣GB", 0, -1, True]
)
def test_other_texts_are_refused_as_budgets(text: str | int) -> None:
    with pytest.raises(InputError, match=r"is no size: .*24GB"):
        budget_bytes(text, 1000)


def test_a_share_above_the_peak_is_refused() -> None:
    with pytest.raises(InputError, match=r"'150%' is above the peak without a plan"):
        budget_bytes("150%", 1000)


def test_sizes_have_readable_units() -> None:
    sizes = (0, 999, 1500, 24.314e9, 5e6)
    assert [size_text(size) for size in sizes] == ["0 bytes", "999 bytes", "1.5 kB", "24.31 GB", "5 MB"]


def test_the_use_without_a_plan_is_that_of_the_simulation() -> None:
    use = device_use(STEP, unplanned(STEP), T4, 10**12)
    assert use.simulation == simulate(STEP, unplanned(STEP))
    assert use.allocator is not None
    assert use.allocator.reserved_bytes > use.simulation.peak_bytes
