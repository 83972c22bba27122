"""What a network is: a list of operations, each a workload with how often it runs, for one way to run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.workload import Workload

__all__ = ["AllReduce", "DType", "Mode", "Network", "NetworkRun", "Operation", "Optimizer", "Phase", "merged"]

Phase = Literal["forward", "backward", "optimizer"]
Mode = Literal["infer", "train"]
DType = Literal["f32", "f16", "bf16"]
Optimizer = Literal["none", "sgd", "adamw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel of a network, or several alike.

    Attributes:
        workload: What is computed. What no operator of this package describes (a copy, a transposition, an
            embedding look-up) stands as an elementwise workload that moves the same bytes.
        count: How often it runs.
        part: What it belongs to, such as ``"attention scores"``: tables group by it.
        phase: Of the step.
        alone: Whether it starts on an empty queue, because the host has just waited for the device: for the
            tokens of an expert, which it must count. Then what a launch costs shows.
    """

    workload: Workload
    count: int = 1
    part: str
    phase: Phase = "forward"
    alone: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"{self.part}: {self.workload} must run once or more, not {self.count} times")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """What a device that holds a part of every layer has to sum up with the others that hold the rest.

    Attributes:
        nbytes: Of the tensor that is summed (all-reduced) over the devices.
        count: How often.
        part: As of `Operation`.
        phase: Likewise.
    """

    nbytes: int
    count: int
    part: str
    phase: Phase = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRun:
    """One way to run a network: one pass of inference, or one training step, on one device.

    Attributes:
        batch: Samples that go through at once on this device: sequences or images.
        seq: Tokens of a sequence; 0 for the network's own (images have none).
        mode: ``"infer"`` is a forward pass of whole sequences (a prompt), ``"train"`` forward and backward,
            and the optimizer's update if there is one.
        dtype: Type of weights and activations.
        fused: Whether a compiler has fused what is elementwise, as `torch.compile` does, and attention is
            one kernel where it has one (f16, bf16).
        tensor: Devices among which heads and inner widths are divided; the operations are those of one.
        layers: The layers that this device holds, from the first up to the second; None for all. It
            has the embedding if it has the first layer of all, and the head if it has the last.
        optimizer: What updates the parameters at the end of a training step.
        accumulate: Whether new gradients are added to those of earlier passes, as micro-batches are, and not
            written anew.
    """

    batch: int = 1
    seq: int = 0
    mode: Mode = "infer"
    dtype: DType = "f32"
    fused: bool = False
    tensor: int = 1
    layers: tuple[int, int] | None = None
    optimizer: Optimizer = "none"
    accumulate: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 0 or self.tensor < 1:
            raise InputError(f"batch and tensor must be 1 or more and seq 0 or more; got {self}")
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise InputError(f"layers must be from one up to a later one, got {self.layers}")
        if self.mode == "infer" and self.optimizer != "none":
            raise InputError(f"optimizer={self.optimizer} needs mode=train")

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return self.mode == "train"


class Network(ABC):
    """What a network computes.

    Attributes:
        name: Of the configuration, such as ``gpt2-large``.
        layers: How many layers a pipeline may divide; stages are ranges of them.
    """

    name: str
    layers: int

    @abstractmethod
    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return what one device does in one run, alike operations once, in the order they first run in.

        Raises:
            InputError: if the network cannot be run so: a sequence beyond its positions, heads that cannot be
                divided, layers it does not have.
        """

    @abstractmethod
    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return how many numbers are learned, of those that one device holds (see `NetworkRun`).

        A matrix that two layers share counts once where one device has both.
        """

    @abstractmethod
    def boundary_elements(self, run: NetworkRun) -> int:
        """Return the numbers that one layer passes to the next: what a pipeline stage sends."""

    def all_reduces(self, run: NetworkRun) -> tuple[AllReduce, ...]:
        """Return the sums over devices that a division by `run.tensor` asks for; none if it is 1."""
        return ()

    def boundary_bytes(self, run: NetworkRun) -> int:
        """Return the bytes that one layer passes to the next."""
        return self.boundary_elements(run) * itemsize(run.dtype)

    def stage(self, run: NetworkRun) -> tuple[int, int]:
        """Return the layers that a run holds, from the first up to the second.

        Raises:
            InputError: if there are not so many.
        """
        first, last = run.layers or (0, self.layers)
        if last > self.layers:
            raise InputError(f"{self.name} has {self.layers} layers; got a stage of {first} up to {last}")
        return first, last


def merged(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return operations of which no two agree in all but their counts; these are added up."""
    counts: dict[Operation, int] = {}
    for each in operations:
        one = replace(each, count=1)
        counts[one] = counts.get(one, 0) + each.count
    return tuple(replace(one, count=count) for one, count in counts.items())
