"""Costs of pipeline stages, predicted for a transformer on a device that need not be present.

Times are those of the kernels of `tunebench.workloads.networks` and of the all-reduces of tensor parallelism,
which nothing hides. The gradient of the weights consists of the products that compute it and of the
accumulation of gradients; everything else of the backward pass belongs to the gradient of the input.

Not modelled: products that sequence parallelism overlaps with all-gathers, and the time that it saves in
normalisations; kernels of a particular framework; transfers that slow concurrent kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast.network import HOST_US, OperationTime, predict_operations
from tunebench.forecast.parallel.cluster import Cluster
from tunebench.forecast.parallel.collective import collective_us
from tunebench.forecast.parallel.pipeline import Interconnect, PipelineCosts, StageCosts, link_transfer
from tunebench.forecast.parallel.step import Parallelism
from tunebench.plan.pipeline.activation import ActivationMemory, Recompute, architecture_of
from tunebench.workloads.networks import Network, NetworkRun, Operation, Phase
from tunebench.workloads.networks._network import DType, Optimizer, Stack
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["STATE_BYTES", "PredictedStages"]

STATE_BYTES = {"none": 8, "sgd": 8, "adamw": 16}
"""Bytes per parameter of the parameter, its gradient and the states of the optimizer, by optimizer.

f32: four bytes each of the parameter, its gradient, and (AdamW) two moments. Mixed precision: two bytes each
of the parameter and its gradient, and four of the f32 parameter and of each moment. Source: Rajbhandari et
al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, section 3.1.
"""

_ATTENTION = ("attention", "attention scores", "attention softmax", "attention values", "attention copies")
"""Parts of a network that flash attention replaces by one kernel."""
_SCORES = ("attention scores", "attention softmax", "attention values")
"""Parts that selective recomputation runs again."""
_ONCE = ("embedding", "head", "loss")
"""Parts that full recomputation of the layers does not run again."""


@dataclass(frozen=True, kw_only=True)
class PredictedStages:
    """A transformer that is divided among the ranks of a pipeline.

    Attributes:
        network: The transformer.
        device: One of the devices.
        cluster: Devices and links. Ranks fill nodes one after the other.
        ranks: Ranks of the pipeline.
        tensor: Devices of each rank, which share every layer.
        microbatch: Sequences in a micro-batch.
        seq: Tokens in a sequence.
        dtype: Dtype of parameters and activations.
        fused: Whether a compiler has fused elementwise operations.
        flash_attention: Whether attention is one kernel that keeps no scores.
        sequence_parallel: Whether activations outside of attention and feed-forward layers are divided too.
        recompute: What the backward pass computes again.
        optimizer: Optimizer of the step.
        state_bytes: Bytes per parameter of parameters, gradients and optimizer states; None for those of
            `STATE_BYTES`.
    """

    network: Network
    device: Device
    cluster: Cluster
    ranks: int
    tensor: int = 1
    microbatch: int = 1
    seq: int
    dtype: DType = "f16"
    fused: bool = False
    flash_attention: bool = False
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    optimizer: Optimizer = "adamw"
    state_bytes: float | None = None
    _known: dict[tuple[int, int], _StageTimes] = field(
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
                f"the {self.tensor} devices that share a layer must be in one node: expected a divisor of "
                f"{per_node} devices per node"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise InputError("sequence parallelism needs tensor parallelism of at least 2")
        if self.flash_attention and self.dtype == "f32":
            raise InputError("flash attention needs dtype f16 or bf16, got f32")

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
            flash_attention=self.flash_attention,
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
        for rank, layers in zip(placement, self.layers(len(placement)), strict=True):
            stages.append(self._stage(layers, first_of_rank=rank not in seen))
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

    def layers(self, stages: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of each stage as half-open ranges."""
        return Parallelism(pipeline=stages).stages(self.network.layers)

    def optimizer_us(self, placement: Sequence[int]) -> float:
        """Return the time of the optimizer on the rank that needs longest."""
        times = [0.0] * self.ranks
        for rank, layers in zip(placement, self.layers(len(placement)), strict=True):
            times[rank] += self._times(layers).optimizer_us
        return max(times)

    def with_microbatch(self, microbatch: int) -> PredictedStages:
        """Return the same stages for micro-batches of another size."""
        return replace(self, microbatch=microbatch)

    # -- one stage -----------------------------------------------------------------------------------------

    def _stage(self, layers: tuple[int, int], *, first_of_rank: bool) -> StageCosts:
        """Return the costs of a stage. What is computed again counts once, with the first stage of a rank."""
        times, memory = self._times(layers), self.memory
        count = layers[1] - layers[0]
        begins, ends = layers[0] == 0, layers[1] == self.network.layers
        outside = memory.embedding_bytes * begins + memory.head_bytes * ends
        activation = memory.layer_bytes * count + outside
        for_weights = memory.weight_gradient_bytes * count + memory.head_gradient_bytes * ends
        sent = self.network.boundary_bytes(self._run(layers)) // (
            self.tensor if self.sequence_parallel else 1
        )
        return StageCosts(
            forward_us=times.forward_us,
            input_gradient_us=times.input_gradient_us,
            weight_gradient_us=times.weight_gradient_us,
            activation_bytes=activation,
            retained_bytes=min(for_weights, activation),
            send_bytes=0 if ends else sent,
            static_bytes=self._static_bytes(layers) + memory.recomputed_bytes * first_of_rank,
        )

    def _static_bytes(self, layers: tuple[int, int]) -> int:
        """Return the bytes of parameters, gradients and optimizer states on each device."""
        each = STATE_BYTES[self.optimizer] if self.state_bytes is None else self.state_bytes
        if self.state_bytes is None and self.dtype != "f32" and self.optimizer != "adamw":
            each /= 2
        return round(self.network.parameters(self.tensor, layers) * each)

    def _run(self, layers: tuple[int, int]) -> NetworkRun:
        return NetworkRun(
            batch=self.microbatch,
            seq=self.seq,
            mode="train",
            dtype=self.dtype,
            fused=self.fused,
            tensor=self.tensor,
            layers=layers,
            optimizer=self.optimizer,
            accumulate=True,
        )

    def _times(self, layers: tuple[int, int]) -> _StageTimes:
        if layers not in self._known:
            run = self._run(layers)
            self._known[layers] = _StageTimes.of(
                predict_operations(self.operations(run), self.device),
                {phase: self._sums_us(run, phase) for phase in ("forward", "backward")},
                self.recompute,
                flash_attention=self.flash_attention,
            )
        return self._known[layers]

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return the operations of a run: attention as one kernel or not, whatever the others are."""
        others = [each for each in self.network.operations(run) if each.part not in _ATTENTION]
        stack: Stack = "compiled" if self.flash_attention else "eager"
        attended = self.network.operations(replace(run, stack=stack))
        return (*others, *(each for each in attended if each.part in _ATTENTION))

    def _sums_us(self, run: NetworkRun, phase: Phase) -> float:
        """Return the time of the all-reduces of tensor parallelism in one phase."""
        group = self.cluster.group(self.tensor)
        return sum(
            each.count * float(collective_us("all-reduce", each.nbytes, group))
            for each in self.network.collectives(run)
            if each.phase == phase
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageTimes:
    """Times of the passes of a stage, and of its optimizer, in microseconds."""

    forward_us: float
    input_gradient_us: float
    weight_gradient_us: float
    optimizer_us: float

    @classmethod
    def of(
        cls,
        operations: Sequence[OperationTime],
        sums_us: dict[Phase, float],
        recompute: Recompute,
        *,
        flash_attention: bool,
    ) -> _StageTimes:
        """Return the times of a stage from those of its operations and all-reduces."""
        by_phase = {
            phase: [each for each in operations if each.operation.phase == phase]
            for phase in ("forward", "backward", "optimizer")
        }
        again_us = 0.0
        if recompute == "full":
            again_us = _total_us(each for each in by_phase["forward"] if each.operation.part not in _ONCE)
            again_us += sums_us["forward"]
        elif recompute == "selective" and not flash_attention:
            again_us = _total_us(each for each in by_phase["forward"] if each.operation.part in _SCORES)
        weights = [each for each in by_phase["backward"] if _of_weights(each.operation)]
        others = [each for each in by_phase["backward"] if not _of_weights(each.operation)]
        return cls(
            forward_us=_total_us(by_phase["forward"]) + sums_us["forward"],
            input_gradient_us=_total_us(others) + sums_us["backward"] + again_us,
            weight_gradient_us=_total_us(weights),
            optimizer_us=_total_us(by_phase["optimizer"]),
        )


def _total_us(operations: Iterable[OperationTime]) -> float:
    """Return the time of operations, or of their launches by the host if that is longer."""
    given = list(operations)
    return max(sum(each.time_us for each in given), HOST_US * sum(each.operation.count for each in given))


def _of_weights(operation: Operation) -> bool:
    """Return whether an operation of the backward pass computes a gradient of weights."""
    work = operation.workload
    product = isinstance(work, Gemm) and work.trans == "tn" and operation.part not in _ATTENTION
    return product or operation.part in ("gradients", "embedding")
