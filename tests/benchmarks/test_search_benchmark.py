"""The benchmark of searches: what counts as asked for, what is kept, and what the tables say."""

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
"""Valid are all but three points; the optimum is (7, 1), 10 ms."""


def cache(device: str, times_ms: dict[tuple[int, int], float | str]) -> dict[str, object]:
    """Return the content of a cache file."""
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
    """Two devices: what is fastest on the other one fails on this one."""
    (tmp_path / "tiny").mkdir()
    here = TIMES_MS | {(6, 1): "RuntimeFailedConfig"}
    there = {config: time + 20 for config, time in TIMES_MS.items()} | {(6, 1): 1.0, (7, 1): 2.0}
    for device, times_ms in (("here", here), ("there", there)):
        with gzip.open(tmp_path / "tiny" / f"{device}.json.gz", "wt") as file:
            json.dump(cache(device, times_ms), file)
    return Data(tmp_path)


def recording(data: Data) -> RecordedSpace:
    return read(data.path("tiny/here"))


def rows(data: Data, *configs: tuple[int, int]) -> list[int]:
    found = [recording(data).table.row({"a": a, "b": b}) for a, b in configs]
    assert None not in found
    return [row for row in found if row is not None]


# -- what counts ---------------------------------------------------------------------------------------------


def test_what_is_asked_for_again_does_not_count_and_a_failure_does(data: Data) -> None:
    asked = rows(data, (6, 1), (9, 4), (6, 1), (9, 4), (8, 1), (12, 8), (7, 1))
    done = kernel_tuner_search.replayed(recording(data), asked, trials=5, seed=0)
    assert done.best_us == (math.inf, 17e3, 11e3, 11e3, 10e3)
    assert not done.exhausted
    cut = kernel_tuner_search.replayed(recording(data), asked, trials=2, seed=0)
    assert cut.best_us == (math.inf, 17e3)


def test_a_strategy_that_ends_early_stays_at_its_best(data: Data) -> None:
    done = kernel_tuner_search.replayed(recording(data), rows(data, (6, 1), (9, 4)), trials=200, seed=0)
    assert done.efficiency(10e3) == dict.fromkeys((25, 50, 100, 200), pytest.approx(10 / 17))
    failed = kernel_tuner_search.replayed(recording(data), rows(data, (6, 1)), trials=200, seed=0)
    assert failed.efficiency(10e3)[25] == 0


def test_another_tuner_is_given_what_was_recorded_and_nothing_else(data: Data) -> None:
    given = kernel_tuner_search.cache_of(recording(data))
    assert given["tune_params"] == VALUES
    assert set(given["cache"]) == {f"{a},{b}" for a, b in TIMES_MS}
    assert given["cache"]["6,1"]["time"] == "RuntimeFailedConfig"
    assert given["cache"]["9,4"] == {"a": 9, "b": 4, "time": pytest.approx(17)}
    assert json.dumps(given).endswith("}}}")  # the other tuner's sign of a file that is whole


@pytest.mark.skipif(kernel_tuner_search.version() is None, reason="Kernel Tuner is not installed")
@pytest.mark.parametrize("strategy", kernel_tuner_search.STRATEGIES)
def test_a_strategy_asks_for_the_space_alone_by_its_seed(data: Data, strategy: str) -> None:
    done = kernel_tuner_search.search(recording(data), strategy, trials=20, seed=1)
    assert 5 <= len(done.best_us) <= 20  # in so small a space, some end early
    assert done.best_us == kernel_tuner_search.search(recording(data), strategy, trials=20, seed=1).best_us
    assert done.best_us != kernel_tuner_search.search(recording(data), strategy, trials=20, seed=2).best_us


# -- what is kept --------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """Every search that is really made, in order."""
    run: Callable[[Search, Data], Found] = sampler_replays.run
    seen: list[Search] = []

    def told(search: Search, data: Data) -> Found:
        found = run(search, data)
        seen.append(search)
        return found

    monkeypatch.setattr(sampler_replays, "run", told)
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


def test_a_search_that_was_made_is_not_made_again(
    data: Data, made: list[Search], capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark(data, samplers="random,surrogate") == 0
    assert [(one.sampler, one.seed) for one in made] == [
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
    assert [one.seed for one in made[4:]] == [2, 2]


def test_each_seed_is_another_search(data: Data) -> None:
    ones = [Search(space="tiny/here", sampler="random", seed=seed) for seed in range(8)]
    assert len({sampler_replays.run(one, data).efficiency[25] for one in ones}) > 1


def test_what_another_version_found_does_not_stand(data: Data, made: list[Search]) -> None:
    benchmark(data)
    told = json.loads(out(data).read_text())
    told["searches"][1]["by"] = "tunebench 0.0.9"
    out(data).write_text(json.dumps(told))
    assert Results(out(data)).get(made[1]) is None
    benchmark(data)
    assert made[2:] == [made[1]]


def test_an_interrupted_benchmark_keeps_what_it_has_and_goes_on(
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
    assert [one.seed for one in made] == [0, 1, 2, 3]


def test_two_benchmarks_may_keep_results_in_one_file(tmp_path: Path) -> None:
    results = [Results(tmp_path / "out.json") for _ in range(2)]
    for seed, one in enumerate(results):
        made = Search(space="x/1", sampler="tpe", seed=seed)
        one.add(Found(search=made, by="", asked=200, efficiency={25: 0.5}))
    assert len(json.loads((tmp_path / "out.json").read_text())["searches"]) == 2


def test_processes_find_what_one_finds(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # is set by what is tested, and taken back here
    benchmark(data)
    alone = out(data).read_text()
    out(data).unlink()
    benchmark(data, "--jobs=2")
    assert out(data).read_text() == alone


def test_strategies_that_are_not_installed_are_left_out(
    data: Data, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = sampler_replays.version

    def version(sampler: str) -> str | None:
        return None if sampler in kernel_tuner_search.STRATEGIES else installed(sampler)

    for module in (search, sampler_replays):
        monkeypatch.setattr(module, "version", version)
    assert benchmark(data, samplers="random,random_sample", seeds=1) == 0
    told = capsys.readouterr()
    assert "tunebench[peers]" in told.err
    assert "| random |" in told.out
    assert "random_sample" not in told.out
    there = Search(space="tiny/here", sampler="random_sample")  # made where it was installed
    efficiency = dict.fromkeys((25, 50, 100, 200), 0.5)
    Results(out(data)).add(Found(search=there, by="kernel-tuner 1.5.0", asked=48, efficiency=efficiency))
    assert benchmark(data, samplers="random,random_sample", seeds=1) == 0
    assert "| random_sample | 1 | 0.500 | 0.500 |" in capsys.readouterr().out


def test_without_recordings_it_says_so(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    assert search.main(["--spaces=tiny/here,tiny/gone", f"--data={data.folder}"]) == 6
    assert "tiny/gone" in capsys.readouterr().err


def test_only_code_makes_another_version(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    source = tmp_path / "search" / "loop.py"
    source.write_text("x = 1\n")
    before = sampler_replays.fingerprint(tmp_path)
    source.write_text("x = 1  # one\n")
    assert sampler_replays.fingerprint(tmp_path) == before
    source.write_text("x = 2\n")
    assert sampler_replays.fingerprint(tmp_path) != before


# -- what is told --------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_mean_over_seeds() -> None:
    samples = np.random.default_rng(5).normal(0.8, 0.1, (400, 1))
    low, high = search.interval(samples)
    spread = 1.96 * samples.std() / 20
    assert low == pytest.approx(samples.mean() - spread, abs=0.1 * spread)
    assert high == pytest.approx(samples.mean() + spread, abs=0.1 * spread)


def test_seeds_are_drawn_for_all_spaces_at_once() -> None:
    """What one space gains by a seed the other one loses: their mean does not vary."""
    gains = np.random.default_rng(5).uniform(-0.1, 0.1, 20)
    low, high = search.interval(np.column_stack([0.8 + gains, 0.8 - gains]))
    assert (low, high) == (pytest.approx(0.8), pytest.approx(0.8))


def test_the_mean_is_over_seeds_that_all_spaces_have(tmp_path: Path) -> None:
    results = Results(tmp_path / "out.json")
    for space, seed, share in (("x/1", 0, 0.5), ("x/1", 1, 0.9), ("x/2", 1, 0.7)):
        one = Search(space=space, sampler="random_sample", seed=seed)
        told = dict.fromkeys((25, 50, 100, 200), share)
        results.add(
            Found(search=one, by=sampler_replays.version("random_sample") or "", asked=200, efficiency=told)
        )
    lines = search.comparison(results, ["x/1", "x/2"], ["random_sample", "tpe"], 2).splitlines()[2:]
    assert [line.split(" | ")[2:4] for line in lines] == [
        ["2", lines[0].split(" | ")[3]],
        ["1", "0.700"],
        ["1", "0.800"],
    ]
    assert lines[0].split(" | ")[3].startswith("0.700 (0.500 to 0.900)")


# -- other devices -------------------------------------------------------------------------------------------


def test_devices_of_one_kernel_are_a_family() -> None:
    among = ("gemm/a", "gemm/b", "gemm/c", "gemm_other/a")
    assert sampler_replays.elsewhere("gemm/b", among) == ("gemm/a", "gemm/c")
    assert sampler_replays.elsewhere("gemm_other/a", among) == ()


def test_taking_over_the_fastest_elsewhere_may_fail_here(data: Data) -> None:
    here, there = data.space("tiny/here"), data.space("tiny/there")
    assert search.taken_over(here, [there.recording], 1) == 0
    assert search.taken_over(here, [there.recording], 2) == 1
    assert search.taken_over(there, [here.recording], 1) == pytest.approx(0.5)


def test_what_failed_elsewhere_is_taken_over_last(data: Data) -> None:
    here, there = data.space("tiny/here"), data.space("tiny/there")
    all_but_one = len(TIMES_MS) - 1
    assert search.taken_over(there, [here.recording], all_but_one) == pytest.approx(0.5)
    assert search.taken_over(there, [here.recording], all_but_one + 1) == 1


def test_a_warm_search_stands_beside_what_is_taken_over(
    data: Data, made: list[Search], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "SPACES", ("tiny/here", "tiny/there", "tiny/absent"))
    assert benchmark(data, "warm", samplers="surrogate", seeds=1) == 0
    assert [one.elsewhere for one in made] == [("tiny/there",)]
    assert list(json.loads(out(data).read_text())["searches"][0]["efficiency"]) == ["25", "50"]
    lines = capsys.readouterr().out.splitlines()
    assert benchmark(data, "warm", samplers="surrogate", seeds=1) == 0
    assert len(made) == 1
    assert lines[2].startswith("| tiny/here | surrogate, warm | 1 | - | ")
    assert lines[3] == "| tiny/here | the others' fastest, measured again | - | 0.000 | 1.000 | 1.000 |"


# -- thinking ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "values"), sampler_overhead.SIZES.items())
def test_synthetic_spaces_are_as_large_as_they_say(count: int, values: tuple[int, ...]) -> None:
    assert math.prod(values) == count


def test_thinking_is_timed_between_outcomes_and_proposals() -> None:
    took = sampler_overhead.thinking("random", (2, 3, 2, 2), proposals=7)
    assert len(took.then_s) == 7
    assert min(took.first_s, *took.then_s) > 0
    prospects, times_us = sampler_overhead.synthetic((2, 3, 2, 2))
    assert len(prospects.table) == len(times_us) == 24
    assert set(map(len, prospects.figures.values())) == {24}
