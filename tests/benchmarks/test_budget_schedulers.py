"""Benchmark of budget scheduling for suites: search traces, and rules that divide a budget."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import budget_schedulers, replay_traces
from benchmarks.replay_traces import SearchTrace
from tunebench.cache_file import RecordedSpace
from tunebench.outcome import CompileFailed
from tunebench.space import Parameter
from tunebench.space import Space as Parameters
from tunebench.tuning.replay import Space, replay

TABLE = Parameters((Parameter("a", tuple(range(1, 13)), ""), Parameter("b", (1, 2, 4, 8), ""))).enumerate()


def recording() -> RecordedSpace:
    times = 10.0 + (TABLE["a"] - 7.0) ** 2 + TABLE["b"]
    times[5] = np.nan
    return RecordedSpace(
        kernel="mine",
        device="NVIDIA H200",
        problem=(),
        table=TABLE,
        times_us=times,
        fastest_us=times,
        failures={5: CompileFailed(reason="recorded")},
    )


def course(best_us: tuple[float, ...], floor_us: float = 0.0, *, ended: bool = False) -> SearchTrace:
    return SearchTrace(
        subspace="made",
        seed=0,
        by="",
        best_us=best_us,
        floor_us=(floor_us,) * len(best_us),
        optimum_us=min(best_us),
        median_us=100.0,
        ended=ended,
    )


def test_trace_trial_by_trial_equals_search_at_once() -> None:
    trace = replay_traces.follow(Space.of(recording()), seed=3, trials=60)
    at_once = replay(Space.of(recording()), trials=60, seed=3, sampler="surrogate")
    assert trace.best_us == at_once.best_us
    assert trace.ended
    assert len(trace) == len(TABLE)
    assert trace.time_us(1000) == trace.optimum_us == 11.0


def test_trace_survives_json_round_trip() -> None:
    made = course((np.inf, 9.0, 9.0, 4.0), floor_us=2.0)
    record = json.loads(json.dumps(made.record()))
    assert record["best_us"] == [[0, None], [1, 9.0], [3, 4.0]]
    assert SearchTrace.from_record(record) == made
    assert (made.time_us(0), made.time_us(1), made.time_us(3)) == (100.0, 100.0, 9.0)


def test_part_of_a_space_has_its_own_times_and_failures() -> None:
    part = replay_traces.part(recording(), {"b": 2})
    assert len(part.table) == 12
    assert set(part.table["b"]) == {2}
    assert list(part.failures) == [1] == np.flatnonzero(np.isnan(part.times_us)).tolist()
    assert part.optimum_us == 12.0


FALLING = course(tuple(np.linspace(50.0, 10.0, 100)))
FLAT = course((12.0,) * 100)
SHORT = course((30.0, 20.0), ended=True)


@pytest.mark.parametrize("way", ["equal", "by_time", "saving", "hindsight"])
def test_every_rule_keeps_the_budget(way: str) -> None:
    made = getattr(budget_schedulers, way)((3, 1, 2), (FALLING, FLAT, SHORT), 60)
    assert sum(made) == 60 or way == "hindsight"  # hindsight may spend less if more trials save nothing
    assert sum(made) <= 60
    assert all(1 <= trials <= len(trace) for trials, trace in zip(made, (FALLING, FLAT, SHORT), strict=True))


def test_trials_go_to_improving_searches_and_hindsight_is_best() -> None:
    model = budget_schedulers.Model((0, 1, 2), (3, 1, 2))
    traces = (FALLING, FLAT, SHORT)
    times = {
        name: model.time_us(traces, getattr(budget_schedulers, name)(model.counts, traces, 60))
        for name in ("equal", "by_time", "saving", "hindsight")
    }
    assert times["hindsight"] == model.time_us(traces, (58, 1, 1)) or times["hindsight"] == model.time_us(
        traces, (57, 1, 2)
    )
    assert times["hindsight"] <= times["saving"] < times["equal"]
    assert times["saving"] <= times["by_time"]
    ratios_by_rule, off = budget_schedulers.ratios([model], [traces, traces], 20)
    assert ratios_by_rule["saving"] == pytest.approx(np.full((2, 1), times["saving"] / times["equal"]))
    assert off == pytest.approx(np.full((2, 1), times["equal"] / (3 * 10 + 12 + 2 * 20)))
    low, high = budget_schedulers.interval(ratios_by_rule["saving"])
    assert low == pytest.approx(high) == pytest.approx(budget_schedulers.geometric(ratios_by_rule["saving"]))


def test_models_draw_each_workload_once_with_weights_by_time() -> None:
    optima_us = [1.0, 10.0, 100.0] * 5
    for model in budget_schedulers.draw(optima_us, 20):
        assert 6 <= len(set(model.workloads)) == len(model.workloads) <= 12
        parts = [count * optima_us[i] for i, count in zip(model.workloads, model.counts, strict=True)]
        assert max(parts) / min(parts) <= budget_schedulers.WEIGHTS * 1.5  # counts are integers
    assert budget_schedulers.draw(optima_us, 3) == budget_schedulers.draw(optima_us, 3)


def test_missing_recorded_spaces_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert budget_schedulers.main(["--data", str(tmp_path), "--out", str(tmp_path / "c.jsonl")]) == 6
    assert "gemm/RTX_3090" in capsys.readouterr().err
