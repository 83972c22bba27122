"""Memory of each device under a plan, by kind: `DeviceMemory`.

Experts: a device has its share of each layer's experts, and divides their states with the devices that have
the same experts. Its activations include a row for each expert of a token.

Mixed precision with AdamW: two bytes per parameter, two per gradient, and twelve of the f32 parameter and two
moments. Activations are those of Korthikanti et al. (`tunebench.plan.pipeline.activation`), times the
micro-batches in flight: p - x on rank x of p ranks in 1F1B, and ``(v - 1) p + 2 (p - 1 - x) + 1`` stages'
worth with v stages per device (interleaved 1F1B), of which a device keeps at most all that a step has. The
peak is on the first rank, which has most in flight, or on the last one, which has the head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

from tunebench.errors import InputError
from tunebench.forecast.parallel.layer_stream import DEPTH
from tunebench.plan.cluster.layer_time import LayerDivision, LayerRun
from tunebench.plan.cluster.space import ClusterPlan, TrainingJob
from tunebench.plan.cluster.storage import Placement
from tunebench.plan.pipeline.activation import ActivationMemory
from tunebench.workloads.networks._network import DType

__all__ = [
    "COMMUNICATOR_BYTES",
    "CONTEXT_BYTES",
    "FRAGMENTATION",
    "WORKSPACE_BYTES",
    "DeviceMemory",
    "MemoryPricer",
    "communicators",
]

PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 12
"""Bytes per parameter. Source: Rajbhandari et al., "ZeRO", 2020, section 3.1."""

CONVERTED_BYTES = 2
"""Bytes per parameter of a matrix in 8-bit floats and its transpose, which Transformer Engine keeps from one
micro-batch to the next beside the 16-bit parameters."""

WIDE_BYTES = 4
"""Bytes of a gradient that is summed in f32."""

CONTEXT_BYTES = 900_000_000
"""Memory of the CUDA context and of loaded kernels. Assumed, not measured."""

WORKSPACE_BYTES = 2 * 32 * 2**20
"""Workspaces of cuBLAS and Transformer Engine: 32 MiB each on Hopper. Source: PyTorch, `CUDABlas` (32 MiB on
sm_90); NVIDIA/TransformerEngine, `get_cublas_workspace_size_bytes`."""

COMMUNICATOR_BYTES = 24 * (524_288 + 4_915_200 + 4_194_304)
"""Buffers of an NCCL communicator: for each of 24 channels, those of the protocols LL, LL128 and Simple.
Source: NVIDIA/nccl, `src/init.cc` (`DEFAULT_LL_BUFFSIZE`, `DEFAULT_LL128_BUFFSIZE`, `DEFAULT_BUFFSIZE`)."""

FRAGMENTATION = 0.05
"""Share of activations that the allocator loses to fragmentation. Assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peak memory of the fullest device, in bytes.

    Attributes:
        rank: Pipeline rank of the device.
        parameters: Parameters, with those that full sharding gathers, and copies in 8-bit floats.
        gradients: Gradients.
        optimizer: States of the optimizer.
        activations: Activations of the micro-batches in flight.
        working: What a backward pass computes again for one layer, or the gradient of the logits.
        context: Assumed memory of the CUDA context and of loaded kernels.
        workspace: Workspaces of libraries.
        nccl: Buffers of communicators: those of tensors, copies, experts and stages.
        fragmentation: Assumed loss of the allocator.
        host: Most host memory of a device: states, gradients, parameters, activations, and buffers.
        nvme: Most NVMe of a device.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    context: int
    workspace: int
    nccl: int
    fragmentation: int
    host: int = 0
    nvme: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        held = self.parameters + self.gradients + self.optimizer + self.activations + self.working
        return held + self.context + self.workspace + self.nccl + self.fragmentation

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("rank", "host", "nvme")
        }


class MemoryPricer:
    """Memory of the plans of a job.

    Raises:
        InputError: if parameters are not of a supported dtype.
    """

    dtypes: ClassVar[tuple[DType, ...]] = ("f16", "bf16")
    """Supported dtypes of parameters."""

    def __init__(self, job: TrainingJob) -> None:
        if job.dtype not in self.dtypes:
            raise InputError(f"dtype must be {' or '.join(self.dtypes)}, got {job.dtype}")
        self.job = job
        self._activation = lru_cache(maxsize=None)(self._activation_memory)
        self._largest = lru_cache(maxsize=None)(self._largest_layer)
        self._parameters = lru_cache(maxsize=None)(self._rank_parameters)
        self._stage_parameters = lru_cache(maxsize=None)(self._held_parameters)

    def of(self, plan: ClusterPlan) -> DeviceMemory:
        """Return the memory of the fullest device."""
        ranks = (0,) if plan.pipeline == 1 else (0, plan.pipeline - 1)
        sizes = [self.of_rank(plan, rank) for rank in ranks]
        fullest = max(sizes, key=lambda each: each.total)
        return replace(fullest, host=max(each.host for each in sizes), nvme=max(each.nvme for each in sizes))

    def of_rank(self, plan: ClusterPlan, rank: int) -> DeviceMemory:
        """Return the memory of the devices of a rank of the pipeline."""
        return self.of_stage(plan, rank, None)

    def of_stage(self, plan: ClusterPlan, rank: int, layers: tuple[int, int] | None) -> DeviceMemory:
        """Return the memory of the devices of a rank in mixed precision, whatever layers it has.

        Args:
            plan: The plan.
            rank: The rank.
            layers: Layers of its only stage as a half-open range; None for an even division.
        """
        memory = self._activation(LayerRun.of(plan))
        activations, working = self._activations(plan, rank, memory, layers), memory.recomputed_bytes
        if rank == plan.pipeline - 1:
            working = max(working, memory.head_gradient_bytes)
        division = LayerRun.of(plan).division
        parts = (
            self._stage_parameters(division, layers)
            if layers
            else self._parameters(division, plan.pipeline, plan.chunks, rank)
        )
        held, shards = sum(parts), plan.shards
        states = sum(-(-count // each) for count, each in zip(parts, shards, strict=True))
        placed = Placement.of(plan)
        converted = self._converted_bytes(plan, rank, layers)
        gradient_bytes = WIDE_BYTES if self.job.wide_gradients else GRADIENT_BYTES
        parameters, gradients = PARAMETER_BYTES * held, gradient_bytes * held
        host, nvme = 0, 0
        if placed.scatters or plan.states != "device":
            largest = self._largest(division)
            buffer = DEPTH * largest
            if placed.gathers or plan.parameters != "device":
                parameters = PARAMETER_BYTES * ((states if plan.parameters == "device" else 0) + buffer)
            if placed.streams_gradients or placed.scatters:
                gradients = gradient_bytes * ((0 if placed.streams_gradients else states) + buffer)
            host, nvme = _stored_bytes(placed, states, DEPTH * -(-largest // min(shards)))
        if plan.activations == "host":
            kept = self._layer_activations(plan, rank, memory, layers)
            moved = max(0, kept - DEPTH * memory.layer_bytes)
            activations, host = activations - moved, host + kept
        return DeviceMemory(
            rank=rank,
            parameters=parameters + converted,
            gradients=gradients,
            optimizer=STATE_BYTES * states if plan.states == "device" else 0,
            host=host,
            nvme=nvme,
            activations=activations,
            working=working,
            context=CONTEXT_BYTES,
            workspace=WORKSPACE_BYTES,
            nccl=COMMUNICATOR_BYTES * communicators(plan),
            fragmentation=round(FRAGMENTATION * (activations + working)),
        )

    def _activations(
        self,
        plan: ClusterPlan,
        rank: int,
        memory: ActivationMemory,
        layers: tuple[int, int] | None = None,
    ) -> int:
        """Return the bytes of the micro-batches in flight on a rank."""
        ranks, count = plan.pipeline, plan.microbatches(self.job.batch)
        total = self._layer_activations(plan, rank, memory, layers)
        if rank == 0:
            embeddings = min(count, ranks if plan.chunks == 1 else 2 * ranks)
            total += embeddings * memory.embedding_bytes
        return total + memory.head_bytes * (rank == ranks - 1)

    def _layer_activations(
        self, plan: ClusterPlan, rank: int, memory: ActivationMemory, layers: tuple[int, int] | None
    ) -> int:
        """Return the bytes that the layers of a rank keep for the micro-batches in flight."""
        ranks, chunks, count = plan.pipeline, plan.chunks, plan.microbatches(self.job.batch)
        each, more = divmod(self.job.network.layers, ranks * chunks)
        stages = min(count, ranks - rank)
        if chunks > 1:
            stages = min(count * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)
        held = layers[1] - layers[0] if layers else each + (rank < more)
        return stages * held * memory.layer_bytes

    def _rank_parameters(
        self, division: LayerDivision, pipeline: int, chunks: int, rank: int
    ) -> tuple[int, int]:
        """Return the parameters of a rank outside experts, and those of its experts."""
        each, more = divmod(self.job.network.layers, pipeline * chunks)
        others = routed = 0
        for stage in range(rank, pipeline * chunks, pipeline):
            first = stage * each + min(stage, more)
            found = self._stage_parameters(division, (first, first + each + (stage < more)))
            others, routed = others + found[0], routed + found[1]
        return others, routed

    def _held_parameters(self, division: LayerDivision, layers: tuple[int, int]) -> tuple[int, int]:
        return division.held(self.job.network, layers)

    def _converted_bytes(self, plan: ClusterPlan, rank: int, layers: tuple[int, int] | None) -> int:
        """Return the bytes of the matrices in 8-bit floats, and of their transposes, on a rank."""
        if self.job.fp8 == "none":
            return 0
        network, stages = self.job.network, plan.pipeline * plan.chunks
        each, more = divmod(network.layers, stages)
        count = layers[1] - layers[0] if layers else 0
        if not layers:
            count = sum(each + (stage < more) for stage in range(rank, stages, plan.pipeline))
        if plan.parameters != "device" or plan.sharding == "full":
            count = min(count, DEPTH)
        routed = LayerRun.of(plan).division.held(network, (0, count))[1]
        return CONVERTED_BYTES * (network.matrix_parameters(plan.tensor, (0, count)) + routed)

    def _activation_memory(self, run: LayerRun) -> ActivationMemory:
        return run.activations(self.job)

    def _largest_layer(self, division: LayerDivision) -> int:
        """Return the parameters of a layer, or of the one with the embedding if that has more."""
        last = self.job.network.layers - 1
        kinds = {(0, 1), (last // 2, last // 2 + 1), (last, last + 1)}
        return max(sum(self._stage_parameters(division, each)) for each in kinds)


def communicators(plan: ClusterPlan) -> int:
    """Return the number of groups that each device communicates in."""
    return sum(size > 1 for size in (plan.tensor, plan.copies, plan.context, plan.expert, plan.pipeline))


def _stored_bytes(placed: Placement, states: int, buffer: int) -> tuple[int, int]:
    """Return the host memory and the NVMe of a device for its share of parameters.

    Buffers hold the layers that move through host memory: all bytes of a parameter, on the way in and out.

    Args:
        placed: Where data is.
        states: Parameters whose states the device keeps.
        buffer: Parameters of the layers that are buffered.
    """
    host = nvme = 0
    if placed.states == "host":
        host += (STATE_BYTES + GRADIENT_BYTES) * states
    elif placed.states == "nvme":
        nvme += STATE_BYTES * states
        host += 2 * (STATE_BYTES + GRADIENT_BYTES + PARAMETER_BYTES) * buffer
        if placed.streams_gradients and placed.parameters != "nvme":
            host += GRADIENT_BYTES * states
    if placed.parameters == "host":
        host += PARAMETER_BYTES * states
    elif placed.parameters == "nvme":
        nvme += (PARAMETER_BYTES + GRADIENT_BYTES) * states
    return host, nvme
