"""Collectives of data parallelism beside the kernels of a pass: reduced gradients, gathered parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import itemsize
from tunebench.training.interconnect.cluster import ProcessGroup
from tunebench.training.interconnect.collective import Collective, collective_us
from tunebench.workloads.networks import Network, NetworkRun

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["BUCKET_BYTES", "BucketExchange", "bucket_bytes", "chained_us", "gradient_bytes"]

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients per all-reduce. Source: `bucket_cap_mb` of PyTorch's DistributedDataParallel."""


def gradient_bytes(network: Network, run: NetworkRun, layers: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return the bytes of each layer's gradients in the order of the backward pass, and those of its experts.

    Parameters before the first layer count with the first layer, those behind the last layer with the last
    one. A matrix shared by both is complete with the first layer.

    Args:
        network: The network.
        run: How it runs; its degrees of tensor and expert parallelism and the dtype of gradients count.
        layers: Layers of the stage as a half-open range.
    """
    first, last = layers
    parameters = [network.held_parameters(run, (layer, layer + 1)) for layer in range(first, last)][::-1]
    dense, routed = [counts[0] for counts in parameters], [counts[1] for counts in parameters]
    # A matrix that both ends share is complete only with the first layer: take it from the last one, which is
    # entry 0 in the order of the backward pass.
    dense[0] -= sum(dense) - network.held_parameters(run, layers)[0]
    size = itemsize(run.gradient_dtype)
    return [count * size for count in dense], [count * size for count in routed]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketExchange:
    """Collectives of data parallelism, in buckets, beside the kernels of a pass.

    Gradients are summed during a backward pass. In reverse, the same holds for parameters that are gathered
    during a forward pass, each bucket before its layer.

    Experts have another data-parallel size than the rest. All buckets are one queue.

    Attributes:
        groups: Data-parallel group of each part of the parameters.
        bucket_bytes: Largest bucket.
        overlap: Whether the collectives run beside the pass; otherwise all are one, at its end.
        slower: Factor on the predicted time of collectives.
        occupied: Share of the SMs that the collectives take from the kernels.
    """

    groups: tuple[ProcessGroup, ...]
    bucket_bytes: int = BUCKET_BYTES
    overlap: bool = True
    slower: float = 1.0
    occupied: float = 0.0

    def total_us(self, collective: Collective, parts: Sequence[Sequence[int]]) -> float:
        """Return the time of all buckets, one after the other.

        Args:
            collective: Kind of the collective.
            parts: Bytes of each layer, in the order of the backward pass, for each group.
        """
        pairs = zip(parts, self.groups, strict=True)
        if not self.overlap:
            return self.slower * sum(
                float(collective_us(collective, sum(sizes), group)) for sizes, group in pairs
            )
        return float(sum(self._takes_us(collective, sizes, group)[0].sum() for sizes, group in pairs))

    def exposed_us(self, collective: Collective, parts: Sequence[Sequence[int]], pass_us: float) -> float:
        """Return how long buckets are still in transit when the pass has ended (see `times_us`)."""
        return self.times_us(collective, parts, pass_us)[0]

    def times_us(
        self, collective: Collective, parts: Sequence[Sequence[int]], pass_us: float
    ) -> tuple[float, float]:
        """Return how long buckets are still in transit when the pass has ended, and the time of all of them.

        What the pass loses to them counts as exposed.
        Layers take equal shares of the pass, and the bytes of a layer become available evenly in its share.
        Buckets are sent one after the other: the last one ends at the latest of each bucket's start and the
        time of all buckets from it on.

        Args:
            collective: Kind of the collective.
            parts: Bytes of each layer, in the order of the backward pass, for each group.
            pass_us: Kernels of the pass, in microseconds.
        """
        if not self.overlap or not any(map(any, parts)):
            total_us = self.total_us(collective, parts)
            return total_us, total_us
        takes_and_ready = [self._takes_us(collective, *pair) for pair in zip(parts, self.groups, strict=True)]
        takes, ready = (np.concatenate(columns) for columns in zip(*takes_and_ready, strict=True))
        # Experts and the rest share the network: one queue, in the order in which buckets become ready.
        order = np.argsort(ready, kind="stable")
        # Time of each bucket and all after it. The queue ends at the latest of (ready + remaining) over the
        # buckets.
        remaining = np.cumsum(takes[order][::-1])[::-1]
        exposed_us = max(0.0, float((pass_us * ready[order] + remaining).max()) - pass_us)
        total_us = float(remaining[0])
        return exposed_us + self.occupied * max(0.0, total_us - exposed_us), total_us

    def _takes_us(
        self, collective: Collective, sizes: Sequence[int], group: ProcessGroup
    ) -> tuple[Array, Array]:
        """Return the time of each bucket, and the share of the pass after which it is ready."""
        if not any(sizes):
            return np.empty(0), np.empty(0)
        counts = np.array([-(-nbytes // self.bucket_bytes) for nbytes in sizes], dtype=np.int64)
        sending_layers = np.flatnonzero(counts)
        bucket_counts = counts[sending_layers]
        bucket_bytes = np.array(sizes, dtype=np.float64)[sending_layers] / bucket_counts
        takes = self.slower * collective_us(collective, bucket_bytes, group)
        layer = np.repeat(sending_layers, bucket_counts)
        bucket = np.concatenate([np.arange(1, count + 1) / count for count in bucket_counts])
        return np.repeat(takes, bucket_counts), (layer + bucket) / len(sizes)


def bucket_bytes(run: NetworkRun, copies: int) -> int:
    """Return the bytes of a bucket of gradients, by the stack of a run.

    Source: `bucket_cap_mb` of PyTorch's DistributedDataParallel; NVIDIA/Megatron-LM,
    `megatron/core/distributed/distributed_data_parallel_config.py` (`bucket_size`, in parameters).
    """
    if run.kernels != "megatron":
        return BUCKET_BYTES
    return max(40_000_000, 1_000_000 * copies) * itemsize(run.gradient_dtype)


def chained_us(stages: Iterable[tuple[float, float, float]]) -> float:
    """Return the exposed time of the collectives of the stages of a device, which run one after the other.

    Args:
        stages: For each stage, the last one of the device first: what is exposed of its collectives alone,
            their total time, and the time from the end of the stage before to that of the stage.
    """
    behind_us: float | None = None
    for exposed_us, total_us, window_us in stages:
        # What is exposed alone, or what the queue of the stage before pushes beyond the window of this one.
        behind_us = exposed_us if behind_us is None else max(exposed_us, behind_us + total_us - window_us)
    return behind_us or 0.0
