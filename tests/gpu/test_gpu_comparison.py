"""Comparison of programs by interleaved timing, and the speedups that an acceptance run derives from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import interleaved, speedups
from tests.gpu.interleaved import TimedCall
from tests.support import measured
from tunebench.fault import DeviceLost
from tunebench.outcome import LaunchFailed, Measured, Result
from tunebench.workloads import parse

SOFTMAX = "softmax:rows=64,cols=100,dtype=f32"


def call(name: str, rounds: Sequence[Sequence[float] | Exception], log: list[str]) -> TimedCall:
    remaining = list(rounds)

    def take() -> Sequence[float]:
        log.append(name)
        now = remaining.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    def prepare() -> Callable[[], Sequence[float]]:
        return take

    return TimedCall(name, prepare)


def compared(calls: Sequence[TimedCall], **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names that a comparison yields, and its rows."""
    comparison, names = interleaved.compare(calls, **options), []
    while True:
        try:
            names.append(next(comparison))
        except StopIteration as end:
            return names, end.value


def test_program_that_loses_the_device_ends_the_comparison() -> None:
    lost = call("ours", [DeviceLost("ILLEGAL_ADDRESS", "detail")], [])
    with pytest.raises(DeviceLost):
        compared([lost], rounds=1, ours="ours")


def test_programs_run_in_turn_and_are_ranked() -> None:
    log: list[str] = []
    ours = call("ours", [[10.0] * 5, [12.0] * 5, [12.0] * 5], log)
    library = call("library", [[9.0] * 5, [9.0] * 5, [30.0] * 5], log)
    names, rows = compared([ours, library], rounds=3, ours="ours")
    assert names == ["ours", "library"] * 4
    assert log == ["ours", "library"] * 3
    assert [row["name"] for row in rows] == ["library", "ours"]
    assert [row["median_us"] for row in rows] == [9.0, 12.0]
    assert [row["speedup"] for row in rows] == [0.75, 1.0]
    assert rows[0]["samples"] == 15


def test_no_round_begins_after_the_time_limit() -> None:
    times = iter([0.0, 5.0, 11.0])
    slow = call("slow", [[5.0]] * 3, [])
    names, rows = compared([slow], rounds=3, ours="slow", most_s=10.0, clock=lambda: next(times))
    assert names == ["slow"] * 3
    assert rows[0]["samples"] == 2


def test_failing_program_is_dropped() -> None:
    def refuses() -> Callable[[], Sequence[float]]:
        raise RuntimeError("not for this workload")

    log: list[str] = []
    late = call("late", [[5.0], ValueError("lost"), [5.0]], log)
    ours = call("ours", [[7.0]] * 3, log)
    _, rows = compared([TimedCall("never", refuses), late, ours], rounds=3, ours="ours")
    assert rows[0]["name"] == "ours"
    assert rows[1:] == [
        {"name": "never", "problem": "RuntimeError: not for this workload"},
        {"name": "late", "problem": "ValueError: lost"},
    ]
    assert log == ["late", "ours", "late", "ours", "ours"]


def entry(variant: str, us: float, config: int, kind: type = Measured) -> Any:
    key = SimpleNamespace(variant=variant, config=f"bm={config}")
    outcome = measured(us) if kind is Measured else LaunchFailed(reason="no")
    return SimpleNamespace(key=key, result=Result(outcome=outcome), bound_us=1.0)


def test_best_configuration_of_each_variant_is_found() -> None:
    entries = [
        entry("gemm/slow", 50.0, 1),
        entry("gemm/mma", 11.0, 2),
        entry("gemm/mma", 10.0, 3),
        entry("gemm/simt", 30.0, 4),
        entry("gemm/broken", 1.0, 5, LaunchFailed),
    ]
    best = speedups.best_of_each(entries)
    assert list(best) == ["gemm/mma", "gemm/simt", "gemm/slow"]
    assert best["gemm/mma"] == {"config": "bm=3", "median_us": 10.0, "bound_us": 1.0}


def times(**us: float) -> list[dict[str, Any]]:
    return [{"name": name, "median_us": value} for name, value in us.items()] + [
        {"name": "x", "problem": "no"}
    ]


def test_ratios_by_workload_and_path_with_geometric_means() -> None:
    rows = [
        {
            "workload": "one",
            "paths": ["mma", "simt"],
            "rows": times(mma=10.0, simt=20.0, torch=20.0, triton=5.0),
        },
        {"workload": "two", "paths": ["simt"], "rows": times(simt=4.0, torch=2.0)},
        {"workload": "not timed", "paths": ["mma"], "problem": "not done"},
        {"workload": "alone", "paths": ["mma"], "rows": times(mma=1.0)},
    ]
    ratios = speedups.ratios(rows)
    assert set(ratios["by_workload"]) == {"one", "two"}
    assert ratios["by_workload"]["one"]["mma"] == {"torch": 2.0, "triton": 0.5, "fastest": 0.5}
    assert ratios["by_workload"]["one"]["simt"]["torch"] == 1.0
    means = ratios["geometric_means"]
    assert means["mma"]["torch"] == {"ratio": pytest.approx(2.0), "workloads": 1}
    assert means["simt"]["torch"] == {"ratio": pytest.approx(0.5**0.5), "workloads": 2}
    assert means["best of all"]["torch"] == {"ratio": pytest.approx(1.0), "workloads": 2}
    assert means["best of all"]["fastest"] == {"ratio": pytest.approx(0.5), "workloads": 2}


FUSED = "softmax:rows=64,cols=100,dtype=f32,prologue=scale"


def test_fusion_gain_needs_all_parts_measured() -> None:
    parts = [str(part) for part in parse(FUSED).unfused()]
    assert len(parts) == 2
    rows = [
        {"workload": text, "median_us": us} for text, us in zip([FUSED, *parts], (4.0, 3.0, 5.0), strict=True)
    ]
    assert speedups.fusion_gains(rows) == {FUSED: {"whole_us": 4.0, "parts_us": 8.0, "gain": 2.0}}
    assert speedups.fusion_gains(rows[:2]) == {}
    assert speedups.fusion_gains([*rows[:2], {"workload": parts[1], "median_us": None}]) == {}


def test_bandwidth_share_of_memory_bound_workloads() -> None:
    rows = [
        {"workload": SOFTMAX, "median_us": 2.0},
        {"workload": "gemm:m=8,n=8,k=8,dtype=f16", "median_us": 1.0},
    ]
    moved = 2 * 64 * 100 * 4
    assert speedups.bandwidth_shares(rows, 100.0) == {SOFTMAX: pytest.approx(moved / 2e-6 / 1e9 / 100.0)}
    assert speedups.bandwidth_shares(rows, None) == {}


def test_no_speedup_without_own_time() -> None:
    _, rows = compared([call("library", [[3.0]], [])], rounds=1, ours="ours")
    assert rows == [{"name": "library", "median_us": 3.0, "ci_us": (3.0, 3.0), "samples": 1}]
