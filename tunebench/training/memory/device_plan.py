"""Plans that fit a device: on a GPU the segments of the caching allocator must fit, not only the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.training.memory.allocator import AllocatorUse, allocator_use, memory_events
from tunebench.training.memory.bound import lower_bound_us
from tunebench.training.memory.planner import MemoryPlan, PlanEffort, plan_memory
from tunebench.training.memory.schedule import Action
from tunebench.training.memory.simulation import Simulation, simulate
from tunebench.training.memory.step import TrainingStep

__all__ = ["DeviceUse", "device_use", "plan_on_device"]

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
    step: TrainingStep, schedule: tuple[Action, ...], device: Device, budget_bytes: int
) -> DeviceUse:
    """Return the time and the memory of a schedule on a device.

    Args:
        step: The training step.
        schedule: Actions in order.
        device: The device.
        budget_bytes: Bytes that the step may take, in segments of the caching allocator on a GPU.
    """
    simulation = simulate(step, schedule)
    if device.kind != "gpu":
        fits = simulation.peak_bytes <= budget_bytes
        return DeviceUse(simulation=simulation, allocator=None, fits=fits)
    events = list(memory_events(step, schedule, steps=STEPS))
    limited = allocator_use(events, capacity_bytes=budget_bytes)
    if limited.fits:
        return DeviceUse(simulation=simulation, allocator=limited, fits=True)
    return DeviceUse(simulation=simulation, allocator=allocator_use(events), fits=False)


def plan_on_device(
    step: TrainingStep,
    budget_bytes: int,
    device: Device,
    *,
    effort: PlanEffort | None = None,
    cuts: Sequence[float] = CUTS,
) -> tuple[MemoryPlan, DeviceUse]:
    """Return the fastest plan found that fits a budget on a device.

    If the segments of the caching allocator exceed the budget because of fragmentation, the search is
    repeated for fewer requested bytes. If none of several attempts fits, the first plan is returned.

    Args:
        step: The training step.
        budget_bytes: Bytes that the step may take.
        device: The device.
        effort: How long to search in each attempt.
        cuts: Fractions of the budget that further attempts leave to fragmentation.

    Raises:
        InputError: No plan fits the budget; the message states the least budget.
    """
    plan = first = plan_memory(step, budget_bytes, effort=effort)
    use = first_use = device_use(step, plan.schedule, device, budget_bytes)
    for cut in cuts:
        if use.fits or use.allocator is None:
            break
        # Below the peak of the last plan, or the search would return the same plan again.
        target_bytes = min(int((1 - cut) * budget_bytes), plan.simulation.peak_bytes - 1)
        try:
            plan = plan_memory(step, target_bytes, effort=effort)
        except InputError:
            break
        use = device_use(step, plan.schedule, device, budget_bytes)
    if plan is first or not use.fits:
        return first, first_use
    # The plan was searched for fewer bytes, so its bound and proof do not hold for the whole budget.
    lower_us = lower_bound_us(step, budget_bytes)
    return replace(plan, budget_bytes=budget_bytes, lower_us=lower_us, optimal=False), use
