"""Memory of each device under a plan, by kind: `DeviceMemory`.

Mixed precision with AdamW: two bytes per parameter, two per gradient, and twelve of the f32 parameter and two
moments. Activations are those of Korthikanti et al. (`tunebench.plan.pipeline.activation`), times the
micro-batches in flight: p - x on rank x of p ranks in 1F1B, and ``(v - 1) p + 2 (p - 1 - x) + 1`` stages'
worth with v stages per device (interleaved 1F1B), of which a device keeps at most all that a step has. The
peak is on the first rank, which has most in flight, or on the last one, which has the head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from tunebench.plan.cluster.layer_time import LayerRun
from tunebench.plan.cluster.space import ClusterPlan, TrainingJob
from tunebench.plan.pipeline.activation import ActivationMemory, architecture_of
from tunebench.workloads.networks import Network

__all__ = ["FRAGMENTATION", "RESERVED_BYTES", "DeviceMemory", "MemoryPricer"]

PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 12
"""Bytes per parameter. Source: Rajbhandari et al., "ZeRO", 2020, section 3.1."""

RESERVED_BYTES = 1_500_000_000
"""Memory of the CUDA context, of NCCL's buffers and of cuBLAS workspaces. Assumed, not measured."""

FRAGMENTATION = 0.05
"""Share of activations that the allocator loses to fragmentation. Assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peak memory of the fullest device, in bytes.

    Attributes:
        rank: Pipeline rank of the device.
        parameters: Parameters, with those that full sharding gathers.
        gradients: Gradients.
        optimizer: States of the optimizer.
        activations: Activations of the micro-batches in flight.
        working: What a backward pass computes again for one layer, or the gradient of the logits.
        allowance: Assumed memory of context, libraries and fragmentation.
        host: Host memory for each device: states of the optimizer and the gradients that it reads.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    allowance: int
    host: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rank", "host")
        }


class MemoryPricer:
    """Memory of the plans of a job."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._activation = lru_cache(maxsize=None)(self._activation_memory)
        self._parameters = lru_cache(maxsize=None)(self._rank_parameters)

    def of(self, plan: ClusterPlan) -> DeviceMemory:
        """Return the memory of the fullest device."""
        ranks = (0,) if plan.pipeline == 1 else (0, plan.pipeline - 1)
        return max((self._rank(plan, rank) for rank in ranks), key=lambda each: each.total)

    def _rank(self, plan: ClusterPlan, rank: int) -> DeviceMemory:
        memory = self._activation(LayerRun.of(plan))
        activations, working = self._activations(plan, rank, memory), memory.recomputed_bytes
        if rank == plan.pipeline - 1:
            working = max(working, memory.head_gradient_bytes)
        held = self._parameters(plan.tensor, plan.pipeline, plan.chunks, rank)
        states = held // (1 if plan.sharding == "none" else plan.data)
        offloaded = plan.states == "host"
        parameters, gradients = PARAMETER_BYTES * held, GRADIENT_BYTES * held
        if plan.sharding == "full":
            largest = _largest_layer(self.job.network, plan.tensor)
            parameters = PARAMETER_BYTES * (states + 2 * largest)
            gradients = GRADIENT_BYTES * (states + largest)
        return DeviceMemory(
            rank=rank,
            parameters=parameters,
            gradients=gradients,
            optimizer=0 if offloaded else STATE_BYTES * states,
            host=(STATE_BYTES + GRADIENT_BYTES) * states if offloaded else 0,
            activations=activations,
            working=working,
            allowance=RESERVED_BYTES + round(FRAGMENTATION * (activations + working)),
        )

    def _activations(self, plan: ClusterPlan, rank: int, memory: ActivationMemory) -> int:
        """Return the bytes of the micro-batches in flight on a rank."""
        ranks, chunks, count = plan.pipeline, plan.chunks, plan.microbatches(self.job.batch)
        each, more = divmod(self.job.network.layers, ranks * chunks)
        if chunks == 1:
            stages = embeddings = min(count, ranks - rank)
        else:
            stages = min(count * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)
            embeddings = min(count, 2 * ranks)
        total = stages * (each + (rank < more)) * memory.layer_bytes
        if rank == 0:
            total += embeddings * memory.embedding_bytes
        return total + memory.head_bytes * (rank == ranks - 1)

    def _rank_parameters(self, tensor: int, pipeline: int, chunks: int, rank: int) -> int:
        network = self.job.network
        each, more = divmod(network.layers, pipeline * chunks)
        total = 0
        for stage in range(rank, pipeline * chunks, pipeline):
            first = stage * each + min(stage, more)
            total += network.parameters(tensor, (first, first + each + (stage < more)))
        return total

    def _activation_memory(self, run: LayerRun) -> ActivationMemory:
        return ActivationMemory(
            architecture=architecture_of(self.job.network),
            batch=run.microbatch,
            seq=self.job.seq,
            dtype=self.job.dtype,
            tensor=run.tensor,
            sequence_parallel=run.sequence_parallel,
            recompute=run.recompute,
            flash_attention=run.flash,
        )


def _largest_layer(network: Network, tensor: int) -> int:
    """Return the parameters of a layer, or of the embedding if that is larger."""
    last = network.layers - 1
    kinds = {(0, 1), (last // 2, last // 2 + 1), (last, last + 1)}
    return max(network.parameters(tensor, each) for each in kinds)
