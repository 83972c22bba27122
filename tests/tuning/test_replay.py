"""Search of recorded tuning spaces: the loop of `tune`, with times read from cache files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.public_data import IS_WHOLE, found
from tunebench.cache_file import RecordedSpace, read
from tunebench.cli import run
from tunebench.errors import InputError
from tunebench.outcome import CompileFailed
from tunebench.search.registry import SAMPLERS
from tunebench.space import Parameter
from tunebench.space import Space as Parameters
from tunebench.tuning.replay import Space, replay

TABLE = Parameters((Parameter("a", tuple(range(1, 13)), ""), Parameter("b", (1, 2, 4, 8), ""))).enumerate()


def recording(scale: float = 1.0, **changes: object) -> RecordedSpace:
    times = scale * (10.0 + (TABLE["a"] - 7.0) ** 2 + TABLE["b"])
    times[5] = np.nan
    facts = {
        "kernel": "mine",
        "device": "NVIDIA H200",
        "problem": (),
        "table": TABLE,
        "times_us": times,
        "fastest_us": times,
        "failures": {5: CompileFailed(reason="recorded")},
    }
    return RecordedSpace(**facts | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_search_asks_for_each_configuration_once_and_finds_the_optimum(sampler: str) -> None:
    done = replay(Space.of(recording()), trials=len(TABLE) + 5, seed=0, sampler=sampler)
    assert len(done.best_us) == len(TABLE)
    assert done.exhausted
    assert list(done.best_us) == sorted(done.best_us, reverse=True)
    assert done.best_us[-1] == recording().optimum_us
    assert done.efficiency(recording().optimum_us) == {
        25: pytest.approx(11 / done.best_us[24]),
        50: 1,
        100: 1,
        200: 1,
    }


def test_times_not_asked_for_have_no_effect() -> None:
    """The sampler sees only the times it asks for, so changes of other times have no effect until then."""
    first = replay(Space.of(recording()), trials=20, seed=3, sampler="surrogate")
    asked_until = 12  # the initial design does not depend on times
    changed = recording(times_us=np.where(np.isnan(recording().times_us), np.nan, 5.0))
    second = replay(Space.of(changed), trials=asked_until, seed=3, sampler="surrogate")
    assert set(second.best_us) <= {5.0, np.inf}
    assert len(first.best_us) == 20


def test_a_budget_ends_a_search_before_its_checkpoints() -> None:
    done = replay(Space.of(recording()), trials=30, seed=0, sampler="random")
    assert set(done.efficiency(11.0)) == {25}
    assert done.efficiency(11.0, (1, 7, 30, 31)).keys() == {1, 7, 30}
    assert not done.exhausted


def test_times_of_another_device_are_known_beforehand_by_configuration() -> None:
    elsewhere = recording(scale=3.0, table=TABLE)
    warm = replay(Space.of(recording()), trials=6, seed=0, sampler="surrogate", elsewhere=[elsewhere])
    assert warm.best_us[0] == recording().optimum_us
    times_us = Space.of(recording()).prospects([elsewhere]).elsewhere_us[0]
    assert times_us[5] == np.inf
    assert times_us[0] == pytest.approx(3 * recording().times_us[0])


def test_a_recording_of_another_kernel_is_no_help() -> None:
    other_table = Parameters((Parameter("z", (1, 2), ""),)).enumerate()
    with pytest.raises(InputError, match="same parameters"):
        Space.of(recording()).prospects([recording(table=other_table, times_us=np.ones(2), failures={})])


def test_tables_find_each_others_rows() -> None:
    fewer = Parameters((Parameter("a", (12, 3, 99), ""), Parameter("b", (8, 1), ""))).enumerate()
    rows = TABLE.rows_of(fewer)
    for row, other_row in enumerate(rows):
        config = fewer.config(row)
        assert (other_row == -1) == (config["a"] == 99)
        assert other_row == -1 or TABLE.config(int(other_row)) == config


# -- command line, on public recordings --------------------------------------------------------------


def printed_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    assert run([str(word) for word in words]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_replay_prints_efficiency_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    path = found("recorded/convolution/RTX_2080_Ti.json.gz")
    data = printed_json(
        capsys, "replay", path, "--trials", 50, "--seeds", 2, "--sampler", "surrogate", "--json"
    )
    assert data["device"] == "rtx-2080-ti"
    assert data["optimum_ms"] == pytest.approx(0.9002624)
    assert [run["seed"] for run in data["runs"]] == [0, 1]  # type: ignore[attr-defined]
    for replayed_run in data["runs"]:  # type: ignore[attr-defined]
        assert replayed_run["measured"] == 50
        assert set(replayed_run["efficiency"]) == {"25", "50"}
        assert replayed_run["efficiency"]["50"] > 0.8


def test_replay_reports_skipped_configurations_and_missed_optima(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [found(f"recorded/convolution/{name}.json.gz") for name in ("RTX_2080_Ti", "RTX_3060_laptop")]
    words = ("replay", paths[0], "--warm-from", paths[1], "--trials", 50, "--sampler", "random")
    [off] = printed_json(capsys, *words, "--json")["runs"]  # type: ignore[misc]
    assert (off["unlikely"], off["unlikely_winners"], off["unlikely_missed"]) == (0, 0, 0)
    [run_] = printed_json(capsys, *words, "--learned-pruner", "--json")["runs"]  # type: ignore[misc]
    if IS_WHOLE:
        assert 0.05 * 6768 < run_["unlikely"] < 0.9 * 6768
        assert run_["unlikely_missed"] <= 0.002 * run_["unlikely"]
        assert run_["unlikely_winners"] < 0.005 * run_["unlikely"]
    assert run([str(word) for word in (*words, "--learned-pruner")]) == 0
    assert "really faster" in capsys.readouterr().out


def test_learned_pruner_uses_no_time_not_asked_for() -> None:
    """Changed times of configurations that the search did not ask for affect only the reported misses."""
    search = functools.partial(
        replay, trials=25, seed=1, sampler="random", elsewhere=[recording(scale=3.0)], learned_pruner=True
    )
    first = search(Space.of(recording()))
    times = recording().times_us
    hidden = np.where(times < first.best_us[-1], 1.0, times)  # the search asked for none of these
    second = search(Space.of(recording(times_us=hidden)))
    assert (hidden == 1.0).any()
    assert second.best_us == first.best_us
    assert second.postponed.count == first.postponed.count > 0
    assert second.postponed.winners == first.postponed.winners


def test_bound_is_compared_with_a_recorded_space(capsys: pytest.CaptureFixture[str]) -> None:
    path = found("recorded/convolution_milo/A100.json.gz")
    data = printed_json(capsys, "bound", path, "--json")
    assert data["described"] == data["rows"] == (ROWS if IS_WHOLE else pytest.approx(150, abs=1))
    assert data["violations"] == 0
    assert data["bound_over_best"] == pytest.approx(0.761, abs=1e-3)
    assert data["pruned_share"] == pytest.approx(0.404, abs=1e-3 if IS_WHOLE else 0.1)
    assert data["multiply_adds"] == {"over_best": pytest.approx(0.700, abs=1e-3), "pruned_share": 0}
    floors: Any = data["floors"]
    assert set(floors) == {"dram", "fma pipe", "issue", "load/store", "shared", "latency"}
    assert max(floor["over_best"] for floor in floors.values()) == data["bound_over_best"]
    assert max(floor["pruned_share"] for floor in floors.values()) <= data["pruned_share"]
    assert sum(floor["binds_share"] for floor in floors.values()) == pytest.approx(1)


ROWS = 4201
"""Configurations with a time in the whole recording of the A100."""

T4 = "recorded/convolution_milo/A100_T4.json.gz"
DESCRIPTION = ("--kernel", "convolution_kernel", "--device", "a100-40-pcie", "--problem", "4096x4096")


def test_options_supply_facts_missing_from_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    path = found("recorded/convolution_milo/A100.json.gz")
    whole = printed_json(capsys, "bound", path, "--json")
    assert printed_json(capsys, "bound", found(T4), *DESCRIPTION, "--json") == whole
    assert (
        printed_json(capsys, "bound", path, *DESCRIPTION, "--json") == whole
    )  # the file and the options describe the same kernel
    undescribed = printed_json(capsys, "bound", found(T4), "--json")
    assert (undescribed["rows"], undescribed["described"]) == (whole["rows"], 0)
    run = printed_json(
        capsys, "replay", found(T4), *DESCRIPTION, "--trials", 30, "--sampler", "bound", "--json"
    )
    assert run["device"] == "a100-40-pcie"
    assert run["runs"][0]["masked"] > 0  # type: ignore[index]


@pytest.mark.parametrize(
    ("file", "option", "value", "message"),
    [
        (T4, "--device", "a100-40-pci", "Did you mean 'a100-40-pcie'"),
        (T4, "--kernel", "convolution", "Known: Xgemm, convolution_kernel"),
        (T4, "--problem", "4096 4096", "sizes such as 4096x4096"),
        ("recorded/convolution_milo/A100.json.gz", "--device", "rtx-3090", "the file contains a100-40-pcie"),
        (
            "recorded/convolution_milo/A100.json.gz",
            "--kernel",
            "Xgemm",
            "the file contains convolution_kernel",
        ),
        ("recorded/convolution_milo/A100.json.gz", "--problem", "64x64", r"the file contains (4096, 4096)"),
    ],
)
def test_wrong_description_options_are_refused(
    file: str, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bound", str(found(file)), option, value]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "AMD Instinct MI250X"}, "AMD Instinct MI250X is not described"),
        ({"device": "mi210"}, "the cost model of Xgemm does not cover gfx90a"),
        ({"device": "Tesla P100-PCIE-16GB"}, "the cost model of Xgemm does not cover sm_60"),
        ({"problem": (64, 64)}, "Xgemm has a cost model for problem size 4096x4096, not 64x64"),
        ({"kernel": "mine"}, "its kernel has no cost model; Xgemm and convolution_kernel have one"),
    ],
)
def test_error_names_facts_missing_for_a_bound(changes: dict[str, Any], reason: str) -> None:
    values = {"MWG": 64, "NWG": 64, "KWG": 32, "MDIMC": 16, "NDIMC": 16, "MDIMA": 16, "NDIMB": 16}
    values |= {"KWI": 2, "VWM": 2, "VWN": 2, "SA": 1, "SB": 1}
    table = Parameters(tuple(Parameter(name, (value,), "") for name, value in values.items())).enumerate()
    facts = {"kernel": "Xgemm", "device": "NVIDIA GeForce RTX 3090", "problem": (4096, 4096), "table": table}
    facts |= {"times_us": np.array([1e4]), "fastest_us": np.array([1e4]), "failures": {}}
    assert Space.of(recording(**facts)).bounds is not None  # type: ignore[arg-type]
    space = Space.of(recording(**facts | changes))  # type: ignore[arg-type]
    assert (space.bounds, space.missing) == (None, reason)


def test_violated_bound_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {"cache": {}, **{key: value for key, value in _convolution().items() if key != "cache"}}
    for place, (key, entry) in enumerate(list(_convolution()["cache"].items())[:50]):
        entries["cache"][key] = entry | ({"time": 1e-6, "times": []} if place % 10 == 0 else {})
    path = tmp_path / "impossible.json"
    path.write_text(json.dumps(entries))
    data = printed_json(capsys, "bound", path, "--json")
    assert int(str(data["violations"])) >= 1


def _convolution() -> dict[str, dict[str, dict[str, object]]]:
    import gzip

    with gzip.open(found("recorded/convolution_milo/A100.json.gz"), "rt") as file:
        return dict(json.load(file))


def test_undescribed_kernel_has_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    path = found("recorded/dedispersion_milo/A100.json.gz")
    data = printed_json(capsys, "bound", path, "--json")
    assert (data["described"], data["violations"], data["bound_over_best"]) == (0, 0, None)
    assert Space.of(read(path)).prospects().bounds_us.max() == 0


def test_descriptions_go_by_name_and_parameters_not_by_file(tmp_path: Path) -> None:
    data = _convolution()
    data["kernel_name"] = "something_else"  # type: ignore[assignment]
    path = tmp_path / "A100.json"
    path.write_text(json.dumps(data))
    assert Space.of(read(path)).bounds is None
