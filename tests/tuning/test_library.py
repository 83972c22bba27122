"""Libraries timed in rounds: all rounds count, and one that dies takes no run with it."""

from __future__ import annotations

import pytest

from tunebench.device import find
from tunebench.executor.local import Caller
from tunebench.measure.baseline import Baseline, BaselineFailed
from tunebench.measure.timing import Protocol
from tunebench.outcome import Crashed
from tunebench.tuning.library import Libraries, stage
from tunebench.workloads import parse

PROBLEM = parse("softmax:rows=8,cols=8,dtype=f32")
QUICK = Protocol(min_samples=4, max_samples=5, max_s=0.02)


def test_libraries_are_timed_in_a_process_of_their_own_and_pooled() -> None:
    with Libraries(PROBLEM, find("cpu"), QUICK, Caller(stage()), rounds=2) as libraries:
        libraries.time(0)
        libraries.time(0)
    numpy = next(baseline for baseline in libraries.baselines() if baseline.name == "numpy")
    taken = [found["numpy"].samples_us for found in libraries.rounds]
    assert len(taken) == 2
    assert numpy.samples_us == (*taken[0], *taken[1])
    assert all(len(samples) >= 2 for samples in taken)
    assert min(numpy.samples_us) <= numpy.median_us <= max(numpy.samples_us)


@pytest.mark.parametrize("end", [Crashed(reason="SIGSEGV"), RuntimeError("out of memory")], ids=repr)
def test_one_that_fails_is_not_tried_again_and_the_reason_kept(
    monkeypatch: pytest.MonkeyPatch, end: object
) -> None:
    answers = iter([[Baseline.of("numpy", [3.0, 4.0, 5.0])], end])

    def call(*_: object) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    libraries = Libraries(PROBLEM, find("cpu"), QUICK, Caller(stage()), rounds=3)
    monkeypatch.setattr(libraries._calls, "call", call)
    for _ in range(3):
        libraries.time(0)
    assert libraries.baselines() == (Baseline.of("numpy", [3.0, 4.0, 5.0]),)
    assert libraries.failure is not None
    assert ("SIGSEGV" in libraries.failure) or ("out of memory" in libraries.failure)


def test_one_that_fails_in_a_round_has_no_time_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy, torch = (Baseline.of(name, [3.0, 4.0, 5.0]) for name in ("numpy", "torch"))
    answers = iter(
        [[numpy, torch], [numpy, BaselineFailed(name="torch", reason="RuntimeError: No available kernel")]]
    )
    libraries = Libraries(PROBLEM, find("cpu"), QUICK, Caller(stage()), rounds=2)
    monkeypatch.setattr(libraries._calls, "call", lambda *_: next(answers))
    for _ in range(2):
        libraries.time(0)
    assert libraries.baselines() == (Baseline.of("numpy", [3.0, 4.0, 5.0] * 2),)
    assert libraries.failure is None
    assert libraries.failures == {"torch": "torch could not be timed: RuntimeError: No available kernel"}
