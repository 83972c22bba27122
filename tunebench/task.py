"""One question for an executor: what becomes of this configuration on this device?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebench.device import Device
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One configuration of one variant, to be compiled, verified and timed.

    Attributes:
        variant: The implementation.
        workload: The problem.
        config: A valid point of the variant's space.
        device: Where it is to run, or what it is to be compiled for.
        seed: Seed of the random inputs it is verified and timed on.
        predicted_us: Expected time, for devices that are not here.
        interval_us: What nine of ten times lie between, likewise.
        thorough: Whether to take many samples, as for finalists, and never to abort.
        prune: Whether to leave it out if its bound, now that it is compiled, exceeds the incumbent.
    """

    variant: Variant[Any]
    workload: Workload
    config: Config
    device: Device
    seed: int = 0
    predicted_us: float | None = None
    interval_us: tuple[float, float] | None = None
    thorough: bool = False
    prune: bool = False
