"""What a group takes on a device: measured where it was, predicted elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tunebench.answer import Answer, timed
from tunebench.bound import dram_us
from tunebench.device import Device
from tunebench.dispatch import Preference
from tunebench.errors import DatabaseError, InputError
from tunebench.explanation import Forecaster
from tunebench.forecast.network import predict_operations
from tunebench.graph.group import FusedGroup
from tunebench.graph.node import Graph, Value
from tunebench.workload import Traffic, Workload
from tunebench.workloads import parse
from tunebench.workloads.networks import Operation
from tunebench.workloads.operators.elementwise import Elementwise

__all__ = ["Price", "Prices"]

LIBRARY = "torch"

GATHERING = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select"})
"""Operators of torch that read as much of a table as they write."""

AGAIN = 1.001
"""How many times as long a product is taken to be with a function ahead, where it is predicted.

Predictions know nothing of computing it again for each tile that reads the operand. Of two places that it may
have, ahead of a product and behind the one before, the one behind is to be the cheaper.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The least time that is known, or believed, for a group.

    Attributes:
        us: Time of all its kernels.
        by: Whose kernels they are.
        how: How the time is known.
        kernels: How many are launched.
        nbytes: What they read and write, each tensor once a kernel.
        variant: Key of the variant, of one kernel of ours.
    """

    us: float
    by: Literal["tunebench", "torch"]
    how: Literal["measured", "predicted"]
    kernels: int
    nbytes: int
    variant: str = ""


class Prices:
    """Prices of groups on one device, each problem once.

    Kernels of ours take what the database says they took there, or else what is predicted for their best
    configuration with cold caches. Kernels of torch take what they took beside ours, or what is predicted for
    a vendor's library; on a processor, for which nobody predicts libraries, as long as ours. Where torch was
    timed for several nodes together, each is taken to have had its predicted share.

    Args:
        graph: Whose groups.
        device: Where they run; it need not be here.
        preferred: Whose kernels are taken for a node that both can do.
        measured_only: Whether kernels of ours are taken only where they were timed.
    """

    def __init__(
        self,
        graph: Graph,
        device: Device,
        preferred: Preference = "faster",
        *,
        measured_only: bool = False,
    ) -> None:
        self.graph, self.device, self._preferred = graph, device, preferred
        self._measured_only = measured_only
        self._shares: dict[int, float] = {}
        """Times of nodes by torch that are known from groups."""
        self._forecaster = Forecaster(device=device)
        self._ours = functools.cache(self._ours_of)
        self._library_us = functools.cache(self._library_us_of)

    def learn(self, groups: Iterable[FusedGroup]) -> None:
        """Take in what torch took for groups: the smaller first, which say more of each node."""
        for group in sorted(groups, key=lambda group: len(group.nodes)):
            if len(group.nodes) == 1 or len(group.workloads) != 1:
                continue
            us, is_measured = self._library_us(group.workloads[0])
            unknown = [i for i in group.nodes if self.torch(i).how == "predicted"]
            rest = us - sum(self.torch(i).us for i in group.nodes if i not in unknown)
            if is_measured and unknown and rest > 0:
                predicted = {i: self.torch(i).us for i in unknown}
                whole = sum(predicted.values())
                self._shares |= {i: rest * share / whole for i, share in predicted.items()}

    def price(self, group: FusedGroup) -> Price:
        """Return the price of the cheaper of ours and torch's, for one node; of ours for several.

        What is only believed of ours is not held against what was measured of torch's.

        Raises:
            InputError: if the group has several nodes that no kernel of ours is to do on the device.
        """
        ours = self.ours(group)
        if len(group.nodes) > 1:
            if ours is None or self._preferred == "torch":
                raise InputError(f"no kernel on {self.device.name} does {', '.join(group.workloads)}")
            return ours
        torch = self.torch(group.nodes[0])
        if ours is None or self._preferred == "torch":
            return torch
        if self._preferred == "tunebench":
            return ours
        is_belief = ours.how == "predicted" and torch.how == "measured"
        return torch if is_belief or ours.us >= torch.us else ours

    def ours(self, group: FusedGroup) -> Price | None:
        """Return the price of a group by our kernels; None if there are none for it."""
        found = [self._ours(text) for text in group.workloads] if group.roles else []
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return None
        if self._measured_only and any(one.how == "predicted" for one in known):
            return None
        copies_us = self.copy_us(2 * group.copied) if group.copied else 0.0
        return Price(
            us=sum(one.us for one in known) + copies_us,
            by="tunebench",
            how="measured" if all(one.how == "measured" for one in known) else "predicted",
            kernels=len(known) + bool(group.copied),
            nbytes=sum(parse(text).traffic().total_bytes for text in group.workloads) + 2 * group.copied,
            variant=known[0].variant if len(known) == 1 else "",
        )

    def torch(self, index: int) -> Price:
        """Return the price of a node by torch."""
        node = self.graph.nodes[index]
        moved = self._moved(index)
        if index in self._shares:
            return Price(us=self._shares[index], by="torch", how="measured", kernels=1, nbytes=moved)
        texts = (*node.workloads, *filter(None, [self._as_elementwise(index)]))
        if texts:
            times = [self._library_us(text) for text in texts]
            how = "measured" if all(known for _, known in times) else "predicted"
            us, kernels = sum(us for us, _ in times), len(times)
        else:
            us, how, kernels = self.copy_us(moved), "predicted", 1
        return Price(us=us, by="torch", how=how, kernels=kernels, nbytes=moved)  # type: ignore[arg-type]

    # -- parts ---------------------------------------------------------------------------------------------

    def _ours_of(self, text: str) -> Price | None:
        workload = parse(text)
        known = self._timed(text)
        moved = workload.traffic().total_bytes
        if known is not None:
            variant, us, how = known.variant, known.expected_us, "measured"
        else:
            best = self._forecaster.best(workload)
            if best is None:
                return None
            us = best.us * (AGAIN if getattr(workload, "has_pre", False) else 1.0)
            variant, how = best.variant, "predicted"
        return Price(us=us, by="tunebench", how=how, kernels=1, nbytes=moved, variant=variant)  # type: ignore[arg-type]

    def _library_us_of(self, text: str) -> tuple[float, bool]:
        """Return the time of torch's kernels for a problem, and whether it was measured."""
        known = self._timed(text)
        if known is not None and LIBRARY in known.baselines:
            return known.expected_us * known.baselines[LIBRARY].ratio, True
        workload = parse(text)
        if self.device.kind == "gpu":
            operation = Operation(workload=workload, part="")
            return float(predict_operations([operation], self.device)[0].each_us), False
        best = self._forecaster.best(workload)
        return (best.us if best else self.copy_us(workload.traffic().total_bytes)), False

    def _timed(self, text: str) -> Answer | None:
        try:
            known = timed(text, device=self.device)
        except DatabaseError:
            return None
        return known if known is not None and known.how == "measured here" else None

    def copy_us(self, nbytes: int) -> float:
        """Return what moving some bytes takes, half of them read and half written."""
        if self.device.kind != "gpu":
            return dram_us(Traffic(read_bytes=nbytes // 2, write_bytes=nbytes // 2), self.device, "cold")
        return self._library_us(str(_like_a_copy(nbytes)))[0]

    def _moved(self, index: int) -> int:
        """Return the bytes that a node reads and writes."""
        node = self.graph.nodes[index]
        written = sum(self._value(name).nbytes for name in node.writes)
        if node.target in GATHERING:
            return 2 * written
        return written + sum(self._value(name).nbytes for name in node.reads)

    def _value(self, name: str) -> Value:
        return self.graph.values[name]

    def _as_elementwise(self, index: int) -> str | None:
        """Return an elementwise node, alone, as the problem it is the price of."""
        node = self.graph.nodes[index]
        if not node.expression:
            return None
        return str(_like_a_copy(self._moved(index)))


def _like_a_copy(nbytes: int) -> Workload:
    """Return an elementwise problem that moves as many bytes."""
    cols = max(1, nbytes // 8)
    rows = 1
    while cols % 2 == 0 and cols > 4096:
        rows, cols = rows * 2, cols // 2
    return Elementwise.from_dimensions({"rows": rows, "cols": cols, "dtype": "f32", "expression": "x"})
