"""Limiting resource of a configuration: math, memory, on-chip memory, or latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunebench.bound import Bound, Resource
from tunebench.explanation.grid import Waves
from tunebench.forecast.execution import LAUNCH_US

__all__ = ["KINDS", "Cause", "Kind", "Limit", "limit"]

Kind = Literal["math", "memory", "on-chip memory", "latency"]
"""Kind of the limiting resource.

NVIDIA's guides have three kinds and count on-chip memory as memory. Here it is separate, because another tile
shape relieves it while faster DRAM does not.
"""

Cause = Literal["floor", "launch", "few blocks"]
"""Cause of the limit: the largest lower bound of all resources, launch overhead above the work, or idle SMs.
"""

KINDS: Mapping[str, Kind] = {
    "dram": "memory",
    "fma pipe": "math",
    "tensor pipe": "math",
    "special functions": "math",
    "issue": "math",
    "load/store": "on-chip memory",
    "shared": "on-chip memory",
    "fill port": "on-chip memory",
    "latency": "latency",
}
"""Kind of limit by resource of the lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limiting resource, and its distance to the next one.

    Attributes:
        kind: Kind of the limiting resource.
        cause: Cause of the limit.
        resource: Resource with the largest lower bound, for every kind.
        against: Resource of another kind with the largest lower bound; None if there is none, and for
            latency.
        factor: Ratio of the two lower bounds, of launch overhead to work, or of SMs to blocks; None if there
            is nothing to compare with.
        launch_us: Approximate launch overhead in microseconds.
        work_us: Predicted time without launch overhead, in microseconds.
    """

    kind: Kind
    cause: Cause
    resource: Resource
    against: Resource | None = None
    factor: float | None
    launch_us: float
    work_us: float


def limit(bound: Bound, predicted_us: float, launches: int, waves: Waves | None) -> Limit:
    """Return the limiting resource of a configuration.

    It is latency if launch overhead exceeds the work, or if there are fewer blocks than SMs and the
    configuration is not limited by memory.

    Args:
        bound: Lower bound of the configuration.
        predicted_us: Predicted time of the configuration, in microseconds.
        launches: Number of sequential launches; 0 on a CPU.
        waves: Waves of blocks; None without thread blocks.
    """
    kind, launch_us = KINDS[bound.binding], launches * LAUNCH_US
    work_us = predicted_us - launch_us
    cause: Cause = "floor"
    against: Resource | None = None
    if launch_us >= work_us:
        kind, cause, factor = "latency", "launch", launch_us / work_us if work_us else None
    elif waves is not None and waves.blocks < waves.sm_count and kind != "memory":
        kind, cause, factor = "latency", "few blocks", waves.sm_count / waves.blocks
    else:
        # The lower bounds are sorted, largest first.
        against = next((name for name in bound.floors if KINDS[name] != kind), None)
        factor = bound.us / bound.floors[against] if against is not None else None
    return Limit(
        kind=kind,
        cause=cause,
        resource=bound.binding,
        against=against,
        factor=factor,
        launch_us=launch_us,
        work_us=work_us,
    )
