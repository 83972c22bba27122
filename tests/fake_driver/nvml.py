"""A fake of `pynvml`: one GPU of constant power whose energy counter follows the wall time."""

from __future__ import annotations

import time
from types import ModuleType

__all__ = ["WATTS", "FakeNvml"]

WATTS = 250.0
STEP_S = 0.02
"""Time between updates of the energy, in seconds."""


class FakeNvml(ModuleType):
    """The used part of pynvml."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """Any failure of NVML."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self._began = time.monotonic()
        self.calls: list[list[float | str]] = []

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:  # noqa: N802
        return bus

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 2619}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return round(1e3 * WATTS)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        updates = int((time.monotonic() - self._began) / STEP_S)
        return round(1e3 * WATTS * STEP_S * updates)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        return 41

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, low: int, high: int) -> None:  # noqa: N802
        self.calls.append(["lock", low, high])

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:  # noqa: N802
        self.calls.append(["reset"])

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.95.05"
