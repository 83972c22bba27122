"""Memory of messages that arrive late, against simulations with any times."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tunebench.errors import InputError
from tunebench.training.pipeline import balance, with_transfers
from tunebench.training.pipeline.message_memory import ended_sends, most_bytes
from tunebench.training.schedules import (
    ActionKind,
    PipelineCosts,
    PipelineSchedule,
    StageCosts,
    find_schedule,
    one_f_one_b,
    simulate_pipeline,
)


def costs_of(schedule: PipelineSchedule, random: Random) -> PipelineCosts:
    stages = [
        StageCosts(
            forward_us=random.uniform(1, 9),
            input_gradient_us=random.uniform(1, 9),
            weight_gradient_us=random.uniform(1, 9),
            activation_bytes=(activation_bytes := random.randint(20, 90)),
            retained_bytes=random.randint(5, 120),
            evict_bytes=random.randint(5, activation_bytes),
            send_bytes=random.randint(1, 40),
            static_bytes=random.randint(0, 99),
        )
        for _ in schedule.placement
    ]
    return PipelineCosts(stages=tuple(stages))


def with_times(costs: PipelineCosts, random: Random) -> PipelineCosts:
    """Return costs with other times, some of which are far longer than all others."""
    return replace(
        costs,
        stages=tuple(
            replace(
                stage,
                forward_us=10 ** random.uniform(-2, 3),
                input_gradient_us=10 ** random.uniform(-2, 3),
                weight_gradient_us=10 ** random.uniform(-2, 3),
                send_us=10 ** random.uniform(-2, 3),
            )
            for stage in costs.stages
        ),
    )


@pytest.mark.parametrize(
    ("name", "balanced"),
    [("gpipe", False), ("1f1b", False), ("1f1b", True), ("interleaved-1f1b", False), ("zb-h1", False)],
)
def test_no_times_make_a_rank_hold_more(name: str, balanced: bool) -> None:
    random = Random(0)
    more = 0
    for ranks in (2, 4):
        plain = find_schedule(name).make(ranks, 8)
        costs = costs_of(plain, random)
        schedule = with_transfers(balance(plain, costs, slowdown=1.0) if balanced else plain, costs)
        most = most_bytes(schedule, costs)
        more += sum(simulate_pipeline(schedule, costs).peak_bytes) < sum(most)
        for _ in range(20):
            peaks = simulate_pipeline(schedule, with_times(costs, random)).peak_bytes
            assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True))
    assert more


def test_gradients_prove_that_outputs_have_arrived() -> None:
    schedule = with_transfers(one_f_one_b(2, 4), PipelineCosts.uniform(2))
    for actions, ended in zip(schedule.actions, ended_sends(schedule), strict=True):
        counts = dict(zip(actions, ended, strict=True))
        passes = [(action, count) for action, count in counts.items() if action.kind.computes]
        if passes[0][0].stage == 0:  # the gradient of a micro-batch is sent after its output was used
            assert [count for action, count in passes if action.kind is ActionKind.BACKWARD] == [1, 2, 3, 4]
        else:  # rank 0 sends output 2 after it has used gradient 0
            assert [count for action, count in passes if action.kind is ActionKind.FORWARD] == [0, 0, 1, 2]


def test_a_message_counts_until_it_must_have_arrived() -> None:
    stage = StageCosts(
        forward_us=1, input_gradient_us=1, weight_gradient_us=1, activation_bytes=10, send_bytes=3
    )
    costs = PipelineCosts(stages=(stage, stage))
    schedule = with_transfers(find_schedule("gpipe").make(2, 4), costs)
    # Rank 0 has four activations, four outputs that rank 1 may not have used, and one gradient or more.
    peaks = simulate_pipeline(schedule, costs).peak_bytes
    assert peaks[0] < 4 * (10 + 3) <= most_bytes(schedule, costs)[0] <= 4 * (10 + 3 + 3)


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    schedule = with_transfers(one_f_one_b(2, 2), PipelineCosts.uniform(2))
    first, second = schedule.actions
    backward_first = tuple(sorted(first, key=lambda action: action.kind is not ActionKind.BACKWARD))
    with pytest.raises(InputError, match="wait for each other"):
        ended_sends(replace(schedule, actions=(backward_first, second)))
