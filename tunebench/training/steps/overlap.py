"""Communication beside kernels: how long a device waits, and what the kernels lose.

A collective that runs beside a product hides behind it, and takes SMs from it: NCCL runs a block per channel,
and a block has an SM for itself. Kernels beside it lose the share of these SMs for as long.

With user buffers, a collective before or behind a product is divided into as many parts as devices, and each
part moves while the product of another part runs. The first or the last part remains exposed. Copies are made
by copy engines, which take no SMs.

Sources: NVIDIA/nccl, issues 689 and 1656 (a channel occupies an SM), 1041 (16 channels where switches
reduce); NVIDIA/nccl-tests, issue 100 (24 channels on 8 x A100); NVIDIA/TransformerEngine,
`common/comm_gemm_overlap`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunebench.training.interconnect.cluster import Link, ProcessGroup
from tunebench.workloads.networks import TensorCollective

__all__ = ["CHANNELS", "CHANNELS_OF_NETWORK", "TensorOverlap", "node_channels", "occupied_sms"]

CHANNELS, CHANNELS_OF_SWITCH, CHANNELS_OF_NETWORK = 24, 16, 4
"""Channels of NCCL on NVLink, where NVLink switches reduce, and on other links. The last is assumed."""


def node_channels(inside: Link) -> int:
    """Return the channels of NCCL between the devices of a node."""
    return CHANNELS if inside.ll128 else CHANNELS_OF_NETWORK


def occupied_sms(group: ProcessGroup) -> int:
    """Return the number of SMs that a collective of a group takes from kernels beside it."""
    if group.local < 2 or not group.inside.ll128:
        return CHANNELS_OF_NETWORK
    return CHANNELS_OF_SWITCH if group.inside.reduces and group.local > 2 else CHANNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOverlap:
    """How collectives of tensor parallelism run beside products.

    Attributes:
        products: Whether those of the backward pass run behind products that do not need them.
        user_buffers: Whether those with a product before or behind them run in parts.
        parts: Tensor-parallel size.
        occupied: Share of the SMs that a collective takes.
    """

    products: bool
    user_buffers: bool
    parts: int
    occupied: float

    def exposed_us(
        self, collective: TensorCollective, takes_us: float, product_us: Callable[[str, str], float]
    ) -> float:
        """Return how long a device waits, or computes longer, for one collective.

        Args:
            collective: The collective.
            takes_us: Its time alone.
            product_us: Returns the time of a product, by part of the network and gradient.
        """
        if self.user_buffers and collective.beside:
            # In parts: one part is exposed in any case, and the rest as far as it takes longer than the
            # product.
            beside_us = product_us(*collective.beside)
            return max(0.0, takes_us - beside_us) + min(takes_us, beside_us) / self.parts
        if collective.behind and (self.products or self.user_buffers):
            # Hidden time is not free: the collective's channels take SMs from the product.
            hidden_us = min(takes_us, product_us(*collective.behind))
            return takes_us - hidden_us + self.occupied * hidden_us
        return takes_us
