"""Division of a trial budget among workloads: by expected saving, and with trials for every workload."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.tuning.budget_scheduler import FIRST, FRUITLESS, ROUND, BudgetScheduler, TaskState


def account(count: int = 1, *course: tuple[int, float], floor_us: float = 0.0) -> TaskState:
    """Return the state of a task after trials with the given counts and best times."""
    made = TaskState(count=count, expected_us=10.0)
    for trials, best_us in course:
        made.update(trials=trials, best_us=best_us, floor_us=floor_us)
    return made


def test_expected_saving_grows_with_the_time_in_the_model() -> None:
    assert account(6, (12, 5.0)).saving_us(4) == pytest.approx(3 * account(2, (12, 5.0)).saving_us(4))
    assert account(1, (12, 9.0)).saving_us(4) == pytest.approx(3 * account(1, (12, 3.0)).saving_us(4))


def test_initial_estimate_is_a_best_time_inverse_to_the_trials() -> None:
    assert account(1, (12, 6.0)).power == 1.0
    assert account(1, (12, 6.0)).saving_us(4) == pytest.approx(6.0 * (1 - 12 / 16) / 4)


def test_expected_saving_falls_without_progress_but_stays_positive() -> None:
    still, falling = account(1, (12, 8.0), (48, 8.0)), account(1, (12, 32.0), (48, 8.0))
    assert falling.power == pytest.approx(1.0)
    assert still.power == pytest.approx(2 / (2 + math.log(4)))
    assert 0 < still.saving_us(4) < falling.saving_us(4)


def test_expected_saving_is_small_after_the_first_round() -> None:
    early, late = account(1, (FIRST, 8.0)), account(1, (4 * FIRST, 8.0))
    assert early.power == late.power
    assert late.saving_us(4) < early.saving_us(4) / 4**2 * 1.3


def test_expected_saving_is_limited_by_the_bound() -> None:
    assert account(5, (12, 8.0), floor_us=7.9).saving_us(4) == pytest.approx(5 * 0.1 / 4)
    assert account(5, (12, 8.0), floor_us=8.0).closed
    assert account(5, (12, 8.0), floor_us=8.0).saving_us(4) == 0


def test_workload_without_a_successful_trial_is_abandoned() -> None:
    assert not account(1, (FRUITLESS - 1, math.inf)).closed
    assert account(1, (FRUITLESS, math.inf)).closed
    assert account(1, (12, math.inf)).time_us == 10.0
    assert account(1, (12, math.inf)).saving_us(4) > 0


def test_the_next_round_goes_where_the_greatest_saving_is_expected() -> None:
    still, falling = account(1, (12, 8.0), (48, 8.0)), account(1, (12, 32.0), (48, 8.0))
    done = account(1000, (12, 8.0), floor_us=8.0)
    allotment = BudgetScheduler({"still": still, "falling": falling, "done": done}, 1000)
    assert allotment.next(left=500) == ("falling", ROUND)
    assert allotment.next(left=2) == ("falling", 2)
    falling.update(trials=52, best_us=8.0, floor_us=0.0, closed=True)
    assert allotment.next(left=500) == ("still", ROUND)
    still.update(trials=52, best_us=8.0, floor_us=0.0, closed=True)
    assert allotment.next(left=500) is None


def test_first_rounds_are_short_where_time_allows_few_trials() -> None:
    fresh = {name: account(count) for name, count in (("small", 1), ("middle", 2), ("large", 3))}
    allotment = BudgetScheduler(fresh, 1_000_000)
    assert allotment.next(1_000_000) == ("large", FIRST)
    assert allotment.next(1_000_000, 12) == ("large", 2)
    assert allotment.next(1_000_000, 0) == ("large", 1)


def test_first_rounds_follow_time_in_the_model_and_count_known_trials() -> None:
    tuned, large, small = account(1, (200, 1.0)), account(9), account(1)
    allotment = BudgetScheduler({"known": tuned, "small": small, "large": large}, 10 * FIRST)
    assert allotment.next(left=100) == ("large", FIRST)
    large.update(trials=FIRST, best_us=1.0, floor_us=0.0)
    assert allotment.next(left=100) == ("small", FIRST)
    small.update(trials=FIRST - 5, best_us=1.0, floor_us=0.0)  # an interrupted task continues
    assert allotment.next(left=100) == ("small", 5)


courses = st.lists(st.floats(0.5, 1.0), min_size=1, max_size=60)


@given(st.lists(st.tuples(st.integers(1, 50), courses), min_size=1, max_size=6), st.integers(1, 200))
def test_whole_budget_is_divided_and_every_workload_gets_trials(
    problems: list[tuple[int, list[float]]], total: int
) -> None:
    """Each workload has as many configurations as factors; each multiplies the best time by its factor."""
    accounts = {number: TaskState(count=count, expected_us=1.0) for number, (count, _) in enumerate(problems)}
    allotment, trials_left = BudgetScheduler(accounts, total), total
    while (turn := allotment.next(trials_left)) is not None:
        number, trials = turn
        task, (_, course) = accounts[number], problems[number]
        assert 1 <= trials <= trials_left
        made = min(trials, len(course) - task.trials)
        trials_left -= made
        best_us = 100.0 * math.prod(course[: task.trials + made])
        task.update(trials=task.trials + made, best_us=best_us, floor_us=0.0, closed=made < trials)
    sizes = [len(course) for _, course in problems]
    assert total - trials_left == min(total, sum(sizes))
    first = max(1, min(FIRST, total // (2 * len(problems))))
    if total >= len(problems):
        assert all(
            task.trials >= min(first, size) for task, size in zip(accounts.values(), sizes, strict=True)
        )
