"""Plans that fit a device: on a GPU the segments of the caching allocator must fit, not only the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.training.memory.allocator import AllocatorUse, allocator_use, memory_events
from tunebench.training.memory.bound import lower_bound_us
from tunebench.training.memory.planner import MemoryPlan, PlanEffort, plan_memory, restricted_forms
from tunebench.training.memory.schedule import Action
from tunebench.training.memory.simulation import Simulation, simulate
from tunebench.training.memory.step import TrainingStep

__all__ = ["CUTS", "DeviceUse", "device_use", "plan_on_device"]

STEPS = 2
"""Steps for which memory is allocated; later steps find the free blocks that earlier ones left."""

CUTS = (0.01, 0.02, 0.04, 0.08, 0.12, 0.16)
"""Fractions of the budget that further attempts leave to fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Time and memory of a schedule on a device.

    Attributes:
        simulation: Time, and requested bytes.
        allocator: What the caching allocator takes; none on a processor, which has none.
        fits: Whether the schedule fits the budget.
    """

    simulation: Simulation
    allocator: AllocatorUse | None
    fits: bool


def device_use(
    step: TrainingStep,
    schedule: tuple[Action, ...],
    device: Device,
    budget_bytes: int,
    *,
    expandable_segments: bool = False,
) -> DeviceUse:
    """Return the time and the memory of a schedule on a device.

    Args:
        step: The training step.
        schedule: Actions in order.
        device: The device.
        budget_bytes: Bytes that the step may take, in segments of the caching allocator on a GPU.
        expandable_segments: Whether segments are expandable (see `allocator_use`).
    """
    simulation = simulate(step, schedule)
    if device.kind != "gpu":
        fits = simulation.peak_bytes <= budget_bytes
        return DeviceUse(simulation=simulation, allocator=None, fits=fits)
    events = list(memory_events(step, schedule, steps=STEPS))
    limited = allocator_use(events, capacity_bytes=budget_bytes, expandable_segments=expandable_segments)
    if limited.fits:
        return DeviceUse(simulation=simulation, allocator=limited, fits=True)
    whole = allocator_use(events, expandable_segments=expandable_segments)
    return DeviceUse(simulation=simulation, allocator=whole, fits=False)


def plan_on_device(
    step: TrainingStep,
    budget_bytes: int,
    device: Device,
    *,
    effort: PlanEffort | None = None,
    cuts: Sequence[float] = CUTS,
    expandable_segments: bool = False,
) -> tuple[MemoryPlan, DeviceUse]:
    """Return the fastest plan found that fits a budget on a device.

    If the segments of the caching allocator exceed the budget because of fragmentation, the search is
    repeated for fewer requested bytes, also for plans that only recompute and for plans that only swap. If
    none of these attempts fits, the first plan is returned.

    Args:
        step: The training step.
        budget_bytes: Bytes that the step may take.
        device: The device.
        effort: How long to search in each attempt.
        cuts: Fractions of the budget that further attempts leave to fragmentation.
        expandable_segments: Whether segments are expandable (see `allocator_use`).

    Raises:
        InputError: No plan fits the budget; the message states the least budget.
    """

    def use_of(schedule: tuple[Action, ...]) -> DeviceUse:
        return device_use(step, schedule, device, budget_bytes, expandable_segments=expandable_segments)

    plan = plan_memory(step, budget_bytes, effort=effort)
    use = use_of(plan.schedule)
    if use.fits or use.allocator is None:
        return plan, use
    attempts = [
        _first_that_fits(form, plan if form is step else None, budget_bytes, effort, cuts, use_of)
        for form in restricted_forms(step)
    ]
    fitting = [attempt for attempt in attempts if attempt is not None]
    if not fitting:
        return plan, use
    schedule, use = min(fitting, key=lambda attempt: attempt[1].simulation.step_us)
    # The plan was searched for fewer bytes, so its bound and proof do not hold for the whole budget.
    lower_us = lower_bound_us(step, budget_bytes)
    plan = replace(plan, schedule=schedule, simulation=use.simulation, lower_us=lower_us, optimal=False)
    return plan, use


def _first_that_fits(
    form: TrainingStep,
    plan: MemoryPlan | None,
    budget_bytes: int,
    effort: PlanEffort | None,
    cuts: Sequence[float],
    use_of: Callable[[tuple[Action, ...]], DeviceUse],
) -> tuple[tuple[Action, ...], DeviceUse] | None:
    """Return the schedule and the use of the first plan for fewer bytes that fits; none if none does.

    Args:
        form: The step, or a form of it that may only recompute or only swap.
        plan: The plan for the whole budget, if it is known not to fit.
        budget_bytes: Bytes that the step may take.
        effort: How long to search in each attempt.
        cuts: Fractions of the budget that attempts leave to fragmentation.
        use_of: Returns the use of a schedule.
    """
    for cut in cuts if plan is not None else (0.0, *cuts):
        target_bytes = int((1 - cut) * budget_bytes)
        if plan is not None:
            # Below the peak of the last plan, or the search would return the same plan again.
            target_bytes = min(target_bytes, plan.simulation.peak_bytes - 1)
        try:
            plan = plan_memory(form, target_bytes, effort=effort)
        except InputError:
            return None
        use = use_of(plan.schedule)
        if use.fits:
            return plan.schedule, use
    return None
