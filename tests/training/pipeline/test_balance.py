"""Balanced memory: evictions to a partner rank."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tunebench.errors import InputError
from tunebench.training.pipeline.balance import balance, balance_at_limit
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.schedules import (
    ActionKind,
    Interconnect,
    LinearTransfer,
    PipelineCosts,
    PipelineSchedule,
    PipelineSimulation,
    StageCosts,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate_pipeline,
)


def link(ranks: int, transfer_us: float) -> Interconnect:
    """Links on which one unit of activations takes some time."""
    unit = LinearTransfer(bytes_per_us=1 / transfer_us)
    return Interconnect.grouped(ranks, ranks, unit, unit)


def balanced(ranks: int, limit: int, transfer_us: float = 0.0) -> tuple[PipelineSchedule, PipelineSimulation]:
    interconnect = link(ranks, transfer_us) if transfer_us else None
    costs = PipelineCosts.uniform(ranks, interconnect=interconnect)
    schedule = balance_at_limit(one_f_one_b(ranks, 4 * ranks), costs, limit)
    return schedule, simulate_pipeline(schedule, costs)


@pytest.mark.parametrize("ranks", range(2, 33, 2))
def test_no_rank_holds_more_than_half_of_the_ranks_and_one(ranks: int) -> None:
    """With instant transfers, the limit of BPipe holds and the step takes as long as that of 1F1B."""
    limit = math.ceil((ranks + 2) / 2)
    _, got = balanced(ranks, limit)
    assert max(got.peak_bytes) <= limit
    assert got.step_us == (5 * ranks - 1) * 3


def test_peak_microbatches_of_balanced_1f1b() -> None:
    assert balanced(4, 3)[1].peak_bytes == (3, 3, 2, 3)
    assert balanced(8, 5)[1].peak_bytes == (5, 5, 5, 5, 4, 5, 5, 4)
    assert set(balanced(16, 9)[1].peak_bytes) == {8, 9}


def test_each_eviction_is_released_and_loaded_before_its_backward_pass() -> None:
    schedule, _ = balanced(8, 5, transfer_us=1.0)
    for actions in schedule.actions:
        order = {action: index for index, action in enumerate(actions)}
        evicted = [action for action in actions if action.kind is ActionKind.EVICT]
        assert len(order) == len(actions)
        for action in evicted:
            kinds = (
                ActionKind.FORWARD,
                ActionKind.EVICT,
                ActionKind.RELEASE,
                ActionKind.LOAD,
                ActionKind.BACKWARD,
            )
            positions = [order[action._replace(kind=kind)] for kind in kinds]
            assert positions == sorted(positions)
        assert len(evicted) == sum(action.kind is ActionKind.LOAD for action in actions)
    assert [any(a.kind is ActionKind.EVICT for a in rank_actions) for rank_actions in schedule.actions] == [
        True
    ] * 3 + [False] * 5


@pytest.mark.parametrize("transfer_us", [0.5, 1.0, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("ranks", [8, 12])
def test_transfers_hide_if_they_take_no_longer_than_both_passes(ranks: int, transfer_us: float) -> None:
    """A copy in flight counts on both ranks, hence one micro-batch more."""
    _, got = balanced(ranks, ranks // 2 + 2, transfer_us)
    assert got.step_us == (5 * ranks - 1) * 3
    assert max(got.peak_bytes) <= ranks // 2 + 2


def test_longer_transfers_show_as_a_bubble() -> None:
    _, hidden = balanced(8, 5, transfer_us=3.0)
    _, exposed = balanced(8, 5, transfer_us=4.0)
    assert hidden.step_us == 117
    assert exposed.step_us > 125
    assert exposed.exposed_us > 10
    assert exposed.bubble > hidden.bubble


def test_least_memory_that_costs_no_time_is_found() -> None:
    schedule = one_f_one_b(8, 32)
    for transfer_us, max_peak in ((0.5, 5), (2.0, 6), (3.5, 7)):
        costs = PipelineCosts.uniform(8, interconnect=link(8, transfer_us))
        got = simulate_pipeline(balance(schedule, costs), costs)
        assert max(got.peak_bytes) <= max_peak
        assert got.step_us == 117
    slow = PipelineCosts.uniform(8, interconnect=link(8, 6.0))
    assert simulate_pipeline(balance(schedule, slow), slow).step_us == 117
    longer = simulate_pipeline(balance(schedule, slow, slowdown=1.0), slow)
    assert max(longer.peak_bytes) < 8
    assert 117 < longer.step_us <= 234


@pytest.mark.parametrize("make", [gpipe, interleaved_1f1b])
def test_other_schedules_are_balanced(make: type) -> None:
    schedule = make(4, 8)
    costs = PipelineCosts.uniform(schedule.stages)
    plain = simulate_pipeline(schedule, costs)
    limit = max(plain.peak_bytes) - 2
    acceptors = (3, 2, 1, 0)
    result = balance_at_limit(schedule, costs, limit, acceptors=acceptors)
    got = simulate_pipeline(result, costs)
    evicting = [rank for rank, peak in enumerate(plain.peak_bytes) if peak > limit]
    assert evicting
    assert all(got.peak_bytes[rank] <= limit for rank in evicting if acceptors[rank] not in evicting)


@pytest.mark.parametrize("make", [one_f_one_b, interleaved_1f1b])
@pytest.mark.parametrize("transfer_us", [0.0, 0.25, 1.0, 2.5])
@pytest.mark.parametrize("send_us", [0.0, 0.4])
def test_explicit_transfers_take_as_long_as_implicit_ones(
    make: type, transfer_us: float, send_us: float
) -> None:
    schedule = make(6, 12)
    interconnect = link(6, transfer_us) if transfer_us else None
    uniform = PipelineCosts.uniform(schedule.stages, interconnect=interconnect)
    costs = PipelineCosts(
        stages=tuple(dataclasses.replace(stage, send_us=send_us) for stage in uniform.stages),
        interconnect=interconnect,
    )
    for tested in (
        schedule,
        balance_at_limit(schedule, costs, max(simulate_pipeline(schedule, costs).peak_bytes) - 2),
    ):
        implicit = simulate_pipeline(tested, costs)
        explicit = with_transfers(tested, costs)
        got = simulate_pipeline(explicit, costs)
        assert explicit.explicit
        assert got.step_us <= implicit.step_us * 1.02
        assert len(got.transfers) == len(implicit.transfers)
        assert with_transfers(explicit, costs) is explicit


def test_both_sides_list_transfers_in_one_order() -> None:
    """Libraries that match transfers of a pair by their order need it."""
    costs = PipelineCosts.uniform(8, interconnect=link(8, 0.7))
    schedule = balance_at_limit(one_f_one_b(8, 16), costs, 6)
    explicit = with_transfers(schedule, costs)
    sends: dict[tuple[int, int], list[tuple[str, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for rank, actions in enumerate(explicit.actions):
        for action in actions:
            partner = explicit.acceptors[explicit.placement[action.stage]]
            name = (action.kind.value.removeprefix("SEND_").removeprefix("RECV_"), action.microbatch)
            if action.kind is ActionKind.SEND_FORWARD:
                sends.setdefault((rank, rank + 1), []).append(name)
            elif action.kind is ActionKind.SEND_BACKWARD:
                sends.setdefault((rank, rank - 1), []).append(name)
            elif action.kind is ActionKind.RECEIVE_FORWARD:
                receives.setdefault((rank - 1, rank), []).append(name)
            elif action.kind is ActionKind.RECEIVE_BACKWARD:
                receives.setdefault((rank + 1, rank), []).append(name)
            elif action.kind is ActionKind.EVICT:
                sends.setdefault((rank, partner), []).append(("swap", action.microbatch))
            elif action.kind is ActionKind.ACCEPT:
                receives.setdefault((action.stage, rank), []).append(("swap", action.microbatch))
            elif action.kind is ActionKind.RETURN:
                sends.setdefault((rank, action.stage), []).append(("swap", action.microbatch))
            elif action.kind is ActionKind.LOAD:
                receives.setdefault((partner, rank), []).append(("swap", action.microbatch))
    assert sends == receives
    assert sum(name == "swap" for sent in sends.values() for name, _ in sent) > 10


def test_what_cannot_be_balanced_is_refused() -> None:
    costs = PipelineCosts.uniform(4)
    schedule = one_f_one_b(4, 8)
    with pytest.raises(InputError, match=r"rank 0 cannot keep 0 bytes of activations at 0F0"):
        balance_at_limit(schedule, costs, 0)
    with pytest.raises(InputError, match="lists transfers or evictions already"):
        balance_at_limit(with_transfers(schedule, costs), costs, 3)
    with pytest.raises(InputError, match="expected an acceptor for each of the 4 ranks"):
        balance_at_limit(schedule, costs, 3, acceptors=(1, 0))
    assert balance_at_limit(schedule, costs, 4) is schedule


def test_receives_are_issued_when_they_are_needed_and_evictions_do_not_wait_for_them() -> None:
    """Sends are issued after their pass; receives of gradients do not precede them."""
    us = (
        (186, 230, 0),
        (316, 297, 16),
        (324, 240, 33),
        (278, 286, 16),
        (309, 368, 16),
        (336, 291, 33),
        (305, 358, 16),
    )
    stages = [
        StageCosts(
            forward_us=forward,
            input_gradient_us=backward / 2,
            weight_gradient_us=backward / 2,
            activation_bytes=1000 * kilobytes,
            send_bytes=16000,
        )
        for forward, backward, kilobytes in (*us, (696, 646, 219))
    ]
    costs = PipelineCosts(stages=tuple(stages), interconnect=Interconnect.instant(4))
    schedule = interleaved_1f1b(4, 8, 2)
    plain = [str(action) for action in with_transfers(schedule, costs).actions[0]]
    assert plain[:4] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1"]
    balanced = balance(schedule, costs, slowdown=0.01)
    assert balanced.acceptors
    explicit = simulate_pipeline(with_transfers(balanced, costs), costs)
    assert explicit.step_us >= simulate_pipeline(balanced, costs).step_us
