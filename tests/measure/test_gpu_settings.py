"""Clocks and power limits as parameters, on a fake of NVML that logs its calls; restored after any end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import until
from tunebench.errors import EnvironmentFault
from tunebench.measure.gpu_settings import GpuSettings, settings_of

BUS = "0000:01:00.0"
FAKE = """
import os
class NVMLError(Exception): pass
def _log(*parts):
    with open(os.environ["NVML_LOG"], "a") as file:
        file.write(" ".join(map(str, parts)) + "\\n")
def nvmlInit(): pass
def nvmlDeviceGetHandleByPciBusId(bus): return bus
def nvmlDeviceGetPowerManagementLimit(handle): return 400_000
def nvmlDeviceSetPowerManagementLimit(handle, limit):
    if os.environ.get("NVML_REFUSES"): raise NVMLError("Insufficient Permissions")
    _log("power", limit)
def nvmlDeviceSetGpuLockedClocks(handle, low, high): _log("sm", low, high)
def nvmlDeviceSetMemoryLockedClocks(handle, low, high): _log("memory", low, high)
def nvmlDeviceResetGpuLockedClocks(handle): _log("sm reset")
def nvmlDeviceResetMemoryLockedClocks(handle): _log("memory reset")
"""
ALL = {"sm_clock_mhz": 1200, "memory_clock_mhz": 2619, "power_limit_w": 250, "block": 128}
SET = ["sm 1200 1200", "memory 2619 2619", "power 250000"]
RESTORED = ["sm reset", "memory reset", "power 400000"]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    (tmp_path / "pynvml.py").write_text(FAKE)
    monkeypatch.setenv("NVML_LOG", str(tmp_path / "log"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def read() -> list[str]:
        path = tmp_path / "log"
        return path.read_text().splitlines() if path.exists() else []

    return read


def test_settings_are_applied_and_restored(log: Callable[[], list[str]]) -> None:
    assert settings_of(ALL) == {"sm_clock_mhz": 1200.0, "memory_clock_mhz": 2619.0, "power_limit_w": 250.0}
    settings = GpuSettings(BUS)
    with settings.applied(ALL):
        assert log() == SET
    assert log() == SET + RESTORED
    settings.close()
    assert log() == SET + RESTORED  # the waiting process had nothing left to restore
    sys.modules.pop("pynvml")


def test_configurations_without_settings_call_nothing(log: Callable[[], list[str]]) -> None:
    with GpuSettings(BUS).applied({"block": 128}):
        assert "pynvml" not in sys.modules
    assert log() == []


def test_settings_are_restored_if_the_measurement_fails(log: Callable[[], list[str]]) -> None:
    settings = GpuSettings(BUS)
    with pytest.raises(ZeroDivisionError), settings.applied({"sm_clock_mhz": 1200}):
        _ = 1 / 0
    settings.close()
    assert log() == ["sm 1200 1200", "sm reset"]
    sys.modules.pop("pynvml")


def test_a_refusal_says_what_is_needed(log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVML_REFUSES", "1")
    settings = GpuSettings(BUS)
    with pytest.raises(EnvironmentFault, match=r"Insufficient Permissions.*need root"), settings.applied(ALL):
        pytest.fail("it was refused")
    settings.close()
    assert log()[:2] == SET[:2]
    assert log()[-2:] == RESTORED[:2]  # what was set before is restored
    sys.modules.pop("pynvml")


def test_nvml_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnvironmentFault, match="pip install nvidia-ml-py"), GpuSettings(BUS).applied(ALL):
        pytest.fail("it is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_the_gpu_as_it_was(
    end: signal.Signals, log: Callable[[], list[str]], tmp_path: Path
) -> None:
    program = (
        f"import sys, time; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tunebench.measure.gpu_settings import GpuSettings\n"
        f"with GpuSettings({BUS!r}).applied({ALL!r}):\n"
        "    print('set', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process: Any = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "set\n"
    assert log() == SET
    os.kill(process.pid, end)
    process.wait()
    process.stdout.close()
    until(lambda: log() == SET + RESTORED, "the restored settings", limit_s=60)
