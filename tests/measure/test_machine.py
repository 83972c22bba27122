"""State of the machine: the load of other programs is recorded, that of this process is not."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebench.measure import machine
from tunebench.measure.machine import MachineState, RunTimes, ThreadClocks

Stat = Callable[[int, int], None]


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stat:
    """Return a function that sets the busy and idle seconds of the machine; 10 s pass between readings."""
    file = tmp_path / "stat"
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(machine, "STAT", file)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(machine.time, "process_time", lambda: 0.0)
    return lambda busy, idle: (
        file.write_text(f"cpu  {100 * busy} 0 0 {100 * idle} 0 0 0 0 9 9\ncpu0\n"),
        None,
    )[1]


@pytest.mark.parametrize(("busy_s", "share"), [(20, 0.5), (3, None), (100, 1.0)])
def test_load_of_other_programs_is_a_condition(stat: Stat, busy_s: int, share: float | None) -> None:
    stat(5, 5)
    state = MachineState(lambda call: 7.0)
    stat(5 + busy_s, 25)
    assert state.conditions(reference=False).get("busy_elsewhere") == share


def test_own_load_does_not_count(stat: Stat, monkeypatch: pytest.MonkeyPatch) -> None:
    stat(0, 0)
    state = MachineState(lambda call: 7.0)
    stat(20, 20)
    monkeypatch.setattr(machine.time, "process_time", lambda: 20.0)
    assert state.conditions(reference=False) == {}


def test_reference_kernel_is_timed_by_its_fastest_run(stat: Stat) -> None:
    times = iter([9.0, 7.5, 8.0, 7.9, 30.0])
    assert MachineState(lambda call: next(times)).conditions(reference=True) == {"reference_us": 7.5}


def test_system_without_these_counts_reports_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STAT", Path("/no/such/file"))
    assert MachineState(lambda call: 7.0).conditions(reference=False) == {}


# -- times of runs on a busy machine -------------------------------------------------------------------------


def times(wall_us: float, busiest_us: float, waited_us: float, processor_us: float = 0.0) -> RunTimes:
    return RunTimes(
        wall_us=wall_us,
        busiest_us=busiest_us,
        processor_us=processor_us or busiest_us,
        waited_us=waited_us,
    )


@pytest.mark.parametrize(
    ("run", "us"),
    [
        pytest.param(times(500, 480, 0), 500, id="nothing waited: the wall time, with its synchronisation"),
        pytest.param(times(500, 480, 40), 500, id="threads start as on an idle machine"),
        pytest.param(times(8500, 500, 8000), 500, id="preempted"),
        pytest.param(times(8500, 500, 16000), 500, id="two threads waited"),
        pytest.param(times(8500, 500, 0), 8500, id="it slept, or another process did its work"),
        pytest.param(times(8500, 500, 1000), 7500, id="it slept, and waited 1 ms for a processor"),
        pytest.param(times(2000, 2000, 6000), 2000, id="more threads than processors, all of its own"),
        pytest.param(times(500, 520, 300), 500, id="clocks read before and after the run"),
    ],
)
def test_time_of_a_run_leaves_out_waiting_for_a_processor_only(run: RunTimes, us: float) -> None:
    assert run.run_us == us


class Scheduler:
    """Runs of kernels among other programs: each run of a thread is interrupted at random, for milliseconds.

    Args:
        seed: Seed of the interruptions.
        load: Other programs per processor.
    """

    def __init__(self, seed: int, load: float) -> None:
        self._random, self._load = random.Random(seed), load

    def run(self, kernel_us: float, threads: int) -> RunTimes:
        work_us = [kernel_us * self._random.uniform(0.98, 1.0) for _ in range(threads)]
        waited_us = [self._waited_us(us) for us in work_us]
        return RunTimes(
            wall_us=max(map(sum, zip(work_us, waited_us, strict=True))),
            busiest_us=max(work_us),
            processor_us=sum(work_us),
            waited_us=sum(waited_us),
        )

    def _waited_us(self, work_us: float, slice_us: float = 3000.0) -> float:
        waits = int(work_us / slice_us + self._random.random()) + (self._random.random() < self._load / 4)
        return sum(self._load * slice_us * self._random.uniform(0.5, 1.5) for _ in range(waits))


KERNELS = {"best": (450.0, 2), "default": (540.0, 2), "numpy": (700.0, 1), "torch": (800.0, 2)}
"""Time in microseconds with free processors, and number of threads."""


def order(load: float, figure: Callable[[RunTimes], float]) -> tuple[list[str], dict[str, float]]:
    scheduler = Scheduler(seed=1, load=load)
    rounds = [{name: scheduler.run(*kernel) for name, kernel in KERNELS.items()} for _ in range(400)]
    medians = {
        name: statistics.median(figure(round_times[name]) for round_times in rounds) for name in KERNELS
    }
    return sorted(medians, key=medians.__getitem__), medians


def test_order_and_times_on_a_busy_machine_are_those_of_a_quiet_one() -> None:
    quiet, quiet_us = order(0.0, lambda run: run.run_us)
    assert quiet == list(KERNELS)
    for load in (1.0, 2.0, 4.0):
        busy, busy_us = order(load, lambda run: run.run_us)
        assert busy == quiet
        assert busy_us == pytest.approx(quiet_us, rel=0.03)
    by_wall_time, _ = order(1.0, lambda run: run.wall_us)
    assert by_wall_time[0] == "numpy"  # of two threads, one waits more often than a single thread


def test_clocks_of_this_process_are_read() -> None:
    clock = itertools.count(0, 50_000_000)
    end = threading.Event()

    def run() -> None:
        worker = threading.Thread(target=end.wait)
        worker.start()
        sum(range(200_000))
        end.set()
        worker.join()

    times = ThreadClocks(2).times(run, lambda: next(clock))
    assert times.wall_us == 50_000
    assert 0 < times.busiest_us <= times.processor_us
    assert times.waited_us >= 0


def test_processor_time_of_a_thread_counts_where_it_is_spent() -> None:
    begin, done = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        sum(range(2_000_000))
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    clock = itertools.count(0, 10**9)
    times = ThreadClocks(64).times(lambda: (begin.set(), done.wait()), lambda: next(clock))
    worker.join()
    assert times.busiest_us > 0.8 * times.processor_us


def test_system_that_does_not_count_waiting_gives_wall_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TASKS", "/no/such/folder")
    clock = itertools.count(0, 1_000_000)
    times = ThreadClocks(2).times(lambda: None, lambda: next(clock))
    assert (times.run_us, times.waited_us) == (1000.0, 0.0)


@pytest.mark.parametrize(("busy_s", "policy"), [(1, None), (30, "passive")])
def test_threads_do_not_spin_on_a_busy_machine(
    stat: Stat, monkeypatch: pytest.MonkeyPatch, busy_s: int, policy: str | None
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(machine.os, "environ", environment)
    stat(0, 0)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: stat(busy_s, 40 - busy_s))
    machine.spin_only_if_idle()
    assert environment.get("OMP_WAIT_POLICY") == policy
