"""Contract of every schedule in the registry. A schedule that is added there is tested here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebench import cli
from tunebench.cli import _completion
from tunebench.errors import UnknownName
from tunebench.training.cluster import ClusterPlan
from tunebench.training.cluster.framework import RUNNABLE
from tunebench.training.schedules import ActionKind, PipelineCosts, simulate_pipeline
from tunebench.training.schedules.registry import (
    PLANNED_SCHEDULES,
    SCHEDULES,
    NamedSchedule,
    find_schedule,
    first_stage_in_flight,
    planned_schedule,
    stages_in_flight,
)
from tunebench.training.steps import parallelism
from tunebench.training.steps.parallelism import Parallelism, pipeline_schedule

SIZES = [(1, 2), (2, 4), (3, 3), (4, 8), (4, 16)]
"""Numbers of ranks and of micro-batches. Looped schedules need micro-batches that the ranks divide."""

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
every_size = pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
with_chunks = pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        pytest.param(schedule, chunks, id=f"{schedule.name}-{chunks}")
        for schedule in SCHEDULES.values()
        for chunks in ((1, 2, 3) if schedule.layout == "looped" else (1,))
    ],
)


@with_chunks
@every_size
def test_passes_are_complete_and_end(
    schedule: NamedSchedule, ranks: int, microbatches: int, chunks: int
) -> None:
    stages = ranks * schedule.stages_per_rank(chunks)
    made = schedule.make(ranks, microbatches, chunks)
    if chunks == 1 or schedule.layout == "looped":
        assert schedule.make(ranks, microbatches).name == schedule.name
    assert made.placement == schedule.placement(ranks, chunks)
    assert len(made.placement) == stages
    assert made.microbatches == microbatches
    kinds = {action.kind for actions in made.actions for action in actions}
    assert schedule.splits_backward == (ActionKind.WEIGHT_GRADIENT in kinds)
    simulation = simulate_pipeline(made, PipelineCosts.uniform(stages))  # raises in a deadlock
    busy_us = 3 * microbatches * stages // ranks
    assert busy_us <= simulation.step_us <= 3 * microbatches * stages


@with_chunks
@every_size
def test_in_flight_formula_is_the_simulated_maximum(
    schedule: NamedSchedule, ranks: int, microbatches: int, chunks: int
) -> None:
    per_rank = schedule.stages_per_rank(chunks)
    costs = PipelineCosts.uniform(ranks * per_rank)
    made = schedule.make(ranks, microbatches, chunks)
    simulated = simulate_pipeline(made, costs).peak_bytes
    formula = [int(schedule.stages_in_flight(ranks, rank, per_rank, microbatches)) for rank in range(ranks)]
    assert all(peak <= max_in_flight for peak, max_in_flight in zip(simulated, formula, strict=True))
    assert max(simulated) == max(formula)
    first = replace(costs.stages[0], activation_bytes=1)
    later_stages = [replace(stage, activation_bytes=0) for stage in costs.stages[1:]]
    of_first = max(simulate_pipeline(made, PipelineCosts(stages=(first, *later_stages))).peak_bytes)
    if schedule.first_stage is not None:
        assert of_first <= schedule.first_stage(ranks, chunks)


@every_schedule
def test_plans_follow_from_the_record(schedule: NamedSchedule) -> None:
    ranks, microbatches = 4, 8
    chunks = 2 if schedule.layout == "looped" else 1
    order = Parallelism(pipeline=ranks, microbatches=microbatches, chunks=chunks, schedule=schedule.name)
    assert order.splits_backward == schedule.splits_backward
    assert order.placement == schedule.placement(ranks, chunks) == pipeline_schedule(order).placement
    if not schedule.planned:
        with pytest.raises(UnknownName, match=f"schedule of a plan '{schedule.name}'.*Known: .*zbv"):
            plan_of(schedule.name, ranks, chunks)
        return
    plan = plan_of(schedule.name, ranks, chunks)
    assert plan.splits_backward == schedule.splits_backward
    assert plan.stages_per_device == schedule.stages_per_rank(chunks)
    if schedule.interleaved:
        assert plan_of(schedule.name, ranks, 2).schedule_name == schedule.interleaved
    for rank in range(ranks):
        counts = stages_in_flight(schedule.name, ranks, rank, chunks, microbatches)
        per_rank = schedule.stages_per_rank(chunks)
        assert counts == schedule.stages_in_flight(ranks, rank, per_rank, microbatches)
    limit = schedule.first_stage(ranks, chunks) if schedule.first_stage else microbatches
    assert first_stage_in_flight(schedule.name, ranks, chunks, microbatches) == min(limit, microbatches)


def plan_of(schedule: str, pipeline: int, chunks: int) -> ClusterPlan:
    return ClusterPlan(
        nodes=1,
        tensor=1,
        pipeline=pipeline,
        data=1,
        chunks=chunks,
        microbatch=1,
        recompute="none",
        sequence_parallel=False,
        flash=True,
        sharding="none",
        schedule=schedule,
    )


@pytest.mark.slow  # imports torch
def test_torch_has_the_schedules_that_name_a_class_of_it() -> None:
    classes = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in filter(None, (schedule.torch for schedule in SCHEDULES.values())):
        assert classes.get_schedule_class(name).__name__ == f"Schedule{name}"


@every_schedule
def test_frameworks_run_the_schedules_that_they_name(schedule: NamedSchedule) -> None:
    assert schedule.megatron in (
        None,
        "forward_backward_pipelining_with_interleaving",
        "forward_backward_pipelining_without_interleaving",
    )
    assert schedule.deepspeed in (None, "TrainSchedule")
    for framework, name in (("megatron", "megatron"), ("torchtitan", "torch"), ("deepspeed", "deepspeed")):
        runs = schedule.planned and getattr(schedule, name) is not None
        assert runs == (schedule.name in RUNNABLE[framework]["schedule"].split("|"))


@every_schedule
def test_help_and_completion_name_it(schedule: NamedSchedule, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["predict"], ["plan", "pipeline"], *([["plan", "cluster"]] * schedule.planned)):
        assert cli.run([*command, "--help"]) == 0
        assert f" {schedule.name}" in capsys.readouterr().out
    assert _completion.schedules(f"1f1b,{schedule.name}")[0] == f"1f1b,{schedule.name}"
    if schedule.planned:
        assert f"tensor=8,schedule={schedule.name}" in _completion.plan_values("tensor=8,schedule=")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"unknown schedule '1f2b'.*Known: .*1f1b.*zbv"):
        find_schedule("1f2b")
    with pytest.raises(UnknownName, match="unknown schedule '1f2b'"):
        Parallelism(schedule="1f2b")
    with pytest.raises(UnknownName, match="unknown schedule of a plan '1f2b'"):
        plan_of("1f2b", 2, 1)
    assert all(planned_schedule(name, 1).name == name for name in PLANNED_SCHEDULES)


def test_former_table_follows_from_the_records() -> None:
    with pytest.warns(FutureWarning, match="TIMED_SCHEDULES is deprecated"):
        assert parallelism.TIMED_SCHEDULES == ("zb-h1", "zb-h2", "interleaved-zb")
