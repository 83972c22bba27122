"""Workloads of the acceptance steps.

They are listed in `acceptance_workloads.toml`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tunebench.device import Device
from tunebench.kernels import variants
from tunebench.variant import GpuVariant, Variant
from tunebench.workloads import parse

__all__ = [
    "HEADLINE",
    "MEASURED",
    "RECORDED",
    "REFERENCES",
    "SANITIZED",
    "SANITIZED_FIRST",
    "VERIFIED",
    "WGMMA",
    "measured",
    "small_workloads",
    "smoke_workloads",
]

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


SANITIZED_FIRST: list[str] = _LISTED["sanitized_first"]
"""Variants that compute-sanitizer checks first: one of each way in which Hopper's instructions are used."""

SMALL_WORKLOADS = 2
"""Workloads of each variant to run under a checker."""


def small_workloads(variant: Variant[Any], device: Device) -> list[str]:
    """Return workloads of a variant that are small enough for compute-sanitizer."""
    supported = (text for text in SANITIZED if variant.refuses(parse(text), device) is None)
    return [text for text, _ in zip(supported, range(SMALL_WORKLOADS), strict=False)]


def smoke_workloads(device: Device) -> dict[str, str]:
    """Return a workload of each GPU variant that supports the device, by the key of the variant."""
    listed = [*WGMMA, *HEADLINE, *VERIFIED]
    texts = {}
    for variant in variants():
        if isinstance(variant, GpuVariant):
            text = next((text for text in listed if variant.refuses(parse(text), device) is None), None)
            texts |= {} if text is None else {variant.key: text}
    return texts


LEAST_FLOPS = 1e5


def _one_of_each(texts: list[str]) -> list[str]:
    """Return the smallest workload above `LEAST_FLOPS` of each operator and direction, in f16."""
    first_texts: dict[tuple[str, str], str] = {}
    for workload in sorted(map(parse, texts), key=lambda workload: workload.flops()):
        if workload.dtype == "f16" and workload.flops() > LEAST_FLOPS:
            first_texts.setdefault((workload.operator, getattr(workload, "direction", "")), str(workload))
    return list(first_texts.values())


REFERENCES = _one_of_each(SANITIZED)
"""Workloads whose reference on the GPU is compared with that on the host."""

WGMMA: list[str] = _LISTED["wgmma"]
"""Workloads of medium size: every variant that uses wgmma supports one of them."""

HEADLINE: list[str] = _LISTED["headline"]
"""Workloads whose times are compared with the libraries, the most important first."""

MEASURED: dict[str, int] = {str(parse(text)): trials for text, trials in _LISTED["measured"]}
"""Number of trials of each workload to tune."""

PART_TRIALS = 30
"""Trials of each unfused part of a fused workload."""

RECORDED: list[tuple[str, str]] = [(*entry,) for entry in _LISTED["recorded"]]
"""Workload and variant of each whole search space to record."""


def measured() -> dict[str, int]:
    """Return the trials of each workload to tune; the unfused parts of a fused workload follow it."""
    trials: dict[str, int] = {}
    for text, count in MEASURED.items():
        trials[text] = count
        for part in map(str, parse(text).unfused()):
            trials.setdefault(part, MEASURED.get(part, PART_TRIALS))
    return trials
