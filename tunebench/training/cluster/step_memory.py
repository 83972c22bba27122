"""Memory of the devices of a predicted step: `step_memory`.

The kinds are those of `MemoryPricer`, with the activations of the micro-batches that the step's schedule has
in flight, and with recomputation of some layers. Steps with a schedule that a plan may have are
those of `MemoryPricer`, unless stages are uneven.
"""

from __future__ import annotations

from dataclasses import replace

from tunebench.training.cluster.device_memory import FRAGMENTATION, DeviceMemory, MemoryPricer
from tunebench.training.cluster.layer_time import LayerRun
from tunebench.training.cluster.space import PARALLEL_SIZES, ClusterPlan, TrainingJob
from tunebench.training.schedules.registry import SPLIT_SCHEDULES
from tunebench.training.steps.parallelism import Parallelism, most_in_flight, pipeline_schedule
from tunebench.workloads.networks import Network, NetworkRun

__all__ = ["step_memory"]


def step_memory(network: Network, run: NetworkRun, parallelism: Parallelism) -> tuple[DeviceMemory, ...]:
    """Return the memory of the devices of each rank of the pipeline.

    Args:
        network: A transformer with layers of gpt2 or llama.
        run: How it runs: a training step of Megatron-LM in 16 bits, with the batch and tokens of all
            devices.
        parallelism: Division of the step.

    Raises:
        InputError: if the network or the run is of another kind.
    """
    job = TrainingJob(
        network=network,
        batch=run.batch,
        seq=run.seq,
        dtype=run.dtype,
        fp8=run.fp8,
        wide_gradients=run.wide_gradients,
        optimizer=run.optimizer,
    )
    of, prices = parallelism, MemoryPricer(job)
    plan = _plan(run, of)
    # The formulas of schedules with split passes hold for even stages and full groups of micro-batches.
    grouped = of.chunks == 1 or of.microbatches % of.pipeline == 0
    if plan.schedule in SPLIT_SCHEDULES and of.stage_layers is None and grouped and of.pipeline > 1:
        return tuple(prices.of_rank(plan, rank) for rank in range(of.pipeline))
    stages = of.stages(network.layers)
    in_flight = most_in_flight(pipeline_schedule(of))
    plan = replace(plan, schedule="1f1b", recompute_layers=0)
    kept = LayerRun.of(plan).activations(job)
    whole = LayerRun.of(replace(plan, recompute="none")).activations(job)
    found = []
    for rank in range(of.pipeline):
        mine = [stage for stage, other in enumerate(of.placement) if other == rank]
        only = stages[mine[0]] if len(mine) == 1 and of.pipeline > 1 else None
        memory = prices.of_stage(plan, rank, only)
        activations = 0
        for stage in mine:
            count = stages[stage][1] - stages[stage][0]
            again = count if run.recompute_layers is None else min(count, run.recompute_layers)
            held = again * kept.layer_bytes + (count - again) * whole.layer_bytes
            held += kept.embedding_bytes * (stage == 0)
            activations += in_flight[stage] * held + kept.head_bytes * (stage == len(stages) - 1)
        activations = min(activations, _most(memory, activations, of, run))
        lost = round(FRAGMENTATION * (activations + memory.working))
        found.append(replace(memory, activations=activations, fragmentation=lost))
    return tuple(found)


def _most(memory: DeviceMemory, activations: int, parallelism: Parallelism, run: NetworkRun) -> int:
    """Return the exact activations of interleaved 1F1B, whose stages do not all peak at the same time."""
    exact = parallelism.schedule == "interleaved-1f1b" and run.recompute_layers is None
    return memory.activations if exact and parallelism.stage_layers is None else activations


def _plan(run: NetworkRun, of: Parallelism) -> ClusterPlan:
    """Return the step as a plan; GPipe and DualPipeV, which no plan has, as 1F1B."""
    known = of.schedule in SPLIT_SCHEDULES
    return ClusterPlan(
        **{
            **{name: getattr(of, name) for name in PARALLEL_SIZES},
            "expert_tensor": of.devices_per_expert,
            "chunks": of.chunks if known else of.stage_count // of.pipeline,
        },
        nodes=1,
        microbatch=of.microbatch(run.batch),
        recompute=run.recompute,
        sequence_parallel=run.sequence_parallel,
        flash=run.flash,
        sharding=of.sharding,
        schedule=of.schedule if known else "1f1b",
        recompute_layers=run.recompute_layers or 0,
        context_gather=run.context_gather,
    )
