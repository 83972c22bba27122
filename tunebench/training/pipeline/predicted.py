"""Costs of pipeline stages, predicted for a transformer on a device that need not be present.

Times are those of `tunebench.training.steps.step`. The gradient of the weights consists of the products
that compute it and of the accumulation of gradients; everything else of the backward pass belongs to the
gradient of the input: recomputation, and what collectives of tensor parallelism cannot hide.

Not modelled: collectives that a split backward pass hides less; transfers that slow concurrent kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tunebench._deprecation import warn_renamed
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.optimizer import OPTIMIZERS, find_optimizer
from tunebench.stack import Kernels
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.pipeline.activation import ActivationMemory, architecture_of
from tunebench.training.schedules import Interconnect, PipelineCosts, StageCosts, link_transfer
from tunebench.training.steps.step import Parallelism, PipelineStage, predict_step
from tunebench.training.steps.time_range import End
from tunebench.workloads.networks import Network, NetworkRun
from tunebench.workloads.networks.network_run import DType, Optimizer, Recompute

__all__ = ["PredictedStages"]


@dataclass(frozen=True, kw_only=True)
class PredictedStages:
    """A transformer that is divided among the ranks of a pipeline.

    Attributes:
        network: The transformer.
        device: One of the devices.
        cluster: Devices and links. Ranks fill nodes one after the other.
        ranks: Ranks of the pipeline.
        tensor: Tensor-parallel size: devices of each rank.
        microbatch: Sequences in a micro-batch.
        seq: Tokens in a sequence.
        dtype: Dtype of parameters and activations.
        stack: Software that runs the network, as of `NetworkRun`.
        flash_attention: Whether attention is one kernel that keeps no scores; the stack compiled always has
            it in f16 and bf16.
        sequence_parallel: Whether activations outside of attention and feed-forward layers are divided too.
        recompute: Activation recomputation in the backward pass.
        tensor_overlap: Whether collectives of tensor parallelism run during products of the backward pass.
        optimizer: Optimizer of the step.
        state_bytes: Bytes per parameter of parameters, gradients and optimizer states; None for those of
            the optimizer (`tunebench.optimizer`), and in 16 bits an f32 copy of what it updates.
        end: End of the 90 % prediction interval that times are taken from.
    """

    network: Network
    device: Device
    cluster: Cluster
    ranks: int
    tensor: int = 1
    microbatch: int = 1
    seq: int
    dtype: DType = "f16"
    stack: Kernels = "megatron"
    flash_attention: bool = False
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    tensor_overlap: bool = True
    optimizer: Optimizer = "adamw"
    state_bytes: float | None = None
    end: End = "expected"
    _known: dict[int, tuple[PipelineStage, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        per_node = self.cluster.devices_per_node
        if self.ranks < 1 or self.tensor < 1:
            raise InputError(f"expected at least one rank of one device, got {self.ranks} of {self.tensor}")
        if self.ranks * self.tensor > self.cluster.devices:
            raise InputError(
                f"{self.ranks} ranks of {self.tensor} device(s) need {self.ranks * self.tensor} devices, and "
                f"the cluster has {self.cluster.devices}"
            )
        if per_node % self.tensor:
            raise InputError(
                f"a tensor-parallel size of {self.tensor} does not fit a node: expected a divisor of "
                f"{per_node} devices per node"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise InputError("sequence parallelism needs tensor parallelism of at least 2")
        if self.flash_attention and self.dtype == "f32":
            raise InputError("flash attention needs dtype f16 or bf16, got f32")
        if self.stack != "megatron" and (
            self.recompute != "none" or self.sequence_parallel or self.flash_attention
        ):
            raise InputError(
                "recomputation, sequence parallelism and a choice of flash attention need the stack "
                f"megatron, got {self.stack}"
            )
        architecture = architecture_of(self.network)
        if architecture.decoder_layers:
            raise InputError(
                f"{self.network.name} has an encoder and a decoder: expected one stack of layers, "
                "because stages of a decoder also receive the output of the encoder; give the costs of stages"
            )
        if self.stack == "megatron" and architecture.family not in ("gpt2", "vit") and not architecture.fused:
            raise InputError(
                "the kernels of Megatron-LM are known for gpt2, vit, llama, mixtral, qwen2_moe and "
                f"qwen3_moe, got {architecture.family}: use the stack eager or compiled"
            )

    @cached_property
    def memory(self) -> ActivationMemory:
        """How activations of a layer are kept."""
        return ActivationMemory(
            architecture=architecture_of(self.network),
            batch=self.microbatch,
            seq=self.seq,
            dtype=self.dtype,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            flash_attention=self.flash_attention or (self.stack == "compiled" and self.dtype != "f32"),
            expert_tensor=self.tensor,
        )

    def costs(self, placement: Sequence[int], *, pairs: bool = False) -> PipelineCosts:
        """Return the costs of all stages of a schedule.

        Args:
            placement: Rank of each stage; layers are divided evenly among stages.
            pairs: Whether ranks that exchange activations share nodes.

        Raises:
            InputError: if there are fewer layers than stages, or the network does not support the run.
        """
        seen: set[int] = set()
        stages = []
        for rank, predicted in zip(placement, self.predicted(len(placement)), strict=True):
            stages.append(self._stage(predicted, first_of_rank=rank not in seen))
            seen.add(rank)
        return PipelineCosts(stages=tuple(stages), interconnect=self.interconnect(pairs=pairs))

    def interconnect(self, *, pairs: bool = False) -> Interconnect:
        """Return the links between ranks."""
        inside, between = self.cluster.inside, self.cluster.between
        return Interconnect.grouped(
            self.ranks,
            self.cluster.devices_per_node // self.tensor,
            link_transfer(inside),
            link_transfer(between),
            pairs=pairs,
        )

    def optimizer_us(self, placement: Sequence[int]) -> float:
        """Return the time of the optimizer on the rank that needs longest."""
        times = [0.0] * self.ranks
        for rank, stage in zip(placement, self.predicted(len(placement)), strict=True):
            times[rank] += stage.optimizer.at(self.end)
        return max(times)

    def predicted(self, stages: int) -> tuple[PipelineStage, ...]:
        """Return the predicted work of each stage, if layers are divided evenly among so many.

        Raises:
            InputError: if there are fewer layers than stages, or the network does not support the run.
        """
        if stages not in self._known:
            chunks = stages // self.ranks
            schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
            division = Parallelism(
                tensor=self.tensor,
                pipeline=self.ranks,
                schedule=schedule,
                chunks=chunks,
                tensor_overlap=self.tensor_overlap,
            )
            step = predict_step(self.network, self.device, self.run, self.cluster, division)
            self._known[stages] = step.stages
        return self._known[stages]

    @property
    def run(self) -> NetworkRun:
        """How the network runs a micro-batch."""
        return NetworkRun(
            batch=self.microbatch,
            seq=self.seq,
            mode="train",
            dtype=self.dtype,
            optimizer=self.optimizer,
            accumulate=True,
            stack=self.stack,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
            flash=self.flash_attention,
        )

    def at(self, end: End) -> PredictedStages:
        """Return the same stages with the times of another end of the prediction interval."""
        stages = replace(self, end=end)
        # Predictions contain all ends of the interval: nothing has to be predicted again.
        stages._known.update(self._known)
        return stages

    def with_microbatch(self, microbatch: int) -> PredictedStages:
        """Return the same stages for micro-batches of another size."""
        return replace(self, microbatch=microbatch)

    # -- one stage -----------------------------------------------------------------------------------------

    def _stage(self, predicted: PipelineStage, *, first_of_rank: bool) -> StageCosts:
        """Return the costs of a stage. Recomputed activations count with the first stage of a rank only."""
        memory, (first, end) = self.memory, predicted.layers
        has_head = end == self.network.layers
        outside = memory.embedding_bytes * (first == 0) + memory.head_bytes * has_head
        activation = memory.layer_bytes * (end - first) + outside
        for_weights = memory.weight_gradient_bytes * (end - first) + memory.head_gradient_bytes * has_head
        weights_us = predicted.weights.at(self.end)
        return StageCosts(
            forward_us=(predicted.forward + predicted.sums_forward).at(self.end),
            # Everything of the backward pass that is not the gradient of weights, exposed collectives
            # included.
            input_gradient_us=(predicted.backward + predicted.sums_backward).at(self.end) - weights_us,
            weight_gradient_us=weights_us,
            activation_bytes=activation,
            retained_bytes=for_weights,
            send_bytes=predicted.send_bytes,
            static_bytes=self._static_bytes(predicted.layers) + memory.recomputed_bytes * first_of_rank,
        )

    def _static_bytes(self, layers: tuple[int, int]) -> int:
        """Return the bytes of parameters, gradients and optimizer states on each device."""
        parameter_bytes = self.state_bytes
        if parameter_bytes is None:
            optimizer, size = find_optimizer(self.optimizer), itemsize(self.dtype)
            states = optimizer.state_bytes(size) if size == 4 else optimizer.mixed_state_bytes
            parameter_bytes = 2 * size + states
        return round(self.network.parameters(self.tensor, layers) * parameter_bytes)


def __getattr__(name: str) -> Any:
    if name != "STATE_BYTES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", "tunebench.optimizer.OPTIMIZERS")
    return {optimizer.name: 8 + optimizer.state_bytes(4) for optimizer in OPTIMIZERS.values()}
