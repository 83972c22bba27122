"""Schedules of a pipeline with split backward passes: figures of their papers, and torch's schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import needs_torch
from tunebench.errors import InputError
from tunebench.training.schedules import (
    ActionKind,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    StageCosts,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    schedule_of,
    simulate_pipeline,
    v_half,
    v_min,
    v_placement,
    v_schedule,
    zb_h1,
    zb_h2,
    zbv,
)

MAKERS: dict[str, Callable[[int, int], PipelineSchedule]] = {
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zero_bubble,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}


def work_of(schedule: PipelineSchedule) -> int:
    """Time of the passes of a rank, of one unit each."""
    return 3 * schedule.microbatches * schedule.stages // schedule.ranks


def bubble_of(schedule: PipelineSchedule) -> float:
    """Longest span of a rank less its passes, of one unit each."""
    got = simulate_pipeline(schedule, PipelineCosts.uniform(schedule.stages))
    return max(got.span_us) - work_of(schedule)


def peaks_of(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Most stages of which each rank holds activations."""
    return simulate_pipeline(schedule, PipelineCosts.uniform(schedule.stages)).peak_bytes


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_zb_h1_idles_a_third_of_1f1b_with_its_memory(ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks + 1, 3 * ranks):
        schedule = zb_h1(ranks, microbatches)
        assert bubble_of(schedule) * 3 == bubble_of(one_f_one_b(ranks, microbatches)) == 3 * (ranks - 1)
        assert max(peaks_of(schedule)) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_zb_h2_has_no_bubble(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        schedule = zb_h2(ranks, microbatches)
        assert bubble_of(schedule) == 0
        assert max(peaks_of(schedule)) == 2 * ranks - 1


@pytest.mark.parametrize("ranks", [*range(2, 17, 2), 24, 32])
def test_v_schedules_keep_the_memory_of_their_paper(ranks: int) -> None:
    """Two stages of a rank are one unit of its memory. Bubbles are those of the formula below."""
    for make, units in ((v_half, (ranks + 2) // 2), (v_min, (ranks + 4) // 3)):
        schedule = make(ranks, 2 * ranks)
        assert max(peaks_of(schedule)) == 2 * units
        assert bubble_of(schedule) == known_bubble(ranks, 2 * units)


def known_bubble(ranks: int, most_stages: int) -> int:
    return 3 * ranks - 1 - 3 * most_stages + max(3 * ranks, ranks - 1 + 2 * (1 + (most_stages + 1) // 2))


@pytest.mark.parametrize(("most", "bubble"), [(4, 11), (5, 8), (6, 5), (7, 3), (8, 0)])
@pytest.mark.parametrize("microbatches", [12, 16, 33])
def test_bubble_of_v_schedules_by_memory(most: int, bubble: int, microbatches: int) -> None:
    schedule = v_schedule(4, microbatches, most)
    assert bubble_of(schedule) == bubble == known_bubble(4, most)
    assert max(peaks_of(schedule)) <= most


@pytest.mark.parametrize("most", [2, 3])
def test_v_schedules_run_in_less_memory_than_they_need_to_be_fast(most: int) -> None:
    assert max(peaks_of(v_schedule(4, 6, most))) <= most
    with pytest.raises(InputError, match="memory of 2 stages, got 4, 6 and 1"):
        v_schedule(4, 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_schedules_run_for_any_number_of_microbatches(name: str, ranks: int) -> None:
    for microbatches in (1, 2, ranks, 7):
        schedule = MAKERS[name](ranks, microbatches)
        assert schedule.name == name
        got = simulate_pipeline(schedule, PipelineCosts.uniform(schedule.stages))
        assert all(busy == work_of(schedule) for busy in got.busy_us)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_times_of_stages_place_weight_gradients(ranks: int, microbatches: int, data: st.DataObject) -> None:
    """Any times of stages and links make a schedule with the same limit of memory."""

    def costs_of(stages: int) -> PipelineCosts:
        times = st.lists(st.floats(0, 10), min_size=4, max_size=4)
        made = [
            StageCosts(
                forward_us=stage_times[0],
                input_gradient_us=stage_times[1],
                weight_gradient_us=stage_times[2],
                send_us=stage_times[3],
                activation_bytes=1,
            )
            for stage_times in data.draw(st.lists(times, min_size=stages, max_size=stages))
        ]
        return PipelineCosts(stages=tuple(made))

    most_stages = data.draw(st.integers(2, 2 * ranks + 2))
    looped, doubled = costs_of(ranks), costs_of(2 * ranks)
    for schedule, costs, limit in (
        (zb_h1(ranks, microbatches, costs=looped), looped, ranks),
        (zb_h2(ranks, microbatches, costs=looped), looped, 2 * ranks - 1),
        (interleaved_zero_bubble(ranks, microbatches, costs=doubled), doubled, 4 * ranks),
        (v_schedule(ranks, microbatches, most_stages, costs=doubled), doubled, most_stages),
    ):
        assert max(simulate_pipeline(schedule, costs).peak_bytes) <= limit


def test_weight_gradients_move_with_the_times_of_stages() -> None:
    """A slow stage in the middle, and weight gradients that take longer than other passes."""
    slow = StageCosts(forward_us=3, input_gradient_us=2, weight_gradient_us=1, activation_bytes=1)
    quick = StageCosts(forward_us=1, input_gradient_us=1, weight_gradient_us=4, activation_bytes=1)
    costs = PipelineCosts(stages=(quick, slow, quick, slow))
    for make in (zb_h1, zb_h2):
        placed, usual = make(4, 12, costs=costs), make(4, 12)
        assert placed.actions != usual.actions
        fast = simulate_pipeline(placed, costs).step_us
        assert fast <= simulate_pipeline(usual, costs).step_us
        assert fast < simulate_pipeline(one_f_one_b(4, 12), costs).step_us


# ------------------------------------------------------------------------------------- torch's schedules


def torch_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """Return a schedule of torch, made without processes or models."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        """What a schedule asks of a stage."""

        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages = index, ranks * chunks
            self.group_rank, self.group_size, self.group = 0, ranks, None
            self.has_backward, self.submod = True, None

    Stage.__abstractmethods__ = frozenset()  # none of its methods is called

    def listed(action: Any) -> list[PipelineAction]:
        if action is None:
            return []
        if action.sub_actions:
            return [torch_action for sub in action.sub_actions for torch_action in listed(sub)]
        parsed = PipelineAction.parse(str(action))
        return [parsed] if parsed.kind.computes else []

    of_class = schedules.get_schedule_class(name)
    if chunks == 1:
        order = of_class(Stage(0), microbatches, loss_fn=lambda *_: None)._get_pipeline_order()
    else:
        stages = [Stage(index * ranks) for index in range(chunks)]
        order = of_class(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    actions = [list(itertools.chain.from_iterable(map(listed, order[rank]))) for rank in range(ranks)]
    if name == "1F1B":  # torch 2.13 numbers the forward passes of the last rank from 1
        actions[-1] = [
            torch_action._replace(
                microbatch=torch_action.microbatch - (torch_action.kind is ActionKind.FORWARD)
            )
            for torch_action in actions[-1]
        ]
    return schedule_of(name, actions)


TORCH = {
    "GPipe": (gpipe, 1, 16),
    "1F1B": (one_f_one_b, 1, 4),
    "Interleaved1F1B": (interleaved_1f1b, 2, 11),
    "LoopedBFS": (looped_bfs, 2, 32),
    "InterleavedZeroBubble": (interleaved_zero_bubble, 2, 8),
    "ZBVZeroBubble": (zbv, 2, 8),
    "DualPipeV": (dualpipe_v, 2, 9),
}
"""Our schedule, its chunks, and the most stages that a rank holds with 4 ranks and 16 micro-batches."""


@needs_torch
@pytest.mark.parametrize("name", sorted(TORCH))
def test_memory_and_time_of_torchs_schedules(name: str) -> None:
    make, chunks, peak = TORCH[name]
    ours, theirs = make(4, 16), torch_schedule(name, 4, 16, chunks)
    assert ours.placement == theirs.placement
    assert max(peaks_of(theirs)) == max(peaks_of(ours)) == peak
    assert bubble_of(ours) == bubble_of(theirs)
    costs = PipelineCosts.uniform(ours.stages)
    assert simulate_pipeline(ours, costs).step_us == simulate_pipeline(theirs, costs).step_us


@needs_torch
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 16), (6, 12), (5, 20)])
def test_torch_runs_the_same_actions(name: str, ranks: int, microbatches: int) -> None:
    make, chunks, _ = TORCH[name]
    assert make(ranks, microbatches).actions == torch_schedule(name, ranks, microbatches, chunks).actions


@needs_torch
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 16), (6, 12)])
def test_torch_runs_the_same_passes_between_weight_gradients(ranks: int, microbatches: int) -> None:
    def without_weights(schedule: PipelineSchedule) -> list[list[PipelineAction]]:
        weights = ActionKind.WEIGHT_GRADIENT
        return [
            [action for action in rank_actions if action.kind is not weights]
            for rank_actions in schedule.actions
        ]

    theirs = torch_schedule("InterleavedZeroBubble", ranks, microbatches, 2)
    assert without_weights(interleaved_zero_bubble(ranks, microbatches)) == without_weights(theirs)


def test_stages_of_a_v_are_on_the_ranks_of_the_schedule() -> None:
    assert zbv(3, 2).placement == dualpipe_v(3, 2).placement == v_placement(3)
