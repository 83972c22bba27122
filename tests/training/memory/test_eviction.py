"""Eviction of tensors in large steps."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.plan_memory_reference import random_step
from benchmarks.plan_memory_steps import residual_step, transformer_step
from tunebench.training.memory import (
    PlanEffort,
    TrainingStep,
    least_bytes,
    plan_memory,
    simulate,
    unplanned,
)
from tunebench.training.memory.eviction import Restoration, StepIndex


@pytest.mark.parametrize("seed", range(8))
def test_times_to_restore_and_next_uses_stay_right_while_tensors_come_and_go(seed: int) -> None:
    step = random_step(seed, most=40)
    index, draw = StepIndex(step), random.Random(seed)
    swapped = frozenset(tensor for tensor in step.producers() if draw.random() < 0.2)
    tensors = Restoration(index, swapped)
    for stage in range(len(step.operations)):
        for tensor in index.outputs[stage]:
            tensors.arrive(tensor)
        tensors.write(stage)
        for tensor in [tensor for tensor in index.producer[: stage + 2] if tensor > 0]:
            if draw.random() < 0.3 and tensors.present[tensor]:
                tensors.leave(tensor, copied=tensors.swaps(tensor) and not tensors.on_host[tensor])
            elif draw.random() < 0.2 and not tensors.present[tensor]:
                tensors.arrive(tensor)
        tensors.update_costs()
        for tensor, producer in step.producers().items():
            if producer <= stage:
                assert tensors.cost_us[tensor] == _cost_us(tensors, index, tensor)
                assert tensors.need_us[tensor] == _need_us(tensors, index, tensor, stage)


def _cost_us(tensors: Restoration, index: StepIndex, tensor: int) -> float:
    """Return the time to restore a tensor, worked out from the start."""
    step, producer = index.step, index.producer[tensor]
    assert step.link is not None
    if tensors.on_host[tensor] or (tensors.present[tensor] and tensors.swaps(tensor)):
        return step.link.to_device_us(index.size[tensor])
    if not step.operations[producer].recomputable:
        return math.inf
    total_us, longest_us = step.operations[producer].time_us, 0.0
    for read in index.reads[producer]:
        if not tensors.present[read]:
            cost_us = _cost_us(tensors, index, read)
            last_us = cost_us if tensors.on_host[read] else step.operations[index.producer[read]].time_us
            total_us += last_us
            longest_us = max(longest_us, cost_us - last_us)
    return total_us + longest_us


def _need_us(tensors: Restoration, index: StepIndex, tensor: int, stage: int) -> float:
    """Return when a tensor is needed next, worked out from the start."""
    uses = [index.clock_us[use] for use in index.uses[tensor] if use > stage]
    for reader in index.readers[tensor]:
        uses += [
            _need_us(tensors, index, output, stage)
            for output in index.outputs[reader]
            if reader <= stage and not tensors.present[output] and not tensors.on_host[output]
        ]
    return min(uses, default=math.inf)


@pytest.mark.parametrize(
    ("step", "most_overhead"), [(transformer_step(3), 0.15), (residual_step(15), 0.2)], ids=["gpt", "resnet"]
)
def test_plans_of_layers_fit_and_recompute_little(step: TrainingStep, most_overhead: float) -> None:
    low, peak = least_bytes(step), simulate(step, unplanned(step)).peak_bytes
    budget = low + 4 * (peak - low) // 10
    plan = plan_memory(step, budget, effort=PlanEffort(exact_operations=0, rounds=1, relaxed_size=0))
    assert plan.simulation.peak_bytes <= budget
    assert plan.simulation.step_us <= (1 + most_overhead) * step.compute_us
    assert plan.lower_us > step.compute_us


def test_a_linear_program_proposes_what_to_keep_and_bounds_the_time_tightly() -> None:
    pytest.importorskip("highspy", reason="the extra `torch` is not installed")
    step = residual_step(30, link=None)
    budget = 4 * simulate(step, unplanned(step)).peak_bytes // 10
    with_it, without = (
        plan_memory(step, budget, effort=PlanEffort(exact_operations=0, rounds=0, relaxed_size=size))
        for size in (1, 0)
    )
    assert with_it.lower_us > without.lower_us
    assert with_it.gap < 0.5 * without.gap
    assert with_it.simulation.step_us < without.simulation.step_us
