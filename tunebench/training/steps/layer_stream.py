"""A pass through layers whose data moves between memories before and after each layer: `stream_us`.

Layers compute one after the other. Before a layer computes, a chain of transfers brings its data, such as a
read from NVMe, a copy to the device, and an all-gather. Afterwards another chain takes its results away. Each
resource carries one transfer at a time, in the order of issue:

- The first `depth` layers are fetched when the pass starts, and nothing earlier.
- When layer i ends, its results leave, and then layer i + depth is fetched into the buffer of layer i.
- Layer i computes once its data has arrived, and once the results of layer i - depth have left their buffer.

The time of a pass is an exact recurrence over these rules. It ends when the last result has left. Passes do
not overlap each other. Without `depth` of at least 2, nothing is fetched ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tunebench.errors import InputError

__all__ = ["DEPTH", "LayerWork", "Transfer", "stream_us"]

DEPTH = 2
"""Layers in buffers: one computes while the next one is fetched. Assumed for every plan."""

Transfer = tuple[str, float]
"""A resource and how long it is busy, in microseconds."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer in a pass.

    Attributes:
        compute_us: Time of the layer once its data is there.
        before: Transfers that bring its data, one after the other.
        after: Transfers of its results, one after the other.
    """

    compute_us: float
    before: tuple[Transfer, ...] = ()
    after: tuple[Transfer, ...] = ()

    def only(self, *resources: str) -> LayerWork:
        """Return the layer without transfers of other resources."""
        return LayerWork(
            self.compute_us,
            tuple(transfer for transfer in self.before if transfer[0] in resources),
            tuple(transfer for transfer in self.after if transfer[0] in resources),
        )


def stream_us(layers: Sequence[LayerWork], depth: int = DEPTH) -> float:
    """Return the time of a pass in microseconds.

    Args:
        layers: Layers in the order of the pass.
        depth: Layers whose data, and whose results, fit in buffers.

    Raises:
        InputError: if depth is less than 1.
    """
    if depth < 1:
        raise InputError(f"depth must be at least 1, got {depth}")
    free_us: dict[str, float] = defaultdict(float)

    def moved(chain: Sequence[Transfer], ready_us: float) -> float:
        for resource, us in chain:
            ready_us = free_us[resource] = max(ready_us, free_us[resource]) + us
        return ready_us

    arrived_us = [moved(layer.before, 0.0) for layer in layers[:depth]]
    drained_us: list[float] = []
    now_us = 0.0
    for index, layer in enumerate(layers):
        # The results of layer i - depth must have left the buffer that this layer writes to.
        buffer_us = drained_us[index - depth] if index >= depth else 0.0
        now_us = max(now_us, arrived_us[index], buffer_us) + layer.compute_us
        drained_us.append(moved(layer.after, now_us))
        # Only now is this layer's buffer free for the data of layer i + depth.
        if index + depth < len(layers):
            arrived_us.append(moved(layers[index + depth].before, now_us))
    return max([now_us, *drained_us])
