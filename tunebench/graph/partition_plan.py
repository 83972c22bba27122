"""Plan of a step on a device: the partition into groups of minimal time, and the price of each group."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tunebench._deprecation import renamed, renamed_fields
from tunebench._figure import significant
from tunebench.device import Device
from tunebench.dispatch import Preference
from tunebench.errors import InputError
from tunebench.graph.group import FusedGroup, groups
from tunebench.graph.node import Graph
from tunebench.graph.partition import Partition, PartitionCandidate, cheapest_partition
from tunebench.graph.price import Price, Prices

__all__ = ["PartitionPlan", "PricedGroup", "plan_partition"]

FORECAST_ERROR = 1.25
"""Factor by which half of all predicted times are wrong (docs/bound.md)."""

__getattr__ = renamed(__name__, {"plan": "plan_partition"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedGroup:
    """A group with its price, and the prices of its single nodes.

    Attributes:
        group: The group.
        price: Time and traffic of the group.
        alone: Price of each node alone, by the faster of tuned kernels and torch.
    """

    group: FusedGroup
    price: Price
    alone: tuple[Price, ...]

    @property
    def saved_us(self) -> float:
        """Microseconds saved by the group; negative if it is slower than its nodes alone."""
        return sum(price.us for price in self.alone) - self.price.us

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory traffic saved by the group."""
        return sum(price.nbytes for price in self.alone) - self.price.nbytes


@renamed_fields({"problems": "workloads", "library_us": "torch_us", "library": "torch_prices"})
@dataclass(frozen=True, kw_only=True, repr=False)
class PartitionPlan:
    """The chosen groups of a step on a device.

    Attributes:
        graph: The step.
        device: The device.
        chosen: The groups, in an order in which they can run.
        rejected: Groups of several nodes that are slower than their single nodes, slowest first.
        torch_prices: Price of each node by torch.
        partition: Proof or optimality gap of the choice.
        alternatives: Groups of tuned kernels that were not chosen, with a predicted time within
            `FORECAST_ERROR` of what the chosen groups take for the same nodes: measured, they may be faster.
        asked: Workloads whose records were read: as long as their answers are the same, so is the plan.
    """

    graph: Graph
    device: Device
    chosen: tuple[PricedGroup, ...]
    rejected: tuple[PricedGroup, ...]
    torch_prices: tuple[Price, ...]
    partition: Partition
    alternatives: tuple[PricedGroup, ...] = ()
    asked: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return the step, its time and its groups, one line each."""
        head = f"{self.graph.name} {self.graph.phase} on {self.device.name}: {_digits(self.us)} us, "
        head += f"{_digits(self.torch_us)} us by torch, {self.proof}"
        return "\n".join([head, *(f"  {self._line(offer)}" for offer in self.chosen)])

    def _line(self, offer: PricedGroup) -> str:
        nodes = [self.graph.nodes[index] for index in offer.group.nodes]
        computed = " and ".join(offer.group.workloads) or nodes[0].reason
        targets = " + ".join(node.target.removeprefix("aten.") for node in nodes)
        return f"{_digits(offer.price.us):>10} us by {offer.price.by:<9}  {targets}: {computed}"

    @property
    def us(self) -> float:
        """Time of the step in microseconds: the sum of its groups."""
        return sum(offer.price.us for offer in self.chosen)

    @property
    def interval_us(self) -> tuple[float, float] | None:
        """Ends of the interval of `us`, as if all predictions were wrong in the same direction.

        None where times on a processor are predicted, since their errors are not known.
        """
        if self.device.kind != "gpu" and any(offer.price.how == "predicted" for offer in self.chosen):
            return None
        return (
            sum(offer.price.low_us for offer in self.chosen),
            sum(offer.price.high_us for offer in self.chosen),
        )

    @property
    def proof(self) -> str:
        """How good the choice is known to be; a proof rests on predicted times where there are some."""
        proof = "proven optimal" if self.partition.exact else f"optimality gap {self.partition.gap:.1%}"
        predicted = any(offer.price.how == "predicted" for offer in self.chosen)
        return f"{proof} under the forecast" if predicted else proof

    @property
    def alone_us(self) -> float:
        """Time in microseconds if each node runs alone, by the faster of tuned kernels and torch."""
        return sum(price.us for offer in self.chosen for price in offer.alone)

    @property
    def torch_us(self) -> float:
        """Time in microseconds if torch runs every node."""
        return sum(price.us for price in self.torch_prices)

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory traffic saved by fusion."""
        return sum(offer.saved_bytes for offer in self.chosen if len(offer.group.nodes) > 1)

    @property
    def fused(self) -> tuple[PricedGroup, ...]:
        """The groups of several nodes, in running order."""
        return tuple(offer for offer in self.chosen if len(offer.group.nodes) > 1)

    @functools.cached_property
    def coverage(self) -> float:
        """Fraction of torch's time spent in nodes that an operator of tunebench computes."""
        covered = {index for offer in self.chosen if offer.group.workloads for index in offer.group.nodes}
        total = self.torch_us
        return sum(self.torch_prices[index].us for index in covered) / total if total else 0.0

    @functools.cached_property
    def alternative_workloads(self) -> Counter[str]:
        """Workloads of the alternatives that no chosen group has, with their counts per step."""
        texts = Counter(text for offer in self.alternatives for text in offer.group.workloads)
        return Counter({text: count for text, count in texts.items() if text not in self.workloads})

    @functools.cached_property
    def workloads(self) -> Counter[str]:
        """Workloads to tune, with their counts per step."""
        return Counter(text for offer in self.chosen for text in offer.group.workloads)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "model": self.graph.name,
            "phase": self.graph.phase,
            "device": self.device.name,
            "us": self.us,
            "interval_us": self.interval_us and list(self.interval_us),
            "alone_us": self.alone_us,
            "library_us": self.torch_us,
            "saved_bytes": self.saved_bytes,
            "coverage": self.coverage,
            "gap": self.partition.gap,
            "groups": [_to_json(self.graph, offer) for offer in self.chosen],
            "rejected": [_to_json(self.graph, offer) for offer in self.rejected],
            "alternatives": [_to_json(self.graph, offer) for offer in self.alternatives],
        }


def _digits(us: float) -> str:
    """Return a time with one decimal, or with two significant digits if it is below 1 us."""
    return f"{us:.1f}" if us >= 1 else f"{significant(us, 2)}"


def _to_json(graph: Graph, offer: PricedGroup) -> dict[str, Any]:
    return {
        "nodes": [graph.nodes[index].name for index in offer.group.nodes],
        "targets": [graph.nodes[index].target for index in offer.group.nodes],
        "kind": offer.group.kind,
        "workloads": list(offer.group.workloads),
        "us": offer.price.us,
        "interval_us": offer.price.interval_us and list(offer.price.interval_us),
        "by": offer.price.by,
        "how": offer.price.how,
        "variant": offer.price.variant,
        "bytes": offer.price.nbytes,
        "saved_us": offer.saved_us,
        "saved_bytes": offer.saved_bytes,
    }


def plan_partition(
    graph: Graph, device: Device, *, preferred: Preference = "faster", measured_only: bool = False
) -> PartitionPlan:
    """Choose the groups of minimal total time for a step on a device.

    Args:
        graph: The step.
        device: The device; it need not be in this machine.
        preferred: Which kernels run a node that both tuned kernels and torch can compute.
        measured_only: Whether to use tuned kernels only where they were measured on this device.
    """
    prices = Prices(graph, device, preferred, measured_only=measured_only)
    legal = groups(graph)
    prices.learn(legal)
    priced = list(_priced_groups(legal, prices))
    partition = cheapest_partition(
        graph.predecessors,
        [PartitionCandidate(nodes=frozenset(o.group.nodes), cost_us=o.price.us) for o in priced],
    )
    chosen = tuple(priced[index] for index in partition.chosen)
    rejected = [offer for offer in priced if len(offer.group.nodes) > 1 and offer.saved_us < 0]
    return PartitionPlan(
        graph=graph,
        device=device,
        chosen=chosen,
        rejected=tuple(sorted(rejected, key=lambda offer: offer.saved_us)),
        torch_prices=tuple(map(prices.torch, range(len(graph.nodes)))),
        partition=partition,
        alternatives=tuple(_alternatives(priced, chosen)),
        asked=prices.asked,
    )


def _alternatives(priced: Iterable[PricedGroup], chosen: Iterable[PricedGroup]) -> Iterator[PricedGroup]:
    """Yield the groups that might beat what was chosen for their nodes, if predictions err as usual."""
    share_us: dict[int, float] = {}
    for offer in chosen:
        whole_us = sum(price.us for price in offer.alone)
        for index, price in zip(offer.group.nodes, offer.alone, strict=True):
            share_us[index] = offer.price.us * (price.us / whole_us if whole_us else 1 / len(offer.alone))
    taken = {offer.group.nodes for offer in chosen}
    for offer in priced:
        is_open = offer.price.by == "tunebench" and offer.price.how == "predicted"
        chosen_us = sum(share_us[index] for index in offer.group.nodes)
        if is_open and offer.group.nodes not in taken and offer.price.us <= FORECAST_ERROR * chosen_us:
            yield offer


def _priced_groups(legal: Iterable[FusedGroup], prices: Prices) -> Iterable[PricedGroup]:
    """Yield every group that some kernel computes, with its price; single nodes first."""
    alone: list[Price] = []
    for group in legal:
        try:
            price = prices.price(group)
        except InputError:
            continue
        # Single nodes come first, in order: `alone` is complete when the first larger group is priced.
        if len(group.nodes) == 1:
            alone.append(price)
        yield PricedGroup(group=group, price=price, alone=tuple(alone[index] for index in group.nodes))
