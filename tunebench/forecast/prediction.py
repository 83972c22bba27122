"""What a prediction says: a time, how sure it is, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Basis", "Binding", "Prediction", "Predictions"]

Basis = Literal["interpolated", "extrapolated"]
"""What a prediction rests on.

``"interpolated"``: problems and devices like this one were measured. ``"extrapolated"``: the problem or the
device lies outside of what was measured, and the interval is wider.
"""

Binding = Literal["tensor pipe", "fma pipe", "dram", "launch"]
"""What takes most of the time: a unit of the device, or what a launch costs whatever it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How long a workload will take on a device, run by the kernels a framework would choose.

    Attributes:
        workload: What is computed.
        device: Where.
        time_us: Expected time; never below `bound_us`.
        low_us: Nine of ten real times lie between this and `high_us`; never below `bound_us`.
        high_us: The other end.
        bound_us: What no kernel that does the textbook's operations beats, even if caches hold its inputs.
        utilisation: Share of the peak that is reached: operations at the rate that the device sustains, or
            bytes at the bandwidth of its memory, over the expected time. Caches may serve more than that.
        binding: What takes most of the time.
        basis: Whether it lies within what was measured.
        because: What the basis is, in words.
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

    def __post_init__(self) -> None:
        if not 0 <= self.bound_us <= self.low_us <= self.time_us <= self.high_us:
            raise InputError(f"a prediction's bound, low, time and high must not fall; got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predictions of many workloads on one device, as columns; attributes are those of `Prediction`."""

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
        """Return one prediction."""
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
