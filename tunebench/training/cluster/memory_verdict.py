"""Whether a predicted memory fits: interval, probability and verdict (`MemoryVerdict`).

The logarithm of measured over predicted memory is taken as normal around 0. Its spread is that of published
peaks, to which no constant was fitted (`python -m benchmarks.predict_memory`), all of one framework on one
cluster; for frameworks without published peaks it is a judgement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from tunebench.training.cluster.framework_memory import Framework

__all__ = ["MemoryVerdict", "memory_verdict"]

MEASURED: Mapping[Framework, float] = {"deepspeed": 0.065}
"""Root mean square of the logarithm of measured over predicted memory, by framework. That of the published
peaks is 0.056; it is widened because they are of few shapes and one cluster."""

ASSUMED = 0.10
"""The same for frameworks without published peaks. A judgement."""

LEAST, LIKELY = 0.5, 0.9
"""Below the first probability, a plan does not fit; from the second on it fits; between them it is tight."""

COVERAGE = 0.9
"""Probability of the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """Whether a plan fits a device.

    Attributes:
        low: Lower end of the 90 % interval of the memory that a device needs, in bytes.
        high: Upper end of it.
        usable: Memory that programs can use, in bytes.
        probability: Probability that the plan fits.
    """

    low: int
    high: int
    usable: int
    probability: float

    @property
    def name(self) -> Literal["fits", "tight", "does not fit"]:
        """Verdict: it fits from 90 % on, and does not fit below 50 %."""
        if self.probability < LEAST:
            return "does not fit"
        return "fits" if self.probability >= LIKELY else "tight"


def memory_verdict(needed: int, usable: int, framework: Framework) -> MemoryVerdict:
    """Return whether a predicted memory fits a device.

    Args:
        needed: Predicted memory that the device needs, in bytes (`DeviceMemory.needed`).
        usable: Memory that programs can use, in bytes.
        framework: Framework whose buffers are in the prediction.
    """
    errors = NormalDist(0.0, MEASURED.get(framework, ASSUMED))
    factor = math.exp(errors.inv_cdf(0.5 + COVERAGE / 2))
    return MemoryVerdict(
        low=round(needed / factor),
        high=round(needed * factor),
        usable=usable,
        probability=errors.cdf(math.log(usable / needed)),
    )
