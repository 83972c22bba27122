"""Explanation of a configuration's time (`explain`): its limiting resource, and changes that would save time.

The terms are those of NVIDIA's guides: an operation is math limited, memory limited or latency limited; its
arithmetic intensity is compared with the ops:byte ratio of the device; tile and wave quantization waste work.

Source: NVIDIA, "GPU Performance Background User's Guide" and "Matrix Multiplication Background User's Guide",
2023; the roofline is that of Williams, Waterman and Patterson, CACM 52(4), 2009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebench._lazy import lazy_names

if TYPE_CHECKING:
    from tunebench.explanation.advice import Advice, Forecaster, PredictedBest, WorkloadChange, advise
    from tunebench.explanation.alignment import Alignment, alignments
    from tunebench.explanation.analysis import Explanation, MeasuredTime, Shares, explain, explain_choice
    from tunebench.explanation.fusion import FusionGain
    from tunebench.explanation.grid import BlockResources, Waves
    from tunebench.explanation.limit import Limit
    from tunebench.explanation.roofline import Ceiling, Roofline

__all__ = [
    "Advice",
    "Alignment",
    "BlockResources",
    "Ceiling",
    "Explanation",
    "Forecaster",
    "FusionGain",
    "Limit",
    "MeasuredTime",
    "PredictedBest",
    "Roofline",
    "Shares",
    "Waves",
    "WorkloadChange",
    "advise",
    "alignments",
    "explain",
    "explain_choice",
]

_LAZY = {
    "Advice": "advice",
    "Alignment": "alignment",
    "BlockResources": "grid",
    "Ceiling": "roofline",
    "Explanation": "analysis",
    "Forecaster": "advice",
    "FusionGain": "fusion",
    "Limit": "limit",
    "MeasuredTime": "analysis",
    "PredictedBest": "advice",
    "Roofline": "roofline",
    "Shares": "analysis",
    "Waves": "grid",
    "WorkloadChange": "advice",
    "advise": "advice",
    "alignments": "alignment",
    "explain": "analysis",
    "explain_choice": "analysis",
}
"""Module of each name, imported at its first use: forecasts are used without the search and the database."""

__getattr__ = lazy_names(__name__, _LAZY)
