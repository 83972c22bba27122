"""Clocks and power limits of a GPU as parameters of a configuration, restored after each measurement.

Locked clocks and power limits outlast the process that set them. A child process therefore waits for the end
of this one, by whatever signal, and restores what is still set.

Source: NVML reference, nvmlDeviceSetGpuLockedClocks, nvmlDeviceSetMemoryLockedClocks,
nvmlDeviceSetPowerManagementLimit: they need root or the capability of an administrator.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tunebench._child import WORKING_FOLDER, absolute_environment, python_command
from tunebench.errors import EnvironmentFault

__all__ = ["SETTINGS", "GpuSettings", "guard", "settings_of"]

SETTINGS = ("sm_clock_mhz", "memory_clock_mhz", "power_limit_w")
"""Names of parameters that set the GPU: locked clocks in MHz, and the power limit in W."""


def settings_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings among the parameters of a configuration."""
    return {name: float(config[name]) for name in SETTINGS if name in config}


class GpuSettings:
    """Sets and restores clocks and power limit of one GPU.

    Args:
        pci_bus_id: Bus address of the GPU.
    """

    def __init__(self, pci_bus_id: str) -> None:
        self._pci_bus_id = pci_bus_id
        self._guard: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def applied(self, config: Mapping[str, Any]) -> Iterator[None]:
        """Apply the settings of a configuration within the context; without any nothing is called.

        Clocks are unlocked afterwards, also if they were locked before, which NVML does not report.

        Args:
            config: The configuration.

        Raises:
            EnvironmentFault: NVML is missing, or this process may not change the GPU.
        """
        settings = settings_of(config)
        if not settings:
            yield
            return
        device = _Nvml(self._pci_bus_id)
        before = {name: device.power_limit_w() for name in settings if name == "power_limit_w"}
        restored = {name: before.get(name) for name in settings}
        self._tell(restored)
        try:
            device.set(settings)
            yield
        finally:
            device.restore(restored)
            self._tell({})

    def close(self) -> None:
        """End the process that waits for the end of this one."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def _tell(self, restored: Mapping[str, float | None]) -> None:
        """Tell the waiting process what it would have to restore; it is started at the first call."""
        if self._guard is None:
            main = "from tunebench.measure.gpu_settings import guard; guard(sys.argv[1])"
            self._guard = subprocess.Popen(
                python_command(main, self._pci_bus_id),
                stdin=subprocess.PIPE,
                text=True,
                cwd=WORKING_FOLDER,
                env=absolute_environment(),
                start_new_session=True,  # a signal to the group of this process does not reach it
            )
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(dict(restored)) + "\n")
            self._guard.stdin.flush()


def guard(pci_bus_id: str) -> None:
    """Restore what another process has set and not restored at its end; reads from it until then.

    Args:
        pci_bus_id: Bus address of the GPU.
    """
    restored: dict[str, float | None] = {}
    for line in sys.stdin:
        restored = json.loads(line)
    if restored:
        _Nvml(pci_bus_id).restore(restored)


class _Nvml:
    """The settings of one GPU in NVML."""

    def __init__(self, pci_bus_id: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise EnvironmentFault(
                f"{', '.join(SETTINGS)} are set by NVML: run pip install nvidia-ml-py"
            ) from None
        self._nvml: Any = pynvml
        with self._explained("finding the GPU"):
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)

    def power_limit_w(self) -> float:
        """Return the power limit in W."""
        with self._explained("reading the power limit"):
            return float(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle)) / 1e3

    def set(self, settings: Mapping[str, float]) -> None:
        """Set clocks in MHz and the power limit in W."""
        for name, value in settings.items():
            with self._explained(f"setting {name}={value:.0f}"):
                self._set(name, value)

    def restore(self, restored: Mapping[str, float | None]) -> None:
        """Unlock clocks and restore the power limit, all of them even if one fails."""
        for name, value in restored.items():
            with contextlib.suppress(self._nvml.NVMLError):
                if name == "power_limit_w" and value is not None:
                    self._set(name, value)
                elif name == "sm_clock_mhz":
                    self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
                elif name == "memory_clock_mhz":
                    self._nvml.nvmlDeviceResetMemoryLockedClocks(self._handle)

    def _set(self, name: str, value: float) -> None:
        if name == "power_limit_w":
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, round(1e3 * value))
            return
        clock = "Gpu" if name == "sm_clock_mhz" else "Memory"
        lock = getattr(self._nvml, f"nvmlDeviceSet{clock}LockedClocks")
        lock(self._handle, round(value), round(value))

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise EnvironmentFault(
                f"NVML: {error}, {action}; clocks and power limits need root or CAP_SYS_ADMIN and a GPU that "
                f"supports them: leave {', '.join(SETTINGS)} out of the space otherwise"
            ) from error
