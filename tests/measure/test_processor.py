"""Measured rates of the processor: stored per machine, raised only, and never used to prune."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tunebench import device as devices
from tunebench.measure import processor
from tunebench.measure.processor import ProcessorRates, measure_rates, with_measured_rates
from tunebench.tuning.tunable import find_variants
from tunebench.workloads import parse

CPU = devices.local_cpu()
WORKLOAD = parse("softmax:rows=512,cols=1024,dtype=f32")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ProcessorRates]:
    """Return the rates that the next measurements find; the cache folder is empty, and the machine idle."""
    rates: list[ProcessorRates] = []
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(processor, "measure_rates", lambda device: rates.pop(0))
    monkeypatch.setattr(processor, "busy_elsewhere", lambda: 0.0)
    return rates


def rates(gb_s: float, gflop_s: float, *, busy: bool = False) -> ProcessorRates:
    return ProcessorRates(gb_s=gb_s, gflop_s=gflop_s, busy=busy)


def test_rates_are_measured_once_per_machine(
    measured: list[ProcessorRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured += [rates(40, 200), rates(50, 300)]
    first = with_measured_rates(CPU)
    assert (first.measured_gb_s, first.measured_gflop_s) == (40, 200)
    assert with_measured_rates(CPU) == first
    monkeypatch.setattr(processor.platform, "node", lambda: "another")
    monkeypatch.setattr(processor, "Path", lambda path: Path("/no/machine-id"))
    assert with_measured_rates(CPU).measured_gb_s == 50
    assert not measured


def test_rates_of_a_busy_machine_are_raised_once_it_is_idle(measured: list[ProcessorRates]) -> None:
    measured += [rates(20, 200, busy=True), rates(40, 180)]
    assert with_measured_rates(CPU).measured_gb_s == 20
    second = with_measured_rates(CPU)
    assert (second.measured_gb_s, second.measured_gflop_s) == (40, 200)
    assert with_measured_rates(CPU) == second


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 0, "rates": {}}', '{"format": 1, "rates": []}', "NaN"]
)
def test_damaged_and_old_files_are_measured_again(
    measured: list[ProcessorRates], tmp_path: Path, content: str
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / "processor_rates.json").write_text(content)
    measured.append(rates(40, 200))
    assert with_measured_rates(CPU).measured_gb_s == 40
    assert json.loads((folder / "processor_rates.json").read_text())["format"] == 1


def test_this_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("SECONDS", 0.01), ("SMALLEST_BYTES", 1 << 22), ("PRODUCT_SIZE", 64)):
        monkeypatch.setattr(processor, name, small)
    rates = measure_rates(CPU)
    assert rates.gb_s > 0
    assert rates.gflop_s > 0


def test_bounds_of_searches_do_not_change_with_measured_rates() -> None:
    """A kernel may beat a measured rate: what prunes and proves uses rates that none exceeds."""
    slow = dataclasses.replace(CPU, measured_gb_s=1.0, measured_gflop_s=1.0)
    for assumed, with_rates in zip(
        find_variants(WORKLOAD, CPU)[0], find_variants(WORKLOAD, slow)[0], strict=True
    ):
        assert np.array_equal(assumed.bounds.us, with_rates.bounds.us)
        assert assumed.gap_bounds is None
        assert with_rates.gap_bounds is not None
        traffic = WORKLOAD.traffic()
        nbytes = traffic.read_bytes + max(0, traffic.write_bytes - CPU.l2_bytes)
        assert with_rates.gap_bounds.us.min() == pytest.approx(nbytes / 1e3)


def test_bound_at_measured_rates_is_that_of_memory_and_arithmetic() -> None:
    measured = dataclasses.replace(CPU, measured_gb_s=40.0, measured_gflop_s=200.0).with_meaningful_rates()
    assert measured is not None
    assert not measured.assumed
    assert measured.dram_gb_s == 40.0
    assert 2 * measured.sm_count * measured.fma_per_clock * measured.max_clock_mhz == pytest.approx(
        200.0 * 1e3
    )
    assert CPU.with_meaningful_rates() is None
    h100 = devices.representative("sm_90")
    assert h100.with_meaningful_rates() is h100
