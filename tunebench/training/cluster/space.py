"""Plans of training on a cluster, and the space of all of them: `ClusterPlan`, `plan_space`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, overload

from tunebench._lazy import np
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import find_optimizer
from tunebench.space import Constraint, Parameter, Space, Table, Value, distinct_rows
from tunebench.stack import STACKS, efficiency_of, find_stack
from tunebench.training.cluster.framework_memory import Framework, framework_memory
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.pipeline.activation import architecture_of
from tunebench.training.schedules.registry import (
    PLANNED_SCHEDULES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    V_SCHEDULES,
    NamedSchedule,
    planned_schedule,
)
from tunebench.training.steps.calibration import Calibration
from tunebench.training.steps.parallelism import Parallelism, ScheduleName, Sharding, StepDivision
from tunebench.workloads.networks import Network, NetworkRun
from tunebench.workloads.networks.layer_division import LayerExecution, shared_fields
from tunebench.workloads.networks.network_run import DType, Fp8, Optimizer
from tunebench.workloads.networks.transformer import Transformer

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ClusterPlan",
    "Place",
    "PlanSchedule",
    "PlanTable",
    "Sharding",
    "TrainingJob",
    "enumerated",
    "fixed_values",
    "plan_space",
]

Place = Literal["device", "host", "nvme"]
"""Where data is: on the device, in host memory (ZeRO-Offload), or in NVMe (ZeRO-Infinity)."""

PlanSchedule: TypeAlias = str
"""Name of a schedule of plans, one of `PLANNED_SCHEDULES` (`tunebench.training.schedules.registry`); 1F1B is
interleaved if a device has several stages."""

_LOOPED = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].layout == "looped")
_ANY_CHUNKS = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].interleaved)
"""Schedules with any number of stages on each device, and without a pipeline."""

MOST_V_RANKS = 64
"""Most ranks of a V-shaped schedule: the search of its blocks of passes takes seconds for as many."""

MOST_CHUNKS = 8
"""Most stages of a device."""

MOST_CHECKED = 1_000_000
"""Most combinations of values that are tried to find the constraint that excludes all plans."""

MOST_HEAD_LAYERS = 8
"""Most layers as which the head counts."""

LEAST_TOKENS = 1024
"""Fewest tokens of a sequence on each device of context parallelism."""

MOST_MICROBATCH = 64
"""Most sequences in a micro-batch."""

MOST_IMAGES = 1024
"""Most images in a micro-batch: an image has fewer tokens than a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A network to train, and how its software may run it. The kernels are Megatron-LM's.

    Attributes:
        network: The transformer.
        batch: Sequences in a step, of all devices together.
        seq: Tokens per sequence.
        dtype: Dtype of parameters, gradients and activations; states of the optimizer are f32, with an f32
            copy of the parameters in mixed precision (f16, bf16).
        fp8: Scaling of 8-bit floats in linear layers, by Transformer Engine; ``"none"`` without them.
        flash: Whether attention may be one kernel that stores no scores.
        gradient_overlap: Whether gradients are summed during the backward pass, and updated parameters are
            gathered during the forward pass.
        user_buffers: Whether collectives of sequence parallelism run in parts behind the parts of products.
        wide_gradients: Whether gradients are summed in f32.
        cuda_graphs: Whether kernels are launched as CUDA graphs, without host time for each.
        tensor_overlap: Whether collectives of tensor parallelism may run during products of the backward
            pass.
        full_sharding: Whether plans may also shard gradients (ZeRO-2) and parameters (ZeRO-3, FSDP) that
            are on the device. Predicted times are optimistic: published runs of FSDP took 1.1 to 1.3 times as
            long, the first version of ZeRO-3 1.5 to 4.9 times.
        load_factor: Tokens of the busiest device of expert parallelism, relative to the mean.
        capacity_factor: Most tokens of an expert, relative to the mean; others are dropped. None: all stay.
        optimizer: Optimizer of the step (`tunebench.optimizer`).
        fused_loss: Whether the loss is one kernel, as compiled programs have it: in memory, logits and their
            gradient are in 16 bits.
        framework: Framework whose buffers count in memory (`tunebench.training.cluster.framework_memory`).
        stack: Software with kernels of Megatron-LM, by its name in `tunebench.stack`.
        tuning: Whether steps take as long as those of the authors of the stack, or of others; empty for the
            usual one of the stack.
        calibration: What measured steps of the same device and stack say, in place of published ones.
    """

    network: Network
    batch: int
    seq: int
    dtype: DType = "bf16"
    fp8: Fp8 = "none"
    flash: bool = True
    gradient_overlap: bool = True
    tensor_overlap: bool = True
    user_buffers: bool = False
    wide_gradients: bool = False
    cuda_graphs: bool = False
    full_sharding: bool = False
    load_factor: float = 1.0
    capacity_factor: float | None = None
    optimizer: Optimizer = "adamw"
    fused_loss: bool = False
    framework: Framework = "megatron"
    stack: str = "megatron"
    tuning: str = ""
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        efficiency_of(self.stack, self.tuning)
        if find_stack(self.stack).kernels != "megatron":
            known = (stack.name for stack in STACKS.values() if stack.kernels == "megatron")
            raise InputError(
                "plans of transformers are for the kernels of Megatron-LM, and PyTorch's stacks for residual "
                f"networks such as resnet50: expected {' or '.join(known)}, got {self.stack}"
            )
        if self.calibration is not None and self.calibration.stack != self.stack:
            raise InputError(
                f"steps measured with stack {self.calibration.stack} say nothing about stack {self.stack}"
            )
        if self.batch < 1 or self.seq < 1:
            raise InputError(f"batch and seq must be at least 1, got {self.batch} and {self.seq}")
        find_optimizer(self.optimizer)
        framework_memory(self.framework)
        if self.fp8 not in get_args(Fp8):
            raise UnknownName("scaling of 8-bit floats", self.fp8, get_args(Fp8))
        architecture = architecture_of(self.network)
        if architecture.family not in ("gpt2", "vit") and not architecture.fused:
            raise InputError(
                f"{self.network.name} is a {architecture.family} model: expected a transformer with the "
                "layers of gpt2, vit, t5, llama or its relatives (mistral, mixtral, qwen, phi3, gemma, "
                "gpt_oss, deepseek), which the kernels of Megatron-LM are known for"
            )
        if architecture.decoder_layers and self.framework == "torchtitan":
            raise InputError(
                f"{self.network.name} has an encoder and a decoder, which torchtitan has not: use another "
                "framework"
            )
        factors = (self.load_factor, *(() if self.capacity_factor is None else (self.capacity_factor,)))
        if not all(1 <= factor < float("inf") for factor in factors):
            raise InputError(
                f"load_factor and capacity_factor must be at least 1, got {self.load_factor} and "
                f"{self.capacity_factor}"
            )
        if architecture.tokens and self.seq != architecture.tokens:
            raise InputError(
                f"{self.network.name} has {architecture.tokens} tokens for an image of {architecture.image} "
                f"pixels: leave out seq, got {self.seq}"
            )
        if architecture.longest and self.seq > architecture.longest:
            raise InputError(
                f"{self.network.name} has {architecture.longest} positions, got seq={self.seq}: use "
                "shorter sequences, or a config.json with more positions"
            )

    @property
    def expert_load(self) -> float:
        """Tokens of the busiest device of expert parallelism that are not dropped, relative to the mean."""
        return min(self.load_factor, self.capacity_factor or self.load_factor)

    def network_run(self, execution: LayerExecution, **numbers: Any) -> NetworkRun:
        """Return a training step of the job on the stack megatron.

        Args:
            execution: How the passes of layers run.
            numbers: Other fields of the run, such as batch, seq and parallel sizes.
        """
        return NetworkRun(
            mode="train",
            stack=self.stack,
            tuning=self.tuning,
            dtype=self.dtype,
            fp8=self.fp8,
            wide_gradients=self.wide_gradients,
            cuda_graphs=self.cuda_graphs,
            expert_load=self.expert_load,
            **shared_fields(execution, LayerExecution),
            **numbers,
        )

    @property
    def software_factors(self) -> tuple[float, float]:
        """Factors of the software on kernels and launches, and on communication."""
        if self.calibration is not None:
            return self.calibration.factors
        factor = math.exp(efficiency_of(self.stack, self.tuning).mean)
        return factor, factor

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step without recomputation: all scores count, masked or not.

        Of experts, those count that a token is routed to; of keys behind a window, none.

        Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021.
        """
        network, sizes = self.network, architecture_of(self.network)
        assert isinstance(network, Transformer)
        ends = sizes.head_tokens(self.seq) * sizes.hidden * sizes.vocabulary
        ends += sizes.image**2 * sizes.channels * sizes.hidden
        total = 0
        for index in range(network.layers):
            architecture = network.of_layer(index).architecture
            weights = sum(matrix.k * matrix.n for matrix in network.matrices_of(index))
            weights += architecture.hidden * architecture.experts
            weights += 3 * architecture.experts_per_token * architecture.hidden * architecture.ffn
            keys = min(self.seq, architecture.window or self.seq)
            scores = network.attentions_of(index) * keys * architecture.heads
            total += 2 * weights + 4 * scores * architecture.attention_dim
        return 3.0 * self.batch * (self.seq * total + 2 * ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan(StepDivision, LayerExecution):
    """One way to train a network on a cluster: a value for each parameter of `plan_space`.

    Tensor-parallel devices are in one node; context-parallel devices are next to them.

    Attributes:
        nodes: Nodes in use.
        microbatch: Sequences in a micro-batch.
        states: Where the states of the optimizer are. Unless on the device, its update runs in host memory.
        parameters: Where parameters are between passes, and gradients.
        activations: Where the inputs of layers are, if full recomputation keeps nothing else.
        expert_tensor: Tensor-parallel size of each expert: `tensor` or 1.
        schedule: Order of the passes of the pipeline; 1F1B is interleaved if a device has several stages.
        recompute_layers: Number of first layers of each stage with full recomputation; 0 for all.
    """

    nodes: int
    microbatch: int
    states: Place = "device"
    parameters: Place = "device"
    activations: Literal["device", "host"] = "device"
    expert_tensor: int = 1
    schedule: PlanSchedule = "1f1b"
    recompute_layers: int = 0

    def __post_init__(self) -> None:
        planned_schedule(self.schedule, self.chunks)

    @property
    def registered_schedule(self) -> NamedSchedule:
        """Record of the schedule: of the interleaved one if a device has several stages."""
        return planned_schedule(self.schedule, self.chunks)

    @property
    def schedule_name(self) -> ScheduleName:
        """Name of the schedule in `Parallelism`."""
        return self.registered_schedule.name

    @property
    def held_stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank, in the order of the forward pass."""
        return _held_stages(self.schedule_name, self.pipeline, self.chunks)

    @property
    def shards(self) -> tuple[int, int]:
        """Devices that divide the states of parameters outside experts, and of those of experts."""
        return (1, 1) if self.sharding == "none" else (self.copies, self.expert_copies)

    @property
    def values(self) -> dict[str, Value]:
        """Value of each parameter by name, in the order of `plan_space`."""
        return {name: getattr(self, name) for name in _ABOUT}

    def microbatches(self, batch: int) -> int:
        """Return the micro-batches of each copy in a step."""
        return batch // (self.data * self.microbatch)

    def parallelism(self, job: TrainingJob) -> Parallelism:
        """Return the division of the step, for `predict_step`."""
        shared = shared_fields(self, StepDivision)
        # A plan for a network without experts has expert_tensor=1, which in `Parallelism` divides experts.
        expert_tensor = self.expert_tensor if architecture_of(job.network).experts else None
        return Parallelism(
            **{**shared, "schedule": self.schedule_name, "expert_tensor": expert_tensor},
            microbatches=self.microbatches(job.batch),
            overlap=job.gradient_overlap,
            tensor_overlap=job.tensor_overlap,
            user_buffers=job.user_buffers,
        )

    def run(self, job: TrainingJob) -> NetworkRun:
        """Return how the network runs, with the batch of all devices, for `predict_step`."""
        return job.network_run(
            self,
            batch=job.batch,
            seq=job.seq,
            recompute_layers=self.recompute_layers or None,
            optimizer=job.optimizer,
        )

    def __str__(self) -> str:
        """Return the plan as `--fix` reads it, without parameters that have their usual value."""
        usual = {parameter.name: parameter.default for parameter in fields(self)}
        return ",".join(
            f"{name}={_text(value)}"
            for name, value in self.values.items()
            if name in _ALWAYS_SHOWN or (name != "nodes" and value != usual[name])
        )

    def differences(self, other: ClusterPlan) -> str:
        """Return the values that differ from another plan, as text."""
        changed = (name for name in _ABOUT if getattr(self, name) != getattr(other, name))
        return ", ".join(f"{name}={_text(getattr(self, name))}" for name in changed)


@functools.cache
def _held_stages(schedule: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    stages: list[list[int]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(SCHEDULES[schedule].placement(ranks, chunks)):
        stages[rank].append(stage)
    return tuple(map(tuple, stages))


_ABOUT = {
    "nodes": "nodes in use",
    "tensor": "tensor-parallel size",
    "context": "context-parallel size",
    "pipeline": "pipeline-parallel size",
    "data": "data-parallel size",
    "expert": "expert-parallel size",
    "expert_tensor": "tensor-parallel size of each expert",
    "chunks": "stages of each device",
    "embedding_layers": "layers as which the embedding counts when stages divide layers evenly",
    "head_layers": "layers as which the head and the loss count",
    "microbatch": "sequences in a micro-batch",
    "recompute": "activation recomputation",
    "sequence_parallel": "whether tensor parallelism also divides tokens",
    "flash": "whether attention is one kernel",
    "sharding": "what data-parallel ranks shard",
    "states": "where the states of the optimizer are",
    "parameters": "where parameters are between passes",
    "activations": "where the inputs of layers are",
    "schedule": "order of the passes of the pipeline",
    "recompute_layers": "number of first layers of each stage with full recomputation; 0 for all",
    "context_gather": "whether all keys and values are gathered before attention",
}
"""Parameters of `plan_space` in their order, with what they mean."""

_ALWAYS_SHOWN = frozenset(
    (
        "tensor",
        "pipeline",
        "data",
        "chunks",
        "microbatch",
        "recompute",
        "sequence_parallel",
        "flash",
        "sharding",
    )
)
"""Parameters that the text of a plan always has."""


def plan_space(
    job: TrainingJob, machine: TrainingCluster, *, any_nodes: bool = False, any_chunks: bool = False
) -> Space:
    """Return the space of plans.

    Tensor parallelism stays within a node. Context parallelism needs flash attention, and leaves at least
    1,024 tokens of a sequence on each device. Every device is used. Interleaving needs micro-batches that the
    ranks divide, as in Megatron-LM, and without `any_chunks` layers that the stages divide if any number of
    chunks does. The embedding and the head may count as layers, and be stages of their own if all data is on
    the device. Sharded gradients, and parameters that are sharded on the device, are not combined with a
    pipeline, except for parameters in torchtitan's. Parameters or activations off the device are
    not combined with interleaved stages, and selective recomputation not with flash attention, which already
    does it.

    Models with experts have sequence parallelism wherever they have tensor parallelism, as Megatron-LM needs.
    Their experts are divided among devices of a stage that also share or copy the other parts, and are whole
    or divided like these (`expert_tensor`). Data that moves layer by layer is not combined with expert
    parallelism.

    Schedules with split backward passes compute nothing again, because that would be kept until the gradients
    of weights are computed, and have parameters and activations on the device. V-shaped ones have up to 64
    ranks. Recomputation by number of layers counts the first ones of each stage, and has all data on the
    device.

    Args:
        job: The network and its batch.
        machine: The cluster.
        any_nodes: Whether plans may use some of the nodes: a divisor of their number.
        any_chunks: Whether interleaved stages may be uneven even if some number of chunks divides the layers.
    """
    architecture, batch, links = architecture_of(job.network), job.batch, machine.links
    nodes = _divisors(links.nodes) if any_nodes else (links.nodes,)
    values = _values(job, machine, nodes)

    # Constraints are evaluated for columns of values, hence `|` and `&`. Each names the parameters that it
    # needs, and its docstring is the reason that `_conflict` shows if no plan satisfies it.
    def uses_all_devices(nodes: Any, tensor: Any, context: Any, pipeline: Any, data: Any) -> Any:
        """Nodes times the devices of a node is data times context times tensor times pipeline."""
        return data * context * tensor * pipeline == nodes * links.devices_per_node

    def divides_sequences(context: Any, flash: Any) -> Any:
        """Context parallelism needs flash attention."""
        return (context == 1) | (flash == "yes")

    def divides_batch(data: Any, microbatch: Any, pipeline: Any, chunks: Any) -> Any:
        """The batch is a multiple of data times microbatch, with several chunks also of pipeline."""
        interleaved = (chunks == 1) | (batch // (data * microbatch) % pipeline == 0)
        return (batch % (data * microbatch) == 0) & interleaved

    def divides_tokens(tensor: Any, context: Any, sequence_parallel: Any) -> Any:
        """Sequence parallelism needs tensor parallelism that, times context, divides a sequence."""
        return (sequence_parallel == "no") | ((tensor > 1) & (job.seq % (tensor * context) == 0))

    def recomputes_scores(recompute: Any, flash: Any) -> Any:
        """Selective recomputation needs attention that is not flash attention."""
        return (recompute != "selective") | (flash == "no")

    def recomputes_operators(recompute: Any, flash: Any) -> Any:
        """Recomputation by operators needs flash attention."""
        return (recompute != "operators") | (flash == "yes")

    def shards_copies(data: Any, context: Any, pipeline: Any, sharding: Any, parameters: Any) -> Any:
        """Sharding needs copies, and of gradients or parameters on the device no pipeline.

        The pipelines of torchtitan shard parameters.
        """
        possible = (sharding == "optimizer") | (pipeline == 1) | (parameters != "device")
        possible |= (sharding == "full") & (job.framework == "torchtitan")
        return (sharding == "none") | ((data * context > 1) & possible)

    def shards_for_storage(sharding: Any, states: Any, parameters: Any) -> Any:
        """Sharding of gradients or parameters needs --full-sharding, or data off the device."""
        alone = (sharding == "none") | (sharding == "optimizer")
        return alone | ((sharding == "gradients") & (states != "device")) | (parameters != "device")

    def stores_parameters(
        data: Any, context: Any, chunks: Any, sharding: Any, states: Any, parameters: Any
    ) -> Any:
        """Parameters off the device need one chunk, full sharding or one copy, and states as far away."""
        alone = (chunks == 1) & ((sharding == "full") | (data * context == 1))
        below = (states == "nvme") | ((states == "host") & (parameters == "host"))
        return (parameters == "device") | (alone & below)

    def stores_activations(chunks: Any, recompute: Any, activations: Any) -> Any:
        """Activations off the device need full recomputation and one chunk."""
        return (activations == "device") | ((chunks == 1) & (recompute == "full"))

    return Space(
        tuple(Parameter(name, values[name], about) for name, about in _ABOUT.items()),
        (
            *_pipeline_constraints(architecture.layers, most_head_layers(job), any_chunks=any_chunks),
            _gathers_contexts,
            *((_gathers_windows,) if any(architecture.windows) else ()),
            uses_all_devices,
            divides_sequences,
            divides_batch,
            divides_tokens,
            recomputes_scores,
            *((recomputes_operators,) if "operators" in values["recompute"] else ()),
            shards_copies,
            stores_parameters,
            stores_activations,
            *((_divides_experts, _divides_tokens_of_experts, _keeps_experts) if architecture.experts else ()),
            *(() if job.full_sharding else (shards_for_storage,)),
        ),
    )


def _pipeline_constraints(layers: int, most_head_layers: int, *, any_chunks: bool) -> tuple[Constraint, ...]:
    """Return the constraints of stages, of schedules, and of recomputation by number of layers."""

    def divides_layers(pipeline: Any, chunks: Any, embedding_layers: Any, head_layers: Any) -> Any:
        """Several chunks need a pipeline, and stages need a layer beside the embedding and the head.

        Interleaved stages are uneven only if no number of chunks divides the layers, or chunks is fixed.
        """
        counted = layers + embedding_layers + head_layers
        even = counted % (pipeline * chunks) == 0
        divisible = np.any([counted % (pipeline * size) == 0 for size in range(2, MOST_CHUNKS + 1)], axis=0)
        looped = (pipeline > 1) & (even | ~divisible | any_chunks)
        return ((chunks == 1) | looped) & _fits_ends(layers, pipeline * chunks, embedding_layers, head_layers)

    def counts_ends(pipeline: Any, chunks: Any, embedding_layers: Any, head_layers: Any) -> Any:
        """Ends count in a pipeline: both as one layer, or the head as the layers that it takes the time of.

        The head counts as less if the last stage has fewer layers, or as all of them.
        """
        none = (embedding_layers == 0) & (head_layers == 0)
        both = (embedding_layers == 1) & (head_layers == 1)
        possible = _has_layers(layers, pipeline * chunks, 0, head_layers + 1)
        alone = (layers + head_layers) // (pipeline * chunks) == head_layers
        most = (head_layers > 1) & ((head_layers == most_head_layers) | ~possible | alone)
        return none | (pipeline > 1) & (both | (embedding_layers == 0) & most)

    def orders_passes(
        pipeline: Any,
        chunks: Any,
        embedding_layers: Any,
        head_layers: Any,
        recompute: Any,
        parameters: Any,
        activations: Any,
        schedule: Any,
    ) -> Any:
        """Schedules with split backward passes need a pipeline, no recomputation, and all data on the device.

        Looped ones need several chunks, the others one; V-shaped ones up to 64 ranks of two layers.
        """
        split, v_shaped = np.isin(schedule, SPLIT_SCHEDULES), np.isin(schedule, V_SCHEDULES)
        possible = (pipeline > 1) & ((chunks > 1) == np.isin(schedule, _LOOPED))
        stages = _has_layers(layers, 2 * pipeline, embedding_layers, head_layers)
        possible &= ~v_shaped | (stages & (pipeline <= MOST_V_RANKS))
        resident = (recompute == "none") & (parameters == "device") & (activations == "device")
        return np.isin(schedule, _ANY_CHUNKS) | (possible & (~split | resident))

    def recomputes_layers(
        pipeline: Any,
        chunks: Any,
        recompute: Any,
        states: Any,
        activations: Any,
        recompute_layers: Any,
        embedding_layers: Any,
        head_layers: Any,
    ) -> Any:
        """A number in recompute_layers needs full recomputation, and less than the layers of a stage.

        Then states and activations are on the device.
        """
        fewer = recompute_layers < -(-(layers + embedding_layers + head_layers) // (pipeline * chunks))
        whole = (recompute_layers == 0) | ((states == "device") & (activations == "device"))
        return whole & fewer & ((recompute_layers == 0) | (recompute == "full"))

    def keeps_on_device(
        pipeline: Any,
        chunks: Any,
        embedding_layers: Any,
        head_layers: Any,
        states: Any,
        parameters: Any,
        activations: Any,
    ) -> Any:
        """A stage of the embedding or the head alone needs all data on the device."""
        resident = (states == "device") & (parameters == "device") & (activations == "device")
        return resident | _has_layers(layers, pipeline * chunks, embedding_layers, head_layers)

    return divides_layers, counts_ends, orders_passes, recomputes_layers, keeps_on_device


def _fits_ends(layers: int, stages: Any, embedding_layers: Any, head_layers: Any) -> Any:
    """Return whether each stage has a layer, the embedding or the head."""
    per_stage, more = np.divmod(layers + embedding_layers + head_layers, stages)
    return (per_stage >= 1) & (per_stage + (more > 0) >= embedding_layers) & (per_stage >= head_layers)


def _has_layers(layers: int, stages: Any, embedding_layers: Any, head_layers: Any) -> Any:
    """Return whether each stage has a layer beside the embedding and the head."""
    per_stage, more = np.divmod(layers + embedding_layers + head_layers, stages)
    return (per_stage >= 1) & (per_stage + (more > 0) > embedding_layers) & (per_stage > head_layers)


def most_head_layers(job: TrainingJob) -> int:
    """Return the number of layers whose products have about as many multiplications as those of the head."""
    architecture, network = architecture_of(job.network), job.network
    assert isinstance(network, Transformer)
    layer = network.active_parameters() - architecture.hidden * architecture.vocabulary
    head = architecture.hidden * architecture.vocabulary
    return max(1, min(MOST_HEAD_LAYERS, round(head * network.layers / layer)))


def _values(
    job: TrainingJob, machine: TrainingCluster, nodes: tuple[int, ...]
) -> dict[str, tuple[Value, ...]]:
    """Return the values of each parameter, given the numbers of nodes."""
    architecture, batch, links = architecture_of(job.network), job.batch, machine.links
    tensors = tuple(
        size
        for size in _divisors(links.devices_per_node)
        if not (
            architecture.heads % size
            or architecture.heads_k % size
            or architecture.ffn % size
            or architecture.dense_ffn % size
            or architecture.shared_ffn % size
        )
    )
    counts = sorted({divisor for count in nodes for divisor in _divisors(count * links.devices_per_node)})
    locations = ("device", "host", "nvme")[: 1 + bool(machine.host_bytes) + bool(machine.nvme_bytes)]
    sharded = job.full_sharding or bool(machine.host_bytes)
    stacks = 1 + bool(architecture.decoder_layers)
    pipelines = tuple(count for count in counts if count <= architecture.layers and stacks == 1) or (1,)
    return {
        "nodes": nodes,
        "tensor": tensors,
        "context": _contexts(job, links.nodes * links.devices_per_node),
        "pipeline": pipelines,
        "data": tuple(count for count in counts if batch % count == 0) or (1,),
        "expert": _divisors(architecture.experts) if architecture.experts else (1,),
        "expert_tensor": tensors if architecture.experts else (1,),
        "chunks": tuple(range(1, min(MOST_CHUNKS, architecture.layers) + 1)),
        "embedding_layers": (0, 1) if pipelines[1:] else (0,),
        "head_layers": tuple(range(1 + most_head_layers(job))) if pipelines[1:] else (0,),
        "microbatch": tuple(size for size in _divisors(batch) if size <= most_microbatch(job)),
        "recompute": _recomputations(job),
        "sequence_parallel": ("no", "yes"),
        "flash": ("no", "yes") if job.flash and stacks == 1 else ("no",),
        "sharding": ("none", "optimizer", "gradients", "full") if sharded else ("none", "optimizer"),
        "states": locations if updates_in_host_memory(job) else locations[:1],
        "parameters": locations,
        "activations": locations[:2],
        "schedule": PLANNED_SCHEDULES,
        "recompute_layers": tuple(range(architecture.layers)) if stacks == 1 else (0,),
        "context_gather": ("no", "yes"),
    }


def _recomputations(job: TrainingJob) -> tuple[Value, ...]:
    """Return the kinds of recomputation: that by operators is torchtitan's."""
    architecture = architecture_of(job.network)
    experts = ("experts",) if architecture.experts else ()
    by_operators = job.framework == "torchtitan" and job.flash and architecture.plain
    return ("none", "selective", *experts, *(("operators",) if by_operators else ()), "full")


def most_microbatch(job: TrainingJob) -> int:
    """Return the most sequences or images of a micro-batch."""
    return MOST_IMAGES if architecture_of(job.network).patch else MOST_MICROBATCH


def updates_in_host_memory(job: TrainingJob) -> bool:
    """Return whether processors can update the parameters of a job: not if that needs matrix products."""
    optimizer = find_optimizer(job.optimizer)
    return optimizer.updates and not optimizer.newton_schulz_steps


def _gathers_windows(context: Any, context_gather: Any) -> Any:
    """Context parallelism of layers with a sliding window gathers contexts."""
    return (context == 1) | (context_gather == "yes")


def _gathers_contexts(context: Any, context_gather: Any) -> Any:
    """Gathering of contexts needs context parallelism."""
    return (context > 1) | (context_gather == "no")


def _divides_experts(tensor: Any, context: Any, data: Any, expert: Any, expert_tensor: Any) -> Any:
    """Expert times expert_tensor divides data times context times tensor."""
    shared = (expert_tensor == 1) | (expert_tensor == tensor)
    return shared & (data * context * tensor % (expert * expert_tensor) == 0)


def _divides_tokens_of_experts(tensor: Any, sequence_parallel: Any) -> Any:
    """Tensor parallelism with experts needs sequence parallelism."""
    return (tensor == 1) | (sequence_parallel == "yes")


def _keeps_experts(
    tensor: Any, expert: Any, expert_tensor: Any, sharding: Any, parameters: Any, activations: Any
) -> Any:
    """Divided experts need parameters and activations on the device, and gradients that are not sharded."""
    whole = (expert == 1) & (expert_tensor == tensor)
    streams = (sharding == "gradients") | (sharding == "full")
    return whole | ~(streams | (parameters != "device") | (activations != "device"))


def _contexts(job: TrainingJob, devices: int) -> tuple[int, ...]:
    """Return the degrees of context parallelism: each device has two parts of a sequence."""
    # Each device has an early and a late part of a sequence, which balances causal attention: two parts, each
    # whole.
    max_size = job.seq // LEAST_TOKENS if job.flash else 1
    return tuple(
        size for size in _divisors(devices) if size == 1 or (size <= max_size and job.seq % (2 * size) == 0)
    )


def fixed_values(
    space: Space, fixed: Mapping[str, str], why: Callable[[str, str], str] = lambda name, value: ""
) -> Space:
    """Return a space in which some parameters have one value, or few.

    Args:
        space: The space.
        fixed: Value of each fixed parameter as text; ``a|b`` allows two values.
        why: Returns the reasons why a parameter, by name, does not have a value.

    Raises:
        UnknownName: if there is no such parameter.
        InputError: if a parameter does not have this value.
    """
    parameters = {parameter.name: parameter for parameter in space.parameters}
    chosen: dict[str, tuple[Value, ...]] = {}
    for name, text in fixed.items():
        if name not in parameters:
            raise UnknownName("parameter of a plan", name, parameters)
        alternatives = text.split("|")
        match = tuple(value for value in parameters[name].values if str(value) in alternatives)
        if not match:
            values = ", ".join(map(str, parameters[name].values))
            reasons = "; ".join(dict.fromkeys(filter(None, (why(name, value) for value in alternatives))))
            because = f"{reasons}; " if reasons else ""
            raise InputError(f"{name}={text} is not possible here: {because}expected one of {values}")
        chosen[name] = match
    return space.restrict(**chosen)


class PlanTable(Sequence[ClusterPlan]):
    """All plans of a space as columns; a plan is made when it is read.

    Args:
        table: The configurations.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> ClusterPlan: ...

    @overload
    def __getitem__(self, index: slice) -> list[ClusterPlan]: ...

    def __getitem__(self, index: int | slice) -> ClusterPlan | list[ClusterPlan]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        pairs = zip(self._parameters, self._table.ordinals[index].tolist(), strict=True)
        return ClusterPlan(**{name: values[ordinal] for (name, values), ordinal in pairs})

    @functools.cached_property
    def _parameters(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """Name and values of each parameter."""
        parameters = []
        for parameter in self._table.space.parameters:
            switch = set(parameter.values) <= {"yes", "no"}
            values = tuple(value == "yes" for value in parameter.values) if switch else parameter.values
            parameters.append((parameter.name, values))
        return tuple(parameters)

    def column(self, name: str) -> NDArray[Any]:
        """Return the values of a parameter of all plans."""
        position = self._table.space.names.index(name)
        return np.array(self._parameters[position][1])[self._table.ordinals[:, position]]

    def take(self, rows: NDArray[Any]) -> PlanTable:
        """Return the plans of some rows."""
        return PlanTable(self._table.take(rows))

    def grouped(self, *names: str) -> tuple[PlanTable, NDArray[Any]]:
        """Return one plan per combination of some parameters, and the index of the combination of each plan.

        Args:
            names: The parameters.
        """
        columns = [self._table.space.names.index(name) for name in names]
        counts = [len(values) for _, values in self._parameters]
        rows, number = distinct_rows(self._table.ordinals, columns, counts)
        return self.take(rows), number

    def mapped(self, function: Callable[[ClusterPlan], Any], *names: str) -> NDArray[Any]:
        """Return a function of some parameters for all plans; of several numbers, as columns.

        Args:
            function: Returns a number, or a tuple of numbers, of a plan with these parameters.
            names: The parameters that it depends on.
        """
        plans, inverse = self.grouped(*names)
        # The function is called once for each combination; its numbers come first, so that callers unpack
        # columns.
        return np.array([function(plan) for plan in plans]).T[..., inverse]


def enumerated(space: Space) -> PlanTable:
    """Return all plans of a space.

    Raises:
        InputError: if there is none.
    """
    table: Table = space.enumerate()
    if not len(table):
        raise InputError(
            f"no plan divides this batch and network among the devices: {_conflict(space)}; change the "
            "batch, the number of devices or --fix"
        )
    return PlanTable(table)


def _conflict(space: Space) -> str:
    """Return which constraints of a space no values satisfy: as few as possible, at most three together."""
    for count in (1, 2, 3):
        for constraints in itertools.combinations(space.constraints, count):
            names = {name for constraint in constraints for name in signature(constraint).parameters}
            parameters = tuple(parameter for parameter in space.parameters if parameter.name in names)
            # An error message is worth seconds, not minutes: skip what would take longer to enumerate.
            if math.prod(len(parameter.values) for parameter in parameters) > MOST_CHECKED:
                continue
            if not len(Space(parameters, constraints).enumerate()):
                fixed = [f"{p.name}={p.values[0]}" for p in parameters if len(p.values) == 1]
                texts = [
                    " ".join((constraint.__doc__ or "").split()).rstrip(".") for constraint in constraints
                ]
                reasons = "; and ".join(text[:1].lower() + text[1:] for text in texts)
                return f"{reasons}, with {', '.join(fixed)}" if fixed else reasons
    return "its constraints exclude one another"


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
