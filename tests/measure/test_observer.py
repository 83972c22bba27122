"""Observers: NVML's power and energy on a fake clock, and users' observers in a runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import measured
from tunebench.errors import InputError
from tunebench.measure.observer import NVML, NvmlObserver, ObservedSamples, load_observer, metric_names
from tunebench.outcome import Measured, WrongResult

RUN_US = 200.0


class FakeGpu:
    """A GPU of constant power whose readings are updated every `step_s`, and its time."""

    problem: str | None = None

    def __init__(self, watts: float, *, step_s: float = 0.1, has_energy: bool = True) -> None:
        self._watts, self._step_s, self._has_energy = watts, step_s, has_energy
        self.seconds = 0.0
        self.runs = 0

    def now(self) -> float:
        return self.seconds

    def repeat(self, count: int, during: Callable[[], None]) -> None:
        self.runs += count
        self.seconds += count * RUN_US / 1e6
        during()

    def energy_j(self) -> float | None:
        updates = int(self.seconds / self._step_s)
        return self._watts * self._step_s * updates if self._has_energy else None

    def power_w(self) -> float:
        return self._watts + int(self.seconds / self._step_s) % 2

    def sm_mhz(self) -> float:
        return 1410.0

    def memory_mhz(self) -> float | None:
        return None


def observe(gpu: Any, **changes: Any) -> dict[str, float]:
    return NvmlObserver(gpu, now=gpu.now, **changes).observe(gpu.repeat, RUN_US)


def test_energy_is_integrated_between_updates() -> None:
    gpu = FakeGpu(250.0)
    values = observe(gpu)
    # Updates are noticed at the end of a batch of 5 ms, and the first and the last are a second apart.
    assert values["power_w"] == pytest.approx(250.0, rel=0.01)
    assert values["energy_j"] == pytest.approx(250.0 * RUN_US / 1e6, rel=0.01)
    assert values["power_updates_hz"] == pytest.approx(10.0, rel=0.01)
    assert values["clock_mhz"] == 1410.0
    assert "memory_clock_mhz" not in values  # it has no reading
    assert 1.3 < gpu.seconds < 2.0
    assert set(values) <= set(NvmlObserver.metrics)


def test_power_is_averaged_without_an_energy_counter() -> None:
    values = observe(FakeGpu(99.5, has_energy=False))
    assert values["power_w"] == pytest.approx(100.0, rel=0.01)
    assert values["energy_j"] == pytest.approx(100.0 * RUN_US / 1e6, rel=0.01)
    assert values["power_updates_hz"] == pytest.approx(10.0, rel=0.2)


def test_an_energy_that_is_never_updated_ends_the_observation() -> None:
    gpu = FakeGpu(250.0, step_s=1e9)
    assert observe(gpu, seconds=0.5)["power_w"] == pytest.approx(250.0)
    assert gpu.seconds < 3.0


def test_a_gpu_without_nvml_is_a_reason_and_no_failure() -> None:
    gpu = FakeGpu(250.0)
    gpu.problem = "nvidia-ml-py is not installed"
    observed = ObservedSamples([NvmlObserver(gpu, now=gpu.now)])  # type: ignore[arg-type]
    observed.before()
    observed.after()
    observed.repeat(gpu.repeat, RUN_US)
    outcome = observed.added_to(measured(2.0))
    assert isinstance(outcome, Measured)
    assert outcome.metrics == {}
    assert "nvidia-ml-py is not installed" in outcome.conditions["not_observed"][0]


# -- observers of users --------------------------------------------------------------------------------------

SOURCE = """
class Counting:
    metrics = ("samples", "share")
    calls = []

    def before_samples(self):
        self.calls.append("before")

    def after_samples(self):
        self.calls.append("after")
        return {"samples": len(self.calls), "share": SHARE}

OBSERVER = Counting()
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(source: str = SOURCE, share: str = "0.5") -> str:
        path = tmp_path / f"observer_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source.replace("SHARE", share))
        return str(path)

    return write


def test_observers_are_called_around_the_samples(file: Callable[..., str]) -> None:
    observed = ObservedSamples([load_observer(file())])
    observed.before()
    observed.after()
    assert observed.values == {"samples": 2.0, "share": 0.5}
    assert observed.added_to(measured(2.0)) == dataclasses.replace(
        measured(2.0), metrics={"samples": 2.0, "share": 0.5}
    )
    wrong = WrongResult(reason="y[0] is 1")
    assert observed.added_to(wrong) is wrong


@pytest.mark.parametrize(
    ("share", "problem"), [("1 / 0", "division by zero"), ("float('nan')", "share is nan")]
)
def test_an_observer_that_fails_leaves_its_values_out(
    file: Callable[..., str], share: str, problem: str
) -> None:
    observed = ObservedSamples([load_observer(file(share=share))])
    observed.after()
    assert "share" not in observed.values
    assert problem in observed.problems[0]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = ", "observer .*SyntaxError"),
        ("OBSERVER = 3", "OBSERVER must have metrics, before_samples, after_samples"),
        ("import sys; sys.exit(3)", "observer "),
    ],
)
def test_a_file_without_an_observer_is_refused(file: Callable[..., str], source: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_observer(file(source))
    with pytest.raises(InputError, match="expected nvml or a Python file"):
        load_observer("nothing.py")


def test_names_of_observed_values(file: Callable[..., str]) -> None:
    assert metric_names([]) == set()
    assert metric_names([NVML, file()]) == {*NvmlObserver.metrics, "samples", "share"}
