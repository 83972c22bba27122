"""Memory of a device by kind, against formulas and simulated schedules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.training.cluster.test_stage_time import JOB, PLAN
from tunebench.training.cluster import TrainingCluster, TrainingJob, plan_space
from tunebench.training.cluster.device_memory import (
    CONTEXT_BYTES,
    CONTIGUOUS,
    FRAGMENTATION,
    MemoryPricer,
    communicator_bytes,
)
from tunebench.training.cluster.space import enumerated, fixed_values
from tunebench.training.cluster.step_memory import step_memory
from tunebench.training.pipeline.activation import ActivationMemory, architecture_of
from tunebench.training.schedules import PipelineCosts, StageCosts, simulate_pipeline
from tunebench.training.schedules.action import ActionKind
from tunebench.training.schedules.generators import interleaved_1f1b, one_f_one_b
from tunebench.training.schedules.registry import SPLIT_SCHEDULES
from tunebench.training.steps.parallelism import pipeline_schedule
from tunebench.workloads.networks import network
from tunebench.workloads.networks.network_run import Fp8

ACTIVATION = ActivationMemory(
    architecture=architecture_of(JOB.network),
    batch=4,
    seq=JOB.seq,
    dtype=JOB.dtype,
    tensor=4,
    sequence_parallel=True,
)


def test_kinds_are_those_of_mixed_precision_with_adamw() -> None:
    memory = MemoryPricer(JOB).of(PLAN)
    parameters = JOB.network.parameters(4, (0, 18))
    assert memory.rank == 0
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        2 * parameters,
        2 * parameters,
        12 * parameters,
    )
    assert memory.activations == 2 * (18 * ACTIVATION.layer_bytes + ACTIVATION.embedding_bytes)
    assert memory.step == 4 * parameters  # gradients in f32
    held = memory.activations + memory.working
    assert memory.fragmentation == round(FRAGMENTATION["none", False][CONTIGUOUS] * held)
    # tensors, copies, all devices and a model have neighbours in a node; stages and both ends have not
    in_node = sum(communicator_bytes(size, 24) for size in (4, 2, 16, 8))
    assert memory.nccl == in_node + 2 * communicator_bytes(2, 8)
    assert memory.context == CONTEXT_BYTES
    assert memory.total == sum(memory.kinds.values())


def test_activations_of_an_encoder_and_a_decoder_are_the_sum_of_both_stacks() -> None:
    """Per token of T5 base, in bytes: what Korthikanti et al. count, for one attention or two."""
    architecture, seq = architecture_of(network("t5-base")), 128
    memory = ActivationMemory(architecture=architecture, seq=seq, batch=2)
    h, scores = 768, 5 * 12 * seq
    attention = 2 * 2 * h + h + 2 * 4 * h + scores  # normalisation and products, mask, heads and result
    feed_forward = 2 * 2 * h + h + 2 * 2 * 3072
    stacks = 12 * (attention + feed_forward) + 12 * (2 * attention + feed_forward)
    assert 24 * memory.layer_bytes == 2 * seq * stacks
    # Masks of both embeddings, the encoder's output, and a bias of scores in each stack.
    assert memory.embedding_bytes == 2 * seq * (2 * h + 2 * h + 2 * 2 * 12 * seq)


def test_sharding_divides_states_and_then_everything() -> None:
    prices = MemoryPricer(JOB)
    plan = replace(PLAN, pipeline=1, data=4)
    whole, states, full = (
        prices.of(replace(plan, sharding=sharding)) for sharding in ("none", "optimizer", "full")
    )
    assert states.optimizer == pytest.approx(whole.optimizer / 4, abs=12)
    assert (states.parameters, states.gradients) == (whole.parameters, whole.gradients)
    assert full.optimizer == states.optimizer
    assert whole.parameters / 4 < full.parameters < whole.parameters
    assert full.activations == whole.activations


@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 1), (4, 1), (4, 3), (2, 6), (4, 9)])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_activations_are_those_of_the_simulated_schedule(pipeline: int, chunks: int, microbatch: int) -> None:
    plan = replace(PLAN, tensor=2, pipeline=pipeline, data=1, chunks=chunks, microbatch=microbatch)
    memory = MemoryPricer(JOB).of(plan)
    activation = replace(ACTIVATION, tensor=2, batch=microbatch)
    count, stages = plan.microbatches(JOB.batch), pipeline * chunks
    layers = JOB.network.layers // stages
    costs = [
        StageCosts(
            forward_us=1.0,
            input_gradient_us=2.0,
            weight_gradient_us=0.0,
            activation_bytes=layers * activation.layer_bytes
            + activation.embedding_bytes * (stage == 0)
            + activation.head_bytes * (stage == stages - 1),
        )
        for stage in range(stages)
    ]
    schedule = interleaved_1f1b(pipeline, count, chunks) if chunks > 1 else one_f_one_b(pipeline, count)
    peak = simulate_pipeline(schedule, PipelineCosts(stages=tuple(costs))).peak_bytes[memory.rank]
    assert peak <= memory.activations <= 1.02 * peak


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
@pytest.mark.parametrize(("pipeline", "microbatch"), [(2, 1), (4, 1), (4, 2), (3, 2), (4, 16)])
@pytest.mark.parametrize("weights_us", [0.5, 1.0, 3.0])
def test_memory_of_split_backward_passes_is_at_least_that_of_simulated_schedules(
    schedule: str, pipeline: int, microbatch: int, weights_us: float
) -> None:
    """The limit holds for any times; at most the activations of the last stage's head are counted twice."""
    chunks = 3 if schedule == "interleaved-zb" else 1
    if chunks > 1 and JOB.batch // microbatch % pipeline:
        pytest.skip("interleaved stages need micro-batches that the ranks divide")
    plan = replace(
        PLAN, tensor=2, pipeline=pipeline, data=1, chunks=chunks, microbatch=microbatch, schedule=schedule
    )
    activation, parallelism = replace(ACTIVATION, tensor=2, batch=microbatch), plan.parallelism(JOB)
    ranges = parallelism.stages(JOB.network.layers)
    costs = PipelineCosts(
        stages=tuple(
            StageCosts(
                forward_us=1.0,
                input_gradient_us=1.0,
                weight_gradient_us=weights_us,
                activation_bytes=(end - first) * activation.layer_bytes
                + activation.embedding_bytes * (first == 0)
                + activation.head_bytes * (end == JOB.network.layers),
                retained_bytes=(end - first) * activation.weight_gradient_bytes
                + activation.head_gradient_bytes * (end == JOB.network.layers),
            )
            for first, end in ranges
        )
    )
    peaks = simulate_pipeline(pipeline_schedule(parallelism, costs=costs), costs).peak_bytes
    prices = MemoryPricer(JOB)
    activations = [prices.of_rank(plan, rank).activations for rank in range(pipeline)]
    assert all(peak <= size for peak, size in zip(peaks, activations, strict=True))
    assert max(activations) <= 1.6 * max(peaks)
    run = replace(plan.run(JOB), batch=JOB.batch)
    assert step_memory(JOB.network, run, parallelism)[0] == prices.of_rank(replace(plan, nodes=1), 0)


@pytest.mark.parametrize(("chunks", "ends"), [(2, (0, 5)), (3, (1, 1)), (5, (0, 0)), (5, (0, 1))])
@pytest.mark.parametrize("microbatch", [1, 4])
def test_layers_in_flight_are_those_of_the_schedule(
    chunks: int, ends: tuple[int, int], microbatch: int
) -> None:
    """Uneven interleaved stages: the passes of the schedule are counted one by one."""
    plan = replace(
        PLAN,
        tensor=2,
        pipeline=4,
        data=1,
        chunks=chunks,
        microbatch=microbatch,
        embedding_layers=ends[0],
        head_layers=ends[1],
    )
    parallelism = plan.parallelism(JOB)
    counts = [last - first for first, last in parallelism.stages(JOB.network.layers)]
    assert len(set(counts)) > 1
    schedule = pipeline_schedule(parallelism)
    layer_bytes = replace(ACTIVATION, tensor=2, batch=microbatch).layer_bytes
    for rank in (1, 2):
        stored = [0]
        for action in schedule.actions[rank]:
            sign = 1 if action.kind == ActionKind.FORWARD else -1
            stored.append(stored[-1] + sign * counts[action.stage])
        memory = MemoryPricer(JOB).of_rank(plan, rank)
        assert memory.activations == max(stored) * layer_bytes
        divided, ranges = parallelism.divided(JOB.network)
        held = sum(sum(divided.held_parameters(plan, ranges[stage])) for stage in plan.held_stages[rank])
        assert memory.parameters == 2 * held


def test_ends_without_layers_have_memory_of_their_own() -> None:
    job = TrainingJob(network=network("llama-3-8b"), batch=8, seq=2048)
    plan = replace(PLAN, tensor=1, pipeline=4, data=1, microbatch=1, sequence_parallel=False, flash=True)
    run = plan.run(job)
    layers = {"even": (1, 15, 15, 1), "ends": (0, 16, 16, 0)}
    memory = {
        name: step_memory(job.network, run, replace(plan.parallelism(job), stage_layers=counts))
        for name, counts in layers.items()
    }
    table = 128256 * 4096
    assert [rank.parameters for rank in memory["ends"]][::3] == [2 * table, 2 * (table + 4096)]
    assert sum(rank.parameters for rank in memory["ends"]) == 2 * job.network.parameters()
    assert memory["ends"][1].activations * 15 == memory["even"][1].activations * 16
    assert memory["ends"][0].activations < memory["even"][0].activations


@pytest.mark.parametrize("ends", [(1, 1), (0, 2), (0, 4)])
def test_memory_of_ends_alone_is_that_of_the_step(ends: tuple[int, int]) -> None:
    """Stages of the first or the last rank with no layer: columns, one plan and `step_memory` agree."""
    job = TrainingJob(network=network("gpt2"), batch=56, seq=512)
    fixed = {"embedding_layers": str(ends[0]), "head_layers": str(ends[1]), "schedule": "1f1b"}
    fixed |= {"recompute": "none|full", "recompute_layers": "0"}
    machine = TrainingCluster.parse("4 x l4, host 64GB 100" if ends == (0, 4) else "7 x l4, 7 a node")
    plans = enumerated(fixed_values(plan_space(job, machine), fixed))
    prices, layers = MemoryPricer(job), job.network.layers
    needed = prices.sizes(plans)[0]
    alone = [row for row, plan in enumerate(plans) if any(first == end for first, end in plan.stages(layers))]
    assert alone
    for row in alone:
        plan = plans[row]
        assert (plan.states, plan.parameters, plan.activations) == ("device", "device", "device")
        memory = step_memory(job.network, plan.run(job), plan.parallelism(job))
        assert prices.of(plan).needed == needed[row]
        assert [rank.parameters for rank in memory] == [
            prices.of_rank(plan, rank).parameters for rank in range(plan.pipeline)
        ]
        assert sum(rank.parameters for rank in memory) * plan.tensor >= 2 * job.network.parameters()


def test_fullest_rank_is_one_with_experts() -> None:
    """DeepSeek-V3 in 32 stages: the embedding and a dense layer, two dense ones, experts, the head alone."""
    job = TrainingJob(network=network("deepseek-v3"), batch=64, seq=1024)
    plan = replace(
        PLAN, tensor=2, pipeline=32, data=1, microbatch=1, flash=True, embedding_layers=1, head_layers=1
    )
    assert plan.stages(61)[:3] + plan.stages(61)[-1:] == ((0, 1), (1, 3), (3, 5), (61, 61))
    prices = MemoryPricer(job)
    fullest = max((prices.of_rank(plan, rank) for rank in range(32)), key=lambda memory: memory.needed)
    assert prices.of(plan).parameters == fullest.parameters


def test_recomputation_by_layers_keeps_the_others() -> None:
    plan = replace(PLAN, recompute="full")
    activations = [
        MemoryPricer(JOB).of_rank(replace(plan, recompute_layers=count), 0).activations
        for count in (1, 2, 17, 0)
    ]
    saved_bytes = ACTIVATION.layer_bytes - replace(ACTIVATION, recompute="full").layer_bytes
    assert activations[0] - activations[1] == 2 * saved_bytes
    assert activations[2] - activations[3] == 2 * saved_bytes
    run = replace(plan, recompute_layers=5).run(JOB)
    memory = step_memory(JOB.network, run, plan.parallelism(JOB))
    for rank, rank_memory in enumerate(memory):
        assert rank_memory == MemoryPricer(JOB).of_rank(replace(plan, nodes=1, recompute_layers=5), rank)


def test_gathered_keys_and_values_need_memory_while_a_layer_needs_them() -> None:
    job = TrainingJob(network=network("llama-3-8b"), batch=8, seq=8192)
    ring = replace(PLAN, tensor=2, pipeline=1, data=2, context=4, microbatch=1, flash=True)
    both = [MemoryPricer(job).of(replace(ring, context_gather=gathers)) for gathers in (False, True)]
    architecture = architecture_of(job.network)
    assert both[1].working - both[0].working <= 2 * 2 * 8192 * architecture.inner_k // 2 * 2
    middle = [
        MemoryPricer(job).of_rank(replace(ring, pipeline=4, data=1, context_gather=gathers), 1).working
        for gathers in (False, True)
    ]
    assert middle[1] - middle[0] == 2 * 2 * 8192 * architecture.inner_k // 2 * 2


MACHINES = ("8 x l4, 4 a node, net-100, 12GB", "4 x l4, host 64GB 100, nvme 1TB 6/4")


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_memory_of_many_plans_is_that_of_each(machine: str, fp8: Fp8) -> None:
    job = TrainingJob(
        network=network("gpt2"), batch=8, seq=512, fp8=fp8, full_sharding=True, wide_gradients=fp8 == "none"
    )
    plans = enumerated(plan_space(job, TrainingCluster.parse(machine)))
    prices = MemoryPricer(job)
    totals, host, nvme = prices.sizes(plans)
    rows = random.Random(4).sample(range(len(plans)), 1500)
    for row in rows:
        memory = prices.of(plans[row])
        assert (memory.needed, memory.host, memory.nvme) == (totals[row], host[row], nvme[row]), plans[row]
    assert {plans[row].sharding for row in rows} == {"none", "optimizer", "gradients", "full"}


def test_devices_that_share_sequences_divide_activations_and_states() -> None:
    job = TrainingJob(network=network("llama-3-8b"), batch=8, seq=8192)
    plan = replace(PLAN, tensor=1, pipeline=1, data=1, microbatch=1, flash=True, sequence_parallel=False)
    whole = MemoryPricer(job).of(plan)
    shared = MemoryPricer(job).of(replace(plan, context=4, sharding="optimizer"))
    assert shared.activations == pytest.approx(whole.activations / 4)
    assert shared.parameters == whole.parameters
    assert shared.optimizer == pytest.approx(whole.optimizer / 4)


def test_eight_bit_copies_need_memory_and_inputs_of_products_less() -> None:
    eight = replace(JOB, fp8="delayed")
    wide, narrow = MemoryPricer(JOB).of(PLAN), MemoryPricer(eight).of(PLAN)
    assert narrow.parameters - wide.parameters == 2 * JOB.network.matrix_parameters(4, (0, 18))
    assert narrow.optimizer == wide.optimizer
    eight_bit = replace(ACTIVATION, fp8=True)
    architecture, tokens = ACTIVATION.architecture, ACTIVATION.batch * ACTIVATION.seq
    assert (
        ACTIVATION.layer_bytes - eight_bit.layer_bytes
        == tokens * (2 * architecture.hidden + architecture.ffn - architecture.inner) // 4
    )
