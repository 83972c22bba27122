"""Schedules of a pipeline and their simulation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.errors import InputError
from tunebench.training.schedules import (
    ActionKind,
    Interconnect,
    LinearTransfer,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    StageCosts,
    bubble,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    read_schedule,
    schedule_of,
    simulate_pipeline,
    v_placement,
    write_schedule,
)

GENERATORS = {"gpipe": gpipe, "1f1b": one_f_one_b}
schedules = st.sampled_from(sorted(GENERATORS))
durations = st.floats(0.1, 100)


def actions(*ranks: str) -> list[list[PipelineAction]]:
    return [[PipelineAction.parse(text) for text in rank.split()] for rank in ranks]


def costs_of(forward: list[float], backward: list[float], send: list[float]) -> PipelineCosts:
    return PipelineCosts(
        stages=tuple(
            StageCosts(forward_us=f, input_gradient_us=b, weight_gradient_us=0, send_us=s, activation_bytes=1)
            for f, b, s in zip(forward, backward, [*send, 0], strict=True)
        )
    )


@given(schedules, st.integers(1, 6), st.integers(1, 8), durations, durations)
def test_equal_stages_are_idle_by_the_formula(
    name: str, stages: int, microbatches: int, forward: float, backward: float
) -> None:
    costs = costs_of([forward] * stages, [backward] * stages, [0] * (stages - 1))
    got = simulate_pipeline(GENERATORS[name](stages, microbatches), costs)
    assert got.bubble == pytest.approx(bubble(stages, microbatches), abs=1e-9)


@given(schedules, st.integers(1, 5), st.integers(1, 6), st.data())
def test_no_pipeline_beats_its_busiest_stage_or_its_first_microbatch(
    name: str, stages: int, microbatches: int, data: st.DataObject
) -> None:
    def draw(count: int) -> list[float]:
        return data.draw(st.lists(durations, min_size=count, max_size=count))

    forward, backward, send = draw(stages), draw(stages), draw(stages - 1)
    got = simulate_pipeline(GENERATORS[name](stages, microbatches), costs_of(forward, backward, send))
    busiest = max(microbatches * (f + b) for f, b in zip(forward, backward, strict=True))
    once = sum(forward) + sum(backward) + 2 * sum(send)
    assert got.step_us >= max(busiest, once) * (1 - 1e-12)
    assert got.step_us <= microbatches * once * (1 + 1e-12)


@pytest.mark.slow
@given(st.data())
def test_any_order_ends_when_its_longest_path_does(data: st.DataObject) -> None:
    """Against a fixpoint over the dependencies, for random orders and split backward passes."""
    ranks = data.draw(st.integers(1, 3))
    stages = data.draw(st.integers(ranks, 5))
    microbatches = data.draw(st.integers(1, 4))
    placement = (*range(ranks), *data.draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks)))[
        :stages
    ]
    takes = {kind: data.draw(st.lists(durations, min_size=stages, max_size=stages)) for kind in "FIW"}
    needs: dict[tuple[int, str, int], list[tuple[int, str, int]]] = {}
    for stage in range(stages):
        for microbatch in range(microbatches):
            needs[stage, "F", microbatch] = [(stage - 1, "F", microbatch)] if stage else []
            later = [(stage + 1, "I", microbatch)] if stage + 1 < stages else []
            needs[stage, "I", microbatch] = [(stage, "F", microbatch), *later]
            needs[stage, "W", microbatch] = [(stage, "I", microbatch)]
    lists: list[list[PipelineAction]] = [[] for _ in range(ranks)]
    end_of: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * ranks
    while needs.keys() - end_of.keys():
        ready = sorted(
            key for key, before in needs.items() if key not in end_of and end_of.keys() >= set(before)
        )
        stage, kind, microbatch = key = data.draw(st.sampled_from(ready))
        rank = placement[stage]
        clocks[rank] = max([clocks[rank], *(end_of[before] for before in needs[key])]) + takes[kind][stage]
        end_of[key] = clocks[rank]
        lists[rank].append(PipelineAction(stage, ActionKind(kind), microbatch))
    schedule = PipelineSchedule(
        name="random", microbatches=microbatches, placement=placement, actions=tuple(map(tuple, lists))
    )
    costs = PipelineCosts(
        stages=tuple(
            StageCosts(forward_us=f, input_gradient_us=i, weight_gradient_us=w)
            for f, i, w in zip(*(takes[kind] for kind in "FIW"), strict=True)
        )
    )
    got = simulate_pipeline(schedule, costs)
    for rank, actions_of in enumerate(lists):
        expected = [end_of[action.stage, action.kind.value, action.microbatch] for action in actions_of]
        assert got.ends_us[rank].tolist() == pytest.approx(expected)


def test_forward_passes_alone_follow_one_another() -> None:
    got = simulate_pipeline(gpipe(3, 4, trains=False), costs_of([2, 3, 2], [9, 9, 9], [1, 1]))
    assert [rank_ends[-1] for rank_ends in got.ends_us] == [8, 15, 18]


def test_gradients_go_back_the_way_activations_came() -> None:
    got = simulate_pipeline(one_f_one_b(3, 1), costs_of([1, 1, 1], [1, 1, 1], [1, 5]))
    assert [rank_ends[-1] for rank_ends in got.ends_us] == [18, 16, 10]


def test_peak_microbatches_of_named_schedules() -> None:
    """Chunks that each rank stores at once, for 4 ranks and 16 micro-batches: those of torch's schedules."""
    expected = {
        gpipe(4, 16): (16, 16, 16, 16),
        one_f_one_b(4, 16): (4, 3, 2, 1),
        interleaved_1f1b(4, 16): (11, 9, 7, 5),
        looped_bfs(4, 16): (32, 32, 32, 32),
    }
    for schedule, peaks in expected.items():
        assert simulate_pipeline(schedule, PipelineCosts.uniform(schedule.stages)).peak_bytes == peaks, (
            schedule.name
        )


@pytest.mark.parametrize("microbatches", [1, 3, 4, 6, 8, 9, 16])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_schedules_run_for_any_number_of_microbatches(microbatches: int, chunks: int) -> None:
    for make in (interleaved_1f1b, looped_bfs):
        schedule = make(4, microbatches, chunks)
        got = simulate_pipeline(schedule, PipelineCosts.uniform(schedule.stages))
        assert got.step_us <= (microbatches + 3) * chunks * 3
        assert all(busy == microbatches * chunks * 3 for busy in got.busy_us)


def test_split_backward_frees_activations_in_two_parts() -> None:
    schedule = schedule_of("split", actions("0F0 0F1 0I0 0I1 0W0 0W1"))
    stage = StageCosts(
        forward_us=1, input_gradient_us=2, weight_gradient_us=3, activation_bytes=10, retained_bytes=4
    )
    got = simulate_pipeline(schedule, PipelineCosts(stages=(stage,)))
    assert got.step_us == 12
    assert got.memory[0].nbytes.tolist() == [0, 10, 20, 14, 8, 4, 0]
    assert got.memory[0].times_us.tolist() == [0, 0, 1, 4, 6, 9, 12]


def test_transfers_wait_for_the_link_and_hold_memory_on_both_sides() -> None:
    schedule = gpipe(2, 2, trains=False)
    link = Interconnect.grouped(
        2, 2, LinearTransfer(bytes_per_us=2, latency_us=1), LinearTransfer(bytes_per_us=1)
    )
    stage = StageCosts(forward_us=1, input_gradient_us=1, weight_gradient_us=1, send_bytes=6)
    got = simulate_pipeline(schedule, PipelineCosts(stages=(stage, stage), interconnect=link))
    assert [(transfer.start_us, transfer.end_us) for transfer in got.transfers] == [(1, 5), (5, 9)]
    assert got.step_us == 10
    assert got.peak_bytes == (12, 6)
    assert got.waits_us[1][ActionKind.SEND_FORWARD] == 8


def test_directions_of_a_link_do_not_wait_for_each_other() -> None:
    schedule = PipelineSchedule(
        name="both ways",
        microbatches=2,
        placement=(0, 1),
        actions=tuple(map(tuple, actions("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))),
    )
    stage = StageCosts(forward_us=2, input_gradient_us=2, weight_gradient_us=0, send_us=4)
    got = simulate_pipeline(schedule, PipelineCosts(stages=(stage, stage)))
    spans = {
        (transfer.kind, transfer.microbatch): (transfer.start_us, transfer.end_us)
        for transfer in got.transfers
    }
    assert spans == {
        (ActionKind.SEND_FORWARD, 0): (2, 6),
        (ActionKind.SEND_FORWARD, 1): (6, 10),
        (ActionKind.SEND_BACKWARD, 0): (10, 14),
        (ActionKind.SEND_BACKWARD, 1): (14, 18),
    }


def test_evicted_activations_come_back() -> None:
    schedule = schedule_of(
        "evicts", actions("0F0 0EVICT0 0RELEASE0 0F1 0LOAD0 0B0 0B1", "1F0 1B0 1F1 1B1"), acceptors=(1, 0)
    )
    link = Interconnect.grouped(2, 2, LinearTransfer(bytes_per_us=2), LinearTransfer(bytes_per_us=1))
    stage = StageCosts(forward_us=1, input_gradient_us=1, weight_gradient_us=0, activation_bytes=8)
    got = simulate_pipeline(schedule, PipelineCosts(stages=(stage, stage), interconnect=link))
    assert got.starts_us[0].tolist() == [0, 1, 5, 5, 6, 10, 11]
    assert got.waits_us[0] | {ActionKind.EVICT: 4, ActionKind.LOAD: 4} == got.waits_us[0]
    assert got.exposed_us == 8
    assert got.peak_bytes == (16, 16)


def test_explicit_transfers_start_when_both_sides_are_issued() -> None:
    schedule = schedule_of(
        "explicit",
        actions("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
    )
    stage = StageCosts(forward_us=3, input_gradient_us=4, weight_gradient_us=0, send_us=2, send_bytes=5)
    got = simulate_pipeline(schedule, PipelineCosts(stages=(stage, stage)))
    assert got.step_us == 3 + 2 + 3 + 4 + 2 + 4
    assert [transfer.start_us for transfer in got.transfers] == [3, 12]
    late = dataclasses.replace(
        schedule,
        actions=tuple(map(tuple, actions("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"))),
        name="late",
    )
    with pytest.raises(
        InputError, match="deadlock: rank 0 waits at 0B0 for 1SEND_B0 of rank 1 and 0RECV_B0 of rank 0"
    ):
        simulate_pipeline(late, PipelineCosts(stages=(stage, stage)))


def test_sharded_parameters_are_gathered_before_their_pass() -> None:
    schedule = schedule_of("sharded", actions("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD"))
    stage = StageCosts(
        forward_us=1, input_gradient_us=2, weight_gradient_us=0, unshard_us=5, unsharded_bytes=7, reduce_us=11
    )
    got = simulate_pipeline(schedule, PipelineCosts(stages=(stage,)))
    assert got.step_us == 5 + 1 + 5 + 2 + 11
    assert got.peak_bytes == (7,)
    with pytest.raises(InputError, match="rank 0 cannot execute 0F0: 0UNSHARD is not before it"):
        simulate_pipeline(schedule_of("unsharded", actions("0F0 0B0")), PipelineCosts(stages=(stage,)))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0 0F0 0B0",), "rank 0 cannot execute 0F0: it is the second one"),
        (("0B0 0F0",), "rank 0 cannot execute 0B0: 0F0 is not before it"),
        (("0F0 0W0 0I0",), "rank 0 cannot execute 0W0: 0I0 or 0B0 is not before it"),
        (("0F0 0B0 0W0",), "rank 0 cannot execute 0W0: it is the second one"),
        (("0F0 0I0",), "0W0 is missing on rank 0"),
        (("0F0 0F1 0B0",), "0B1 is missing on rank 0"),
        (("1F0 0F0",), "rank 0 cannot execute 1F0: 0F0 is not before it"),
        (("0F0 1F0 0B0 1B0",), "rank 0 cannot execute 0B0: 1I0 or 1B0 is not before it"),
        (("0B0 0F0", "1F0 1B0"), "rank 0 cannot execute 0B0: 0F0 is not before it"),
        (
            ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"),
            "rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1",
        ),
    ],
)
def test_impossible_schedules_are_errors_that_name_the_action(ranks: tuple[str, ...], message: str) -> None:
    schedule = schedule_of("bad", actions(*ranks))
    with pytest.raises(InputError, match=message):
        simulate_pipeline(schedule, PipelineCosts.uniform(schedule.stages))


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("0F0 0LOAD0 0B0", "0EVICT0 is not before it"),
        ("0F0 0EVICT0 0B0", "its activations are evicted, and 0LOAD0 is not before it"),
        ("0F0 0B0 0EVICT0", "its activations are not needed any more"),
        ("0EVICT0 0F0 0B0", "0F0 is not before it"),
        ("0F0 0EVICT0 0LOAD0 0EVICT0 0B0", "it is the second one"),
    ],
)
def test_impossible_evictions_are_errors(rank: str, message: str) -> None:
    schedule = schedule_of("bad", actions(rank, "1F0 1B0"), acceptors=(1, 0))
    with pytest.raises(InputError, match=message):
        simulate_pipeline(schedule, PipelineCosts.uniform(2))


@pytest.mark.parametrize("text", ["", "F0", "0X0", "0F", "0UNSHARD1", "0F0 1F0", "-1F0", "0f0"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not an action: expected STAGE, KIND and MICROBATCH"):
        PipelineAction.parse(text)


def test_schedules_are_written_and_read(tmp_path: Path) -> None:
    schedule = interleaved_1f1b(3, 5, 2)
    write_schedule(schedule, tmp_path / "interleaved-1f1b.csv")
    assert read_schedule(tmp_path / "interleaved-1f1b.csv") == schedule
    (tmp_path / "bad.csv").write_text("0F0,0G0\n")
    with pytest.raises(InputError, match="'0G0' is not an action"):
        read_schedule(tmp_path / "bad.csv")
    with pytest.raises(InputError, match=r"schedule .* cannot be read"):
        read_schedule(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "at least one micro-batch"),
        ({"placement": (0, 0)}, "every one of the 2 ranks needs a stage"),
        ({"placement": (1, 0)}, "stage 0 is on rank 1"),
        ({"microbatches": 1}, "2 stages and 1 micro-batches"),
        ({"acceptors": (1,)}, "expected an acceptor for each of the 2 ranks"),
    ],
)
def test_inconsistent_schedules_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(one_f_one_b(2, 2), **change)


def test_costs_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match="has 2 stages, and the costs are of 3"):
        simulate_pipeline(one_f_one_b(2, 2), PipelineCosts.uniform(3))
    with pytest.raises(InputError, match="the interconnect has 3 ranks, and the schedule 2"):
        simulate_pipeline(one_f_one_b(2, 2), PipelineCosts.uniform(2, interconnect=Interconnect.instant(3)))
    with pytest.raises(InputError, match="forward_us of a stage must be a finite number"):
        StageCosts(forward_us=float("nan"), input_gradient_us=1, weight_gradient_us=1)


def test_partners_share_a_node() -> None:
    links = Interconnect.grouped(
        8, 4, LinearTransfer(bytes_per_us=1), LinearTransfer(bytes_per_us=2), pairs=True
    )
    assert all(links.nodes[rank] == links.nodes[7 - rank] for rank in range(8))
    assert links.transfer_us(10, 0, 7) == 10
    assert links.transfer_us(10, 1, 2) == 5


def test_stages_in_a_v_turn_without_a_transfer() -> None:
    assert v_placement(2) == (0, 1, 1, 0)
    schedule = schedule_of("v", actions("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"))
    got = simulate_pipeline(schedule, PipelineCosts.uniform(4))
    assert got.step_us == 12
    assert len(got.transfers) == 4
