"""What is decided before a step is planned: compressed activations, and optimizer states on the host.

Each choice changes the step, and plans of the changed steps are compared by their times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tunebench.errors import InputError
from tunebench.training.fitting.compressed_activation import compressible
from tunebench.training.fitting.joint_step import JointStep
from tunebench.training.fitting.optimizer_state import HostStates
from tunebench.training.memory.budget import size_text
from tunebench.training.memory.planner import MemoryPlan
from tunebench.training.memory.schedule import unplanned
from tunebench.training.memory.simulation import simulate
from tunebench.training.memory.step import HostLink, TrainingStep

__all__ = ["ChosenPlan", "PlanChoice", "choices", "fastest", "room_bytes"]

_HOST_SHARES = (0.5, 1.0)
"""Parts of the bytes above the budget for which states on the host are tried."""

_BUCKETS = 3
"""States of the largest parameter that the update has room for: arriving, updated and leaving ones."""

_COMPRESSED_SHARES = (1.0, 1.5)
"""Bytes that compression saves to be tried, over those above the budget; less than all of them suffice if
they are not on the device at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A choice.

    Attributes:
        compressed: Names of the tensors that are compressed for the backward pass.
        host_states: Number of parameters whose optimizer states are on the host between updates, largest
            states first.
    """

    compressed: tuple[str, ...] = ()
    host_states: int = 0


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """The plan of a choice.

    Attributes:
        choice: The choice.
        joint: The step with it.
        plan: The plan of this step.
    """

    choice: PlanChoice
    joint: JointStep
    plan: MemoryPlan


def choices(
    joint: JointStep, budget_bytes: int, element: str | None, states: HostStates | None
) -> list[PlanChoice]:
    """Return the choices to plan.

    Args:
        joint: The step without any of it.
        budget_bytes: Bytes that the device has.
        element: Type of compressed elements; none if nothing is compressed.
        states: The optimizer's states; none if they stay on the device.
    """
    excess_bytes = simulate(joint.step, unplanned(joint.step)).peak_bytes - budget_bytes
    sets: list[tuple[str, ...]] = [()]
    counts = [0 if states is None else states.count]
    if excess_bytes > 0 and states is not None:
        # The update has a peak as well: what stays on the device, and the states that pass through.
        needed = max(excess_bytes, _BUCKETS * states.sizes[0] - room_bytes(joint.step, budget_bytes))
        counts += [max(states.count, states.count_for(part * needed)) for part in _HOST_SHARES]
    if excess_bytes > 0 and element is not None:
        candidates = compressible(joint, element)
        saved_bytes = list(itertools.accumulate(candidate.saved_bytes for candidate in candidates))
        for share in _COMPRESSED_SHARES:
            count = sum(total < share * excess_bytes for total in saved_bytes) + 1
            sets.append(tuple(candidate.name for candidate in candidates[:count]))
        sets.append(tuple(candidate.name for candidate in candidates))
    return [
        PlanChoice(compressed=names, host_states=count)
        for names in dict.fromkeys(sets)
        for count in dict.fromkeys(counts)
    ]


def fastest(
    candidates: list[PlanChoice],
    joint_of: Callable[[PlanChoice], JointStep],
    planned: Callable[[TrainingStep], MemoryPlan],
    budget_bytes: int,
    states: HostStates | None,
) -> ChosenPlan:
    """Return the choice whose plan and copies of states take the least time.

    Args:
        candidates: The choices; the first one is taken if others are not faster.
        joint_of: Returns the step with a choice.
        planned: Returns the plan of a step, or raises InputError.
        budget_bytes: Bytes that the device has.
        states: The optimizer's states.

    Raises:
        InputError: No choice has a plan.
    """
    best: ChosenPlan | None = None
    best_us = float("inf")
    refusal: InputError | None = None
    for choice in candidates:
        joint = joint_of(choice)
        try:
            if choice.host_states:
                assert states is not None
                _require_room(joint.step, budget_bytes, states)
            plan = planned(joint.step)
        except InputError as error:
            refusal = error
            continue
        copies_us = 0.0 if states is None else copy_us(states.host_bytes(choice.host_states), joint.step.link)
        time_us = plan.simulation.step_us + copies_us
        if time_us < best_us:
            best, best_us = ChosenPlan(choice=choice, joint=joint, plan=plan), time_us
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def copy_us(size_bytes: int, link: HostLink | None) -> float:
    """Return the time of copying states to the device and back for one update, in microseconds.

    Args:
        size_bytes: Bytes of the states.
        link: The link to the host.
    """
    if not size_bytes:
        return 0.0
    assert link is not None
    out_us, in_us = link.to_host_us(size_bytes), link.to_device_us(size_bytes)
    return max(out_us, in_us, link.lost_fraction * (out_us + in_us))


def room_bytes(step: TrainingStep, budget_bytes: int) -> int:
    """Return the bytes of a budget that are free during the update.

    Args:
        step: The step.
        budget_bytes: Bytes that the device has.
    """
    return budget_bytes - sum(step.static_bytes.values())


def _require_room(step: TrainingStep, budget_bytes: int, states: HostStates) -> None:
    room, largest = room_bytes(step, budget_bytes), states.sizes[0]
    if room < largest:
        raise InputError(
            f"a budget of {size_text(budget_bytes)} leaves {size_text(max(0, room))} for states of the "
            f"optimizer while parameters are updated, and the largest parameter's take "
            f"{size_text(largest, up=True)}: raise the budget by {size_text(largest - room, up=True)}"
        )
