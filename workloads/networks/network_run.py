"""Networks: lists of operations, each a workload with its count, for one way to run the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from tunebench.dtype import itemsize
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import find_optimizer
from tunebench.stack import Efficiency, Kernels, efficiency_of, find_stack
from tunebench.workload import Workload
from tunebench.workloads.networks.layer_division import LayerDivision, LayerExecution, Recompute

__all__ = [
    "ContextExchange",
    "DType",
    "Fp8",
    "Mode",
    "Network",
    "NetworkRun",
    "Operation",
    "Optimizer",
    "Phase",
    "Recompute",
    "Stack",
    "TensorCollective",
    "merged",
]

Phase = Literal["forward", "backward", "optimizer"]
Mode = Literal["infer", "train"]
DType = Literal["f32", "f16", "bf16"]
Optimizer: TypeAlias = str
"""Name of an optimizer in `tunebench.optimizer`."""

Stack: TypeAlias = str
"""Name of a software stack in `tunebench.stack`."""

Fp8 = Literal["none", "delayed", "current"]
"""Scaling of 8-bit floats in Transformer Engine: none are used, or scales follow from the maxima of earlier
steps (delayed), or from those of each tensor itself (current)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel of a network, or several equal ones.

    Attributes:
        workload: The workload. A kernel without an operator (copy, transposition, embedding look-up) is an
            elementwise workload with the same bytes.
        count: How often it runs.
        part: Part of the network, such as ``"attention scores"``; tables group by it.
        phase: Phase of the step.
        alone: Whether it starts on an empty queue, because the host waited for the device (for example for
            the number of tokens of an expert). Its launch cost is then not hidden.
        loop: Kernels that one call of an operator launches in a loop of C++, of which the count is a
            multiple: each but the first takes the host little time.
    """

    workload: Workload
    count: int = 1
    part: str
    phase: Phase = "forward"
    alone: bool = False
    loop: int = 1

    def __post_init__(self) -> None:
        if self.loop < 1 or self.count % self.loop:
            raise InputError(
                f"{self.part}: {self.workload} must run a multiple of loop={self.loop} times, not "
                f"{self.count} times"
            )
        if self.count < 1:
            raise InputError(f"{self.part}: {self.workload} must run once or more, not {self.count} times")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCollective:
    """A collective of tensor or expert parallelism: every device holds a part of each layer.

    Attributes:
        nbytes: Bytes of the whole tensor; of an all-to-all, those that each device sends.
        count: How often it runs.
        part: Part of the network.
        phase: Phase of the step.
        collective: Kind.
        behind: Part of the network whose gradient product may run at the same time, and which: that of the
            input or that of the weights. None if the device waits.
        beside: Part of the network whose product needs the result, or has the operand, and which: of the
            forward pass or the gradient of the input. Both can run in parts at the same time.
        group: Devices that take part: those that share a layer, those that have different experts of a layer,
            or those that share an expert.
    """

    nbytes: int
    count: int
    part: str
    phase: Phase = "forward"
    collective: Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"] = "all-reduce"
    behind: tuple[str, Literal["input", "weights"]] | None = None
    beside: tuple[str, Literal["forward", "input"]] | None = None
    group: Literal["tensor", "expert", "expert tensor"] = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextExchange:
    """Communication of context parallelism.

    In a ring, each device passes keys and values on to the next one, during a kernel of attention, which
    computes with the keys and values before. If they are gathered instead, the kernel waits for all of them.

    Attributes:
        nbytes: Bytes that each device sends, or bytes of the whole tensor that is gathered.
        count: How often it runs.
        phase: Phase of the step.
        behind: Pass of attention whose kernels run at the same time as a send.
        collective: Kind of the collective; None for a send to the next device of the ring.
    """

    nbytes: int
    count: int
    phase: Phase = "forward"
    behind: Phase = "forward"
    collective: Literal["all-gather", "reduce-scatter"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRun(LayerDivision, LayerExecution):
    """One way to run a network on one device: a forward pass, or a training step.

    Operations are those of one device. The stack megatron is needed for sequence parallelism, expert
    parallelism, and recomputation of parts of a layer. Context parallelism needs attention in one kernel:
    `flash` or a compiled stack. With it, attention sees `context` times `seq` tokens.

    Attributes:
        batch: Batch size of this device: sequences or images.
        seq: Tokens per sequence on this device; 0 for images.
        mode: ``"infer"`` for a forward pass of whole sequences (a prompt); ``"train"`` for forward pass,
            backward pass and optimizer step.
        dtype: Dtype of weights and activations.
        stack: Software that runs the network, by its name in `tunebench.stack`, such as `"eager"` PyTorch;
            `"compiled"` by a compiler such as `torch.compile`, with elementwise operations fused and
            attention in one kernel where there is one (f16, bf16); `"serving"`, which also sums short tensors
            by kernels of its own; `"megatron"`, with the fused kernels of
            Megatron-LM; or `"megatron@2022"`.
        tuning: Whether 16-bit training steps take as long as those of the authors of the stack (`"tuned"`),
            or of others (`"typical"`); empty for the usual one of the stack.
        fused: Deprecated alias of ``stack="compiled"``.
        layers: Layers of this device as a half-open range; None for all. The embedding belongs to the first
            layer, the head to the last.
        optimizer: Optimizer of a training step.
        accumulate: Whether gradients are added to those of earlier passes, as with micro-batches.
        fp8: How the linear layers inside the layers of a transformer scale 8-bit floats, by Transformer
            Engine or a compiler; everything else is in `dtype`. Needs 16 bits, and another stack than eager.
        shards: Devices that divide the update of the parameters.
        sharded_parameters: Whether devices divide the parameters (FSDP), so that each pass copies gathered
            parameters into the tensors of a layer, and its gradients into a buffer to be divided again.
        wide_gradients: Whether gradients of 16-bit parameters are summed in f32.
        recompute_layers: Layers of the device, counted from the first one, whose whole forward pass runs
            again with `recompute="full"`; None for all.
        cuda_graphs: Whether the kernels are launched as captured CUDA graphs, without host time for each.
        launch_blocking: Whether each launch waits until its kernel has ended (`CUDA_LAUNCH_BLOCKING=1`), so
            that times of the host and of the device add up.
        expert_load: Tokens of the busiest device of expert parallelism, relative to the mean. The other
            devices wait for it.
        attention: Implementation of attention in one kernel, such as ``"flash-attention-2"``, ``"cudnn"`` or
            ``"triton"`` (see `tunebench.forecast.library.attention_backend`); ``"default"`` for that of the
            stack.
        cached: Tokens of each sequence whose keys and values are in a cache, before the `seq` new ones; None
            for a pass without a cache. With a cache, only the last token of each sequence has logits, and
            compiled stacks run as serving engines do: queries, keys and values by one product, the two
            products of a gated layer by one, all experts by one kernel.
    """

    batch: int = 1
    seq: int = 0
    mode: Mode = "infer"
    dtype: DType = "f32"
    fused: InitVar[bool] = False
    layers: tuple[int, int] | None = None
    optimizer: Optimizer = "none"
    accumulate: bool = False
    stack: Stack = "eager"
    fp8: Fp8 = "none"
    shards: int = 1
    sharded_parameters: bool = False
    wide_gradients: bool = False
    recompute_layers: int | None = None
    cuda_graphs: bool = False
    launch_blocking: bool = False
    expert_load: float = 1.0
    attention: str = "default"
    tuning: str = ""
    cached: int | None = None

    def __post_init__(self, fused: bool) -> None:
        if fused:
            object.__setattr__(self, "stack", "compiled")
        efficiency_of(self.stack, self.tuning)
        if self.fp8 not in get_args(Fp8):
            raise UnknownName("scaling of 8-bit floats", self.fp8, get_args(Fp8))
        if self.fp8 != "none" and self.kernels == "eager":
            raise InputError(f"fp8={self.fp8} needs stack=megatron or compiled, got stack={self.stack}")
        if self.recompute not in get_args(Recompute):
            raise UnknownName("recompute", self.recompute, get_args(Recompute))
        if self.kernels != "megatron" and (
            self.recompute in ("selective", "experts") or self.sequence_parallel
        ):
            raise InputError(
                "recompute=selective, recompute=experts and sequence_parallel need stack=megatron, got "
                f"stack={self.stack}"
            )
        fused = self.flash or self.compiled
        if self.context != 1 and (self.context < 1 or not fused or self.seq % 2):
            raise InputError(
                "context parallelism needs a degree of at least 1, flash or a compiled stack, and an even "
                f"number of tokens on each device, got {self}"
            )
        self._check_experts()
        self._check_cache()
        if min(self.batch, self.tensor, self.shards) < 1 or self.seq < 0:
            raise InputError(f"batch, tensor and shards must be 1 or more and seq 0 or more; got {self}")
        if self.recompute_layers is not None and (self.recompute != "full" or self.recompute_layers < 0):
            raise InputError(
                f"recompute_layers must be 0 or more, with recompute=full; got {self.recompute_layers} with "
                f"recompute={self.recompute}"
            )
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise InputError(f"layers must be from one up to a later one, got {self.layers}")
        find_optimizer(self.optimizer)
        if self.mode == "infer" and self.optimizer != "none":
            raise InputError(f"an optimizer needs a training step: got {self.optimizer} with mode=infer")

    def _check_experts(self) -> None:
        if self.expert < 1 or (self.expert > 1 and self.kernels != "megatron"):
            raise InputError(
                f"expert={self.expert}: expert parallelism needs a degree of at least 1, and stack=megatron, "
                f"got stack={self.stack}"
            )
        if self.expert_tensor not in (None, 1, self.tensor) or not self.expert_load >= 1:
            raise InputError(
                f"expert_tensor must be 1 or {self.tensor} (the degree of tensor parallelism) and "
                f"expert_load at least 1, got {self.expert_tensor} and {self.expert_load}"
            )

    def _check_cache(self) -> None:
        if self.cached is None:
            return
        if self.cached < 0:
            raise InputError(f"cached must be 0 tokens or more, got {self.cached}")
        if self.trains or self.kernels == "megatron" or self.context != 1:
            raise InputError(
                "a cache of keys and values needs mode=infer, a stack with eager or compiled kernels, and "
                f"context=1, got mode={self.mode}, stack={self.stack} and context={self.context}"
            )

    @property
    def serves(self) -> bool:
        """Whether kernels are those of a serving engine: compiled, with a cache of keys and values."""
        return self.cached is not None and self.compiled

    @property
    def keys(self) -> int:
        """Keys of each sequence: those in the cache, and those of the new tokens."""
        return (self.cached or 0) + self.seq

    @property
    def kernels(self) -> Kernels:
        """Kernels of the stack."""
        return find_stack(self.stack).kernels

    @property
    def efficiency(self) -> Efficiency | None:
        """How long the run takes beside its prediction; None unless it is a training step in 16 bits."""
        if not self.trains or self.dtype == "f32":
            return None
        return efficiency_of(self.stack, self.tuning)

    @property
    def compiled(self) -> bool:
        """Whether a compiler has fused elementwise operations."""
        return self.kernels == "compiled"

    @property
    def gradient_dtype(self) -> DType:
        """Dtype in which gradients are summed."""
        return "f32" if self.wide_gradients else self.dtype

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return self.mode == "train"

    @property
    def expert_shards(self) -> int:
        """Devices that divide the update of experts, if the update is divided."""
        if self.shards == 1:
            return 1
        return max(1, self.shards * self.tensor // (self.expert * self.devices_per_expert))


class Network(ABC):
    """A network.

    Attributes:
        name: Name of the configuration, such as ``gpt2-large``.
        layers: Number of layers that pipeline parallelism may divide.
    """

    name: str
    layers: int

    @abstractmethod
    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return the operations of one device in one run, equal ones once, in order of first execution.

        Args:
            run: How the network runs.

        Raises:
            InputError: if the network does not support the run: a sequence that is too long, heads that
                cannot be divided, or layers that it does not have.
        """

    @abstractmethod
    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return the number of parameters on one device.

        A matrix that two layers share counts once if the device has both.

        Args:
            tensor: Degree of tensor parallelism.
            layers: Layers of the device as a half-open range; None for all.
        """

    @property
    def matrices_of_a_layer(self) -> int:
        """Number of matrices of linear layers in a layer; 1 if that is not known."""
        return 1

    def matrix_parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return how many of the parameters outside experts are matrices of linear layers inside its layers.

        Args:
            tensor: Degree of tensor parallelism.
            layers: Layers of the device as a half-open range; None for all.
        """
        return 0

    def expert_parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return the part of `parameters` that belongs to the experts that tokens are routed to.

        Args:
            tensor: Tensor-parallel size of each expert.
            layers: Layers of the device as a half-open range; None for all.
        """
        return 0

    def held_parameters(
        self, division: LayerDivision, layers: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Return the parameters on a device outside experts, and those of its experts.

        Args:
            division: How devices divide parameters.
            layers: Layers of the device as a half-open range; None for all.
        """
        routed = self.expert_parameters(division.tensor, layers)
        unrouted = self.parameters(division.tensor, layers) - routed
        if division.devices_per_expert != division.tensor:
            routed = self.expert_parameters(division.devices_per_expert, layers)
        return unrouted, routed // division.expert

    @abstractmethod
    def boundary_elements(self, run: NetworkRun) -> int:
        """Return the number of elements that one layer passes to the next, or a stage sends."""

    def collectives(self, run: NetworkRun) -> tuple[TensorCollective, ...]:
        """Return the collectives of tensor and expert parallelism; none if both degrees are 1."""
        return ()

    def exchanges(self, run: NetworkRun) -> tuple[ContextExchange, ...]:
        """Return the sends of context parallelism; none if `run.context` is 1."""
        return ()

    def boundary_bytes(self, run: NetworkRun) -> int:
        """Return the bytes that one layer passes to the next."""
        return self.boundary_elements(run) * itemsize(run.dtype)

    @property
    def ends_apart(self) -> bool:
        """Whether what is before the first layer, and behind the last one, are layers (`with_ends_apart`)."""
        return False

    def with_ends_apart(self) -> Network:
        """Return the network with what is before its first layer, and behind its last one, as layers.

        Raises:
            InputError: if the network has nothing there that a pipeline stage may consist of.
        """
        raise InputError(f"{self.name} has no embedding and head that are pipeline stages without layers")

    def stage(self, run: NetworkRun) -> tuple[int, int]:
        """Return the layers of a run as a half-open range.

        Raises:
            InputError: if the network does not have these layers.
        """
        first, last = run.layers or (0, self.layers)
        if last > self.layers:
            raise InputError(f"{self.name} has {self.layers} layers; got a stage of {first} up to {last}")
        return first, last


def merged(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the operations with equal ones merged by adding their counts."""
    merged_by_key: dict[tuple[Workload, str, Phase, bool, int], list[Any]] = {}
    for operation in operations:
        key = (operation.workload, operation.part, operation.phase, operation.alone, operation.loop)
        first_and_count = merged_by_key.setdefault(key, [operation, 0])
        first_and_count[1] += operation.count
    return tuple(
        first if first.count == count else replace(first, count=count)
        for first, count in merged_by_key.values()
    )
