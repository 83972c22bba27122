"""What a fused workload is predicted to gain over its parts, each by kernels of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebench.explanation.advice import Forecaster, PredictedBest
from tunebench.workload import Workload

__all__ = ["FusionGain", "fusing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGain:
    """The least times that are predicted for a whole and for its parts.

    Attributes:
        whole: Of the fused workload.
        parts: Of each part; for all but the first with warm caches, which flatters them where they read more
            than what the one before has written.
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
        """How many times as fast the fused workload is."""
        return self.parts_us / self.whole.us

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "gain": self.gain,
            "whole_us": self.whole.us,
            "parts_us": self.parts_us,
            "parts": [
                {"workload": str(workload), "us": best.us, "variant": best.variant}
                for workload, best in zip(self.workloads, self.parts, strict=True)
            ],
        }


def fusing(workload: Workload, forecaster: Forecaster) -> FusionGain | None:
    """Return what fusing gains; None where nothing is fused, or no variant can do a part."""
    workloads = workload.unfused()
    # A part finds what was written just before it in the cache, as far as that holds it.
    warm = Forecaster(device=forecaster.device, cache="warm")
    found = [(warm if index else forecaster).best(part) for index, part in enumerate(workloads)]
    whole, parts = forecaster.best(workload), tuple(best for best in found if best is not None)
    if whole is None or not workloads or len(parts) < len(workloads):
        return None
    return FusionGain(whole=whole, parts=parts, workloads=workloads)
