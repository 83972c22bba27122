"""The optimiser of pipeline schedules, its lower bound and its integer program."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tunebench.errors import InputError
from tunebench.training.pipeline import named_schedules, optimise_schedule, step_lower_bound_us
from tunebench.training.pipeline._order_search import OrderProblem, order_us
from tunebench.training.schedules import (
    ActionKind,
    Interconnect,
    LinearTransfer,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    StageCosts,
    looped_placement,
    simulate_pipeline,
    v_placement,
)

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)


def random_costs(
    rng: random.Random, placement: Sequence[int], *, links: bool, whole: bool = False
) -> PipelineCosts:
    """Random times and sizes; with links, of two nodes; with `whole`, faster whole backward passes."""
    stages = []
    for _ in placement:
        gradient, weight = rng.uniform(1, 9), rng.uniform(1, 9)
        stages.append(
            StageCosts(
                forward_us=rng.uniform(1, 9),
                input_gradient_us=gradient,
                weight_gradient_us=weight,
                backward_us=0.7 * (gradient + weight) if whole else None,
                activation_bytes=rng.randint(4, 9),
                retained_bytes=rng.randint(1, 4),
                send_bytes=rng.randint(1, 4) if links else 0,
                static_bytes=rng.randint(0, 5),
            )
        )
    ranks = max(placement) + 1
    interconnect = Interconnect.grouped(
        ranks, 2, LinearTransfer(bytes_per_us=2), LinearTransfer(bytes_per_us=1, latency_us=0.5)
    )
    return PipelineCosts(stages=tuple(stages), interconnect=interconnect if links else None)


def all_orders(stage: int, microbatches: int, kinds: Sequence[ActionKind]) -> Iterator[list[PipelineAction]]:
    """Every order of the passes of a stage, micro-batches in order, with whole backward passes or not."""

    def extend(
        forward: int, backward: int, pending: tuple[int, ...], order: list[PipelineAction]
    ) -> Iterator[list[PipelineAction]]:
        if backward == microbatches and not pending:
            yield order
        if forward < microbatches:
            yield from extend(forward + 1, backward, pending, [*order, PipelineAction(stage, F, forward)])
        if backward < forward:
            for kind in {B, I} & {*kinds}:
                more = (*pending, backward) if kind is I else pending
                action = PipelineAction(stage, kind, backward)
                yield from extend(forward, backward + 1, more, [*order, action])
        if pending:
            yield from extend(forward, backward, pending[1:], [*order, PipelineAction(stage, W, pending[0])])

    yield from extend(0, 0, (), [])


def best_of_all(
    costs: PipelineCosts, microbatches: int, kinds: Sequence[ActionKind], limits: Sequence[float]
) -> list[float]:
    """Least time of a step within each limit of memory, over all orders of two ranks."""
    best = [float("inf") for _ in limits]
    for orders in itertools.product(*(list(all_orders(stage, microbatches, kinds)) for stage in (0, 1))):
        schedule = PipelineSchedule(
            name="all", microbatches=microbatches, placement=(0, 1), actions=tuple(map(tuple, orders))
        )
        try:
            got = simulate_pipeline(schedule, costs)
        except InputError:  # the ranks wait for each other
            continue
        for index, limit in enumerate(limits):
            if max(got.peak_bytes) <= limit:
                best[index] = min(best[index], got.step_us)
    return best


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (2, 3))])
@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize(("kinds", "microbatches"), [((F, B), 4), ((F, I, W), 3), ((F, B, I, W), 2)])
def test_small_problems_are_solved_as_by_trying_every_order(
    seed: int, links: bool, kinds: tuple[ActionKind, ...], microbatches: int
) -> None:
    rng = random.Random(seed)
    costs = random_costs(rng, (0, 1), links=links, whole=len(kinds) == 4)
    split = W in kinds
    limits = (None, 26)
    least_us = best_of_all(costs, microbatches, kinds, [limit or float("inf") for limit in limits])
    for memory_bytes, expected in zip(limits, least_us, strict=True):
        got = optimise_schedule((0, 1), microbatches, costs, memory_bytes, split)
        if links and memory_bytes is not None:  # the search does not count transferred tensors
            assert expected * (1 - 1e-9) <= got.simulation.step_us <= 1.02 * expected
        else:
            assert got.simulation.step_us == pytest.approx(expected, rel=1e-9)
        assert got.lower_bound_us <= expected * (1 + 1e-9)
        bound_us = step_lower_bound_us(
            (0, 1), microbatches, costs, memory_bytes=memory_bytes, split_backward=split
        )
        assert bound_us <= expected * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_solved_problems_without_links_have_no_gap(seed: int) -> None:
    rng = random.Random(seed)
    placement, microbatches, split = tuple(range(rng.randint(2, 4))), rng.randint(2, 5), seed % 2 == 0
    costs = random_costs(rng, placement, links=False)
    got = optimise_schedule(placement, microbatches, costs, rng.choice([None, 30, 40]), split, 60.0)
    assert got.solved
    assert got.gap == 0


@pytest.mark.parametrize("seed", range(10))
def test_result_is_never_slower_than_a_named_schedule_that_fits(seed: int) -> None:
    rng = random.Random(100 + seed)
    ranks, microbatches = rng.randint(2, 5), rng.randint(3, 12)
    placement = rng.choice([looped_placement(ranks), looped_placement(ranks, 2), v_placement(ranks)])
    costs = random_costs(rng, placement, links=seed % 2 == 0)
    memory_bytes = rng.choice([None, 20 * ranks + 20])
    split = rng.random() < 0.7
    got = optimise_schedule(placement, microbatches, costs, memory_bytes, split, 1.0)
    assert simulate_pipeline(got.schedule, costs).step_us == got.simulation.step_us
    assert got.lower_bound_us <= got.simulation.step_us
    if memory_bytes is not None:
        assert max(got.simulation.peak_bytes) <= memory_bytes
    fitting = {}
    for name, make in named_schedules().items():
        schedule = make(ranks, microbatches)
        splits = any(action.kind is W for rank_actions in schedule.actions for action in rank_actions)
        if schedule.placement != placement or (splits and not split):
            continue
        named = simulate_pipeline(schedule, costs)
        assert got.lower_bound_us <= named.step_us or not split
        if memory_bytes is None or max(named.peak_bytes) <= memory_bytes:
            fitting[name] = named.step_us
    assert got.best_named_us == min(fitting.values(), default=float("inf"))
    assert got.best_named is None or fitting[got.best_named] == got.best_named_us
    assert got.simulation.step_us <= got.best_named_us


def test_equal_stages_reach_the_bound_of_a_known_schedule() -> None:
    """ZB-H2 idles only until the first micro-batch arrives."""
    got = optimise_schedule(looped_placement(4), 8, PipelineCosts.uniform(4))
    assert got.simulation.step_us == got.lower_bound_us == 3 * 8 + 3
    assert got.solved


def test_memory_makes_the_bound_higher() -> None:
    costs, placement = PipelineCosts.uniform(4), looped_placement(4)
    bounds = [
        step_lower_bound_us(placement, 12, costs, memory_bytes=memory_bytes)
        for memory_bytes in (None, 4, 2, 1)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] == 3 * 12 + 3
    assert bounds[-1] >= 12 * 9  # one micro-batch after the other, but for its weight gradient elsewhere
    optimised = optimise_schedule(placement, 4, costs, 1)
    assert max(optimised.simulation.peak_bytes) == 1
    assert optimised.gap == 0


def test_slow_links_bound_the_step() -> None:
    stage = StageCosts(forward_us=1, input_gradient_us=1, weight_gradient_us=1, send_us=10)
    costs = PipelineCosts(stages=(stage, stage))
    assert step_lower_bound_us((0, 1), 5, costs) >= 5 * 10 + 1 + 1 + 1 + 10 + 1
    assert optimise_schedule((0, 1), 5, costs).gap == 0


def test_simulated_annealing_computes_the_time_of_the_simulation() -> None:
    rng = random.Random(7)
    for placement in (looped_placement(4), looped_placement(3, 2), v_placement(3)):
        ranks = max(placement) + 1
        costs = random_costs(rng, placement, links=True)
        stages, links = len(placement), costs.interconnect
        assert links is not None
        hops = [*itertools.pairwise(placement), (0, 0)]
        copies = [
            links.transfer_us(stage.send_bytes, *hop) if hop[0] != hop[1] else 0.0
            for stage, hop in zip(costs.stages, hops, strict=True)
        ]
        times = [
            [stage.forward_us for stage in costs.stages],
            [stage.input_gradient_us for stage in costs.stages],
            [stage.weight_gradient_us for stage in costs.stages],
        ]
        problem = OrderProblem(
            placement=np.array(placement),
            microbatches=6,
            times=np.array(times),
            whole=np.full(stages, np.inf),
            copies=np.array([copies, copies]),
            links=np.array([links.nodes[a] != links.nodes[b] for a, b in hops], dtype=np.int64),
            held=np.ones((2, stages)),
            limits=np.ones(ranks),
        )
        compared = 0
        for make in named_schedules().values():
            schedule = make(ranks, 6)
            if schedule.placement != placement or any(
                action.kind is B for rank_actions in schedule.actions for action in rank_actions
            ):
                continue
            codes = [
                [(F, I, W).index(action.kind) * stages + action.stage for action in rank_actions]
                for rank_actions in schedule.actions
            ]
            lengths = np.array([len(row) for row in codes])
            assert order_us(problem, np.array(codes), lengths) == simulate_pipeline(schedule, costs).step_us
            compared += 1
        assert compared


def test_impossible_problems_are_refused() -> None:
    costs = PipelineCosts.uniform(2, activation_bytes=5)
    with pytest.raises(InputError, match="rank 0 needs 0 static bytes and 5 for one micro-batch, and has 4"):
        optimise_schedule((0, 1), 2, costs, 4)
    with pytest.raises(InputError, match="expected costs of 3 stages"):
        optimise_schedule((0, 1, 2), 2, costs)
    stage = StageCosts(
        forward_us=1, input_gradient_us=1, weight_gradient_us=1, activation_bytes=5, send_bytes=4
    )
    with pytest.raises(InputError, match="found no schedule of 2 micro-batches within 6 bytes"):
        optimise_schedule((0, 1), 2, PipelineCosts(stages=(stage, stage)), 6)
