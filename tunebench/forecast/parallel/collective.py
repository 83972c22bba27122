"""Predicted time of collectives: latency and bandwidth of the links, over the algorithms of NCCL.

A method (algorithm and protocol) takes ``latency_us + bytes * us_per_byte`` (the alpha-beta model); the
fastest method for the message size is used. Bytes are those of the whole tensor, as nccl-tests counts them:
the result on every device (all-reduce, all-gather, broadcast), the input of every device (reduce-scatter,
all-to-all), or the message sent.

With n devices in each of N nodes, P = n N in total, and S bytes, a device sends

| | within its node | to other nodes | in steps |
|---|---|---|---|
| all-reduce, ring | 2 (P-1)/P S | 2 (P-1)/P S/n | 2 (P-N), 2 (N-1) |
| all-reduce, tree | 2 S | min(2, N-1) S/n | 2 (n-1), 2 log2 N |
| all-reduce, in the switch | (n+1)/n S | min(2, N-1) S/n | 2, 2 log2 N |
| all-gather, reduce-scatter | (P-1)/P S | (P-1)/P S/n | P-N, N-1 |
| broadcast | S | S/n | P-N, N-1 |
| all-to-all | (n-1)/P S | (N-1)/N S | 1, 1 |

and nothing if it is the only device. A ring visits all devices of a node before it leaves the node, with one
ring per link to other nodes. Chunks are pipelined, so both links are busy at once and the slower one counts;
latencies of steps add up.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005
(ring, and the form of the model); Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", 2009 (tree between nodes; a chain within one); NVIDIA/nccl,
`src/graph/tuning.cc` (steps, protocols, in-switch reduction); NVIDIA/nccl-tests, `doc/PERFORMANCE.md` (bus
bandwidth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tunebench._deprecation import renamed
from tunebench._lazy import np
from tunebench.errors import UnknownName
from tunebench.forecast.parallel.cluster import Link, ProcessGroup

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

__all__ = [
    "BASE_US",
    "BULK_STEPS",
    "COLLECTIVES",
    "REACHES",
    "Collective",
    "CollectiveMethod",
    "bus_gb_s",
    "collective_methods",
    "collective_us",
    "send_us",
]

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"]

COLLECTIVES: tuple[Collective, ...] = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "broadcast",
    "all-to-all",
)

BASE_US = 20.0
"""Fixed cost of a collective in microseconds: its launch and the synchronisation of the devices.

Fitted together with `BULK_STEPS`, to one digit, by the mean error over 4 KB to 4 GB on 8 A100 and on 8 H200
of one node each (`tests/data/nccl_tests.toml`). The shortest times measured there are 42 and 31 us; another
machine has 18 us, and NCCL's own model uses 6.6 us.
"""

BULK_STEPS = 10.0
"""Latency of a step of the bulk protocol (NCCL's Simple), relative to the low-latency protocol.

Fitted with `BASE_US`. NCCL's own model uses 5.2 to 5.7.
"""

LOW_LATENCY_SHARE = 0.25
"""Share of the bandwidth that the low-latency protocol reaches. Half of the data sent are flags that mark the
other half as valid, and they are polled one by one. Source: NCCL, as above (LL).
"""

TREE_SHARE = 0.9
"""Share of the bandwidth within a node that trees reach. Source: NCCL, as above."""

IN_NETWORK_SHARE = 0.85
"""Share of the bandwidth that reductions in NVLink switches reach. Source: NCCL, as above (NVLS)."""

REACHES = (0.75, 1.6)
"""90 % interval of the time of a collective, as multiples of the predicted time.

From the 61 measured times of `tests/data/nccl_tests.toml`. The upper end comes from small messages.
"""


@dataclass(frozen=True, slots=True)
class CollectiveMethod:
    """One method of a collective: an algorithm and the protocol of its steps.

    Attributes:
        algorithm: ``"ring"``, ``"tree"``, ``"in-network"`` or ``"pairs"``.
        protocol: ``"bulk"`` for large messages, ``"low latency"`` for small ones.
        latency_us: Time of an empty message.
        us_per_byte: Time per byte of the tensor.
    """

    algorithm: str
    protocol: str
    latency_us: float
    us_per_byte: float

    def us(self, nbytes: ArrayLike) -> Array:
        """Return the time in microseconds for each number of bytes."""
        return self.latency_us + np.asarray(nbytes, dtype=np.float64) * self.us_per_byte


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """Bytes that each device sends per byte of the tensor, and the number of sequential steps.

    The first figure of each pair is for the links within a node, the second for those between nodes.
    """

    name: str
    sent: tuple[float, float]
    steps: tuple[float, float]
    inside_share: float = 1.0

    def methods(self, group: ProcessGroup) -> tuple[CollectiveMethod, CollectiveMethod]:
        """Return the method for each protocol."""
        links = (group.inside, group.between)
        per_byte = max(
            self.sent[0] / group.inside.bytes_per_us / self.inside_share,
            self.sent[1] / group.between.bytes_per_us,
        )
        steps_us = sum(link.latency_us * steps for link, steps in zip(links, self.steps, strict=True))
        return (
            CollectiveMethod(self.name, "bulk", BASE_US + BULK_STEPS * steps_us, per_byte),
            CollectiveMethod(self.name, "low latency", BASE_US + steps_us, per_byte / LOW_LATENCY_SHARE),
        )


def _ring(group: ProcessGroup, rounds: int, sent: float) -> _Algorithm:
    """Return a ring of several rounds, in which a device sends `sent` bytes per byte of the tensor."""
    outside = sent / group.local if group.nodes > 1 else 0.0
    steps = (rounds * (group.size - group.nodes), rounds * (group.nodes - 1))
    return _Algorithm("ring", (sent if group.local > 1 else 0.0, outside), steps)


def _all_reduce(group: ProcessGroup) -> tuple[_Algorithm, ...]:
    n, nodes, size = group.local, group.nodes, group.size
    ring = _ring(group, 2, 2 * (size - 1) / size)
    climb, up_and_down = 2 * math.ceil(math.log2(nodes)), min(2, nodes - 1) / n
    tree = _Algorithm("tree", (2.0 if n > 1 else 0.0, up_and_down), (2 * (n - 1), climb), TREE_SHARE)
    if not group.inside.reduces or n < 2:
        return ring, tree
    switch = _Algorithm("in-network", ((n + 1) / n, up_and_down), (2, climb), IN_NETWORK_SHARE)
    return ring, tree, switch


def _algorithms(collective: Collective, group: ProcessGroup) -> tuple[_Algorithm, ...]:
    n, nodes, size = group.local, group.nodes, group.size
    if collective == "all-reduce":
        return _all_reduce(group)
    if collective in ("all-gather", "reduce-scatter"):
        return (_ring(group, 1, (size - 1) / size),)
    if collective == "broadcast":
        return (_ring(group, 1, 1.0),)
    if collective == "all-to-all":
        sent = ((n - 1) / size, (nodes - 1) / nodes)
        return (_Algorithm("pairs", sent, (float(n > 1), float(nodes > 1))),)
    raise UnknownName("collective", collective, COLLECTIVES)


def collective_methods(collective: Collective, group: ProcessGroup) -> tuple[CollectiveMethod, ...]:
    """Return every method of a collective; for a group of one device, one that takes no time.

    Args:
        collective: The collective.
        group: Devices that take part.

    Raises:
        UnknownName: if there is no such collective.
    """
    found = tuple(way for each in _algorithms(collective, group) for way in each.methods(group))
    return (CollectiveMethod("ring", "bulk", 0.0, 0.0),) if group.size == 1 else found


def collective_us(collective: Collective, nbytes: ArrayLike, group: ProcessGroup) -> Array:
    """Return the predicted time of a collective in microseconds, for each number of bytes.

    The error against measured bus bandwidths is documented in `docs/guide/parallel.md`.

    Args:
        collective: The collective.
        nbytes: Bytes of the whole tensor, any shape. Zero bytes take no time.
        group: Devices that take part.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    fastest: Array = np.minimum.reduce([way.us(sizes) for way in collective_methods(collective, group)])
    return np.where(sizes > 0, fastest, 0.0)


def send_us(nbytes: ArrayLike, link: Link) -> Array:
    """Return the predicted time to send bytes from one device to another, in microseconds."""
    pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
    return collective_us("broadcast", nbytes, pair)


def bus_gb_s(collective: Collective, nbytes: ArrayLike, us: ArrayLike, devices: int) -> Array:
    """Return the bus bandwidth in GB/s that corresponds to a time, as nccl-tests defines it.

    It is the bandwidth of the slowest link in one direction, independent of the number of devices, if the
    devices themselves reduce.

    Args:
        collective: The collective.
        nbytes: Bytes of the whole tensor.
        us: Time in microseconds.
        devices: Number of devices that took part.
    """
    carried = {"all-reduce": 2 * (devices - 1) / devices, "broadcast": 1.0}.get(
        collective, (devices - 1) / devices
    )
    return np.asarray(nbytes, dtype=np.float64) * carried / np.asarray(us, dtype=np.float64) / 1e3


__getattr__ = renamed(__name__, {"ways": "collective_methods"})
