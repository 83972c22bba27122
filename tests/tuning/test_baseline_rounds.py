"""Baselines timed in rounds: times are pooled over all rounds, and a crash of one does not end the run."""

from __future__ import annotations

import pytest

from tunebench.device import find
from tunebench.measure.baseline import Baseline, BaselineFailed
from tunebench.measure.timing import Protocol
from tunebench.outcome import Crashed
from tunebench.tuning.baseline_rounds import BaselineRounds, judged_stage
from tunebench.workloads import parse

PROBLEM = parse("softmax:rows=8,cols=8,dtype=f32")
QUICK = Protocol(min_samples=4, max_samples=5, max_s=0.02)


def test_baselines_are_timed_in_a_separate_process_and_pooled() -> None:
    with judged_stage().caller() as caller:
        baselines = BaselineRounds(PROBLEM, find("cpu"), QUICK, caller, rounds=2)
        baselines.time()
        baselines.time()
    numpy = next(baseline for baseline in baselines.baselines() if baseline.name == "numpy")
    taken = [timed["numpy"].samples_us for timed in baselines.rounds]
    assert len(taken) == 2
    assert numpy.samples_us == (*taken[0], *taken[1])
    assert all(len(samples) >= 2 for samples in taken)
    assert min(numpy.samples_us) <= numpy.median_us <= max(numpy.samples_us)


@pytest.mark.parametrize("end", [Crashed(reason="SIGSEGV"), RuntimeError("out of memory")], ids=repr)
def test_failing_baseline_is_not_retried_and_its_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch, end: object
) -> None:
    answers = iter([[Baseline.of("numpy", [3.0, 4.0, 5.0])], end])

    def call(*_: object) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    caller = judged_stage().caller()
    monkeypatch.setattr(caller, "call", call)
    baselines = BaselineRounds(PROBLEM, find("cpu"), QUICK, caller, rounds=3)
    for _ in range(3):
        baselines.time()
    assert baselines.baselines() == (Baseline.of("numpy", [3.0, 4.0, 5.0]),)
    assert baselines.failure is not None
    assert ("SIGSEGV" in baselines.failure) or ("out of memory" in baselines.failure)


def test_baseline_that_fails_in_a_round_has_no_time_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numpy, torch = (Baseline.of(name, [3.0, 4.0, 5.0]) for name in ("numpy", "torch"))
    answers = iter(
        [[numpy, torch], [numpy, BaselineFailed(name="torch", reason="RuntimeError: No available kernel")]]
    )
    caller = judged_stage().caller()
    monkeypatch.setattr(caller, "call", lambda *_: next(answers))
    baselines = BaselineRounds(PROBLEM, find("cpu"), QUICK, caller, rounds=2)
    for _ in range(2):
        baselines.time()
    assert baselines.baselines() == (Baseline.of("numpy", [3.0, 4.0, 5.0] * 2),)
    assert baselines.failure is None
    assert baselines.failures == {"torch": "torch could not be timed: RuntimeError: No available kernel"}
