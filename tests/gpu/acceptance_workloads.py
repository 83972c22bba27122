"""Workloads of the acceptance steps `verify`, `sanitize`, `measure`, `compare` and `record`.

They are listed in `acceptance_workloads.toml`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tunebench.workloads import parse

__all__ = ["MEASURED", "RECORDED", "SANITIZED", "VERIFIED", "measured"]

_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

VERIFIED: list[str] = [
    text.format(dtype=dtype)
    for group in _LISTED["verified"]
    for text in group["workloads"]
    for dtype in group["dtypes"]
]
"""Workloads that run with every variant that supports them."""

SANITIZED = [text for text in VERIFIED if "=1024" not in text and "=4096" not in text]
"""Workloads that are small enough for compute-sanitizer."""

MEASURED: dict[str, int] = {str(parse(text)): trials for text, trials in _LISTED["measured"]}
"""Number of trials of each workload to tune."""

PART_TRIALS = 30
"""Trials of each unfused part of a fused workload."""

RECORDED: list[tuple[str, str, int]] = [(*entry,) for entry in _LISTED["recorded"]]
"""Workload, variant and most configurations (at random) of each search space to record."""


def measured() -> dict[str, int]:
    """Return the trials of each workload to tune; the unfused parts of a fused workload follow it."""
    trials: dict[str, int] = {}
    for text, count in MEASURED.items():
        trials[text] = count
        for part in map(str, parse(text).unfused()):
            trials.setdefault(part, MEASURED.get(part, PART_TRIALS))
    return trials
