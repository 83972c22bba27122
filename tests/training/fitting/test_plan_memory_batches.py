"""The hard limit of memory under which batches of the benchmark run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.plan_memory_batches import seconds_within

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_calls_fit_the_limit_or_exhaust_it() -> None:
    assert seconds_within(32 * MIB, lambda: lambda: bytes(24 * MIB)) is not None
    assert seconds_within(16 * MIB, lambda: lambda: bytes(24 * MIB)) is None


def test_other_failures_are_raised() -> None:
    def fails() -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        seconds_within(MIB, lambda: fails)
