"""Predicted gain of a fused workload over separate kernels for its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebench.explanation.advice import Forecaster, PredictedBest
from tunebench.workload import Workload

__all__ = ["FusionGain", "fusion_gain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGain:
    """The shortest predicted times of a fused workload and of its parts.

    Attributes:
        whole: Time of the fused workload.
        parts: Time of each part. All but the first have warm caches, which is optimistic where they read more
            than the part before has written.
        workloads: The parts.
    """

    whole: PredictedBest
    parts: tuple[PredictedBest, ...]
    workloads: tuple[Workload, ...]

    @property
    def parts_us(self) -> float:
        """Time of all parts, one after the other."""
        return sum(part.us for part in self.parts)

    @property
    def gain(self) -> float:
        """Predicted speedup of the fused workload."""
        return self.parts_us / self.whole.us

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary."""
        return {
            "gain": self.gain,
            "whole_us": self.whole.us,
            "parts_us": self.parts_us,
            "parts": [
                {"workload": str(workload), "us": best.us, "variant": best.variant}
                for workload, best in zip(self.workloads, self.parts, strict=True)
            ],
        }


def fusion_gain(workload: Workload, forecaster: Forecaster) -> FusionGain | None:
    """Return the gain of fusion; None if nothing is fused, or no variant supports a part."""
    workloads = workload.unfused()
    # A part finds the output of the part before it in the cache, up to the size of the cache.
    warm = Forecaster(device=forecaster.device, cache="warm")
    predictions = [(warm if index else forecaster).best(part) for index, part in enumerate(workloads)]
    whole, parts = forecaster.best(workload), tuple(best for best in predictions if best is not None)
    if whole is None or not workloads or len(parts) < len(workloads):
        return None
    return FusionGain(whole=whole, parts=parts, workloads=workloads)
