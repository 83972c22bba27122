"""The result of a prediction: expected time, 90 % interval, lower bound, limiting resource and basis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tunebench._dataframe import Tabular
from tunebench._figure import duration, significant
from tunebench._notebook import SHOWN_ROWS, html_grid, html_table
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Basis", "Binding", "Prediction", "Predictions"]

Basis = Literal["interpolated", "extrapolated"]
"""How a prediction relates to the measured data.

``"interpolated"``: similar workloads and devices were measured. ``"extrapolated"``: the workload or the
device is outside the measured range, and the interval is wider.
"""

Binding = Literal["tensor pipe", "fma pipe", "dram", "launch"]
"""The limiting resource: a unit of the device, or the launch overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time of a workload on a device, with the library kernels that a framework would choose.

    Attributes:
        workload: The workload.
        device: The device.
        time_us: Expected time; never below `bound_us`.
        low_us: Lower end of the 90 % prediction interval; never below `bound_us`.
        high_us: Upper end of the 90 % prediction interval.
        bound_us: Lower bound of any kernel that executes the textbook algorithm, even if caches hold its
            inputs.
        utilisation: Share of the peak: FLOPs at the sustained rate, or bytes at the memory bandwidth, divided
            by the expected time. It may exceed 1 if caches serve part of the bytes.
        binding: Limiting resource.
        basis: Whether similar workloads and devices were measured.
        because: Reason for the basis, in words; empty if there is nothing to explain.
    """

    workload: Workload
    device: Device
    time_us: float
    low_us: float
    high_us: float
    bound_us: float
    utilisation: float
    binding: Binding
    basis: Basis
    because: str

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        low_us, high_us = significant(self.low_us), significant(self.high_us)
        rows = (
            ("time", f"{significant(self.time_us)} us, 90 % prediction interval {low_us} to {high_us} us"),
            ("lower bound", f"{significant(self.bound_us)} us"),
            ("limiting resource", self.binding),
            ("basis", self.basis),
            ("because", self.because or None),
        )
        return html_table(f"{self.workload} on {self.device.name}", rows)

    def __post_init__(self) -> None:
        # Callers rely on this order, for example to draw intervals and to compute gaps.
        if not 0 <= self.bound_us <= self.low_us <= self.time_us <= self.high_us:
            raise InputError(f"expected 0 <= bound_us <= low_us <= time_us <= high_us, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions(Tabular):
    """Predictions of many workloads on one device, as columns. Attributes are those of `Prediction`."""

    workloads: tuple[Workload, ...]
    device: Device
    time_us: Array
    low_us: Array
    high_us: Array
    bound_us: Array
    utilisation: Array
    binding: tuple[Binding, ...]
    basis: tuple[Basis, ...]
    because: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.workloads)

    def __getitem__(self, index: int) -> Prediction:
        """Return the prediction of one workload."""
        return Prediction(
            workload=self.workloads[index],
            device=self.device,
            time_us=float(self.time_us[index]),
            low_us=float(self.low_us[index]),
            high_us=float(self.high_us[index]),
            bound_us=float(self.bound_us[index]),
            utilisation=float(self.utilisation[index]),
            binding=self.binding[index],
            basis=self.basis[index],
            because=self.because[index],
        )

    def __iter__(self) -> Iterator[Prediction]:
        return (self[index] for index in range(len(self)))

    def _columns(self) -> Mapping[str, Sequence[object]]:
        numbers = ("time_us", "low_us", "high_us", "bound_us", "utilisation")
        return {
            "workload": [str(workload) for workload in self.workloads],
            "device": [self.device.key] * len(self),
            **{name: getattr(self, name).tolist() for name in numbers},
            **{name: getattr(self, name) for name in ("binding", "basis", "because")},
        }

    def _repr_html_(self) -> str:
        """Return the first predictions for notebooks."""
        rows = (
            (
                prediction.workload,
                duration(prediction.time_us),
                f"{duration(prediction.low_us)} to {duration(prediction.high_us)}",
                prediction.binding,
                prediction.basis,
            )
            for prediction in map(self.__getitem__, range(min(SHOWN_ROWS, len(self))))
        )
        columns = ("workload", ">time", ">90 % interval", "limiting resource", "basis")
        return html_grid(*columns, rows=rows, caption=f"{len(self)} workloads on {self.device.name}")
