"""Clocks, throttling and power of a GPU during measurement; missing readings are reported, not guessed."""

from __future__ import annotations

from typing import Any

__all__ = ["Clock"]

# Source: nvml.h, nvmlClocksEventReasons; the idle bit is omitted, because it is set between samples.
_REASONS = {
    0x002: "application clocks",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks",
}


class Clock:
    """Readings of one GPU through NVML, if NVML is available.

    Args:
        pci_bus_id: Bus address of the GPU.

    Attributes:
        problem: Reason why no reading is available, or None.
    """

    def __init__(self, pci_bus_id: str) -> None:
        self.problem: str | None = None
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self.problem = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
        except pynvml.NVMLError as error:
            self.problem = f"NVML: {error}"
            return
        self._nvml = pynvml

    def sm_mhz(self) -> float | None:
        """Return the current clock of the SMs in MHz, or None if it cannot be read."""
        if self._nvml is None:
            return None
        return self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def memory_mhz(self) -> float | None:
        """Return the current clock of the memory in MHz, or None if it cannot be read."""
        return None if self._nvml is None else self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM)

    def energy_j(self) -> float | None:
        """Return the energy since the driver was loaded in J, or None before Volta."""
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def power_w(self) -> float | None:
        """Return the current power in W, or None if it cannot be read."""
        milliwatts = self._read("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def throttled_by(self) -> frozenset[str]:
        """Return the reasons that currently lower the clock."""
        mask = int(self._read("nvmlDeviceGetCurrentClocksThrottleReasons") or 0)
        return frozenset(reason for bit, reason in _REASONS.items() if mask & bit)

    def surroundings(self) -> dict[str, Any]:
        """Return power limit and draw (W) and temperature (degrees Celsius), where they can be read."""
        if self._nvml is None:
            return {"clocks": f"not read: {self.problem}"}
        limit_mw = self._read("nvmlDeviceGetEnforcedPowerLimit")
        celsius = self._read("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)
        facts = {
            "power_limit_w": limit_mw and limit_mw / 1e3,
            "power_w": self.power_w(),
            "temperature_c": celsius,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def driver(self) -> str | None:
        """Return the version of the display driver, such as ``"580.95.05"``."""
        if self._nvml is None:
            return None
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def _read(self, name: str, *arguments: Any) -> float | None:
        """Return one reading of NVML, or None if this GPU does not support it."""
        if self._nvml is None:
            return None
        try:
            return float(getattr(self._nvml, name)(self._handle, *arguments))
        except self._nvml.NVMLError:
            return None
