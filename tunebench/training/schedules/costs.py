"""What the stages of a pipeline cost, and the links between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

from tunebench.errors import InputError
from tunebench.training.interconnect.cluster import Link
from tunebench.training.interconnect.collective import send_us

__all__ = ["Interconnect", "LinearTransfer", "PipelineCosts", "StageCosts", "link_transfer"]

TransferTime = Callable[[int], float]
"""Time of a transfer in microseconds, given its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTransfer:
    """Time of a transfer as a latency and a bandwidth.

    Attributes:
        bytes_per_us: Bandwidth in one direction, in bytes per microsecond.
        latency_us: Time of a transfer of no bytes, in microseconds.
    """

    bytes_per_us: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_us > 0 or not 0 <= self.latency_us < float("inf"):
            raise InputError(
                f"a transfer needs a bandwidth above 0 and a finite latency of at least 0, got {self}"
            )

    def __call__(self, nbytes: int) -> float:
        """Return the time of a transfer in microseconds."""
        return self.latency_us + nbytes / self.bytes_per_us


def link_transfer(link: Link) -> TransferTime:
    """Return the predicted time of transfers over a link, which remembers sizes: messages repeat."""

    @lru_cache(maxsize=4096)
    def transfer_us(nbytes: int) -> float:
        return float(send_us(nbytes, link))

    return transfer_us


def _instant(_: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """Links between ranks: a rank sends one transfer and receives one at a time over each kind of link.

    Both directions work at the same time (full duplex). Transfers wait for each other in the order in which
    they are issued.

    Attributes:
        nodes: Node of each rank.
        inside: Time of a transfer between ranks of one node.
        between: Time of a transfer between nodes.
    """

    nodes: tuple[int, ...]
    inside: TransferTime = _instant
    between: TransferTime = _instant

    @classmethod
    def instant(cls, ranks: int) -> Interconnect:
        """Return links that take no time."""
        return cls(nodes=(0,) * ranks)

    @classmethod
    def grouped(
        cls, ranks: int, per_node: int, inside: TransferTime, between: TransferTime, *, pairs: bool = False
    ) -> Interconnect:
        """Return the links of ranks that fill nodes one after the other.

        Args:
            ranks: Number of ranks.
            per_node: Ranks in each node.
            inside: Time of a transfer between ranks of one node.
            between: Time of a transfer between nodes.
            pairs: Whether ranks x and ``ranks - 1 - x``, which exchange activations if memory is balanced,
                share a node (pair-adjacent placement).

        Raises:
            InputError: if a node would have no rank, or pairs cannot share nodes.
        """
        if per_node < 1 or (pairs and (per_node % 2 or ranks % 2) and per_node < ranks):
            raise InputError(
                f"expected at least one rank in each node, and an even number with pairs, got {per_node} of "
                f"{ranks} ranks"
            )
        # Ranks fill nodes in this order.
        order = _pair_order(ranks) if pairs else list(range(ranks))
        nodes = [0] * ranks
        for position, rank in enumerate(order):
            nodes[rank] = position // per_node
        return cls(nodes=tuple(nodes), inside=inside, between=between)

    def transfer_us(self, nbytes: int, source: int, target: int) -> float:
        """Return the time of a transfer between two ranks, if nothing else is transferred."""
        crosses = self.nodes[source] != self.nodes[target]
        return (self.between if crosses else self.inside)(nbytes) if nbytes else 0.0


def _pair_order(ranks: int) -> list[int]:
    """Return ranks with x next to its partner ``ranks - 1 - x``."""
    order = [rank for first in range(ranks // 2) for rank in (first, ranks - 1 - first)]
    return order + [ranks // 2] * (ranks % 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Time and memory of one stage, per micro-batch.

    Attributes:
        forward_us: Forward pass.
        input_gradient_us: Gradient of the input alone.
        weight_gradient_us: Gradient of the weights alone.
        backward_us: Both gradients in one pass; None if that takes the sum of the two.
        activation_bytes: Activations, from the start of the forward pass to the end of the backward pass.
        retained_bytes: What the gradient of the weights needs: kept from the end of the input gradient to
            the end of the weight gradient. None for all activations; more than these if an implementation
            also keeps gradients, as PyTorch does.
        send_bytes: Output, and so the gradient of it that comes back.
        send_us: Time to send them to the next stage, or back; None for that of the interconnect.
        evict_bytes: Activations that can be copied to another rank; None for all.
        static_bytes: Parameters, gradients and optimizer states, during the whole step.
        unshard_us: All-gather of the parameters, if they are sharded.
        unsharded_bytes: Parameters while they are gathered.
        reduce_us: Reduction of the gradients over the copies of the stage.
    """

    forward_us: float
    input_gradient_us: float
    weight_gradient_us: float
    backward_us: float | None = None
    activation_bytes: int = 0
    retained_bytes: int | None = None
    send_bytes: int = 0
    send_us: float | None = None
    evict_bytes: int | None = None
    static_bytes: int = 0
    unshard_us: float = 0.0
    unsharded_bytes: int = 0
    reduce_us: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise InputError(f"{name} of a stage must be a finite number of at least 0, got {value}")
        if self.evicted > self.activation_bytes:
            raise InputError(
                f"evict_bytes {self.evicted} exceeds the {self.activation_bytes} activation_bytes"
            )

    @property
    def full_backward_us(self) -> float:
        """Time of both gradients in one pass."""
        split = self.input_gradient_us + self.weight_gradient_us
        return split if self.backward_us is None else self.backward_us

    @property
    def retained(self) -> int:
        """Bytes kept between the two gradients."""
        return self.activation_bytes if self.retained_bytes is None else self.retained_bytes

    @property
    def evicted(self) -> int:
        """Bytes that an eviction copies and frees."""
        return self.activation_bytes if self.evict_bytes is None else self.evict_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """Costs of all stages, and the links.

    Attributes:
        stages: Costs of each stage.
        interconnect: Links between ranks; None for links that take no time.
    """

    stages: tuple[StageCosts, ...]
    interconnect: Interconnect | None = None

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward_us: float = 1.0,
        input_gradient_us: float = 1.0,
        weight_gradient_us: float = 1.0,
        activation_bytes: int = 1,
        interconnect: Interconnect | None = None,
    ) -> PipelineCosts:
        """Return the costs of equal stages that send nothing: by default one unit of time per pass."""
        stage = StageCosts(
            forward_us=forward_us,
            input_gradient_us=input_gradient_us,
            weight_gradient_us=weight_gradient_us,
            activation_bytes=activation_bytes,
        )
        return cls(stages=(stage,) * stages, interconnect=interconnect)

    def static_bytes(self, placement: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that each rank holds during the whole step."""
        totals = [0] * (max(placement) + 1)
        for rank, stage in zip(placement, self.stages, strict=True):
            totals[rank] += stage.static_bytes
        return tuple(totals)
