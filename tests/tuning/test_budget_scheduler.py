"""The rule by which a budget is given out: more where more is to be had, all of it, and nobody starves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.tuning.budget_scheduler import FIRST, FRUITLESS, ROUND, BudgetScheduler, TaskState


def account(count: int = 1, *course: tuple[int, float], floor_us: float = 0.0) -> TaskState:
    """Return an account that was told of trials and best times."""
    made = TaskState(count=count, expected_us=10.0)
    for trials, best_us in course:
        made.update(trials=trials, best_us=best_us, floor_us=floor_us)
    return made


def test_more_is_expected_where_the_model_spends_more_time() -> None:
    assert account(6, (12, 5.0)).saving_us(4) == pytest.approx(3 * account(2, (12, 5.0)).saving_us(4))
    assert account(1, (12, 9.0)).saving_us(4) == pytest.approx(3 * account(1, (12, 3.0)).saving_us(4))


def test_before_anything_is_seen_the_best_time_is_believed_to_fall_inversely_to_the_trials() -> None:
    assert account(1, (12, 6.0)).power == 1.0
    assert account(1, (12, 6.0)).saving_us(4) == pytest.approx(6.0 * (1 - 12 / 16) / 4)


def test_a_problem_that_stands_still_is_expected_to_save_less_and_never_nothing() -> None:
    still, falling = account(1, (12, 8.0), (48, 8.0)), account(1, (12, 32.0), (48, 8.0))
    assert falling.power == pytest.approx(1.0)
    assert still.power == pytest.approx(2 / (2 + math.log(4)))
    assert 0 < still.saving_us(4) < falling.saving_us(4)


def test_past_the_first_round_a_search_is_expected_to_leave_little_to_later_trials() -> None:
    early, late = account(1, (FIRST, 8.0)), account(1, (4 * FIRST, 8.0))
    assert early.power == late.power
    assert late.saving_us(4) < early.saving_us(4) / 4**2 * 1.3


def test_no_more_is_expected_than_the_bound_leaves() -> None:
    assert account(5, (12, 8.0), floor_us=7.9).saving_us(4) == pytest.approx(5 * 0.1 / 4)
    assert account(5, (12, 8.0), floor_us=8.0).closed
    assert account(5, (12, 8.0), floor_us=8.0).saving_us(4) == 0


def test_a_problem_that_nothing_succeeds_for_is_given_up() -> None:
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


def test_first_rounds_come_in_the_order_of_the_models_time_and_know_what_is_known() -> None:
    known, large, small = account(1, (200, 1.0)), account(9), account(1)
    allotment = BudgetScheduler({"known": known, "small": small, "large": large}, 10 * FIRST)
    assert allotment.next(left=100) == ("large", FIRST)
    large.update(trials=FIRST, best_us=1.0, floor_us=0.0)
    assert allotment.next(left=100) == ("small", FIRST)
    small.update(trials=FIRST - 5, best_us=1.0, floor_us=0.0)  # an interrupted one goes on
    assert allotment.next(left=100) == ("small", 5)


courses = st.lists(st.floats(0.5, 1.0), min_size=1, max_size=60)


@given(st.lists(st.tuples(st.integers(1, 50), courses), min_size=1, max_size=6), st.integers(1, 200))
def test_all_of_the_budget_is_given_out_and_nobody_starves(
    problems: list[tuple[int, list[float]]], total: int
) -> None:
    """Each problem has as many configurations as its course has factors; time falls by one with each."""
    accounts = {number: TaskState(count=count, expected_us=1.0) for number, (count, _) in enumerate(problems)}
    allotment, left = BudgetScheduler(accounts, total), total
    while (turn := allotment.next(left)) is not None:
        number, trials = turn
        one, (_, course) = accounts[number], problems[number]
        assert 1 <= trials <= left
        made = min(trials, len(course) - one.trials)
        left -= made
        best_us = 100.0 * math.prod(course[: one.trials + made])
        one.update(trials=one.trials + made, best_us=best_us, floor_us=0.0, closed=made < trials)
    sizes = [len(course) for _, course in problems]
    assert total - left == min(total, sum(sizes))
    first = max(1, min(FIRST, total // (2 * len(problems))))
    if total >= len(problems):
        assert all(one.trials >= min(first, size) for one, size in zip(accounts.values(), sizes, strict=True))
