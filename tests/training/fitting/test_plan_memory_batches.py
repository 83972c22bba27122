"""The hard limit of memory under which batches of the benchmark run."""

from __future__ import annotations

import mmap

import pytest

pytest.importorskip("torch")

from benchmarks.plan_memory_batches import seconds_within

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_calls_fit_the_limit_or_exhaust_it() -> None:
    def takes() -> mmap.mmap:  # malloc could take what this process has freed, which the limit does not see
        return mmap.mmap(-1, 24 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    assert seconds_within(32 * MIB, lambda: takes) is not None
    assert seconds_within(16 * MIB, lambda: takes) is None


def test_other_failures_are_raised() -> None:
    def fails() -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        seconds_within(MIB, lambda: fails)
