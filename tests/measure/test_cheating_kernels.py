"""No kernel that cheats is served: each has a trial or a round of the finals in which it is found wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.measure import outside_cheats
from tests.measure.cheating_kernels import CHEATS, HONEST
from tests.measure.kernel_worker import executor, measure
from tunebench.executor.local import LocalExecutor
from tunebench.measure.timing import Protocol
from tunebench.outcome import FAILURES, Measured, Outcome
from tunebench.tuning.finalist import ROUNDS
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=40,cols=65,dtype=f32")
LARGE = parse("softmax:rows=512,cols=512,dtype=f32")
PRODUCT = parse("gemm:m=768,n=768,k=768,dtype=f32")
PROTOCOL = Protocol(cache="warm", min_samples=6, max_samples=6, max_s=0.2)

LEAST_US = 100.0
"""Shorter than any of these kernels takes for `LARGE`, and longer than what a falsified sample says."""

SHARED = (
    *("state: recomputes the rows that changed", "state: a thread recomputes the rows that changed"),
    *("globals: a max that shadows the builtin", "globals: another numpy"),
    *("frames: a later start of the timer", "builtins: a max that restores itself"),
    *("replies: to the judge, false samples", "replies: to the judge, before the work"),
    "files: changes its input to one whose result it knows",
    "state: computes all launches of a batch in the first",
    "clocks: an alarm computes launches that have returned",
    "processes: stops the judge while it computes",
)
"""New kernels that are tried in every run of the tests, in processes that they share."""


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalExecutor]:
    with executor(PROTOCOL) as workers:
        yield workers


@pytest.fixture(scope="module")
def honest_workers() -> Iterator[LocalExecutor]:
    """Return processes in which no dishonest kernel ran: some leave threads."""
    with executor(PROTOCOL) as workers:
        yield workers


@pytest.fixture(scope="module")
def cold_workers() -> Iterator[LocalExecutor]:
    with executor(Protocol()) as workers:
        yield workers


def outcomes_of(workers: LocalExecutor, name: str, workload: object, rounds: int = ROUNDS) -> list[Outcome]:
    """Return the outcomes of a search trial and of the finals, up to the first failure."""
    outcomes: list[Outcome] = []
    for thorough in (False, *[True] * rounds):
        outcomes.append(measure(workers, name, workload, thorough=thorough))  # type: ignore[arg-type]
        if isinstance(outcomes[-1], FAILURES):
            break
    return outcomes


@pytest.mark.parametrize("name", CHEATS)
def test_dishonest_kernel_is_caught(workers: LocalExecutor, name: str) -> None:
    outcomes = outcomes_of(workers, name, WORKLOAD)
    assert any(outcome.kind == "wrong_result" for outcome in outcomes), outcomes


@pytest.mark.parametrize("name", HONEST)
def test_honest_kernel_is_served(honest_workers: LocalExecutor, name: str) -> None:
    search, *finals = outcomes_of(honest_workers, name, WORKLOAD)
    assert isinstance(search, Measured), search
    assert "timed launches" in search.verification.detail
    for outcome in finals:
        assert isinstance(outcome, Measured), outcome
        assert "launches, chosen at random" in outcome.verification.detail


def test_cheats_cover_every_kind() -> None:
    kinds = Counter(name.split(":")[0] for name in CHEATS)
    assert sum(kinds.values()) >= 50
    assert kinds.keys() == {
        *("stale output", "cache", "later calls", "detection", "memory", "replaced", "asynchronous", "broken")
    }


@pytest.mark.parametrize("name", SHARED)
def test_no_false_time_is_served_from_outside(cold_workers: LocalExecutor, name: str) -> None:
    assert_not_served_falsely(cold_workers, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", outside_cheats.CHEATS)
def test_no_false_time_is_served_from_new_processes(name: str) -> None:
    with executor(Protocol()) as workers:
        assert_not_served_falsely(workers, name)


def assert_not_served_falsely(workers: LocalExecutor, name: str) -> None:
    workload = PRODUCT if "products" in name else LARGE
    finals = [measure(workers, name, workload, thorough=True) for _ in range(2)]
    if not any(isinstance(outcome, FAILURES) for outcome in finals):  # then it did the work, and was timed
        assert min(outcome.median_us for outcome in finals) > LEAST_US, finals  # type: ignore[union-attr]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", outside_cheats.HONEST)
def test_honest_but_unusual_kernel_is_served(name: str) -> None:
    with executor(Protocol()) as workers:
        for outcome in outcomes_of(workers, name, LARGE, 10):
            assert isinstance(outcome, Measured), outcome


def test_outside_cheats_cover_what_a_kernel_can_change() -> None:
    kinds = Counter(name.split(":")[0] for name in outside_cheats.CHEATS)
    assert sum(kinds.values()) >= 40
    assert len(outside_cheats.HONEST) >= 20
    assert kinds.keys() == {
        *("state", "globals", "builtins", "frames", "clocks", "replies", "files", "processes")
    }
