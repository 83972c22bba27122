"""Search benchmark: counting of trials, saved results and printed tables."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import kernel_tuner_search, sampler_overhead, sampler_replays, search
from benchmarks.sampler_replays import Data, Found, Results, Search
from tunebench.cache_file import RecordedSpace, read

VALUES = {"a": list(range(1, 13)), "b": [1, 2, 4, 8]}

TIMES_MS = {(a, b): (a - 7) ** 2 + b + 9.0 for a, b in itertools.product(*VALUES.values()) if a * b != 12}
"""Time of each valid configuration: three points are invalid; the optimum is (7, 1) with 10 ms."""


def cache(device: str, times_ms: dict[tuple[int, int], float | str]) -> dict[str, object]:
    """Return the content of a Kernel Tuner cache file."""
    entries = {f"{a},{b}": {"a": a, "b": b, "time": time} for (a, b), time in times_ms.items()}
    return {
        "device_name": device,
        "kernel_name": "tiny",
        "problem_size": [1],
        "tune_params_keys": list(VALUES),
        "tune_params": VALUES,
        "cache": entries,
    }


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Recorded spaces of two devices: the fastest configuration of `there` fails on `here`."""
    (tmp_path / "tiny").mkdir()
    times_here = TIMES_MS | {(6, 1): "RuntimeFailedConfig"}
    times_there = {config: time + 20 for config, time in TIMES_MS.items()} | {(6, 1): 1.0, (7, 1): 2.0}
    for device, times_ms in (("here", times_here), ("there", times_there)):
        with gzip.open(tmp_path / "tiny" / f"{device}.json.gz", "wt") as file:
            json.dump(cache(device, times_ms), file)
    return Data(tmp_path)


def recording(data: Data) -> RecordedSpace:
    return read(data.path("tiny/here"))


def rows(data: Data, *configs: tuple[int, int]) -> list[int]:
    listed = [recording(data).table.row({"a": a, "b": b}) for a, b in configs]
    assert None not in listed
    return [row for row in listed if row is not None]


# -- counting of trials --------------------------------------------------------------------------------------


def test_repeated_configurations_do_not_count_and_failures_do(data: Data) -> None:
    asked = rows(data, (6, 1), (9, 4), (6, 1), (9, 4), (8, 1), (12, 8), (7, 1))
    done = kernel_tuner_search.replayed(recording(data), asked, trials=5, seed=0)
    assert done.best_us == (math.inf, 17e3, 11e3, 11e3, 10e3)
    assert not done.exhausted
    cut = kernel_tuner_search.replayed(recording(data), asked, trials=2, seed=0)
    assert cut.best_us == (math.inf, 17e3)


def test_strategy_that_ends_early_keeps_its_best_time(data: Data) -> None:
    done = kernel_tuner_search.replayed(recording(data), rows(data, (6, 1), (9, 4)), trials=200, seed=0)
    assert done.efficiency(10e3) == dict.fromkeys((25, 50, 100, 200), pytest.approx(10 / 17))
    failed = kernel_tuner_search.replayed(recording(data), rows(data, (6, 1)), trials=200, seed=0)
    assert failed.efficiency(10e3)[25] == 0


def test_cache_file_for_kernel_tuner_has_exactly_the_recorded_configurations(data: Data) -> None:
    cache = kernel_tuner_search.cache_of(recording(data))
    assert cache["tune_params"] == VALUES
    assert set(cache["cache"]) == {f"{a},{b}" for a, b in TIMES_MS}
    assert cache["cache"]["6,1"]["time"] == "RuntimeFailedConfig"
    assert cache["cache"]["9,4"] == {"a": 9, "b": 4, "time": pytest.approx(17)}
    assert json.dumps(cache).endswith("}}}")  # Kernel Tuner recognizes a complete file by this


@pytest.mark.skipif(kernel_tuner_search.version() is None, reason="Kernel Tuner is not installed")
@pytest.mark.parametrize("strategy", kernel_tuner_search.STRATEGIES)
def test_strategy_depends_on_its_seed_only(data: Data, strategy: str) -> None:
    done = kernel_tuner_search.search(recording(data), strategy, trials=20, seed=1)
    assert 5 <= len(done.best_us) <= 20  # some strategies end early in a small space
    assert done.best_us == kernel_tuner_search.search(recording(data), strategy, trials=20, seed=1).best_us
    assert done.best_us != kernel_tuner_search.search(recording(data), strategy, trials=20, seed=2).best_us


# -- saved results -------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """Searches that are run, in order."""
    run: Callable[[Search, Data], Found] = sampler_replays.run
    seen: list[Search] = []

    def noted(search: Search, data: Data) -> Found:
        result = run(search, data)
        seen.append(search)
        return result

    monkeypatch.setattr(sampler_replays, "run", noted)
    return seen


def benchmark(data: Data, *words: str, samplers: str = "random", seeds: int = 2) -> int:
    options = {
        "spaces": "tiny/here",
        "out": out(data),
        "data": data.folder,
        "samplers": samplers,
        "seeds": seeds,
    }
    return search.main([*words, *(f"--{name}={value}" for name, value in options.items())])


def out(data: Data) -> Path:
    return data.folder / "out.json"


def test_saved_search_is_not_run_again(
    data: Data, made: list[Search], capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark(data, samplers="random,surrogate") == 0
    assert [(saved.sampler, saved.seed) for saved in made] == [
        ("random", 0),
        ("surrogate", 0),
        ("random", 1),
        ("surrogate", 1),
    ]
    table = capsys.readouterr().out
    assert benchmark(data, samplers="random,surrogate") == 0
    assert len(made) == 4
    assert capsys.readouterr().out == table
    assert benchmark(data, samplers="random,surrogate", seeds=3) == 0
    assert [saved.seed for saved in made[4:]] == [2, 2]


def test_seeds_give_different_searches(data: Data) -> None:
    searches = [Search(space="tiny/here", sampler="random", seed=seed) for seed in range(8)]
    assert len({sampler_replays.run(seeded, data).efficiency[25] for seeded in searches}) > 1


def test_result_of_another_version_is_stale(data: Data, made: list[Search]) -> None:
    benchmark(data)
    saved = json.loads(out(data).read_text())
    saved["searches"][1]["by"] = "tunebench 0.0.9"
    out(data).write_text(json.dumps(saved))
    assert Results(out(data)).get(made[1]) is None
    benchmark(data)
    assert made[2:] == [made[1]]


def test_interrupted_benchmark_continues_with_missing_searches(
    data: Data, made: list[Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sampler_replays.run

    def interrupted(search: Search, data: Data) -> Found:
        if len(made) == 2:
            raise KeyboardInterrupt
        return run(search, data)

    with monkeypatch.context() as patch:
        patch.setattr(sampler_replays, "run", interrupted)
        assert benchmark(data, seeds=4) == 130
    assert len(json.loads(out(data).read_text())["searches"]) == 2
    assert benchmark(data, seeds=4) == 0
    assert [finished.seed for finished in made] == [0, 1, 2, 3]


def test_two_benchmarks_share_a_results_file(tmp_path: Path) -> None:
    results = [Results(tmp_path / "out.json") for _ in range(2)]
    for seed, results_file in enumerate(results):
        made = Search(space="x/1", sampler="tpe", seed=seed)
        results_file.add(Found(search=made, by="", asked=200, efficiency={25: 0.5}))
    assert len(json.loads((tmp_path / "out.json").read_text())["searches"]) == 2


def test_parallel_searches_equal_serial_searches(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # the benchmark sets it; restore it after the test
    benchmark(data)
    alone = out(data).read_text()
    out(data).unlink()
    benchmark(data, "--jobs=2")
    assert out(data).read_text() == alone


def test_strategies_without_kernel_tuner_are_skipped(
    data: Data, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = sampler_replays.version

    def version(sampler: str) -> str | None:
        return None if sampler in kernel_tuner_search.STRATEGIES else installed(sampler)

    for module in (search, sampler_replays):
        monkeypatch.setattr(module, "version", version)
    assert benchmark(data, samplers="random,random_sample", seeds=1) == 0
    printed = capsys.readouterr()
    assert "tunebench[peers]" in printed.err
    assert "| random |" in printed.out
    assert "random_sample" not in printed.out
    searched_elsewhere = Search(
        space="tiny/here", sampler="random_sample"
    )  # run where Kernel Tuner was installed
    efficiency = dict.fromkeys((25, 50, 100, 200), 0.5)
    Results(out(data)).add(
        Found(search=searched_elsewhere, by="kernel-tuner 1.5.0", asked=48, efficiency=efficiency)
    )
    assert benchmark(data, samplers="random,random_sample", seeds=1) == 0
    assert "| random_sample | 1 | 0.500 | 0.500 |" in capsys.readouterr().out


def test_missing_recorded_space_is_named(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    assert search.main(["--spaces=tiny/here,tiny/gone", f"--data={data.folder}"]) == 6
    assert "tiny/gone" in capsys.readouterr().err


def test_fingerprint_ignores_comments(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    source = tmp_path / "search" / "loop.py"
    source.write_text("x = 1\n")
    before = sampler_replays.fingerprint(tmp_path)
    source.write_text("x = 1  # one\n")
    assert sampler_replays.fingerprint(tmp_path) == before
    source.write_text("x = 2\n")
    assert sampler_replays.fingerprint(tmp_path) != before


# -- tables --------------------------------------------------------------------------------------------------


def test_interval_covers_the_mean_over_seeds() -> None:
    samples = np.random.default_rng(5).normal(0.8, 0.1, (400, 1))
    low, high = sampler_replays.interval(samples)
    spread = 1.96 * samples.std() / 20
    assert low == pytest.approx(samples.mean() - spread, abs=0.1 * spread)
    assert high == pytest.approx(samples.mean() + spread, abs=0.1 * spread)


def test_seeds_are_drawn_jointly_for_all_spaces() -> None:
    """Gains of one space cancel losses of the other for each seed, so the mean is constant."""
    gains = np.random.default_rng(5).uniform(-0.1, 0.1, 20)
    low, high = sampler_replays.interval(np.column_stack([0.8 + gains, 0.8 - gains]))
    assert (low, high) == (pytest.approx(0.8), pytest.approx(0.8))


def test_mean_uses_only_seeds_of_all_spaces(tmp_path: Path) -> None:
    results = Results(tmp_path / "out.json")
    for space, seed, share in (("x/1", 0, 0.5), ("x/1", 1, 0.9), ("x/2", 1, 0.7)):
        random_search = Search(space=space, sampler="random_sample", seed=seed)
        shares = dict.fromkeys((25, 50, 100, 200), share)
        version = sampler_replays.version("random_sample") or ""
        results.add(Found(search=random_search, by=version, asked=200, efficiency=shares))
    lines = search.comparison(results, ["x/1", "x/2"], ["random_sample", "tpe"], 2).splitlines()[2:]
    assert [line.split(" | ")[2:4] for line in lines] == [
        ["2", lines[0].split(" | ")[3]],
        ["1", "0.700"],
        ["1", "0.800"],
    ]
    assert lines[0].split(" | ")[3].startswith("0.700 (0.500 to 0.900)")


# -- other devices -------------------------------------------------------------------------------------------


def test_elsewhere_is_the_other_devices_of_the_kernel() -> None:
    among = ("gemm/a", "gemm/b", "gemm/c", "gemm_other/a")
    assert sampler_replays.elsewhere("gemm/b", among) == ("gemm/a", "gemm/c")
    assert sampler_replays.elsewhere("gemm_other/a", among) == ()


def test_fastest_configuration_of_another_device_may_fail(data: Data) -> None:
    space_here, space_there = data.space("tiny/here"), data.space("tiny/there")
    assert search.taken_over(space_here, [space_there.recording], 1) == 0
    assert search.taken_over(space_here, [space_there.recording], 2) == 1
    assert search.taken_over(space_there, [space_here.recording], 1) == pytest.approx(0.5)


def test_configuration_that_failed_elsewhere_comes_last(data: Data) -> None:
    space_here, space_there = data.space("tiny/here"), data.space("tiny/there")
    all_but_one = len(TIMES_MS) - 1
    assert search.taken_over(space_there, [space_here.recording], all_but_one) == pytest.approx(0.5)
    assert search.taken_over(space_there, [space_here.recording], all_but_one + 1) == 1


def test_warm_table_has_search_and_fastest_of_other_devices(
    data: Data, made: list[Search], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "SPACES", ("tiny/here", "tiny/there", "tiny/absent"))
    assert benchmark(data, "warm", samplers="surrogate", seeds=1) == 0
    assert [finished.elsewhere for finished in made] == [("tiny/there",)]
    assert list(json.loads(out(data).read_text())["searches"][0]["efficiency"]) == ["25", "50"]
    lines = capsys.readouterr().out.splitlines()
    assert benchmark(data, "warm", samplers="surrogate", seeds=1) == 0
    assert len(made) == 1
    assert lines[2].startswith("| tiny/here | surrogate, warm | 1 | - | ")
    assert lines[3] == "| tiny/here | fastest of the other devices | - | 0.000 | 1.000 | 1.000 |"


# -- overhead ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "values"), sampler_overhead.SIZES.items())
def test_synthetic_space_has_the_stated_size(count: int, values: tuple[int, ...]) -> None:
    assert math.prod(values) == count


def test_overhead_has_one_time_per_proposal() -> None:
    took = sampler_overhead.thinking("random", (2, 3, 2, 2), proposals=7)
    assert len(took.then_s) == 7
    assert min(took.first_s, *took.then_s) > 0
    prospects, times_us = sampler_overhead.synthetic((2, 3, 2, 2))
    assert len(prospects.table) == len(times_us) == 24
    assert set(map(len, prospects.figures.values())) == {24}
