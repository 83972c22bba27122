"""Memory plans against integer programs, exhaustive search and lower bounds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from benchmarks.plan_memory import CHAINS, greedy_us, random_budget
from benchmarks.plan_memory_reference import (
    TooManyStates,
    chain_operations,
    chain_step,
    fastest_us,
    random_step,
)
from tunebench.errors import InputError
from tunebench.training.memory import (
    HostLink,
    PlanEffort,
    StepOperation,
    StepTensor,
    TrainingStep,
    exact_schedule,
    least_budget,
    least_budget_exact,
    lower_bound_us,
    memory_curve,
    plan_memory,
    relaxed_bound_us,
    simulate,
    unplanned,
)

pytest.importorskip("highspy", reason="the extra `torch` is not installed")

QUICK = PlanEffort(exact_operations=0, rounds=4, relaxed_size=0)
"""No integer or linear program."""

FEASIBLE = [seed for seed in range(40) if 4 < len(random_step(seed).operations) <= 8][:12]


@pytest.mark.parametrize(
    ("count", "budget", "least"),
    [(count, budget, least) for count, row in CHAINS.items() for budget, least in enumerate(row, 4)],
)
def test_chains_take_the_least_number_of_operations(count: int, budget: int, least: int) -> None:
    result = exact_schedule(chain_step(count), budget)
    assert result.schedule is not None
    assert result.optimal
    assert simulate(chain_step(count), result.schedule, budget_bytes=budget).step_us == least


def test_the_recurrence_of_chains_gives_the_least_number_of_operations() -> None:
    for count, row in CHAINS.items():
        assert [chain_operations(count, budget) for budget in range(4, 4 + len(row))] == list(row)
    assert chain_operations(20, 4) == 193
    assert relaxed_bound_us(chain_step(20), 4, stages=40) == pytest.approx(193, rel=1e-5)


def test_the_greedy_search_is_near_the_optimum_of_long_chains() -> None:
    for count, budget, max_ratio in ((20, 4, 1.02), (20, 7, 1.02), (40, 8, 1.03), (40, 12, 1.0)):
        least = chain_operations(count, budget)
        assert least <= greedy_us(chain_step(count), budget, rounds=5) <= max_ratio * least


def test_swaps_that_keep_pace_with_the_link_leave_little_to_recompute() -> None:
    link = HostLink(to_host_gb_s=0.5e-3, to_device_gb_s=0.5e-3)  # a copy takes as long as two operations
    step = chain_step(100, link=link)
    assert greedy_us(step, 20, rounds=2) < 1.2 * step.compute_us


def test_the_greedy_search_is_near_the_least_number_of_operations_of_chains() -> None:
    for count, row in CHAINS.items():
        for budget, least in enumerate(row, 4):
            assert least <= greedy_us(chain_step(count), budget, rounds=20) <= 1.05 * least


@pytest.mark.parametrize("seed", FEASIBLE)
def test_no_staged_schedule_of_a_random_step_is_faster_than_the_integer_program(seed: int) -> None:
    step = random_step(seed)
    budget = random_budget(step, seed)
    result = exact_schedule(step, budget)
    assert result.schedule is not None
    assert result.optimal
    best_us = simulate(step, result.schedule, budget_bytes=budget).step_us
    assert result.lower_us <= best_us <= result.lower_us * (1 + 1e-3)
    assert fastest_us(step, budget, best_us - 1e-6, most_states=100_000) is None
    assert fastest_us(step, budget, best_us + 1e-6, most_states=100_000) == pytest.approx(best_us)
    assert lower_bound_us(step, budget) <= best_us + 1e-6
    for stages in (2, 5, 24):
        assert relaxed_bound_us(step, budget, stages=stages) <= best_us + 1e-6
    assert exact_schedule(step, budget, relaxed=True).lower_us <= best_us + 1e-6
    assert lower_bound_us(step, budget) <= greedy_us(step, budget, rounds=4)


def test_lower_bounds_hold_for_every_schedule_of_the_greedy_search() -> None:
    for seed in range(100, 130):
        step = random_step(seed, most=20)
        budget = random_budget(step, seed)
        fastest = greedy_us(step, budget, rounds=4) + 1e-6
        assert lower_bound_us(step, budget) <= fastest
        assert max(relaxed_bound_us(step, budget, stages=stages) for stages in (3, 40)) <= fastest


def test_the_linear_program_bounds_chains_with_long_recomputation_tightly() -> None:
    for (count, budget), least in {(6, 4): 18, (8, 4): 31, (10, 4): 48}.items():
        assert lower_bound_us(chain_step(count), budget) < 0.9 * least
        assert relaxed_bound_us(chain_step(count), budget) == pytest.approx(least, rel=1e-5)
        assert plan_memory(chain_step(count), budget).gap < 1e-5


def test_plan_has_a_table_and_a_row_for_each_tensor() -> None:
    plan = plan_memory(chain_step(8), 4)
    assert "proved optimal" in plan._repr_html_()
    columns = plan.to_columns()
    assert columns["tensor"] == [tensor.tensor for tensor in plan.tensors]
    assert sum(columns["kept"]) == sum(tensor.kept for tensor in plan.tensors) < len(plan.tensors)


def test_exhaustive_search_finds_the_same_time_when_it_skips_dominated_states() -> None:
    compared = 0
    for seed in range(80):
        step = random_step(seed, most=7)
        budget = random_budget(step, seed)
        below_us = greedy_us(step, budget, rounds=2) + 1e-6
        with suppress(TooManyStates):
            every = fastest_us(step, budget, below_us, most_states=600, skip_dominated=False)
            assert every is not None
            assert fastest_us(step, budget, below_us) == every
            compared += every > step.compute_us
    assert compared >= 12


def test_curves_fall_with_the_budget_and_hybrid_plans_are_never_slower() -> None:
    for seed in range(12):
        step = random_step(seed)
        hybrid, *single_kind = (
            memory_curve(variant, points=5, effort=QUICK)
            for variant in (step, step.without_link(), step.without_recomputation())
        )
        times = [plan.simulation.step_us for plan in hybrid]
        peaks = [plan.simulation.peak_bytes for plan in hybrid]
        assert times == sorted(times, reverse=True)
        assert peaks == sorted(peaks)
        assert times[-1] == step.compute_us
        for plan in (plan for curve in single_kind for plan in curve):
            fastest = plan_memory(step, plan.budget_bytes, effort=QUICK)
            assert fastest.simulation.step_us <= plan.simulation.step_us
            assert fastest.simulation.peak_bytes <= plan.budget_bytes


def test_a_budget_that_is_too_small_raises_and_states_the_least() -> None:
    with pytest.raises(InputError, match=r"budget of 3 bytes; the least possible budget is 4 bytes"):
        plan_memory(chain_step(6), 3)
    assert plan_memory(chain_step(6), 4).simulation.step_us == 18


def test_the_least_budget_agrees_with_the_integer_program() -> None:
    for seed in FEASIBLE:
        step = random_step(seed).without_link()
        least, exact = least_budget(step), least_budget_exact(step)
        assert exact[1]
        assert least.budget_bytes == exact[0]
        assert plan_memory(step, least.budget_bytes).simulation.peak_bytes == least.budget_bytes
        assert least_budget(random_step(seed)).proven


def test_swaps_that_operations_pay_for_give_way_to_recomputation() -> None:
    link = HostLink(to_host_gb_s=1e-3, to_device_gb_s=1e-3)  # a copy of a byte takes 1 us, as an operation
    free, paid = (
        plan_memory(chain_step(6, link=replace(link, lost_fraction=fraction)), 5) for fraction in (0.0, 1.0)
    )
    recomputing = plan_memory(chain_step(6), 5)
    assert any(tensor.copied_in_before for tensor in free.tensors)
    assert free.simulation.step_us < paid.simulation.step_us <= recomputing.simulation.step_us
    assert not any(tensor.copied_in_before for tensor in paid.tensors)
    assert not paid.optimal  # the integer program does not know the lost time
    assert paid.lower_us <= paid.simulation.step_us


def test_a_plan_states_what_happens_to_each_saved_tensor() -> None:
    link = HostLink(to_host_gb_s=1.0, to_device_gb_s=1.0)
    swap = plan_memory(chain_step(6, link=link), 4)
    assert swap.simulation.step_us < 12.1  # copies of a byte take 1 ns
    moved = [tensor for tensor in swap.tensors if tensor.copied_in_before]
    assert moved
    assert all(tensor.copied_out_after is not None and not tensor.kept for tensor in moved)
    recomputing = plan_memory(chain_step(6), 5)
    recomputed = [tensor for tensor in recomputing.tensors if tensor.recomputed_before]
    assert sum(len(tensor.recomputed_before) for tensor in recomputed) == 2
    assert [tensor.sources for tensor in recomputed] == [(tensor.tensor - 1,) for tensor in recomputed]
    assert all(tensor.kept for tensor in plan_memory(chain_step(6), 7).tensors)


def test_recomputation_that_does_not_fit_is_replaced_by_a_swap() -> None:
    # Writing tensor 1 again needs 7 bytes of workspace, which do not fit beside tensor 2.
    tensors = (
        *(StepTensor(name=name, size_bytes=size) for name, size in (("a", 3), ("b", 5), ("c", 1), ("d", 1))),
    )
    operations = (
        StepOperation(name="a", time_us=1.0, inputs=(), outputs=(0,), workspace_bytes=7),
        StepOperation(name="b", time_us=1.0, inputs=(), outputs=(1,), workspace_bytes=5),
        StepOperation(name="c", time_us=1.0, inputs=(1,), outputs=(2,)),
        StepOperation(name="d", time_us=1.0, inputs=(0, 1, 2), outputs=(3,)),
    )
    link = HostLink(to_host_gb_s=1e-3, to_device_gb_s=1e-3)
    step = TrainingStep(tensors=tensors, operations=operations, link=link)
    assert plan_memory(step, 10, effort=QUICK).simulation.stall_us > 0
    with pytest.raises(InputError, match=r"least budget with a known plan is 1[1-9] bytes"):
        plan_memory(step.without_link(), 10, effort=QUICK)


def test_a_step_that_reads_an_unwritten_tensor_is_refused() -> None:
    step = chain_step(2)
    with pytest.raises(InputError, match="no earlier operation writes"):
        replace(step, operations=step.operations[1:])
    with pytest.raises(InputError, match="must be written once"):
        replace(step, operations=(*step.operations, step.operations[0]))
    assert simulate(step, unplanned(step)).step_us == 4


def test_an_operation_that_writes_only_resident_memory_runs_in_an_exact_schedule() -> None:
    step = chain_step(4)
    loss = StepOperation(name="loss", time_us=1.0, inputs=(4,), outputs=())
    with_loss = replace(step, operations=(*step.operations[:4], loss, *step.operations[4:]), results=(8,))
    schedule = exact_schedule(with_loss, 4).schedule
    assert schedule is not None
    assert simulate(with_loss, schedule, budget_bytes=4).step_us == 10
