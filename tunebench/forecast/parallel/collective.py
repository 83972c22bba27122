"""How long collectives take: latency and bandwidth of the links, over the algorithms that NCCL chooses from.

A way to do a collective takes ``latency_us + bytes * us_per_byte`` (the model of alpha and beta); the
fastest way for so many bytes is taken. Bytes are those of the whole tensor, as NCCL's tests count: what every
device ends up with (all-reduce, all-gather, broadcast), begins with (reduce-scatter, all-to-all) or sends.

With n devices in each of N nodes, P = n N in all, and S bytes, a device sends

| | within its node | to other nodes | in steps |
|---|---|---|---|
| all-reduce, ring | 2 (P-1)/P S | 2 (P-1)/P S/n | 2 (P-N), 2 (N-1) |
| all-reduce, tree | 2 S | min(2, N-1) S/n | 2 (n-1), 2 log2 N |
| all-reduce, in the switch | (n+1)/n S | min(2, N-1) S/n | 2, 2 log2 N |
| all-gather, reduce-scatter | (P-1)/P S | (P-1)/P S/n | P-N, N-1 |
| broadcast | S | S/n | P-N, N-1 |
| all-to-all | (n-1)/P S | (N-1)/N S | 1, 1 |

and nothing where there is nobody. Rings go through all devices of a node before they leave it, one ring for
each of its links to others. Both links are busy at once, since chunks follow one another, so the slower one
counts; steps add up.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005
(ring, and the form of the model); Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", 2009 (tree between nodes; a chain within one); NVIDIA/nccl,
`src/graph/tuning.cc` (steps, protocols, switches that add); NVIDIA/nccl-tests, `doc/PERFORMANCE.md` (bus
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
"""What any collective costs before a byte moves: its launch, and that devices wait for one another.

Chosen together with `BULK_STEPS`, to one digit, by mean error over 4 KB to 4 GB on 8 A100 and on 8 H200 of
one node each (`tests/data/nccl_tests.toml`). The least measured there is 42 and 31 us; another machine
shows 18, and NCCL counts on 6.6.
"""

BULK_STEPS = 10.0
"""The latency of a step that moves much (NCCL's Simple protocol), over that of one that moves few bytes.

See `BASE_US`. NCCL counts on 5.2 to 5.7.
"""

LOW_LATENCY_SHARE = 0.25
"""The share of the bandwidth that messages of few bytes get: half of what is sent are flags that tell that
the other half is there, and they are looked at one by one. Source: NCCL, as above (LL).
"""

TREE_SHARE = 0.9
"""The share of the bandwidth within a node that trees get. Source: NCCL, as above."""

IN_NETWORK_SHARE = 0.85
"""The share of the bandwidth that reductions in NVLink's switches get. Source: NCCL, as above (NVLS)."""

REACHES = (0.75, 1.6)
"""Nine of ten collectives take between these multiples of the predicted time.

Of the 61 measured times of `tests/data/nccl_tests.toml`; those of few bytes are the ones that take longer.
"""


@dataclass(frozen=True, slots=True)
class CollectiveMethod:
    """One way to do a collective: an algorithm, and the protocol of its steps.

    Attributes:
        algorithm: ``"ring"``, ``"tree"``, ``"in-network"`` or ``"pairs"``.
        protocol: ``"bulk"`` for much, ``"low latency"`` for few bytes.
        latency_us: What it takes with no bytes.
        us_per_byte: What each byte of the tensor takes.
    """

    algorithm: str
    protocol: str
    latency_us: float
    us_per_byte: float

    def us(self, nbytes: ArrayLike) -> Array:
        """Return the time for so many bytes."""
        return self.latency_us + np.asarray(nbytes, dtype=np.float64) * self.us_per_byte


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """What each device sends of each byte, and the steps that follow one another.

    The first figure is of the links within a node, the second of those between nodes.
    """

    name: str
    sent: tuple[float, float]
    steps: tuple[float, float]
    inside_share: float = 1.0

    def methods(self, group: ProcessGroup) -> tuple[CollectiveMethod, CollectiveMethod]:
        """Return it with each protocol."""
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
    """Return a ring gone through so many times, in which a device sends so much of each byte."""
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
    """Return every way to do a collective; one that takes no time if the group has one device.

    Raises:
        UnknownName: if there is no such collective.
    """
    found = tuple(way for each in _algorithms(collective, group) for way in each.methods(group))
    return (CollectiveMethod("ring", "bulk", 0.0, 0.0),) if group.size == 1 else found


def collective_us(collective: Collective, nbytes: ArrayLike, group: ProcessGroup) -> Array:
    """Return the expected time of a collective, in microseconds, for each number of bytes.

    Its error against measured bus bandwidths is in `docs/guide/parallel.md`.

    Args:
        collective: Which one.
        nbytes: Bytes of the whole tensor, any shape; where nothing is sent, no time is taken.
        group: The devices that take part.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    fastest: Array = np.minimum.reduce([way.us(sizes) for way in collective_methods(collective, group)])
    return np.where(sizes > 0, fastest, 0.0)


def send_us(nbytes: ArrayLike, link: Link) -> Array:
    """Return the expected time to send bytes from one device to another, in microseconds."""
    pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
    return collective_us("broadcast", nbytes, pair)


def bus_gb_s(collective: Collective, nbytes: ArrayLike, us: ArrayLike, devices: int) -> Array:
    """Return the bus bandwidth that a time means, as NCCL's tests tell it, in GB/s.

    It is what the slowest wire has to carry in one direction, whatever the number of devices, if
    devices do the sums.

    Args:
        collective: Which one.
        nbytes: Bytes of the whole tensor.
        us: The time it took.
        devices: How many took part.
    """
    carried = {"all-reduce": 2 * (devices - 1) / devices, "broadcast": 1.0}.get(
        collective, (devices - 1) / devices
    )
    return np.asarray(nbytes, dtype=np.float64) * carried / np.asarray(us, dtype=np.float64) / 1e3


__getattr__ = renamed(__name__, {"ways": "collective_methods"})
