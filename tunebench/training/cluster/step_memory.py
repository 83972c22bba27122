"""Memory of the devices of a predicted step: `step_memory`.

The kinds are those of `MemoryPricer`, with the activations of the micro-batches that the step's schedule has
in flight, and with recomputation of some layers. Steps with a schedule that a plan may have are
those of `MemoryPricer`, unless their numbers of layers are given one by one.
"""

from __future__ import annotations

from dataclasses import replace

from tunebench.errors import InputError
from tunebench.training.cluster.device_memory import DeviceMemory, MemoryPricer
from tunebench.training.cluster.framework_memory import Framework
from tunebench.training.cluster.layer_time import LayerRun
from tunebench.training.cluster.space import ClusterPlan, TrainingJob
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.pipeline.activation import architecture_of
from tunebench.training.schedules.registry import SPLIT_SCHEDULES
from tunebench.training.steps.overlap import CHANNELS, node_channels
from tunebench.training.steps.parallelism import (
    Parallelism,
    StepDivision,
    most_in_flight,
    pipeline_schedule,
)
from tunebench.workloads.networks import Network, NetworkRun
from tunebench.workloads.networks.layer_division import LayerExecution, shared_fields

__all__ = ["step_memory"]


def step_memory(
    network: Network,
    run: NetworkRun,
    parallelism: Parallelism,
    *,
    cluster: Cluster | None = None,
    framework: Framework = "megatron",
) -> tuple[DeviceMemory, ...]:
    """Return the memory of the devices of each rank of the pipeline.

    Args:
        network: A transformer with layers of gpt2 or llama.
        run: How it runs: a training step of Megatron-LM in 16 bits, with the batch and tokens of all
            devices.
        parallelism: Division of the step.
        cluster: Nodes and links; None for one node.
        framework: Framework whose buffers count.

    Raises:
        InputError: if the network or the run is of another kind, or stages are of an encoder and a decoder.
    """
    if architecture_of(network).decoder_layers and parallelism.pipeline > 1:
        raise InputError(
            f"{network.name} has an encoder and a decoder: activations of a stage of one of them are not "
            "known, expected pipeline=1"
        )
    job = TrainingJob(
        network=network,
        batch=run.batch,
        seq=run.seq,
        dtype=run.dtype,
        fp8=run.fp8,
        wide_gradients=run.wide_gradients,
        optimizer=run.optimizer,
        framework=framework,
    )
    prices = MemoryPricer(job, node_channels(cluster.inside) if cluster else CHANNELS)
    plan = _plan(run, parallelism, cluster.nodes if cluster else 1)
    # The formulas of schedules with split passes hold for even stages and full groups of micro-batches.
    grouped = parallelism.chunks == 1 or parallelism.microbatches % parallelism.pipeline == 0
    if (
        plan.schedule in SPLIT_SCHEDULES
        and parallelism.stage_layers is None
        and grouped
        and parallelism.pipeline > 1
    ):
        return tuple(prices.of_rank(plan, rank) for rank in range(parallelism.pipeline))
    counts = [last - first for first, last in parallelism.stages(network.layers)]
    divided_network, stages = parallelism.divided(network)
    prices = MemoryPricer(replace(job, network=divided_network), prices.channels)
    in_flight = most_in_flight(pipeline_schedule(parallelism))
    plan = replace(plan, schedule="1f1b", recompute_layers=0)
    checkpointed = LayerRun.of(plan).activations(job)
    whole = LayerRun.of(replace(plan, recompute="none")).activations(job)
    memories = []
    for rank in range(parallelism.pipeline):
        mine = [stage for stage, owner in enumerate(parallelism.placement) if owner == rank]
        memory = prices.of_stage(plan, rank, [stages[stage] for stage in mine])
        activations = 0
        for stage in mine:
            count = counts[stage]
            recomputed = count if run.recompute_layers is None else min(count, run.recompute_layers)
            microbatch_bytes = (
                recomputed * checkpointed.layer_bytes + (count - recomputed) * whole.layer_bytes
            )
            microbatch_bytes += checkpointed.embedding_bytes * (stage == 0)
            if prices.framework.keeps_outputs and stage < len(stages) - 1:
                microbatch_bytes += checkpointed.input_bytes
            activations += in_flight[stage] * microbatch_bytes + checkpointed.head_bytes * (
                stage == len(stages) - 1
            )
        activations = min(activations, _most(memory, activations, parallelism, run))
        more = activations - memory.activations
        lost = memory.fragmentation + round(prices.fragmentation_share(plan) * more)
        returned = prices.returned_bytes(
            prices.retained_share(plan),
            activations=activations,
            working=memory.working,
            step=memory.step,
            fragmentation=lost,
        )
        memories.append(replace(memory, activations=activations, fragmentation=lost, returned=int(returned)))
    return tuple(memories)


def _most(memory: DeviceMemory, activations: int, parallelism: Parallelism, run: NetworkRun) -> int:
    """Return the exact activations of interleaved 1F1B, whose stages do not all peak at the same time."""
    exact = parallelism.schedule == "interleaved-1f1b" and run.recompute_layers is None
    return memory.activations if exact and parallelism.stage_layers is None else activations


def _plan(run: NetworkRun, parallelism: Parallelism, nodes: int) -> ClusterPlan:
    """Return the step as a plan; GPipe and DualPipeV, which no plan has, as 1F1B."""
    splits = parallelism.schedule in SPLIT_SCHEDULES
    return ClusterPlan(
        **{
            **shared_fields(parallelism, StepDivision),
            "expert_tensor": parallelism.devices_per_expert,
            "chunks": parallelism.chunks if splits else parallelism.stages_per_device,
            "schedule": parallelism.schedule if splits else "1f1b",
        },
        **shared_fields(run, LayerExecution),
        nodes=nodes,
        microbatch=parallelism.microbatch(run.batch),
        recompute_layers=run.recompute_layers or 0,
    )
