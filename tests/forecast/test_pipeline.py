from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.forecast.parallel.pipeline import Schedule, bubble, in_flight, order, run_pipeline

schedules = st.sampled_from(["gpipe", "1f1b"])
durations = st.floats(0.1, 100)


@given(schedules, st.integers(1, 6), st.integers(1, 8), durations, durations)
def test_alike_stages_are_idle_by_the_formula(
    schedule: Schedule, stages: int, microbatches: int, forward: float, backward: float
) -> None:
    got = run_pipeline(
        [forward] * stages,
        [backward] * stages,
        [0] * (stages - 1),
        microbatches=microbatches,
        schedule=schedule,
    )
    busy = microbatches * (forward + backward)
    assert 1 - busy / got.us == pytest.approx(bubble(stages, microbatches))


@given(schedules, st.integers(1, 5), st.integers(1, 6), st.data())
def test_no_pipeline_beats_its_busiest_stage_or_its_first_microbatch(
    schedule: Schedule, stages: int, microbatches: int, data: st.DataObject
) -> None:
    def draw(count: int) -> list[float]:
        return data.draw(st.lists(durations, min_size=count, max_size=count))

    forward, backward, send = draw(stages), draw(stages), draw(stages - 1)
    got = run_pipeline(forward, backward, send, microbatches=microbatches, schedule=schedule)
    busiest = max(microbatches * (f + b) for f, b in zip(forward, backward, strict=True))
    once = sum(forward) + sum(backward) + 2 * sum(send)
    assert got.us >= max(busiest, once) * (1 - 1e-12)
    assert got.us <= microbatches * once * (1 + 1e-12)
    if microbatches == 1:
        assert got.us == pytest.approx(once)


def test_one_stage_does_one_thing_after_the_other() -> None:
    assert run_pipeline([3], [5], [], microbatches=4).us == 32
    assert run_pipeline([3], [5], [], microbatches=4, trains=False).us == 12


def test_forward_passes_alone_follow_one_another() -> None:
    got = run_pipeline([2, 3, 2], [9, 9, 9], [1, 1], microbatches=4, trains=False)
    assert got.ends_us == (8, 15, 18)


def test_gradients_go_back_the_way_activations_came() -> None:
    got = run_pipeline([1, 1, 1], [1, 1, 1], [1, 5], microbatches=1)
    assert got.ends_us == (18, 16, 10)


def test_orders() -> None:
    assert order("gpipe", 1, 2, 2) == (("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1))
    assert [index for _, index in order("1f1b", 0, 2, 3)] == [0, 1, 0, 2, 1, 2]
    assert [name[0] for name, _ in order("1f1b", 1, 2, 3)] == list("fbfbfb")


@given(schedules, st.integers(1, 6), st.integers(1, 8), st.data())
def test_stage_never_exceeds_its_micro_batches_in_flight(
    schedule: Schedule, stages: int, microbatches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    passes = order(schedule, stage, stages, microbatches)
    kept = [0]
    for name, _ in passes:
        kept.append(kept[-1] + (1 if name == "forward" else -1))
    assert len(set(passes)) == 2 * microbatches
    assert (max(kept), kept[-1]) == (in_flight(schedule, stage, stages, microbatches), 0)
