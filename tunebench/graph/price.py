"""Prices of groups on a device: measured times where they exist, predicted times elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tunebench.answer import HERE, Answer, recorded
from tunebench.bound import dram_us
from tunebench.device import Device
from tunebench.dispatch import Preference, is_deterministic
from tunebench.errors import DatabaseError, InputError, LookupMiss
from tunebench.explanation import Forecaster
from tunebench.graph.group import FusedGroup
from tunebench.graph.node import Graph
from tunebench.workload import Traffic, Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.elementwise import Elementwise

__all__ = ["Price", "Prices"]

TORCH = "torch"

GATHER_OPERATORS = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select"})
"""Operators of torch that read as many bytes from a table as they write, for nodes without index maps."""

PROLOGUE_OVERHEAD = 1.001
"""Factor of the predicted time of a product with a prologue.

The prediction ignores that every tile computes the prologue again. The factor makes the same chain cheaper as
the epilogue of the product before it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The minimal measured or predicted time of a group.

    Attributes:
        us: Time of all its kernels in microseconds.
        by: Whether tuned kernels or torch's kernels run it.
        how: Whether the time is measured or predicted.
        kernels: Number of launches.
        nbytes: Bytes read and written, each tensor once per kernel.
        variant: Key of the variant, if it is one tuned kernel.
        interval_us: Ends of the 90 % interval of `us`, if it is predicted for tuned kernels on a GPU.
    """

    us: float
    by: Literal["tunebench", "torch"]
    how: Literal["measured", "predicted"]
    kernels: int
    nbytes: int
    variant: str = ""
    interval_us: tuple[float, float] | None = None

    @property
    def low_us(self) -> float:
        """Lower end of the interval; `us` without one."""
        return self.us if self.interval_us is None else self.interval_us[0]

    @property
    def high_us(self) -> float:
        """Upper end of the interval; `us` without one."""
        return self.us if self.interval_us is None else self.interval_us[1]


class Prices:
    """Prices of groups on one device; each workload is priced once.

    The price of a tuned kernel is its measured time, or else the predicted time of its best configuration
    with cold caches. The price of a torch kernel is the baseline measured with it, or else the predicted time
    of a vendor library; on a CPU, where libraries are not predicted, that of the tuned kernel. A measured
    time of torch for several nodes is divided among them in proportion to their predicted times.

    Args:
        graph: The graph of the groups.
        device: The device; it need not be in this machine.
        preferred: Which kernels run a node that both tuned kernels and torch can compute.
        measured_only: Whether to use tuned kernels only where they were measured on this device.
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
        """Times of nodes by torch in microseconds, derived from measured groups."""
        self._asked: set[str] = set()
        self._forecaster = Forecaster(device=device)
        self._tuned = functools.cache(self._predict_tuned)
        self._torch_us = functools.cache(self._torch_us_of)
        self._timed = functools.cache(self._timed_of)

    @property
    def asked(self) -> frozenset[str]:
        """Workloads whose records decided prices: these are valid as long as their answers are the same."""
        return frozenset(self._asked)

    def learn(self, groups: Iterable[FusedGroup]) -> None:
        """Derive times of single nodes from torch's measured times of groups, smaller groups first."""
        # Small groups first: what they settle leaves less to divide in larger ones.
        for group in sorted(groups, key=lambda group: len(group.nodes)):
            if len(group.nodes) == 1 or len(group.workloads) != 1:
                continue
            us = self._measured_torch_us(group.workloads[0])
            if us is None:
                continue
            unknown = [i for i in group.nodes if self.torch(i).how == "predicted"]
            rest = us - sum(self.torch(i).us for i in group.nodes if i not in unknown)
            if unknown and rest > 0:
                predicted = {i: self.torch(i).us for i in unknown}
                whole = sum(predicted.values())
                self._shares |= {i: rest * share / whole for i, share in predicted.items()}

    def price(self, group: FusedGroup) -> Price:
        """Return the price of a group: a single node by the faster of tuned kernels and torch.

        Groups of several nodes run by tuned kernels only.

        A predicted time of a tuned kernel never wins against a measured time of torch.

        Raises:
            InputError: if the group has several nodes and no tuned kernel computes it on the device.
        """
        tuned = self.tuned(group)
        if len(group.nodes) > 1:
            if tuned is None or self._preferred == "torch":
                raise InputError(f"no kernel on {self.device.name} computes {', '.join(group.workloads)}")
            return tuned
        torch = self.torch(group.nodes[0])
        if tuned is None or self._preferred == "torch":
            return torch
        if self._preferred == "tunebench":
            return tuned
        # A prediction must not replace a kernel that was measured.
        is_belief = tuned.how == "predicted" and torch.how == "measured"
        return torch if is_belief or tuned.us >= torch.us else tuned

    def tuned(self, group: FusedGroup) -> Price | None:
        """Return the price of a group by tuned kernels; None if there are none."""
        prices = [self._tuned(text) for text in group.workloads] if group.roles else []
        tuned = [price for price in prices if price is not None]
        if not tuned or len(tuned) < len(prices):
            return None
        copies_us = self.copy_us(2 * group.copied) if group.copied else 0.0
        return Price(
            us=sum(price.us for price in tuned) + copies_us,
            by="tunebench",
            how="measured" if all(price.how == "measured" for price in tuned) else "predicted",
            kernels=len(tuned) + bool(group.copied),
            # A copy to another layout reads and writes its bytes.
            nbytes=sum(parse(text).traffic().total_bytes for text in group.workloads) + 2 * group.copied,
            variant=tuned[0].variant if len(tuned) == 1 else "",
            interval_us=(
                (sum(p.low_us for p in tuned) + copies_us, sum(p.high_us for p in tuned) + copies_us)
                if any(price.interval_us for price in tuned)
                else None
            ),
        )

    def torch(self, index: int) -> Price:
        """Return the price of a node by torch."""
        node = self.graph.nodes[index]
        moved = self._traffic_bytes(index)
        if index in self._shares:
            return Price(us=self._shares[index], by="torch", how="measured", kernels=1, nbytes=moved)
        copies = [str(_copy_workload(moved))] if node.expression else []
        texts = (*node.workloads, *copies)
        if texts:
            times = [self._torch_us(text) for text in texts]
            origin = "measured" if all(measured for _, measured in times) else "predicted"
            us, kernels = sum(us for us, _ in times), len(times)
        else:
            us, origin, kernels = self.copy_us(moved), "predicted", 1
        return Price(us=us, by="torch", how=origin, kernels=kernels, nbytes=moved)  # type: ignore[arg-type]

    # -- parts ---------------------------------------------------------------------------------------------

    def _predict_tuned(self, text: str) -> Price | None:
        workload = parse(text)
        answer = self._timed(text)
        moved = workload.traffic().total_bytes
        interval_us = None
        if answer is not None:
            variant, us, origin = answer.variant, answer.expected_us, "measured"
        elif self._measured_only:
            return None
        else:
            best = self._forecaster.best(workload)
            if best is None:
                return None
            us = best.us * (PROLOGUE_OVERHEAD if getattr(workload, "has_pre", False) else 1.0)
            variant, origin, interval_us = best.variant, "predicted", best.interval_us
        return Price(
            us=us,
            by="tunebench",
            how=origin,  # type: ignore[arg-type]
            kernels=1,
            nbytes=moved,
            variant=variant,
            interval_us=interval_us,
        )

    def _torch_us_of(self, text: str) -> tuple[float, bool]:
        """Return the time of a workload by torch in microseconds, and whether it was measured."""
        measured_us = self._measured_torch_us(text)
        if measured_us is not None:
            return measured_us, True
        workload = parse(text)
        if self.device.kind == "gpu":
            from tunebench.forecast.network import predict_operations
            from tunebench.workloads.networks import Operation

            operation = Operation(workload=workload, part="")
            return float(predict_operations([operation], self.device, sustained=False)[0].each_us), False
        best = self._forecaster.best(workload)
        return (best.us if best else self.copy_us(workload.traffic().total_bytes)), False

    def _measured_torch_us(self, text: str) -> float | None:
        answer = self._timed(text)
        if answer is None or TORCH not in answer.baselines:
            return None
        return answer.expected_us * answer.baselines[TORCH].ratio

    def _timed_of(self, text: str) -> Answer | None:
        """Return the measured answer of exactly this workload on this device, or None."""
        self._asked.add(text)
        try:
            answer = recorded(text, device=self.device, reproducible=is_deterministic())
        except (DatabaseError, LookupMiss):
            return None
        return answer if answer is not None and answer.how in HERE else None

    def copy_us(self, nbytes: int) -> float:
        """Return the time in microseconds of moving bytes, half of them read and half written."""
        if self.device.kind != "gpu":
            return dram_us(Traffic(read_bytes=nbytes // 2, write_bytes=nbytes // 2), self.device, "cold")
        return self._torch_us(str(_copy_workload(nbytes)))[0]

    def _traffic_bytes(self, index: int) -> int:
        """Return the bytes that a node reads and writes."""
        node, values = self.graph.nodes[index], self.graph.values
        written = sum(values[name].nbytes for name in node.writes)
        if node.target in GATHER_OPERATORS and not node.operands:
            return 2 * written
        maps = [
            (operand.value, operand.index) for operand in node.operands.values() if operand.index is not None
        ]
        maps += [(gather.source, index.indices(gather)) for _, index in maps for gather in index.gathers]
        read = sum(index.touched() * values[name].item_bytes for name, index in maps)
        strided = {name for name, _ in maps}
        return written + read + sum(values[name].nbytes for name in node.reads if name not in strided)


_MOST_COLS = 2**31 - 1
"""Largest dimension of a workload; an odd number of elements above it is rounded up."""


def _copy_workload(nbytes: int) -> Workload:
    """Return an elementwise workload that moves the given number of bytes."""
    cols = max(1, nbytes // 8)
    rows = 1
    while cols > _MOST_COLS or (cols % 2 == 0 and cols > 4096):
        rows, cols = rows * 2, (cols + 1) // 2
    return Elementwise.from_dimensions({"rows": rows, "cols": cols, "dtype": "f32", "expression": "x"})
