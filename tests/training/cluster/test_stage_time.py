"""Composed steps against `predict_step`, their lower bounds, and steps with sharding."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tunebench.errors import InputError
from tunebench.training.cluster import (
    ClusterPlan,
    LayerTimes,
    Slowdown,
    StepPricer,
    TrainingCluster,
    TrainingJob,
    emit,
    plan_space,
)
from tunebench.training.cluster.layer_time import LayerRun
from tunebench.training.cluster.space import enumerated, fixed_values
from tunebench.training.schedules.registry import PLANNED_SCHEDULES
from tunebench.training.steps.parallelism import Parallelism
from tunebench.training.steps.step import predict_step
from tunebench.workloads.networks import network
from tunebench.workloads.networks.network_run import NetworkRun
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

JOB = TrainingJob(network=network("gpt2-large"), batch=32, seq=1024)
MACHINE = TrainingCluster.parse("16 x a100-80-sxm")
LAYERS = LayerTimes(network=JOB.network, device=MACHINE.device, seq=JOB.seq, dtype=JOB.dtype)
PLAN = ClusterPlan(
    nodes=2,
    tensor=4,
    pipeline=2,
    data=2,
    chunks=1,
    microbatch=4,
    recompute="none",
    sequence_parallel=True,
    flash=False,
    sharding="none",
)


def pricer(job: TrainingJob = JOB, **changed: Any) -> StepPricer:
    return StepPricer(**{"job": job, "machine": MACHINE, "layers": LAYERS} | changed)


def predicted(plans: list[ClusterPlan]) -> list[ClusterPlan]:
    LAYERS.predict(map(LayerRun.of, plans))
    return plans


PLANS = random.Random(3).sample(enumerated(plan_space(JOB, MACHINE)), 24)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_step_equals_that_of_predict_step(overlap: bool) -> None:
    job = replace(JOB, gradient_overlap=overlap, tensor_overlap=overlap)
    prices = pricer(job)
    plans = predicted(
        [replace(plan, sharding="none") for plan in PLANS[:8]]
        + [
            PLAN,
            replace(PLAN, chunks=6),
            replace(PLAN, chunks=5, head_layers=2),
            replace(PLAN, pipeline=4, data=1, embedding_layers=1, head_layers=1),
            replace(PLAN, sequence_parallel=False, schedule="zbv", head_layers=3),
        ]
    )
    assert {plan.chunks > 1 for plan in plans} == {True, False}
    for plan in plans:
        expected = predict_step(
            job.network, MACHINE.device, plan.run(job), MACHINE.links, plan.parallelism(job)
        )
        step = prices.step(plan)
        assert step.time_us == pytest.approx(expected.time_us, rel=1e-9), plan
        assert step.bubble_us == pytest.approx(expected.bubble.us, rel=1e-6, abs=1e-3), plan
        assert step.communication_us == pytest.approx(expected.communication.us, rel=1e-9), plan
        assert step.compute_us + step.optimizer_us == pytest.approx(expected.compute.us, rel=1e-9), plan


LONG = TrainingJob(network=network("llama-3-8b"), batch=8, seq=8192)
LONG_LAYERS = LayerTimes(network=LONG.network, device=MACHINE.device, seq=LONG.seq, dtype=LONG.dtype)
RING = replace(PLAN, tensor=2, context=4, pipeline=1, data=2, microbatch=1, flash=True)


@pytest.mark.parametrize(
    "plan",
    [
        RING,
        replace(RING, recompute="full", sequence_parallel=False),
        replace(RING, tensor=1, context=8, pipeline=2, data=1, sequence_parallel=False),
        replace(RING, context_gather=True),
        replace(RING, context_gather=True, recompute="full", recompute_layers=20),
        replace(RING, tensor=1, context=4, pipeline=4, data=1, context_gather=True, schedule="zb-h1"),
    ],
)
def test_step_with_context_parallelism_equals_that_of_predict_step(plan: ClusterPlan) -> None:
    plan = replace(plan, sequence_parallel=plan.sequence_parallel and plan.tensor > 1)
    LONG_LAYERS.predict([LayerRun.of(plan)])
    for job in (LONG, replace(LONG, gradient_overlap=False)):
        expected = predict_step(
            job.network, MACHINE.device, plan.run(job), MACHINE.links, plan.parallelism(job)
        )
        step = pricer(job, layers=LONG_LAYERS).step(plan)
        assert step.time_us == pytest.approx(expected.time_us, rel=1e-9)
        assert step.communication_us == pytest.approx(expected.communication.us, rel=1e-9)


def test_slow_links_expose_keys_and_values() -> None:
    LONG_LAYERS.predict([LayerRun.of(RING)])
    slow = TrainingCluster.parse("16 x a100-80-sxm, 1.5")
    fast = pricer(LONG, layers=LONG_LAYERS).step(RING)
    assert pricer(LONG, layers=LONG_LAYERS, machine=slow).step(RING).waits_us > 10 * fast.waits_us


def test_gradients_are_summed_over_the_devices_that_share_sequences() -> None:
    LONG_LAYERS.predict([LayerRun.of(RING)])
    alone = replace(RING, data=1, context=4, pipeline=2)
    LONG_LAYERS.predict([LayerRun.of(alone)])
    stages = pricer(replace(LONG, gradient_overlap=False), layers=LONG_LAYERS).stages(alone)
    assert all(stage.gradients_us > 0 for stage in stages)


@pytest.mark.slow
def test_bounds_are_below_the_step_and_reached_by_equal_stages() -> None:
    prices = pricer()
    for plan in predicted(PLANS):
        step_us = prices.step_us(plan)
        assert prices.bound_us(plan) <= step_us * (1 + 1e-12)
        if plan.pipeline == 1:
            assert prices.bound_us(plan) == pytest.approx(step_us, rel=1e-12)


SMALL = TrainingJob(network=network("gpt2"), batch=8, seq=512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        SMALL,
        replace(SMALL, gradient_overlap=False, cuda_graphs=True),
        pytest.param(replace(SMALL, seq=1024), marks=pytest.mark.exhaustive),
    ],
)
def test_first_bounds_of_all_plans_are_below_their_second_bounds_and_steps(job: TrainingJob) -> None:
    machine = TrainingCluster.parse("8 x l4, 4 a node, net-100")
    layers = LayerTimes.of(job, machine.device)
    plans = enumerated(plan_space(job, machine))
    layers.predict(map(LayerRun.of, plans))
    prices = pricer(job, machine=machine, layers=layers)
    floors_us = prices.floors_us(plans)
    assert {plan.schedule for plan in plans} == set(PLANNED_SCHEDULES)
    for plan, floor_us in zip(plans, floors_us.tolist(), strict=True):
        assert 0 < floor_us <= prices.bound_us(plan) * (1 + 1e-12), plan
    for plan in random.Random(2).sample(plans, 400):
        assert prices.bound_us(plan) <= prices.step_us(plan) * (1 + 1e-12), plan


PIPED = replace(
    PLAN,
    tensor=1,
    pipeline=4,
    data=4,
    nodes=2,
    microbatch=1,
    recompute="full",
    flash=True,
    sequence_parallel=False,
    sharding="full",
)


@pytest.mark.parametrize("chunks", [1, 3])
def test_full_sharding_in_a_pipeline_gathers_for_each_pass(chunks: int) -> None:
    plan, job = replace(PIPED, chunks=chunks), replace(JOB, framework="torchtitan", full_sharding=True)
    owned = replace(plan, sharding="optimizer")
    predicted([plan, owned])
    prices = pricer(job)
    for full, sharded in zip(prices.stages(plan), prices.stages(owned), strict=True):
        assert full.gradients_us == sharded.gradients_us
        assert full.gather_us == 0 < sharded.gather_total_us
        assert full.waits_forward_us > sharded.waits_forward_us == 0
    assert prices.step_us(plan) > prices.step_us(owned)
    assert prices.bound_us(plan) <= prices.step_us(plan) * (1 + 1e-12)
    expected = predict_step(job.network, MACHINE.device, plan.run(job), MACHINE.links, plan.parallelism(job))
    assert prices.step_us(plan) == pytest.approx(expected.time_us, rel=0.03)


def test_pipelines_with_full_sharding_are_plans_of_torchtitan_only() -> None:
    job = replace(JOB, full_sharding=True)
    pairs = {
        framework: {
            (plan.sharding, plan.pipeline > 1)
            for plan in enumerated(
                fixed_values(
                    plan_space(replace(job, framework=framework), MACHINE), {"tensor": "1", "flash": "yes"}
                )
            ).grouped("sharding", "pipeline")[0]
        }
        for framework in ("megatron", "torchtitan")
    }
    assert pairs["torchtitan"] - pairs["megatron"] == {("full", True)}
    assert ("gradients", True) not in pairs["torchtitan"]
    with pytest.raises(InputError, match=r"a pipeline sums whole gradients .* sharding=optimizer or full"):
        replace(PIPED, sharding="gradients").parallelism(JOB)
    with pytest.raises(InputError, match="full sharding in a pipeline"):
        emit("megatron", PIPED, JOB)


@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_stacks_of_pytorch_divide_sequences(stack: str) -> None:
    """Of the pairs of a causal sequence, each of four devices computes a quarter."""
    llama = network("llama-3-8b")
    run = NetworkRun(
        batch=8, seq=16384, mode="train", dtype="bf16", stack=stack, flash=True, optimizer="adamw"
    )
    device, links = MACHINE.device, TrainingCluster.parse("8 x a100-80-sxm").links
    flops, times = {}, {}
    for context in (1, 4):
        split = Parallelism(data=8 // context, context=context, sharding="full", microbatches=context)
        step = predict_step(llama, device, run, links, split)
        times[context] = step.time_us
        flops[context] = sum(
            timed.operation.count * timed.operation.workload.flops()
            for timed in step.stages[0].kernels.operations
            if isinstance(timed.operation.workload, Attention) and timed.operation.phase == "forward"
        )
    assert flops[4] == pytest.approx(flops[1] / 4, rel=1e-3)
    assert times[1] < times[4] < 1.3 * times[1]
    with pytest.raises(InputError, match="context parallelism needs causal attention"):
        network("bert-base").operations(replace(run, batch=1, seq=256, context=2))
    with pytest.raises(InputError, match="flash or a compiled stack"):
        replace(run, stack="eager", flash=False, context=2)


def test_ends_alone_take_as_long_as_in_predict_step() -> None:
    machine = TrainingCluster.parse("4 x l4, net-100")
    job = replace(SMALL, batch=16)
    layers = LayerTimes.of(job, machine.device)
    fixed = {"schedule": "1f1b", "head_layers": "2|4", "sharding": "none"}
    plans = [
        plan
        for plan in enumerated(fixed_values(plan_space(job, machine), fixed))
        if any(first == end for first, end in plan.stages(job.network.layers))
    ]
    assert {plan.chunks for plan in plans} == {1, 2}
    layers.predict(map(LayerRun.of, plans))
    prices = pricer(job, machine=machine, layers=layers)
    for plan in random.Random(1).sample(plans, 12):
        expected = predict_step(
            job.network, machine.device, plan.run(job), machine.links, plan.parallelism(job)
        )
        assert prices.step_us(plan) == pytest.approx(expected.time_us, rel=1e-6), plan


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PLANNED_SCHEDULES)
def test_step_of_a_schedule_equals_that_of_predict_step(schedule: str) -> None:
    chunks = 3 if schedule == "interleaved-zb" else 1
    plan = replace(PLAN, tensor=2, pipeline=4, microbatch=2, chunks=chunks, schedule=schedule)
    for variation in (plan, replace(plan, sharding="optimizer"), replace(plan, pipeline=2, data=1, tensor=1)):
        variation = replace(variation, sequence_parallel=variation.tensor > 1)
        predicted([variation])
        expected = predict_step(
            JOB.network, MACHINE.device, variation.run(JOB), MACHINE.links, variation.parallelism(JOB)
        )
        step = pricer().step(variation)
        assert step.time_us == pytest.approx(expected.time_us, rel=1e-9), variation
        assert step.communication_us == pytest.approx(expected.communication.us, rel=1e-9), variation
        assert pricer().bound_us(variation) <= step.time_us * (1 + 1e-12)


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_step_with_some_layers_computed_again_equals_that_of_predict_step(
    count: int, pipeline: int, chunks: int
) -> None:
    plan = replace(PLAN, pipeline=pipeline, data=1, chunks=chunks, recompute="full", recompute_layers=count)
    predicted([plan, replace(plan, recompute_layers=0)])
    expected = predict_step(JOB.network, MACHINE.device, plan.run(JOB), MACHINE.links, plan.parallelism(JOB))
    step = pricer().step(plan)
    assert step.time_us == pytest.approx(expected.time_us, rel=1e-9)
    assert step.communication_us == pytest.approx(expected.communication.us, rel=1e-9)
    assert step.time_us < pricer().step_us(replace(plan, recompute_layers=0))


def test_recomputation_by_operators_repeats_half_of_the_products() -> None:
    """Of llama's products, those of keys, after attention, and one of the feed-forward part."""
    job = TrainingJob(network=network("llama-3-8b"), batch=8, seq=4096, framework="torchtitan")
    layers = LayerTimes.of(job, MACHINE.device)
    plan = replace(PLAN, tensor=1, pipeline=1, data=8, nodes=1, microbatch=1, flash=True)
    plan = replace(plan, sequence_parallel=False, recompute="operators")
    kinds = [replace(plan, recompute=kind) for kind in ("none", "operators", "full")]
    layers.predict(map(LayerRun.of, kinds))
    none, operators, full = (layers.passes(LayerRun.of(kind), (1, 2)).backward_us for kind in kinds)
    assert none < operators < full
    run = plan.run(job)
    repeated = {
        (operation.workload.n, operation.workload.k)
        for operation in job.network.operations(replace(run, layers=(1, 2)))
        if operation.part == "recomputation" and isinstance(operation.workload, Gemm)
    }
    assert repeated == {(1024, 4096), (4096, 4096), (14336, 4096)}
    machine = TrainingCluster.parse("8 x a100-80-sxm")
    prices = StepPricer(job=job, machine=machine, layers=layers)
    expected = predict_step(job.network, machine.device, run, machine.links, plan.parallelism(job))
    assert prices.step_us(plan) == pytest.approx(expected.time_us, rel=0.01)


@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_recomputation_by_operators_runs_on_stacks_of_pytorch(stack: str) -> None:
    run = NetworkRun(
        batch=1, seq=4096, mode="train", dtype="bf16", stack=stack, flash=True, recompute="operators"
    )
    repeated = [
        operation.workload.n
        for operation in network("llama-3-8b").operations(replace(run, layers=(1, 2)))
        if operation.part == "recomputation" and isinstance(operation.workload, Gemm)
    ]
    assert sorted(repeated) == [1024, 4096, 14336]
    with pytest.raises(InputError, match="recompute=operators is for flash attention in layers of llama"):
        network("gpt2").operations(replace(run, seq=1024))


def test_division_of_a_dense_plan_may_shard_parameters_beside_tensor_parallelism() -> None:
    plan = replace(PLAN, pipeline=1, data=4, sharding="full", parameters="host", states="host")
    assert plan.parallelism(JOB).sharding == "full"
    assert plan.parallelism(JOB).devices_per_expert == plan.tensor


def test_zero_bubble_schedules_shorten_the_bubble() -> None:
    plan = replace(PLAN, tensor=1, pipeline=4, data=4, microbatch=1, sequence_parallel=False)
    schedules = ("1f1b", "zb-h1", "zbv")
    plans = predicted([replace(plan, schedule=schedule) for schedule in schedules])
    bubbles = [pricer().step(scheduled).bubble_us for scheduled in plans]
    assert bubbles[0] > bubbles[1] > bubbles[2]


def test_optimizer_sharding_divides_the_update_and_gathers_parameters() -> None:
    prices = pricer()
    predicted([PLAN])
    whole, sharded = prices.stages(PLAN)[0], prices.stages(replace(PLAN, sharding="optimizer"))[0]
    assert sharded.optimizer_us < whole.optimizer_us
    assert sharded.gradients_us < whole.gradients_us
    assert whole.gather_us == 0 < sharded.gather_us
    assert sharded.pass_us == whole.pass_us
    summing = pricer(replace(JOB, stack="megatron@2022", tuning="tuned"))
    deepspeed = summing.stages(replace(PLAN, sharding="optimizer"))[0]
    assert deepspeed.gradients_us == whole.gradients_us
    assert deepspeed.gather_us == sharded.gather_us


def test_full_sharding_waits_for_parameters_that_passes_do_not_hide() -> None:
    slow = TrainingCluster.parse("16 x a100-80-sxm, 300, 1")
    plan = replace(PLAN, tensor=1, pipeline=1, data=16, microbatch=1, sequence_parallel=False)
    predicted([plan])
    full = replace(plan, sharding="full")
    waits = [pricer(machine=machine).stages(full)[0].waits_backward_us for machine in (MACHINE, slow)]
    assert 0 < waits[0] < waits[1] / 5
    assert pricer().stages(plan)[0].waits_backward_us == 0


def test_slower_kernels_and_links_lengthen_their_parts() -> None:
    predicted([PLAN])
    base = pricer().step(PLAN)
    kernels = pricer(slowdown=Slowdown(kernels=1.1)).step(PLAN)
    links = pricer(slowdown=Slowdown(communication=1.1)).step(PLAN)
    assert kernels.optimizer_us == pytest.approx(1.1 * base.optimizer_us)
    assert base.time_us < links.time_us < base.time_us + 0.3 * base.communication_us + 1
    assert base.time_us < kernels.time_us
