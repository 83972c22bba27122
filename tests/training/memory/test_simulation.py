"""The judge of memory plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_memory_reference import chain_step
from tunebench.errors import InputError
from tunebench.training.memory import Compute, CopyIn, CopyOut, Free, HostLink, simulate, unplanned

LINK = HostLink(to_host_gb_s=1e-3, to_device_gb_s=1e-3)
"""A byte takes 1 us."""

STEP = chain_step(2, link=LINK)
"""Tensors: 0 is the input, 1 and 2 are activations, 3 and 4 gradients."""


def test_peak_of_a_chain_without_a_plan_is_one_more_than_its_length() -> None:
    for count in (1, 4, 7):
        result = simulate(chain_step(count), unplanned(chain_step(count)))
        assert (result.peak_bytes, result.step_us, result.stall_us) == (count + 1, 2 * count, 0)


def test_a_copy_that_operations_do_not_hide_is_a_stall() -> None:
    swap = (Compute(0), CopyOut(1), Compute(1), Free(1), CopyIn(1), Compute(2), Compute(3))
    result = simulate(STEP, swap)
    assert (result.compute_us, result.stall_us) == (
        4,
        1,
    )  # leaves during operation 1; the return is waited for
    immediately = (Compute(0), CopyOut(1), Free(1), CopyIn(1), Compute(1), Compute(2), Compute(3))
    assert simulate(STEP, immediately).stall_us == 2


def test_operations_lose_a_fraction_of_the_time_of_copies() -> None:
    swap = (Compute(0), CopyOut(1), Compute(1), Free(1), CopyIn(1), Compute(2), Compute(3))
    result = simulate(replace(STEP, link=replace(LINK, lost_fraction=0.25)), swap)
    # The copy to the host takes away 0.25 us; while the return is waited for, what it takes away passes too.
    assert (result.compute_us, result.stall_us) == (4, 1.25)
    with pytest.raises(InputError, match=r"lost_fraction from 0 to 1, found 1\.5"):
        replace(LINK, lost_fraction=1.5)


def test_copies_in_both_directions_overlap_and_those_in_one_direction_queue() -> None:
    slow = replace(STEP, link=HostLink(to_host_gb_s=0.5e-3, to_device_gb_s=0.5e-3))
    queued = (Compute(0), Compute(1), CopyOut(1), CopyOut(2), Free(2), CopyIn(2), Free(1), CopyIn(1))
    assert simulate(slow, (*queued, Compute(2), Compute(3))).stall_us == 8  # 2 + 2 out, then 2 + 2 back
    both = (Compute(0), CopyOut(1), Free(1), CopyIn(1), Compute(1), CopyOut(2), Free(2), CopyIn(2))
    assert simulate(slow, (*both, Compute(2), Compute(3))).stall_us == 2 + 2 + 2 + 2


def test_a_tensor_occupies_memory_until_its_copy_to_the_host_ends() -> None:
    simulation = simulate(
        STEP, (Compute(0), CopyOut(1), Compute(1), Free(1), CopyIn(1), Compute(2), Compute(3))
    )
    assert simulation.bytes_during == (1, 1, 2, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        ((Compute(1),), "runs before operation 0"),
        ((Compute(0),), "1 of 4 operations ran"),
        ((Compute(0), Free(1), Compute(1)), "'a1' is not on the device"),
        ((Compute(0), Compute(0)), "'a1' is on the device already"),
        ((Compute(0), CopyIn(1)), "'a1' is not on the host"),
        ((Compute(0), CopyOut(1), CopyIn(1)), "'a1' is on the device already"),
        ((Compute(0), CopyOut(1), CopyOut(1)), "'a1' is on the host already"),
        ((Compute(0), Free(0)), "'x' is resident"),
        ((Compute(0), Compute(1), Compute(2)), "3 bytes are on the device, above 2"),
    ],
)
def test_an_invalid_schedule_raises_and_says_where(schedule: tuple[object, ...], found: str) -> None:
    with pytest.raises(InputError, match=found):
        simulate(STEP, schedule, budget_bytes=2)  # type: ignore[arg-type]


def test_an_operation_with_side_effects_runs_once() -> None:
    schedule = (Compute(0), Free(1), Compute(0), Compute(1), Compute(2), Compute(3))
    assert simulate(STEP, schedule).compute_us == 5
    with pytest.raises(InputError, match="may run only once"):
        simulate(STEP.without_recomputation(), schedule)


def test_results_must_be_on_the_device_after_the_step() -> None:
    step = replace(STEP, results=(4,))
    assert simulate(step, unplanned(step)).peak_bytes == 3
    with pytest.raises(InputError, match="'g0' is not on the device"):
        simulate(step, unplanned(STEP))
