"""Predicted time of collectives: latency and bandwidth of the links, over the algorithms of NCCL.

A method (algorithm and protocol) takes a latency a and a transfer time w in proportion to the bytes, together
``a + w + ramp * sqrt(a * w)``; the fastest method for the message size is used. The last term is that of
pipelined chunks: many small chunks pay latencies, few large ones leave links idle at the ends, and the best
number of chunks costs sqrt(a w). Bytes are those of the whole tensor, as nccl-tests counts them:
the result on every device (all-reduce, all-gather, broadcast), the input of every device (reduce-scatter,
all-to-all), or the message sent.

With n devices in each of N nodes, P = n N in total, and S bytes, a device sends

| | within its node | to other nodes | in steps |
|---|---|---|---|
| all-reduce, ring | (2 (P-1) + t)/P S | 2 (P-1)/P S/n | 2 (P-N), 2 (N-1) |
| all-reduce, tree | 2 S | min(2, N-1) S/n | 2 (n-1), 2 log2 N |
| all-reduce, in the switch | (n+1)/n S | min(2, N-1) S/n | 2, 2 log2 N |
| all-gather, reduce-scatter | (P-1 + t)/P S | (P-1)/P S/n | P-N, N-1 |
| broadcast | S | S/n | P-N, N-1 |
| all-to-all | (n-1 + t)/P S | (N-1)/N S | 1, 1 |

and nothing if it is the only device. t is a device's own part: it is copied, or received last, while nothing
is sent (`LAST_PART`). A ring visits all devices of a node before it leaves the node, with one
ring per link to other nodes. Chunks are pipelined, so both links are busy at once and the slower one counts;
latencies of steps add up.

Protocols are those of NCCL: low latency (LL), its 128-byte form on NVLink (LL128), and bulk (Simple). Their
constants are the same for every device, and were fitted with `benchmarks/collective_fit.py`; errors, also for
devices left out of the fit, are in `benchmarks/results/predict/collectives.md`. Sums are of floating-point
numbers: switches do not reduce 8-bit integers.

Kernels of serving engines (`direct`) replace NCCL's all-reduce of short tensors within an NVLink node. One
shot: a device reads the whole tensor of every other one and sums, between two barriers. Two shots: it sums
its part, then reads the other parts, after a third barrier. They send (n-1) S and 2 (n-1)/n S.

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
from tunebench.training.interconnect.cluster import Link, ProcessGroup

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

__all__ = [
    "BASE_US",
    "BULK_STEPS",
    "COLLECTIVES",
    "DIRECT_US",
    "LAST_PART",
    "REACHES",
    "STAGED_REACHES",
    "Collective",
    "CollectiveConstants",
    "CollectiveMethod",
    "bus_gb_s",
    "collective_methods",
    "collective_us",
    "reaches_of",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConstants:
    """Constants of the law, the same for every device and link.

    The defaults were fitted by `python -m benchmarks.collective_fit` to 2,547 times of 13 machines, except
    for `tree_share` and `pair_limit_bytes`. Latencies are those of a machine of usual pace: fitted factors on
    the latencies of single machines are 0.7 to 1.7, and 1.1 to 1.7 among machines with A100.

    Attributes:
        base_us: Fixed time of a collective on a stream that the host keeps filled: start of the kernel and
            synchronisation of the devices. A host that starts the kernels of eight devices from one thread
            needs more, 30 to 40 us per collective; those times were left out of the fit.
        steps: Latency of a step of the low-latency protocols, relative to that of the link.
        low_latency_share: Share of the bandwidth that the low-latency protocol reaches. Half of the data sent
            are flags that mark the other half as valid. NCCL's own model uses 0.25 to 0.5.
        larger_us: Fixed time that the LL128 and bulk protocols add.
        ll128_share: Share of the bandwidth that LL128 reaches for the message sizes at which it is used. For
            large messages it would reach 0.94 (120 of 128 bytes are data).
        bulk_steps: Latency of a step of the bulk protocol, relative to that of the link. NCCL's own model
            uses 5.2 to 5.7.
        last_part: Time of the copy or of the last receipt of a device's own part, relative to sending it.
        ramp: Time between latency and full bandwidth of the bulk protocol, per sqrt(latency * transfer time).
        pairs_share: Share of the bandwidth that all-to-all reaches, relative to rings.
        pair_limit_bytes: Bytes to each other device up to which all-to-all uses the low-latency protocol.
            Source: NCCL (`NCCL_P2P_LL_THRESHOLD`, 16384).
        tree_share: Share of the bandwidth within a node that trees reach. Source: NCCL, `tuning.cc`.
        switch_us: Fixed time that in-switch reduction adds.
        switch_share: Share of the bandwidth that in-switch reductions reach. NCCL's own model uses 0.85 on
            Hopper and 0.74 on Blackwell.
    """

    base_us: float = 7.7
    steps: float = 1.6
    low_latency_share: float = 0.38
    larger_us: float = 3.8
    ll128_share: float = 0.5
    bulk_steps: float = 3.4
    last_part: float = 0.43
    ramp: float = 0.46
    pairs_share: float = 0.87
    pair_limit_bytes: float = 16384
    tree_share: float = 0.9
    switch_us: float = 12.0
    switch_share: float = 0.75


_CONSTANTS = CollectiveConstants()

BASE_US = _CONSTANTS.base_us
"""Fixed time of a collective in microseconds (`CollectiveConstants.base_us`)."""

BULK_STEPS = _CONSTANTS.bulk_steps
"""Latency of a step of the bulk protocol (NCCL's Simple), relative to that of the link."""

LAST_PART = _CONSTANTS.last_part
"""Time of the copy or last receipt of a device's own part, relative to sending it."""

DIRECT_US = 6.0
"""Time of an all-reduce of an empty tensor by kernels that read the memory of other devices, in microseconds:
start of the kernel and two barriers.

The shortest published times of short tensors on 8 devices: 6 us (PyTorch's own, the shortest of 6 to 15 us)
and 6.3 us for 24 kB (vLLM's, on MI355X). The author of the issue measured 17 us with the same kernels of
PyTorch. Sources: pytorch/pytorch, pull request 114001 as issue 131739 quotes it; vllm-project/vllm, pull
request 39080.
"""

DIRECT_LIMITS = (256 * 1024, 10 * 1024 * 1024)
"""Largest tensors in bytes that are summed in one shot and in two. Source: pytorch/pytorch,
`intra_node_comm.cu`."""

REACHES = (0.66, 1.56)
"""90 % interval of the time of a collective, as multiples of the predicted time.

The 5th and 95th percentile of times measured on GPUs that were left out of the fit
(`benchmarks/collective_fit.py`). Most of it is the pace of the machine, so small messages are wider and
large ones narrower: from 32 MB, mean errors are 2 to 15 %.
"""

STAGED_REACHES = (0.17, 5.8)
"""As `REACHES`, of devices without peer access, whose messages are staged in host memory.

Student's t for five machines with PCI Express 3 and 4 (`staged_share` of `benchmarks/collective_fit.py`). The
logarithms of their bandwidths have a standard deviation of 0.75.
"""


@dataclass(frozen=True, slots=True)
class CollectiveMethod:
    """One method of a collective: an algorithm and the protocol of its steps.

    Attributes:
        algorithm: ``"ring"``, ``"tree"``, ``"in-network"``, ``"pairs"``, ``"one shot"`` or ``"two shots"``.
        protocol: ``"bulk"`` for large messages, ``"low latency"`` for small ones, ``"low latency 128"``
            between the two on NVLink, or ``"direct"``.
        latency_us: Time of an empty message.
        us_per_byte: Time per byte of the tensor.
        ramp: Additional time per sqrt(latency * time of the bytes).
        limit_bytes: Largest tensor for which the method can be used.
    """

    algorithm: str
    protocol: str
    latency_us: float
    us_per_byte: float
    ramp: float = 0.0
    limit_bytes: float = math.inf

    def us(self, nbytes: ArrayLike) -> Array:
        """Return the time in microseconds for each number of bytes; infinite above the limit."""
        sizes = np.asarray(nbytes, dtype=np.float64)
        transfer = sizes * self.us_per_byte
        time = self.latency_us + transfer + self.ramp * np.sqrt(self.latency_us * transfer)
        return np.where(sizes <= self.limit_bytes, time, np.inf)


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """Bytes that each device sends per byte of the tensor, and the number of sequential steps.

    The first figure of each pair is for the links within a node, the second for those between nodes. `own`
    is a device's own part of the tensor, which costs `LAST_PART` of its transfer within the node.
    """

    name: str
    sent: tuple[float, float]
    steps: tuple[float, float]
    own: float = 0.0
    inside_share: float = 1.0
    fixed_us: float = 0.0
    low_latency_limit: float = math.inf

    def methods(self, group: ProcessGroup, law: CollectiveConstants) -> tuple[CollectiveMethod, ...]:
        """Return the method for each protocol that the algorithm and the links have."""
        sent = self.sent[0] + (law.last_part * self.own if self.sent[0] else 0.0)
        crowded = group.inside.group_share if group.local > 2 else 1.0
        per_byte = max(
            sent / (group.inside.bytes_per_us * self.inside_share * crowded),
            self.sent[1] / group.between.bytes_per_us,
        )
        links = (group.inside, group.between)
        steps_us = sum(link.latency_us * steps for link, steps in zip(links, self.steps, strict=True))
        larger_us = law.base_us + law.larger_us + self.fixed_us
        bulk = CollectiveMethod(self.name, "bulk", larger_us + law.bulk_steps * steps_us, per_byte, law.ramp)
        if self.fixed_us:
            return (bulk,)
        low = CollectiveMethod(
            self.name,
            "low latency",
            law.base_us + law.steps * steps_us,
            per_byte / law.low_latency_share,
            limit_bytes=self.low_latency_limit,
        )
        if self.name == "pairs" or not group.inside.ll128 or group.local < 2:
            return bulk, low
        wide = CollectiveMethod(
            self.name, "low latency 128", larger_us + law.steps * steps_us, per_byte / law.ll128_share
        )
        return bulk, low, wide


def _ring(group: ProcessGroup, rounds: int, sent: float, own_share: float = 0.0) -> _Algorithm:
    """Return a ring of several rounds, in which a device sends `sent` bytes per byte of the tensor."""
    outside = sent / group.local if group.nodes > 1 else 0.0
    steps = (rounds * (group.size - group.nodes), rounds * (group.nodes - 1))
    return _Algorithm("ring", (sent if group.local > 1 else 0.0, outside), steps, own_share)


def _all_reduce(group: ProcessGroup, law: CollectiveConstants) -> tuple[_Algorithm, ...]:
    n, nodes, size = group.local, group.nodes, group.size
    ring = _ring(group, 2, 2 * (size - 1) / size, 1 / size)
    climb, up_and_down = 2 * math.ceil(math.log2(nodes)), min(2, nodes - 1) / n
    chain = (2 * (n - 1), climb)
    tree = _Algorithm("tree", (2.0 if n > 1 else 0.0, up_and_down), chain, inside_share=law.tree_share)
    if not group.inside.reduces or n < 3:
        return ring, tree
    switch = _Algorithm(
        "in-network",
        ((n + 1) / n, up_and_down),
        (0, climb),
        inside_share=law.switch_share,
        fixed_us=law.switch_us,
    )
    return ring, tree, switch


def _algorithms(
    collective: Collective, group: ProcessGroup, law: CollectiveConstants
) -> tuple[_Algorithm, ...]:
    n, nodes, size = group.local, group.nodes, group.size
    if collective == "all-reduce":
        return _all_reduce(group, law)
    if collective in ("all-gather", "reduce-scatter"):
        return (_ring(group, 1, (size - 1) / size, 1 / size),)
    if collective == "broadcast":
        return (_ring(group, 1, 1.0),)
    if collective == "all-to-all":
        pairs = _Algorithm(
            "pairs",
            ((n - 1) / size, (nodes - 1) / nodes * group.crossing),
            (float(n > 1), float(nodes > 1)),
            own=1 / size,
            inside_share=law.pairs_share,
            low_latency_limit=law.pair_limit_bytes * size,
        )
        return (pairs,)
    raise UnknownName("collective", collective, COLLECTIVES)


def _direct_sums(group: ProcessGroup) -> tuple[CollectiveMethod, ...]:
    """Return the sums by kernels that read the memory of other devices of an NVLink node."""
    if group.nodes > 1 or not group.inside.ll128:
        return ()
    us_per_byte = (group.size - 1) / group.inside.bytes_per_us
    barrier_us = _CONSTANTS.steps * group.inside.latency_us
    one, two = DIRECT_LIMITS
    return (
        CollectiveMethod("one shot", "direct", DIRECT_US, us_per_byte, limit_bytes=one),
        CollectiveMethod(
            "two shots", "direct", DIRECT_US + barrier_us, 2 * us_per_byte / group.size, limit_bytes=two
        ),
    )


def collective_methods(
    collective: Collective,
    group: ProcessGroup,
    law: CollectiveConstants | None = None,
    *,
    direct: bool = False,
) -> tuple[CollectiveMethod, ...]:
    """Return every method of a collective; for a group of one device, one that takes no time.

    Args:
        collective: The collective.
        group: Devices that take part.
        law: Constants; None for the fitted ones.
        direct: Whether short tensors may be summed by kernels that read the memory of other devices.

    Raises:
        UnknownName: if there is no such collective.
    """
    law = law or _CONSTANTS
    methods = tuple(
        method
        for algorithm in _algorithms(collective, group, law)
        for method in algorithm.methods(group, law)
    )
    if direct and collective == "all-reduce":
        methods += _direct_sums(group)
    return (CollectiveMethod("ring", "bulk", 0.0, 0.0),) if group.size == 1 else methods


def collective_us(
    collective: Collective,
    nbytes: ArrayLike,
    group: ProcessGroup,
    law: CollectiveConstants | None = None,
    *,
    direct: bool = False,
) -> Array:
    """Return the predicted time of a collective in microseconds, for each number of bytes.

    The error against measured times is documented in `benchmarks/results/predict/collectives.md`.

    Args:
        collective: The collective.
        nbytes: Bytes of the whole tensor, any shape. Zero bytes take no time.
        group: Devices that take part.
        law: Constants; None for the fitted ones.
        direct: Whether short tensors may be summed by kernels that read the memory of other devices.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    methods = collective_methods(collective, group, law, direct=direct)
    fastest: Array = np.minimum.reduce([method.us(sizes) for method in methods])
    return np.where(sizes > 0, fastest, 0.0)


def send_us(nbytes: ArrayLike, link: Link) -> Array:
    """Return the predicted time to send bytes from one device to another, in microseconds."""
    pair = ProcessGroup(local=2, nodes=1, inside=link, between=link)
    return collective_us("broadcast", nbytes, pair)


def reaches_of(group: ProcessGroup | Link) -> tuple[float, float]:
    """Return the 90 % interval of the time of a collective or a message, as multiples of the predicted time.

    Args:
        group: Devices that take part in the collective, or the link that the message uses.
    """
    inside, within = (group, 2) if isinstance(group, Link) else (group.inside, group.local)
    return REACHES if inside.peer_access or within == 1 else STAGED_REACHES


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
