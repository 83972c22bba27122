"""Memory of each device under a plan, by kind: `DeviceMemory`.

Experts: a device has its share of each layer's experts, and divides their states with the devices that have
the same experts. Its activations include a row for each expert of a token.

Mixed precision: two bytes per parameter, two per gradient, and with AdamW twelve of the f32 parameter and two
moments (`tunebench.optimizer`). Activations are those of Korthikanti et al.
(`tunebench.training.pipeline.activation`), times the micro-batches in flight, which follow from the schedule
(`tunebench.training.schedules.registry`). The peak is on the first rank, which has most in flight, or on the
last one, which has the head.

Schedules with gradients of weights apart keep a micro-batch until these are computed: its activations, or, if
that is more, what the gradients of weights need (`ActivationMemory.weight_gradient_bytes`), and also the
gradient of its logits.

Beside the tensors, a device holds what its framework needs
(`tunebench.training.cluster.framework_memory`), what the caching allocator reserves and does not use,
communicators of NCCL, and the CUDA context. Three figures follow: what PyTorch reports as allocated and as
reserved, and what nvidia-smi reports where there is room. Before memory runs out, the allocator gives unused
segments back and tries again, so that a run may need less: that figure decides whether a plan fits.

The formula holds for one plan and for columns of many (`MemoryPricer.of`, `MemoryPricer.sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from tunebench._lazy import np
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.optimizer import find_optimizer
from tunebench.training.cluster.framework_memory import framework_memory
from tunebench.training.cluster.layer_time import LayerDivision, LayerRun
from tunebench.training.cluster.space import ClusterPlan, PlanTable, TrainingJob
from tunebench.training.cluster.storage import StorageLayout
from tunebench.training.pipeline.activation import LOGIT_BYTES, ActivationMemory, architecture_of
from tunebench.training.schedules.registry import (
    SPLIT_SCHEDULES,
    V_SCHEDULES,
    first_stage_in_flight,
    stages_in_flight,
)
from tunebench.training.steps.layer_stream import DEPTH
from tunebench.training.steps.overlap import CHANNELS, CHANNELS_OF_NETWORK
from tunebench.workloads.networks import Network
from tunebench.workloads.networks.network_run import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COMMUNICATOR_BYTES",
    "CONTEXT_BYTES",
    "FRAGMENTATION",
    "PAIR_BYTES",
    "WORKSPACE_BYTES",
    "DeviceMemory",
    "MemoryPricer",
    "communicator_bytes",
]

PARAMETER_BYTES, GRADIENT_BYTES = 2, 2
"""Bytes per parameter. Source: Rajbhandari et al., "ZeRO", 2020, section 3.1."""

CONVERTED_BYTES = 2
"""Bytes per parameter of a matrix in 8-bit floats and its transpose, which Transformer Engine keeps from one
micro-batch to the next beside the 16-bit parameters."""

WIDE_BYTES = 4
"""Bytes of a gradient that is summed in f32."""

CONTEXT_BYTES = 1343 * 2**20
"""Memory of the CUDA context and of loaded kernels. Measured for a process with one small tensor, which loads
all kernels at once: Hugging Face Transformers, "Model training anatomy". With lazy loading (the default since
CUDA 12.2), processes on H200 are reported with 612 MiB, and the kernels of a training step come on top."""

WORKSPACE_BYTES = 2 * 32 * 2**20
"""Workspaces of cuBLAS and Transformer Engine: 32 MiB each on Hopper. Source: PyTorch, `CUDABlas` (32 MiB on
sm_90); NVIDIA/TransformerEngine, `get_cublas_workspace_size_bytes`."""

COMMUNICATOR_BYTES, PAIR_BYTES = 688 * 2**20, 544 * 2**20
"""Memory of an NCCL communicator with 24 channels, and of one of two devices. Measured on A100 with NVLink:
NVIDIA/nccl, issue 964. It is linear in the channels (issue 986), and does not grow beyond two nodes."""

NETWORK_CHANNELS = 2 * CHANNELS_OF_NETWORK
"""The same of a communicator with one device in each node. It has few channels (assumed), each with a buffer
to send from and one to receive into; in a node, neighbours write into the buffer of the receiver. Source:
NVIDIA/nccl, `src/transport/net.cc` and `src/transport/p2p.cc`."""

SEPARATE, CONTIGUOUS = 0, 1
FRAGMENTATION: dict[tuple[str, bool], tuple[float, float]] = {
    ("full", False): (0.15, 0.10),
    ("full", True): (0.09, 0.01),
    ("selective", False): (0.06, 0.03),
    ("none", False): (0.03, 0.02),
    ("none", True): (0.04, 0.0),
}
"""Share of activations that PyTorch's allocator reserves and does not use, by recomputation and flash
attention: with a gradient per parameter, and with gradients in contiguous buffers. Medians of simulated
requests of stages (`python -m benchmarks.predict_memory --fragmentation`), not of measured memory."""

WHOLE, DIVIDED = 0, 1
RETAINED: dict[tuple[str, bool], tuple[float, float]] = {
    ("full", False): (0.05, 0.07),
    ("full", True): (0.02, 0.08),
    ("selective", False): (0.03, 0.05),
    ("none", False): (0.03, 0.03),
    ("none", True): (0.02, 0.04),
}
"""Share of activations, or of the tensors of the step if these are more, that a run needs besides when the
allocator must give unused segments back, by recomputation and flash attention: with whole states of the
optimizer, and with divided ones. Medians of the least memory with which simulated requests of stages do not
fail (`python -m benchmarks.predict_memory --fragmentation`). Only for gradients in contiguous buffers:
otherwise segments of activations also hold gradients, and cannot be given back. Source: PyTorch,
`c10/cuda/CUDACachingAllocator.cpp` (`release_cached_blocks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peak memory of the fullest device, in bytes.

    Attributes:
        rank: Pipeline rank of the device.
        parameters: Parameters, with those that full sharding gathers, and copies in 8-bit floats.
        gradients: Gradients.
        optimizer: States of the optimizer.
        activations: Activations of the micro-batches in flight.
        working: Recomputed activations of one layer, or the gradient of the logits.
        step: Tensors that only the step of the optimizer needs, beside what activations have freed.
        context: CUDA context and loaded kernels.
        workspace: Workspaces of libraries.
        nccl: Buffers of communicators: of the parallel sizes, all devices, a model, its ends and neighbours.
        fragmentation: What the allocator reserves and does not use.
        returned: What it gives back before memory runs out.
        host: Most host memory of a device: states, gradients, parameters, activations, and buffers.
        nvme: Most NVMe of a device.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    step: int = 0
    context: int
    workspace: int
    nccl: int
    fragmentation: int
    returned: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def allocated(self) -> int:
        """Most bytes in tensors, as `torch.cuda.max_memory_allocated` reports."""
        kept = self.parameters + self.gradients + self.optimizer + self.workspace
        return kept + max(self.activations + self.working, self.step)

    @property
    def reserved(self) -> int:
        """Bytes in segments of the allocator, as `torch.cuda.max_memory_reserved` reports."""
        return self.total - self.context - self.nccl

    @property
    def total(self) -> int:
        """All kinds together, as nvidia-smi reports on a device with room for them."""
        return sum(self.kinds.values())

    @property
    def needed(self) -> int:
        """Least bytes of a device that does not run out of memory: what decides whether a plan fits."""
        return self.total - self.returned

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            kind.name: getattr(self, kind.name)
            for kind in fields(self)
            if kind.name not in ("rank", "returned", "host", "nvme")
        }


_Stages: TypeAlias = Sequence[tuple[int, int]]


class _Plans(Protocol):
    """Plans as columns: of one plan, or of a `PlanTable`."""

    def column(self, name: str) -> Any:
        """Return the values of a parameter."""

    def mapped(self, function: Callable[[ClusterPlan], Any], *names: str) -> Any:
        """Return a function of some parameters; of several numbers, as columns."""


@dataclass(frozen=True, slots=True)
class _OnePlan:
    plan: ClusterPlan

    def column(self, name: str) -> Any:
        return getattr(self.plan, name)

    def mapped(self, function: Callable[[ClusterPlan], Any], *names: str) -> Any:
        return function(self.plan)


_RUN = ("tensor", "microbatch", "sequence_parallel", "flash", "context", "expert_tensor", "context_gather")
_DIVISION = ("tensor", "expert", "expert_tensor")
_ENDS = ("embedding_layers", "head_layers")
_STAGES = ("pipeline", "chunks", "schedule", *_ENDS)
_SHARDS = ("data", "tensor", "context", "expert", "expert_tensor", "sharding")
_GROUPS = ("data", "tensor", "context", "expert", "pipeline", "nodes")
_STORAGE = ("states", "parameters", "activations")
_OF_ACTIVATIONS = (*_RUN, *_STAGES, "recompute", "data", "recompute_layers", "activations")
"""Parameters of a plan that the bytes of `MemoryPricer._activation_kinds` depend on."""

_OF_PARAMETERS = (*_DIVISION, *_STAGES, *_STORAGE, "data", "context", "sharding", "nodes")
"""Parameters of a plan that the bytes of `MemoryPricer._parameter_kinds` depend on."""


_RETURNED = frozenset({"activations", "working", "step", "fragmentation"})
"""Kinds that the allocator may give back parts of."""

_LAST = -1
"""The last rank of a pipeline of any number of ranks."""


def _rank_of(rank: int, ranks: Any) -> Any:
    """Return a rank of pipelines of so many ranks, the last one if there are fewer or for `_LAST`."""
    return ranks - 1 if rank == _LAST else np.minimum(rank, ranks - 1)


@lru_cache(maxsize=4096)
def _most_in_flight(counts: tuple[int, ...], ranks: int, in_flight: int, microbatches: int) -> int:
    """Return the most layers in flight on a rank with uneven interleaved stages, each for a micro-batch.

    Groups of as many micro-batches as ranks run forward through one stage after the other, and backward in
    reverse. After each forward pass at most `in_flight` are stored.

    Args:
        counts: Layers of its stages, in the order of the forward pass.
        ranks: Ranks of the pipeline.
        in_flight: Pairs of a micro-batch and a stage in flight.
        microbatches: Number of micro-batches.
    """
    # The order repeats after a group, so two groups beyond the first passes show every state.
    groups = min(-(-microbatches // ranks), -(-in_flight // (ranks * len(counts))) + 2)
    forward = np.cumsum(np.tile(np.repeat(counts, ranks), groups))
    backward = np.cumsum([0, *np.tile(np.repeat(counts[::-1], ranks), groups)])
    ended = np.maximum(0, np.arange(1, len(forward) + 1) - in_flight)
    return int(np.max(forward - backward[ended]))


class MemoryPricer:
    """Memory of the plans of a job.

    Raises:
        InputError: if parameters are not of a supported dtype.
    """

    dtypes: ClassVar[tuple[DType, ...]] = ("f16", "bf16")
    """Supported dtypes of parameters."""

    def __init__(self, job: TrainingJob, channels: int = CHANNELS) -> None:
        """Price the plans of a job.

        Args:
            job: The network and its batch.
            channels: Channels of an NCCL communicator.
        """
        if job.dtype not in self.dtypes:
            raise InputError(f"dtype must be {' or '.join(self.dtypes)}, got {job.dtype}")
        self.job, self.channels = job, channels
        self.optimizer = find_optimizer(job.optimizer)
        self.framework = framework_memory(job.framework)
        self._kept = lru_cache(maxsize=None)(self._kept_bytes)
        self._units = lru_cache(maxsize=None)(self._gathered_units)
        self._stage_parameters = lru_cache(maxsize=None)(self._held_parameters)

    def of(self, plan: ClusterPlan) -> DeviceMemory:
        """Return the memory of the fullest device."""
        # The first rank has the most micro-batches in flight, the last one the head, and one between more
        # layers if an end counts as some: one of them is the fullest.
        ranks = {0, plan.pipeline - 1}
        if plan.head_layers:
            ranks |= {int(_rank_of(rank, plan.pipeline)) for rank in self._between}
        sizes = [self.of_rank(plan, rank) for rank in sorted(ranks)]
        fullest = max(sizes, key=lambda memory: memory.needed)
        return replace(
            fullest, host=max(memory.host for memory in sizes), nvme=max(memory.nvme for memory in sizes)
        )

    @cached_property
    def _between(self) -> tuple[int, ...]:
        """The second rank, and one behind the dense layers of a network with experts."""
        return tuple({1, 1 + architecture_of(self.job.network).dense_layers})

    def of_rank(self, plan: ClusterPlan, rank: int) -> DeviceMemory:
        """Return the memory of the devices of a rank of the pipeline."""
        return self.of_stage(plan, rank, None)

    def of_stage(self, plan: ClusterPlan, rank: int, stages: _Stages | None) -> DeviceMemory:
        """Return the memory of the devices of a rank in mixed precision, whatever layers it has.

        Args:
            plan: The plan.
            rank: The rank.
            stages: Layers of its stages as half-open ranges; None for those of the plan.
        """
        kinds = self._kinds(_OnePlan(plan), rank, stages)
        return DeviceMemory(rank=rank, **{name: int(size) for name, size in kinds.items()})

    def activation_bytes(self, plan: ClusterPlan, rank: int) -> int:
        """Return the bytes of the micro-batches in flight on a rank."""
        return int(self._activations(_OnePlan(plan), rank, None)[0])

    def _stored_layers(self, plan: ClusterPlan, rank: int, stages: _Stages | None) -> tuple[int, int]:
        """Return the most layers in flight on a rank, and the layers of its smallest stage.

        A layer counts once for each micro-batch.
        """
        counts = tuple(last - first for first, last in stages) if stages else self._counts(plan, rank)
        count = plan.microbatches(self.job.batch)
        in_flight = int(stages_in_flight(plan.schedule, plan.pipeline, rank, plan.chunks, count))
        if min(counts) == max(counts) or plan.schedule in V_SCHEDULES:
            return in_flight * max(counts), min(counts)
        return _most_in_flight(counts, plan.pipeline, in_flight, count), min(counts)

    def sizes(
        self, plans: PlanTable, fits: Callable[..., Any] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the memory that the fullest device of each plan needs, and the most host memory and NVMe.

        Args:
            plans: The plans.
            fits: Returns which plans fit, given three such columns. A plan that does not fit on its first
                rank gets the memory of that rank. None to count all ranks of all plans.
        """
        sizes = self._rank_sizes(plans, 0)
        rows = np.arange(len(plans)) if fits is None else np.flatnonzero(fits(*sizes))
        uneven = rows[plans.column("head_layers")[rows] > 0]
        for rank, counted in ((_LAST, rows), *((rank, uneven) for rank in self._between)):
            if len(counted):
                rank_sizes = self._rank_sizes(plans.take(counted), rank)
                for nbytes, rank_bytes in zip(sizes, rank_sizes, strict=True):
                    nbytes[counted] = np.maximum(nbytes[counted], rank_bytes)
        return sizes

    def _rank_sizes(self, plans: PlanTable, rank: int) -> tuple[Any, Any, Any]:
        """Return the memory that a rank of each plan needs, its host memory and its NVMe."""
        # Millions of plans have few combinations of the parameters that each part depends on: each
        # combination is computed once.
        needed, host, nvme = (np.zeros(len(plans), dtype=np.int64) for _ in range(3))
        parts: dict[str, Any] = {}
        for kinds_of, names in (
            (self._activation_kinds, _OF_ACTIVATIONS),
            (self._parameter_kinds, _OF_PARAMETERS),
        ):
            combinations, number = plans.grouped(*names)
            kinds = kinds_of(combinations, rank, None)
            host += _column(kinds.pop("host"), number)
            nvme += _column(kinds.pop("nvme", 0), number)
            needed += _column(sum(kinds.values()), number)
            if self.framework.contiguous:
                for name in _RETURNED.intersection(kinds):
                    parts[name] = parts.get(name, 0) + _column(kinds[name], number)
        if self.framework.contiguous:
            share = plans.mapped(self.retained_share, "recompute", "flash", "sharding")
            needed -= self.returned_bytes(share, **parts)
        return needed, host, nvme

    def _kinds(self, plans: _Plans, rank: int, stages: _Stages | None = None) -> dict[str, Any]:
        """Return the bytes of each kind on the devices of a rank.

        Args:
            plans: One plan, or many.
            rank: The rank, or `_LAST` for the last one of each plan.
            stages: Layers of its stages; None for those of the plan.
        """
        kinds = self._activation_kinds(plans, rank, stages)
        for name, nbytes in self._parameter_kinds(plans, rank, stages).items():
            kinds[name] = kinds.get(name, 0) + nbytes
        parts = {name: kinds[name] for name in _RETURNED}
        share = plans.mapped(self.retained_share, "recompute", "flash", "sharding")
        return {**kinds, "returned": self.returned_bytes(share, **parts)}

    def returned_bytes(
        self, share: Any, *, activations: Any, working: Any, step: Any, fragmentation: Any
    ) -> Any:
        """Return the bytes that the allocator gives back before memory runs out.

        Args:
            share: Share that cannot be given back (`retained_share`).
            activations: Bytes of the micro-batches in flight.
            working: Bytes of recomputed activations, or of the loss.
            step: Bytes that only the step of the optimizer needs.
            fragmentation: Bytes that are reserved and not used where memory does not run out.
        """
        if not self.framework.contiguous:
            return 0
        passes = activations + working
        least = _whole((1 + share) * np.maximum(passes, step))
        return np.maximum(0, passes + step + fragmentation - least)

    def _activation_kinds(self, plans: _Plans, rank: int, stages: _Stages | None) -> dict[str, Any]:
        """Return the bytes of activations, and of what depends on them."""
        activations, working, (layer_bytes, stage_bytes) = self._activations(plans, rank, stages)
        offloads = plans.column("activations") == "host"
        # DEPTH inputs of layers stay on the device: the one in use, and the one that is copied meanwhile.
        moved = np.maximum(0, stage_bytes - DEPTH * layer_bytes)
        activations = activations - np.where(offloads, moved, 0)
        share = plans.mapped(self.fragmentation_share, "recompute", "flash")
        return {
            "host": np.where(offloads, stage_bytes, 0),
            "activations": activations,
            "working": working,
            "fragmentation": _whole(share * (activations + working)) + self._unused_logit_bytes(plans, rank),
        }

    def _parameter_kinds(self, plans: _Plans, rank: int, stages: _Stages | None) -> dict[str, Any]:
        """Return the bytes of parameters, gradients and states, and those that all plans need."""
        parameter_counts = plans.mapped(
            lambda plan: self.held_parameters(plan, _rank_of(rank, plan.pipeline), stages),
            *_DIVISION,
            *_STAGES,
        )
        shards = plans.mapped(lambda plan: plan.shards, *_SHARDS)
        largest, ends = plans.mapped(
            lambda plan: self._units(plan.division, int(_rank_of(rank, plan.pipeline)), plan.pipeline),
            *_DIVISION,
            "pipeline",
        )
        # Shards are rounded up. Experts have other copies than the rest of a layer, so both are divided by
        # themselves.
        states = -(-parameter_counts[0] // shards[0]) - (-parameter_counts[1] // shards[1])
        layout, total = _storage_layout(plans), parameter_counts[0] + parameter_counts[1]
        parameters, gradients = self._parameters_and_gradients(layout, total, states, (largest, ends))
        # Host buffers hold shards of layers. With different numbers of shards, the fewer ones are the larger
        # ones.
        small = DEPTH * -(-largest // np.minimum(shards[0], shards[1]))
        host, nvme = _stored_bytes(layout, states, small, self.optimizer.mixed_state_bytes)
        on_device = layout.states == "device"
        return {
            "parameters": parameters + self._converted_bytes(plans, rank, stages),
            "gradients": gradients,
            "optimizer": np.where(on_device, _whole(self.optimizer.mixed_state_bytes * states), 0),
            "step": np.where(on_device, self.framework.step_bytes(states, wide=self.job.wide_gradients), 0),
            "host": np.where(layout.moves, host, 0),
            "nvme": np.where(layout.moves, nvme, 0),
            "context": CONTEXT_BYTES,
            "workspace": WORKSPACE_BYTES,
            "nccl": plans.mapped(self._communicator_bytes, *_GROUPS),
            "fragmentation": self._unused_shard_bytes(plans, np.maximum(largest, ends)),
        }

    def _parameters_and_gradients(
        self, layout: StorageLayout, total: Any, states: Any, units: tuple[Any, Any]
    ) -> tuple[Any, Any]:
        """Return the bytes of parameters and of gradients on a device.

        Args:
            layout: Where data is.
            total: Parameters of the device.
            states: Parameters whose states it keeps.
            units: Parameters that full sharding gathers for a layer, and for the whole step.
        """
        wide = self.job.wide_gradients
        gradient_bytes = WIDE_BYTES + self.framework.kept_gradient_bytes if wide else GRADIENT_BYTES
        # Data that moves layer by layer needs buffers of DEPTH layers on the device instead of room for all
        # layers.
        buffer, ends = DEPTH * units[0], units[1]
        resident_parameters = np.where(layout.parameters == "device", states, 0)
        fetches = layout.moves & (layout.gathers | (layout.parameters != "device"))
        parameters = PARAMETER_BYTES * np.where(fetches, resident_parameters + buffer, total)
        streams = layout.moves & (layout.streams_gradients | layout.scatters)
        resident_gradients = np.where(layout.streams_gradients, 0, states)
        gradients = gradient_bytes * np.where(streams, resident_gradients + buffer, total)
        if self.framework.gathers_ends:
            # Gradients of a shard are in f32, and its f32 parameters count as states. A pipeline also sums
            # whole gradients over micro-batches.
            in_units = layout.gathers & (layout.parameters == "device") & (layout.states == "device")
            parameters = np.where(in_units, PARAMETER_BYTES * (buffer + ends), parameters)
            summed = np.where(layout.pipeline > 1, gradient_bytes * total, WIDE_BYTES * buffer)
            gradients = np.where(in_units, summed + WIDE_BYTES * states, gradients)
            apart = (layout.pipeline > 1) & (layout.copies > 1) & (layout.sharding == "optimizer")
            gradients = gradients + np.where(apart, WIDE_BYTES * states, 0)
        return parameters, gradients

    def _unused_logit_bytes(self, plans: _Plans, which: int) -> Any:
        """Return the bytes where the logits of a rank, or `_LAST`, were that are too small to be used."""
        if not self.framework.gathers_ends or self.job.fused_loss:
            return 0
        ranks, v_shaped = plans.column("pipeline"), np.isin(plans.column("schedule"), V_SCHEDULES)
        last = _rank_of(which, ranks) == np.where(v_shaped, 0, ranks - 1)
        logits = plans.mapped(lambda plan: self._logits(LayerRun.of(plan)), "tensor", "microbatch", "context")
        return last * self.framework.unused_logit_bytes * logits

    def _unused_shard_bytes(self, plans: _Plans, unit: Any) -> Any:
        """Return the bytes of gathered parameters that no other stream can use.

        Args:
            plans: One plan, or many.
            unit: Most parameters that are gathered at once.
        """
        if not self.framework.gathers_ends:
            return 0
        sharded = (plans.column("data") * plans.column("context") > 1) & (plans.column("sharding") != "none")
        return np.where(sharded, PARAMETER_BYTES * unit, 0)

    def _logits(self, run: LayerRun) -> int:
        """Return the logits of a micro-batch on a device."""
        architecture = architecture_of(self.job.network)
        if architecture.patch:  # each device has the whole head, for the token of the class
            return run.microbatch * architecture.vocabulary
        return run.microbatch * self.job.seq // run.context * architecture.vocabulary // run.tensor

    def _activations(
        self, plans: _Plans, which: int, stages: _Stages | None
    ) -> tuple[Any, Any, tuple[Any, Any]]:
        """Return bytes: micro-batches in flight, recomputation, and the layers' part of the first.

        The last are those of one layer, and of all layers of the device.
        """
        run_bytes = plans.mapped(lambda plan: self._kept(LayerRun.of(plan).whole), *_RUN, "recompute")
        checkpoint_bytes, whole, work, weights, embedding, head, head_gradient, border, ends = run_bytes
        ranks, chunks, schedule = (plans.column(name) for name in ("pipeline", "chunks", "schedule"))
        rank = _rank_of(which, ranks)
        count = self.job.batch // (plans.column("data") * plans.column("microbatch"))
        split, v_shaped = np.isin(schedule, SPLIT_SCHEDULES), np.isin(schedule, V_SCHEDULES)
        in_flight = stages_in_flight(schedule, ranks, rank, chunks, count)
        stored_layers, least_layers = plans.mapped(
            lambda plan: self._stored_layers(plan, int(_rank_of(which, plan.pipeline)), stages),
            *_STAGES,
            "data",
            "microbatch",
        )
        recompute_layers = plans.column("recompute_layers")
        # recompute_layers=0 means all layers of a stage, not none: `recompute` says whether there is any.
        recomputed = np.where(
            recompute_layers > 0, in_flight * np.minimum(recompute_layers, least_layers), stored_layers
        )
        stage_bytes = recomputed * checkpoint_bytes + (stored_layers - recomputed) * whole
        # A split backward pass keeps a micro-batch until its gradients of weights: activations first, then
        # what these need.
        stage_bytes = np.where(split, stored_layers * np.maximum(whole, weights), stage_bytes)
        embedded = np.where(rank == 0, first_stage_in_flight(schedule, ranks, chunks, count), 0)
        total = stage_bytes + embedded * embedding
        # A V-shaped pipeline ends where it starts: the first rank has the head.
        last = rank == np.where(v_shaped, 0, ranks - 1)
        # The gradient of the logits of one micro-batch is in `working`; those of the others wait for their
        # weights.
        waiting = np.where(split, np.minimum(count, in_flight) - 1, 0)
        total = total + last * (head + waiting * head_gradient)
        if self.framework.keeps_outputs:
            total = total + np.where((ranks > 1) & ~last, in_flight * border, 0)
        # Gradients of the embedding and the head are made when no layer has recomputed activations.
        working = np.where(last, np.maximum(work, head_gradient + ends), work)
        working = np.where(rank == 0, np.maximum(working, ends), working)
        # One tensor arrives while another leaves.
        working = working + np.where(ranks > 1, 2 * border, 0)
        return total, working, (checkpoint_bytes, stage_bytes)

    def _kept_bytes(self, run: LayerRun) -> tuple[int, ...]:
        """Return the bytes of a layer and what surrounds it, for each micro-batch.

        In order: a layer with its recomputation, a layer without recomputation, what exists while a layer
        runs backward, inputs of the gradients of weights, embedding, head, gradient of the head, tensor
        between stages, and gradient of the embedding or the head before it is added to its sum.
        """
        memory, whole = run.activations(self.job), run.kept.activations(self.job)
        architecture = memory.architecture
        fused = self.framework.fused_sums and self.job.wide_gradients
        size = 0 if fused else GRADIENT_BYTES
        width = architecture.shared_ffn if architecture.experts_per_token else architecture.ffn
        matrices = (2 if architecture.gated else 1) * width // run.tensor
        matrix_bytes = size * architecture.hidden * matrices
        table_bytes = size * architecture.hidden * architecture.vocabulary // run.tensor
        return (
            memory.layer_bytes,
            whole.layer_bytes,
            memory.recomputed_bytes + run.gathered_bytes(self.job) + memory.backward_bytes + matrix_bytes,
            whole.weight_gradient_bytes,
            memory.embedding_bytes,
            memory.head_bytes - self._narrower_bytes(run),
            memory.head_gradient_bytes + self._loss_bytes(run, memory),
            memory.input_bytes,
            table_bytes,
        )

    def _loss_bytes(self, run: LayerRun, memory: ActivationMemory) -> int:
        """Return the bytes of the loss beside the logits and their 16-bit gradient."""
        framework, logits = self.framework, self._logits(run)
        nbytes = framework.parallel_logit_bytes if run.tensor > 1 else framework.logit_bytes
        gathered = 0
        if framework.keeps_gathered and run.sequence_parallel:
            gathered = (run.tensor - 1) * memory.input_bytes
        return gathered + (0 if self.job.fused_loss else nbytes) * logits

    def _narrower_bytes(self, run: LayerRun) -> int:
        """Return the bytes by which 16-bit logits of a loss in one kernel are smaller than those in f32."""
        return (LOGIT_BYTES - itemsize(self.job.dtype)) * self._logits(run) * self.job.fused_loss

    def fragmentation_share(self, plan: ClusterPlan) -> float:
        """Return the share of activations that the allocator reserves and does not use."""
        if self.framework.expandable:
            return 0.0
        gradients = CONTIGUOUS if self.framework.contiguous else SEPARATE
        without = FRAGMENTATION["none", plan.flash]
        return FRAGMENTATION.get((plan.recompute, plan.flash), without)[gradients]

    def retained_share(self, plan: ClusterPlan) -> float:
        """Return the share of activations or of the step's tensors that the allocator cannot give back."""
        states = WHOLE if plan.sharding == "none" else DIVIDED
        return RETAINED.get((plan.recompute, plan.flash), RETAINED["none", plan.flash])[states]

    def _communicator_bytes(self, plan: ClusterPlan) -> int:
        """Return the bytes of the communicators of a device."""
        return sum(
            communicator_bytes(size, self.channels if local > 1 else NETWORK_CHANNELS)
            for size, local in self._groups(plan)
        )

    def _groups(self, plan: ClusterPlan) -> Iterator[tuple[int, int]]:
        """Yield the size of each group of a device, and how many of its devices are in one node.

        Groups are those of tensors, copies, sequences, experts and stages; all devices; a model, in which
        norms of gradients are summed; and with a pipeline both ends, which share the embedding, and
        neighbours. All devices, and a model, are counted only if they are no other group.
        """
        node, tensor, stage = plan.devices // plan.nodes, plan.tensor, plan.devices // plan.pipeline
        groups = [(tensor, 1), (plan.pipeline, stage)]
        groups += [(size, tensor) for size in (plan.copies, plan.context, plan.expert)]
        if plan.devices not in (size for size, _ in groups):
            groups.append((plan.devices, 1))
        if plan.pipeline > 1:
            groups += [(2, stage)] * (1 + self.framework.pairs)
        for size, stride in groups:
            yield size, min(size, node // stride)
        if min(tensor, plan.pipeline) > 1:
            yield tensor * plan.pipeline, max(min(tensor, node), min(plan.pipeline, node // stage))

    def held_parameters(self, plan: ClusterPlan, rank: int, stages: _Stages | None = None) -> tuple[int, int]:
        """Return the parameters of a rank outside experts, and those of its experts.

        Args:
            plan: The plan.
            rank: The rank.
            stages: Layers of its stages as half-open ranges; None for those of the plan.
        """
        network, ranges = self.job.network, stages
        if ranges is None:
            network, divided = plan.divided(self.job.network)
            ranges = [divided[stage] for stage in plan.held_stages[rank]]
        apart = network.ends_apart and not self.job.network.ends_apart
        counts = [self._stage_parameters(plan.division, stage, apart) for stage in ranges]
        return sum(dense for dense, _ in counts), sum(routed for _, routed in counts)

    def _counts(self, plan: ClusterPlan, rank: int) -> tuple[int, ...]:
        """Return the number of layers of each stage of a rank."""
        stages = plan.stages(self.job.network.layers)
        return tuple(stages[stage][1] - stages[stage][0] for stage in plan.held_stages[rank])

    def _held_parameters(
        self, division: LayerDivision, layers: tuple[int, int], apart: bool
    ) -> tuple[int, int]:
        """Return the parameters of some layers; with `apart`, the embedding and the head are layers."""
        network = self._ends_apart if apart else self.job.network
        return network.held_parameters(division, layers)

    @cached_property
    def _ends_apart(self) -> Network:
        return self.job.network.with_ends_apart()

    def _converted_bytes(self, plans: _Plans, rank: int, stages: _Stages | None) -> Any:
        """Return the bytes of the matrices in 8-bit floats, and of their transposes, on a rank."""
        if self.job.fp8 == "none":
            return 0

        def converted(plan: ClusterPlan) -> int:
            network = self.job.network
            if stages:
                matrices = sum(network.matrix_parameters(plan.tensor, stage) for stage in stages)
                return CONVERTED_BYTES * (matrices + self.held_parameters(plan, rank, stages)[1])
            count = sum(self._counts(plan, int(_rank_of(rank, plan.pipeline))))
            if plan.parameters != "device" or plan.sharding == "full":
                count = min(count, DEPTH)
            last_layers = network.layers - count, network.layers  # the first ones may have no experts
            routed = network.held_parameters(plan, last_layers)[1]
            return CONVERTED_BYTES * (network.matrix_parameters(plan.tensor, last_layers) + routed)

        return plans.mapped(converted, *_DIVISION, *_STAGES, "parameters", "sharding")

    def _gathered_units(self, division: LayerDivision, rank: int, ranks: int) -> tuple[int, int]:
        """Return the parameters that full sharding gathers for a layer, and for the whole step.

        The latter are those of the embedding and the head on a rank, if the framework gathers them together;
        else the former are those of a layer with either, if that has more.
        """
        layers = self.job.network.layers
        middle = layers // 2, layers // 2 + 1
        if not self.framework.gathers_ends:
            kinds = {(0, 1), (layers - 1, layers), ((layers - 1) // 2, (layers - 1) // 2 + 1)}
            return max(sum(self._stage_parameters(division, kind, False)) for kind in kinds), 0
        count = self._ends_apart.layers
        held = [(0, 1)] * (rank == 0) + [(count - 1, count)] * (rank == ranks - 1)
        return sum(self._stage_parameters(division, middle, False)), sum(
            sum(self._stage_parameters(division, kind, True)) for kind in held
        )


def communicator_bytes(size: int, channels: int) -> int:
    """Return the memory of an NCCL communicator in bytes; 0 for one device.

    Args:
        size: Devices of the communicator.
        channels: Its channels.
    """
    if size < 2:
        return 0
    return (PAIR_BYTES if size == 2 else COMMUNICATOR_BYTES) * channels // CHANNELS


def _column(values: Any, number: NDArray[Any]) -> NDArray[Any]:
    """Return the value of each plan, given those of combinations, or one for all of them."""
    column: NDArray[Any] = np.asarray(values)[number] if np.ndim(values) else np.asarray(values)
    return column


def _storage_layout(plans: _Plans) -> StorageLayout:
    """Return the storage layout of plans as columns."""
    names = ("sharding", "states", "parameters", "activations")
    columns = [np.asarray(plans.column(name)) for name in names]
    return StorageLayout(plans.column("pipeline"), plans.column("data") * plans.column("context"), *columns)


def _stored_bytes(layout: StorageLayout, states: Any, buffer: Any, state_bytes: float) -> tuple[Any, Any]:
    """Return the host memory and the NVMe of a device for its share of parameters.

    Buffers hold the layers that move through host memory: all bytes of a parameter, on the way in and out.

    Args:
        layout: Where data is.
        states: Parameters whose states the device keeps.
        buffer: Parameters of the layers that are buffered.
        state_bytes: Bytes of states per parameter, with the f32 copy.
    """
    on_nvme, below = layout.states == "nvme", layout.parameters == "nvme"
    summed = np.where(layout.streams_gradients & ~below, GRADIENT_BYTES * states, 0)
    buffers = _whole(2 * (state_bytes + GRADIENT_BYTES + PARAMETER_BYTES) * buffer)
    host = np.where(layout.states == "host", _whole((state_bytes + GRADIENT_BYTES) * states), 0)
    host = host + np.where(on_nvme, buffers + summed, 0)
    host = host + np.where(layout.parameters == "host", PARAMETER_BYTES * states, 0)
    nvme = np.where(on_nvme, _whole(state_bytes * states), 0)
    return host, nvme + np.where(below, (PARAMETER_BYTES + GRADIENT_BYTES) * states, 0)


def _whole(nbytes: Any) -> Any:
    return np.rint(nbytes).astype(np.int64)
