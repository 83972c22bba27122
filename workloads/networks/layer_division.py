"""How devices divide a layer, and how its passes run: fields that plans and runs share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from tunebench._deprecation import warn_renamed

if TYPE_CHECKING:
    from tunebench.workloads.networks.network_run import Network

__all__ = ["LayerDivision", "LayerExecution", "Recompute", "shared_fields"]

Recompute = Literal["none", "selective", "experts", "operators", "full"]


# The records of this module have no slots, because a class may derive from only one class with slots, and
# `NetworkRun` and `ClusterPlan` derive from several records. Classes that derive from them may have slots.
@dataclass(frozen=True, kw_only=True)
class LayerDivision:
    """How devices divide a layer: its parameters, and with context parallelism its sequences.

    Attributes:
        tensor: Tensor-parallel size: heads and inner widths are divided.
        context: Context-parallel size: sequences are divided.
        expert: Expert-parallel size: the experts of a layer are divided.
        expert_tensor: Tensor-parallel size of each expert: `tensor`, or 1 (parallel folding: tensor-parallel
            ranks of the rest of a layer have whole experts). None for `tensor`.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def devices_per_expert(self) -> int:
        """Tensor-parallel size of each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def division(self) -> LayerDivision:
        """How parameters are divided: without context parallelism, which divides sequences only."""
        return LayerDivision(tensor=self.tensor, expert=self.expert, expert_tensor=self.expert_tensor)

    def held(self, network: Network, layers: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return `Network.held_parameters`; a deprecated alias."""
        warn_renamed("LayerDivision.held(network, layers)", "network.held_parameters(division, layers)")
        return network.held_parameters(self, layers)


@dataclass(frozen=True, kw_only=True)
class LayerExecution:
    """How the passes of a layer run on each device.

    Attributes:
        recompute: Activation recomputation in the backward pass of each layer: of nothing (`"none"`), the
            core of attention (`"selective"`), the router and the experts (`"experts"`), all but attention and
            every second product (`"operators"`, as torchtitan does), or the whole layer (`"full"`).
        sequence_parallel: Whether tensor-parallel ranks also divide the tokens of normalisations, dropout and
            residual sums.
        flash: Whether attention is one kernel that stores no scores, unless its scores have a bias.
        context_gather: Whether context-parallel ranks gather all keys and values before attention,
            instead of passing them round a ring.
    """

    recompute: Recompute = "none"
    sequence_parallel: bool = False
    flash: bool = False
    context_gather: bool = False


def shared_fields(source: Any, record: type) -> dict[str, Any]:
    """Return the values of the fields of a record, as keywords for another class that has them.

    Args:
        source: An object with all fields of the record.
        record: A dataclass, such as `LayerDivision`.
    """
    names, values = _field_reader(record)
    return dict(zip(names, values(source), strict=True))


@functools.cache
def _field_reader(record: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(field.name for field in fields(record))
    return names, attrgetter(*names)
