"""Memory of a device by kind, against formulas and simulated schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.cluster.test_stage_time import JOB, PLAN
from tunebench.forecast.parallel.pipeline import PipelineCosts, StageCosts, simulate_pipeline
from tunebench.forecast.parallel.pipeline.generators import interleaved_1f1b, one_f_one_b
from tunebench.plan.cluster import TrainingJob
from tunebench.plan.cluster.device_memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    MemoryPricer,
)
from tunebench.plan.pipeline.activation import ActivationMemory, architecture_of
from tunebench.workloads.networks import network

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
    held = JOB.network.parameters(4, (0, 18))
    assert memory.rank == 0
    assert (memory.parameters, memory.gradients, memory.optimizer) == (2 * held, 2 * held, 12 * held)
    assert memory.activations == 2 * (18 * ACTIVATION.layer_bytes + ACTIVATION.embedding_bytes)
    assert memory.fragmentation == round(FRAGMENTATION * memory.activations)
    assert memory.nccl == 3 * COMMUNICATOR_BYTES  # of tensors, copies and stages
    assert memory.context == CONTEXT_BYTES
    assert memory.total == sum(memory.kinds.values())


def test_sharding_divides_states_and_then_everything() -> None:
    prices = MemoryPricer(JOB)
    plan = replace(PLAN, pipeline=1, data=4)
    whole, states, full = (prices.of(replace(plan, sharding=each)) for each in ("none", "optimizer", "full"))
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
    one = replace(ACTIVATION, tensor=2, batch=microbatch)
    count, stages = plan.microbatches(JOB.batch), pipeline * chunks
    layers = JOB.network.layers // stages
    costs = [
        StageCosts(
            forward_us=1.0,
            input_gradient_us=2.0,
            weight_gradient_us=0.0,
            activation_bytes=layers * one.layer_bytes
            + one.embedding_bytes * (stage == 0)
            + one.head_bytes * (stage == stages - 1),
        )
        for stage in range(stages)
    ]
    schedule = interleaved_1f1b(pipeline, count, chunks) if chunks > 1 else one_f_one_b(pipeline, count)
    peak = simulate_pipeline(schedule, PipelineCosts(stages=tuple(costs))).peak_bytes[memory.rank]
    assert peak <= memory.activations <= 1.02 * peak


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
    kept = replace(ACTIVATION, fp8=True)
    of, tokens = ACTIVATION.architecture, ACTIVATION.batch * ACTIVATION.seq
    assert ACTIVATION.layer_bytes - kept.layer_bytes == tokens * (2 * of.hidden + of.ffn - of.inner) // 4
