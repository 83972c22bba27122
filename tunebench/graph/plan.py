"""Which groups a model's step runs in: the partition of least time, and why it is that."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tunebench.device import Device
from tunebench.dispatch import Preference
from tunebench.errors import InputError
from tunebench.graph.group import FusedGroup, groups
from tunebench.graph.node import Graph
from tunebench.graph.partition import Partition, PartitionCandidate, cheapest_partition
from tunebench.graph.price import Price, Prices

__all__ = ["PartitionPlan", "PricedGroup", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedGroup:
    """A group with its price, and what its nodes take one by one.

    Attributes:
        group: The nodes.
        price: What they take together.
        alone: What each takes by itself, the cheaper of ours and torch's.
    """

    group: FusedGroup
    price: Price
    alone: tuple[Price, ...]

    @property
    def saved_us(self) -> float:
        """Time saved by being together; negative if it costs more."""
        return sum(one.us for one in self.alone) - self.price.us

    @property
    def saved_bytes(self) -> int:
        """Memory traffic saved by being together."""
        return sum(one.nbytes for one in self.alone) - self.price.nbytes


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """How a step is to be run on a device.

    Attributes:
        graph: The step.
        device: Where.
        chosen: The groups, in an order in which they can run.
        rejected: Groups of several nodes that cost more than these nodes by themselves, the worst first.
        library: What torch takes for each node.
        partition: How the groups were chosen: with a proof, or with a gap.
    """

    graph: Graph
    device: Device
    chosen: tuple[PricedGroup, ...]
    rejected: tuple[PricedGroup, ...]
    library: tuple[Price, ...]
    partition: Partition

    @property
    def us(self) -> float:
        """Time of all groups."""
        return sum(offer.price.us for offer in self.chosen)

    @property
    def alone_us(self) -> float:
        """Time of all nodes, each by itself."""
        return sum(one.us for offer in self.chosen for one in offer.alone)

    @property
    def library_us(self) -> float:
        """Time of all nodes by torch."""
        return sum(one.us for one in self.library)

    @property
    def saved_bytes(self) -> int:
        """Memory traffic that is saved by fusing."""
        return sum(offer.saved_bytes for offer in self.chosen if len(offer.group.nodes) > 1)

    @property
    def fused(self) -> tuple[PricedGroup, ...]:
        """The groups of several nodes, in the order they run."""
        return tuple(offer for offer in self.chosen if len(offer.group.nodes) > 1)

    @functools.cached_property
    def coverage(self) -> float:
        """Share of torch's time that goes into nodes that some operator of ours does."""
        covered = {index for offer in self.chosen if offer.group.workloads for index in offer.group.nodes}
        total = self.library_us
        return sum(self.library[index].us for index in covered) / total if total else 0.0

    @functools.cached_property
    def problems(self) -> Counter[str]:
        """What is to be tuned, and how often a step runs it."""
        return Counter(text for offer in self.chosen for text in offer.group.workloads)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "model": self.graph.name,
            "phase": self.graph.phase,
            "device": self.device.name,
            "us": self.us,
            "alone_us": self.alone_us,
            "library_us": self.library_us,
            "saved_bytes": self.saved_bytes,
            "coverage": self.coverage,
            "gap": self.partition.gap,
            "groups": [_to_json(self.graph, offer) for offer in self.chosen],
            "rejected": [_to_json(self.graph, offer) for offer in self.rejected],
        }


def _to_json(graph: Graph, offer: PricedGroup) -> dict[str, Any]:
    return {
        "nodes": [graph.nodes[index].name for index in offer.group.nodes],
        "targets": [graph.nodes[index].target for index in offer.group.nodes],
        "kind": offer.group.kind,
        "workloads": list(offer.group.workloads),
        "us": offer.price.us,
        "by": offer.price.by,
        "how": offer.price.how,
        "variant": offer.price.variant,
        "bytes": offer.price.nbytes,
        "saved_us": offer.saved_us,
        "saved_bytes": offer.saved_bytes,
    }


def plan(
    graph: Graph, device: Device, *, preferred: Preference = "faster", measured_only: bool = False
) -> PartitionPlan:
    """Choose the groups that a step runs in on a device.

    Args:
        graph: The step.
        device: Where it runs; it need not be here.
        preferred: Whose kernels are taken for a node that both can do.
        measured_only: Whether kernels of ours are taken only where they were timed on this very device.
    """
    prices = Prices(graph, device, preferred, measured_only=measured_only)
    legal = groups(graph)
    prices.learn(legal)
    offers = list(_offers(legal, prices))
    partition = cheapest_partition(
        graph.predecessors,
        [PartitionCandidate(nodes=frozenset(o.group.nodes), cost_us=o.price.us) for o in offers],
    )
    rejected = [offer for offer in offers if len(offer.group.nodes) > 1 and offer.saved_us < 0]
    return PartitionPlan(
        graph=graph,
        device=device,
        chosen=tuple(offers[index] for index in partition.chosen),
        rejected=tuple(sorted(rejected, key=lambda offer: offer.saved_us)),
        library=tuple(map(prices.torch, range(len(graph.nodes)))),
        partition=partition,
    )


def _offers(legal: Iterable[FusedGroup], prices: Prices) -> Iterable[PricedGroup]:
    """Yield every group that some kernel does, those of one node first."""
    alone: list[Price] = []
    for group in legal:
        try:
            price = prices.price(group)
        except InputError:
            continue
        if len(group.nodes) == 1:
            alone.append(price)
        yield PricedGroup(group=group, price=price, alone=tuple(alone[index] for index in group.nodes))
