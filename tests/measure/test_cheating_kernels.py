"""No kernel that cheats is served: each has a trial or a round of the finals in which it is found wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.measure.cheating_kernels import CHEATS, HONEST, Kernel
from tunebench.binary.compiled import Binary
from tunebench.device import find
from tunebench.kernels import variant
from tunebench.measure import cpu, timed_launches, worker
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup
from tunebench.outcome import Measured, Outcome
from tunebench.task import Task
from tunebench.tuning.finalist import ROUNDS
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=40,cols=65,dtype=f32")
PROTOCOL = Protocol(cache="warm", min_samples=6, max_samples=6, max_s=0.2)
BINARY = Binary(key="", language="numba-cpu", target="", payload=b"", entries=("kernel",))

Outcomes = Callable[[Kernel], list[Outcome]]


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outcomes]:
    """Return a function that returns the outcomes of a search trial and of all rounds of the finals."""
    kernels: list[Kernel] = []
    monkeypatch.setattr(cpu, "load_numba_cpu", lambda *_: kernels[-1])
    seeds = np.random.default_rng(5)
    monkeypatch.setattr(
        timed_launches,
        "secrets",
        type("Secrets", (), {"randbits": lambda bits: int(seeds.integers(1 << 62))}),
    )
    chosen, device = variant("softmax/numba_cpu"), find("cpu")
    monkeypatch.setattr(type(chosen), "arguments", lambda *_: ("x", "y"))
    monkeypatch.setattr("tunebench.measure.runner.THOROUGH", {})
    worker.start(Setup(runner="cpu", device=device, protocol=PROTOCOL))

    def run(thorough: bool) -> Outcome:
        config = chosen.default(WORKLOAD, device)
        task: Any = Task(
            variant=chosen, workload=WORKLOAD, config=config, device=device, seed=7, thorough=thorough
        )
        return worker.measure(task, BINARY, None).outcome

    def outcomes(kernel: Kernel) -> list[Outcome]:
        kernels.append(kernel)
        return [run(thorough) for thorough in (False, *[True] * ROUNDS)]

    before = threading.active_count()
    yield outcomes
    for thread in threading.enumerate()[before:]:
        thread.join(10)
    monkeypatch.setattr(worker, "_runner", None)
    monkeypatch.setattr(worker, "_originals", None)


@pytest.mark.parametrize("name", CHEATS)
def test_dishonest_kernel_is_caught(outcomes: Outcomes, name: str) -> None:
    kernel_outcomes = outcomes(CHEATS[name]())
    assert any(outcome.kind == "wrong_result" for outcome in kernel_outcomes), kernel_outcomes


@pytest.mark.parametrize("name", HONEST)
def test_honest_kernel_is_served(outcomes: Outcomes, name: str) -> None:
    for outcome in outcomes(HONEST[name]()):
        assert isinstance(outcome, Measured), outcome
        assert "timed launches" in outcome.verification.detail


def test_cheats_cover_every_kind() -> None:
    kinds = Counter(name.split(":")[0] for name in CHEATS)
    assert sum(kinds.values()) >= 50
    assert kinds.keys() == {
        *("stale output", "cache", "later calls", "detection", "memory", "replaced", "asynchronous", "broken")
    }
