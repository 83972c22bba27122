"""Hand-made forests and experts with known values, and workloads that are only predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunebench.device import Device
from tunebench.forecast.library.forest import Forest
from tunebench.forecast.library.kernel import Arithmetic
from tunebench.forecast.library.model import Expert, Spread
from tunebench.forecast.library.roofline_model import coordinates
from tunebench.workload import Reference, Tolerance, Workload


def constant(value: float) -> Forest:
    """Return a forest of one empty leaf and a base value."""
    return Forest(
        base=value,
        roots=np.array([0], dtype=np.int32),
        feature=np.array([-1], dtype=np.int8),
        threshold=np.zeros(1, dtype=np.float32),
        left=np.zeros(1, dtype=np.int16),
        right=np.zeros(1, dtype=np.int16),
        depth=0,
    )


def forked() -> Forest:
    """Return two trees over a base of 100.

    The first tree compares column 0 with 1 (10 at or below it), then column 1 with -2 (20 or 30). The second
    tree is a leaf of 0.5.
    """
    return Forest(
        base=100.0,
        roots=np.array([0, 5], dtype=np.int32),
        feature=np.array([0, -1, 1, -1, -1, -1], dtype=np.int8),
        threshold=np.array([1.0, 10.0, -2.0, 20.0, 30.0, 0.5], dtype=np.float32),
        left=np.array([1, 0, 1, 0, 0, 0], dtype=np.int16),
        right=np.array([2, 0, 2, 0, 0, 0], dtype=np.int16),
        depth=2,
    )


def knowing(
    device: Device, excess: float, *, columns: int = 1, arithmetic: Arithmetic = "bf16", within: float = 10.0
) -> Expert:
    """Return an expert of a device where every kernel takes ``exp(excess)`` times its roofline time."""
    return Expert(
        device=device.name,
        coordinates=coordinates(device, arithmetic),
        forest=constant(excess),
        near=Spread(-0.1, 0.2),
        least=np.full(columns, -within),
        most=np.full(columns, within),
        least_us=1e-3,
    )


class NeverComputed(Workload):
    """A workload of a user whose time is predicted, but whose result is never computed."""

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        raise AssertionError("a prediction computes nothing")

    def tolerance(self) -> Tolerance:
        raise AssertionError("a prediction computes nothing")
