"""What limits a configuration, and by how much: math, memory, on-chip memory, or latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunebench.bound import Bound, Resource
from tunebench.explanation.grid import Waves
from tunebench.forecast.utilisation import LAUNCH_US

__all__ = ["KINDS", "Cause", "Kind", "Limit", "limit"]

Kind = Literal["math", "memory", "on-chip memory", "latency"]
"""What a configuration waits for.

NVIDIA's guides know three, and memory is all of it. Here what lies inside the chip has a name of its own:
another tile relieves it, faster memory does not.
"""

Cause = Literal["floor", "launch", "few blocks"]
"""Why it does: the highest floor, launching that takes longer than working, or SMs without a block."""

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
"""By resource of the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What limits a configuration, and by how much.

    Attributes:
        kind: What it waits for.
        cause: Why: see `Cause`.
        resource: The resource of the highest floor, whatever the kind.
        against: The resource of the highest floor of another kind; None if there is none, and for latency.
        factor: The one floor over the other, launching over working, or SMs over blocks. None if there is
            nothing to compare with.
        launch_us: What the launches cost, about.
        work_us: Expected time without them.
    """

    kind: Kind
    cause: Cause
    resource: Resource
    against: Resource | None = None
    factor: float | None
    launch_us: float
    work_us: float


def limit(bound: Bound, predicted_us: float, launches: int, waves: Waves | None) -> Limit:
    """Return what limits a configuration.

    Latency does where launching takes longer than working, or where blocks are too few to fill the SMs and
    it is the SMs that have most to do.

    Args:
        bound: Of the configuration.
        predicted_us: Its expected time.
        launches: Kernels that run one after the other; 0 where a launch costs nothing.
        waves: How its blocks fill the device, if it is launched in blocks.
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
        # Floors come highest first.
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
