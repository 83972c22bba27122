"""Gradients that copies of a network sum while the last backward pass still runs."""

from __future__ import annotations

from collections.abc import Sequence

from tunebench._lazy import np
from tunebench.dtype import itemsize
from tunebench.forecast.parallel.cluster import ProcessGroup
from tunebench.forecast.parallel.collective import Collective, collective_us
from tunebench.workloads.networks import Network, NetworkRun

__all__ = ["BUCKET_BYTES", "exposed_gradients_us", "gradient_bytes"]

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients per all-reduce. Source: `bucket_cap_mb` of PyTorch's DistributedDataParallel."""


def gradient_bytes(network: Network, run: NetworkRun, layers: tuple[int, int]) -> list[int]:
    """Return the bytes of each layer's gradients, in the order of the backward pass.

    Parameters before the first layer count with the first layer, those behind the last layer with the last
    one. A matrix shared by both is complete with the first layer.

    Args:
        network: The network.
        run: How it runs; its degree of tensor parallelism and dtype count.
        layers: Layers of the stage as a half-open range.
    """
    first, last = layers
    counts = [network.parameters(run.tensor, (layer, layer + 1)) for layer in range(first, last)][::-1]
    counts[0] -= sum(counts) - network.parameters(run.tensor, layers)
    return [count * itemsize(run.dtype) for count in counts]


def exposed_gradients_us(
    sizes: Sequence[int],
    backward_us: float,
    group: ProcessGroup,
    slower: float = 1.0,
    collective: Collective = "all-reduce",
) -> float:
    """Return how long buckets of gradients are still in transit when the backward pass has ended.

    Layers take equal shares of the pass, and the gradients of a layer become available evenly in its share.
    Buckets are sent one after the other: the last one ends at the latest of each bucket's start and the time
    of all buckets from it on.

    Args:
        sizes: Bytes of each layer's gradients, in the order of the pass.
        backward_us: Time of the pass, in microseconds.
        group: Devices with copies of the network.
        slower: Factor on the predicted time of collectives.
        collective: Kind of the collective.
    """
    counts = np.array([-(-nbytes // BUCKET_BYTES) for nbytes in sizes], dtype=np.int64)
    if not counts.sum():
        return 0.0
    sent = np.flatnonzero(counts)
    each = counts[sent]
    takes = slower * collective_us(collective, np.array(sizes, dtype=np.float64)[sent] / each, group)
    layer = np.repeat(sent, each)
    bucket = np.concatenate([np.arange(1, count + 1) / count for count in each])
    ready = backward_us * (layer + bucket) / len(sizes)
    remaining = np.cumsum(np.repeat(takes, each)[::-1])[::-1]
    return max(0.0, float((ready + remaining).max()) - backward_us)
