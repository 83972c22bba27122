"""Cache files: conversion of files of other tuners, and rejected files."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import measured
from tunebench.cache_file import FORMATS, RecordedTrial, TuningLog, read, scan, write
from tunebench.errors import InputError
from tunebench.outcome import (
    Aborted,
    CompileFailed,
    Crashed,
    LaunchFailed,
    Measured,
    Outcome,
    Result,
    TimedOut,
    WrongResult,
)
from tunebench.search.optimality_proof import ConfigStatus, config_status
from tunebench.space import Config


def cache(**changes: Any) -> dict[str, Any]:
    entries = {
        "64,x": {"b": 64, "m": "x", "time": 2.0, "times": [2.5, 1.5]},
        "8,x": {"b": 8, "m": "x", "time": 4.0, "times": [4.0]},
        "8,y": {"b": 8, "m": "y", "time": "CompilationFailedConfig"},
        "64,y": {"b": 64, "m": "y", "time": "RuntimeFailedConfig", "times": []},
    }
    return {
        "kernel_name": "k",
        "device_name": "NVIDIA A100-PCIE-40GB",
        "problem_size": [4, 8],
        "tune_params_keys": ["b", "m"],
        "tune_params": {"b": [8, 64, 512], "m": ["y", "x"]},
        "cache": entries,
    } | changes


def written(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_kernel_tuner_cache_file_is_read(tmp_path: Path) -> None:
    recording = read(written(tmp_path / "a.json", cache()))
    table = recording.table
    assert [str(table.config(row)) for row in range(4)] == ["b=8,m=y", "b=8,m=x", "b=64,m=y", "b=64,m=x"]
    np.testing.assert_array_equal(recording.times_us, [np.nan, 4000.0, np.nan, 2000.0])
    np.testing.assert_array_equal(recording.fastest_us, [np.nan, 4000.0, np.nan, 1500.0])
    assert isinstance(recording.failures[0], CompileFailed)
    assert isinstance(recording.failures[2], LaunchFailed)
    assert recording.optimum_us == 2000.0
    assert (recording.kernel, recording.problem) == ("k", (4, 8))


def test_t4_and_compressed_files_are_read(tmp_path: Path) -> None:
    results = [
        {
            "configuration": {"b": entry["b"], "m": entry["m"]},
            "times": {"runtimes": entry.get("times", [])},
            "invalidity": {"C": "compile", "R": "runtime"}.get(str(entry["time"])[0], "correct"),
            "measurements": [{"name": "time", "value": entry["time"]}],
        }
        for entry in cache()["cache"].values()
    ]
    path = tmp_path / "t4.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"results": results, "schema_version": "1.0.0"}).encode()))
    recording = read(path)
    assert sorted(recording.times_us[~np.isnan(recording.times_us)]) == [2000.0, 4000.0]
    assert sorted(type(f).kind for f in recording.failures.values()) == ["compile_failed", "launch_failed"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([1, 2], "expected a Kernel Tuner cache file or T4"),
        (cache(tune_params_keys=None), "tune_params_keys"),
        (cache(cache={"8": {"b": 8, "time": 1.0}}), "lacks the parameter 'm'"),
        (cache(cache={"8": {"b": 8, "m": [1], "time": 1.0}}), "numbers or text"),
        (cache(cache={"8": {"b": 8, "m": "x", "time": -1.0}}), "must be positive"),
        (cache(cache={"8": {"b": 8, "m": "x", "time": "no"}}), "none of 1 configurations has a time"),
        (cache(cache={"8": 3}), "must be an object"),
        (cache(cache={k: {"b": 8, "m": "x", "time": 1.0} for k in "ab"}), "occurs twice"),
        ({"results": [{}]}, "results with a configuration"),
    ],
)
def test_file_that_is_not_a_recorded_space_is_refused(tmp_path: Path, data: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(written(tmp_path / "bad.json", data))


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8b broken", b"\xff\xfe", b"[" * 100_000])
def test_invalid_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read as JSON|expected a Kernel Tuner"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json"):
        read(tmp_path / "none.json")


# -- rows and rejected rows --------------------------------------------------------------------------------


def test_rows_keep_samples_effort_and_timestamp(tmp_path: Path) -> None:
    data = cache()
    data["cache"]["64,x"] |= {
        "compile_time": 500.0,
        "verification_time": 0,
        "benchmark_time": 250.0,
        "framework_time": 125.0,
        "strategy_time": "unknown",
        "timestamp": "2023-12-22 09:54:05",
    }
    log, faults = scan(written(tmp_path / "a.json", data))
    assert not faults
    assert (log.kernel, log.device, log.names) == ("k", "NVIDIA A100-PCIE-40GB", ("b", "m"))
    result = log.rows[0].result
    assert isinstance(result.outcome, Measured)
    assert result.outcome.samples_us == (2500.0, 1500.0)
    assert (result.outcome.median_us, result.outcome.ci_us) == (2000.0, (1500.0, 2500.0))
    assert (result.outcome.cache, result.outcome.verification.how) == ("warm", "not verified")
    assert (result.effort.compile_s, result.effort.verify_s, result.effort.measure_s) == (0.5, 0.0, 0.25)
    assert result.conditions == {"framework_s": 0.125, "timestamp": "2023-12-22 09:54:05"}
    assert log.rows[2].result.outcome == CompileFailed(reason="recorded as CompilationFailedConfig")


def test_recorded_average_is_kept_as_time(tmp_path: Path) -> None:
    entry = {"b": 8, "m": "x", "time": 4.0, "times": [1.0, 2.0, 9.0]}
    log, _ = scan(written(tmp_path / "a.json", cache(cache={"8,x": entry})))
    outcome = log.rows[0].result.outcome
    assert isinstance(outcome, Measured)
    assert outcome.median_us == 2000.0
    assert log.recorded_space().times_us.tolist() == [4000.0]
    assert log.recorded_space().fastest_us.tolist() == [1000.0]


BAD_ENTRIES = {
    "no object": (3, "must be an object"),
    "no parameter": ({"b": 8, "time": 1.0}, "lacks the parameter 'm'"),
    "a list": ({"b": 8, "m": [1], "time": 1.0}, "numbers or text"),
    "no number": ({"b": float("nan"), "m": "x", "time": 1.0}, "numbers or text"),
    "a huge number": ({"b": 10**30, "m": "x", "time": 1.0}, "numbers or text"),
    "a comma": ({"b": 8, "m": "x,b=9", "time": 1.0}, "without commas"),
    "a surrogate": ({"b": 8, "m": "\ud800", "time": 1.0}, "numbers or text"),
    "a long text": ({"b": 8, "m": "x" * 2000, "time": 1.0}, "numbers or text"),
    "time zero": ({"b": 8, "m": "x", "time": 0}, "must be positive"),
    "infinite": ({"b": 8, "m": "x", "time": float("inf")}, "must be positive"),
    "no time": ({"b": 8, "m": "x"}, "must be positive"),
    "a bad sample": ({"b": 8, "m": "x", "time": 1.0, "times": [1.0, -1.0]}, "must be positive"),
    "a sample in words": ({"b": 8, "m": "x", "time": 1.0, "times": ["fast"]}, "must be positive"),
    "again": ({"b": 64, "m": "x", "time": 1.0}, "occurs twice"),
}


@pytest.mark.parametrize("bad", BAD_ENTRIES)
def test_rejected_row_is_located_and_the_others_are_read(tmp_path: Path, bad: str) -> None:
    entry, reason = BAD_ENTRIES[bad]
    data = cache()
    data["cache"]["bad"] = entry
    path = written(tmp_path / "a.json", data)
    log, (fault,) = scan(path)
    assert log.rows == scan(written(tmp_path / "b.json", cache()))[0].rows
    assert fault.place == "cache entry 5 ('bad')"
    assert reason in fault.reason
    with pytest.raises(InputError, match=rf"a\.json: cache entry 5 \('bad'\): .*{reason}"):
        read(path)


def test_rejected_t4_results_are_located_by_number(tmp_path: Path) -> None:
    def result(**changes: Any) -> dict[str, Any]:
        measurements = [{"name": "time", "value": 2.0, "unit": "ms"}]
        return {"configuration": {"b": 8}, "invalidity": "correct", "measurements": measurements} | changes

    results = [
        {},
        result(),
        result(configuration={"b": 9, "c": 1}),
        result(configuration={"b": 9}, measurements=[]),
        result(configuration={"b": 9}, measurements=[{"name": "time", "value": 1, "unit": "fortnights"}]),
        7,
    ]
    log, faults = scan(written(tmp_path / "t4.json", {"results": results}))
    assert [row.config for row in log.rows] == [Config({"b": 8})]
    assert [fault.place for fault in faults] == ["result 1", "result 3", "result 4", "result 5", "result 6"]
    for fault, reason in zip(
        faults, ("configuration", "lacks: c", "positive", "fortnights", "object"), strict=True
    ):
        assert reason in fault.reason


@pytest.mark.parametrize(
    ("timeunit", "unit", "us", "sample_us", "compile_s"),
    [
        (None, "", 2e3, 3e3, 5e-3),
        ("miliseconds", "", 2e3, 3e3, 5e-3),
        ("seconds", "", 2e6, 3e6, 5.0),
        ("seconds", "us", 2.0, 3e6, 5.0),
        (None, "ns", 2e-3, 3e3, 5e-3),
    ],
)
def test_t4_times_are_converted_from_their_units(
    tmp_path: Path, timeunit: str | None, unit: str, us: float, sample_us: float, compile_s: float
) -> None:
    data = {
        "metadata": {"timeunit": timeunit},
        "results": [
            {
                "configuration": {"b": 8},
                "invalidity": "correct",
                "times": {"runtimes": [3.0], "compilation": 5},
                "measurements": [
                    {"name": "energy", "value": 9.0},
                    {"name": "time", "value": 2, "unit": unit},
                ],
            }
        ],
    }
    log, _ = scan(written(tmp_path / "t4.json", data))
    outcome = log.rows[0].result.outcome
    assert isinstance(outcome, Measured)
    assert log.rows[0].time_us == pytest.approx(us)
    assert outcome.samples_us == (pytest.approx(sample_us),)
    assert log.rows[0].result.effort.compile_s == pytest.approx(compile_s)


def test_a_cache_file_that_is_still_written_is_read(tmp_path: Path) -> None:
    whole = json.dumps(cache())
    path = tmp_path / "a.json"
    for unfinished in (whole.removesuffix("}}"), whole.removesuffix("}}") + ",\n"):
        path.write_text(unfinished)
        np.testing.assert_array_equal(read(path).times_us, [np.nan, 4000.0, np.nan, 2000.0])


def test_failure_name_may_be_stored_next_to_the_time(tmp_path: Path) -> None:
    entries = cache()["cache"] | {
        "8,y": {"b": 8, "m": "y", "time": 1.0, "__error__": "CompilationFailedConfig"}
    }
    recording = read(written(tmp_path / "a.json", cache(cache=entries)))
    assert isinstance(recording.failures[0], CompileFailed)


@pytest.mark.parametrize("names", [[], ["b", "b"], ["two words"], ["p"] * 101])
def test_invalid_parameter_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(InputError, match=r"a\.json: "):
        scan(written(tmp_path / "a.json", cache(tune_params_keys=names)))


# -- writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_written_file_reads_back_equal(tmp_path: Path, form: str, name: str) -> None:
    rng = np.random.default_rng(0)
    entries = {
        f"{b}": {"b": b, "m": "x", "time": float(t.mean()), "times": t.tolist()}
        for b, t in enumerate(rng.lognormal(0, 2, (300, 5)))
    }
    entries["bad"] = {"b": 300, "m": "x", "time": "InvalidConfig"}
    values = {"b": list(range(301))[::-1]}  # a format keeps the order of values only if it has a field for it
    data = cache(cache=entries, tune_params=values if form == "kernel-tuner" else {})
    log, _ = scan(written(tmp_path / "in.json", data))
    write(log, tmp_path / name, form)
    reread, faults = scan(tmp_path / name)
    assert not faults
    assert (reread.kernel, reread.device, reread.problem) == (log.kernel, log.device, log.problem)
    rows, expected = (
        [(row.config, row.result.outcome) for row in tuning_log.rows] for tuning_log in (reread, log)
    )
    assert rows == expected
    table, original = reread.recorded_space().table, log.recorded_space().table
    assert table.space == original.space
    np.testing.assert_array_equal(table.ordinals, original.ordinals)
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.json", name]


OUTCOMES: dict[str, tuple[Outcome, str, type[Outcome]]] = {
    "compile": (CompileFailed(reason="no such type\nhere"), "compile", CompileFailed),
    "launch": (LaunchFailed(reason="too many threads"), "runtime", LaunchFailed),
    "crash": (Crashed(reason="signal 11"), "runtime", LaunchFailed),
    "wrong": (WrongResult(reason="y[3] is 2"), "correctness", WrongResult),
    "hang": (TimedOut(reason="60 s"), "timeout", TimedOut),
    "hopeless": (Aborted(samples_us=(9.0, 8.0), above_us=2.0), "timeout", TimedOut),
}


def one_of_each() -> TuningLog:
    outcomes = (measured(2.0, 1.0, 3.0), *(outcome for outcome, _, _ in OUTCOMES.values()))
    rows = tuple(
        RecordedTrial(config=Config({"b": b}), result=Result(outcome=o)) for b, o in enumerate(outcomes)
    )
    return TuningLog(
        kernel="gemm/numba_cpu",
        device="h100-sxm",
        workload="gemm:m=1,n=1,k=1,dtype=f32",
        names=("b",),
        rows=rows,
    )


def test_each_failure_has_its_name_in_t4(tmp_path: Path) -> None:
    write(one_of_each(), tmp_path / "t4.json", "t4")
    first, *rejected = json.loads((tmp_path / "t4.json").read_text())["results"]
    assert (first["invalidity"], first["correctness"]) == ("correct", 1)
    assert first["measurements"] == [{"name": "time", "value": 2e-3, "unit": "ms"}]
    assert first["times"]["runtimes"] == [2e-3, 1e-3, 3e-3]
    assert [failure["invalidity"] for failure in rejected] == [word for _, word, _ in OUTCOMES.values()]
    assert [failure["correctness"] for failure in rejected] == [0, 0, 0, 0, 0, 1]
    failures = read(tmp_path / "t4.json").failures
    assert [type(failures[row]) for row in range(1, 7)] == [kind for _, _, kind in OUTCOMES.values()]
    assert [getattr(failures[row], "reason", "") for row in (1, 2)] == [
        "recorded as no such type here",
        "recorded as too many threads",
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_exported_failure_is_closed_in_a_proof_only_if_it_was_closed(tmp_path: Path, form: str) -> None:
    outcomes: list[Outcome] = [outcome for outcome, _, _ in OUTCOMES.values()]
    outcomes += [kind(reason="x", refused=r) for kind in (CompileFailed, LaunchFailed) for r in (False, True)]
    rows = [RecordedTrial(config=Config({"b": b}), result=Result(outcome=o)) for b, o in enumerate(outcomes)]
    write(TuningLog(names=("b",), rows=tuple(rows)), tmp_path / "out.json", form)
    log, _ = scan(tmp_path / "out.json")
    statuses = [config_status(row.result.outcome) for row in log.rows]
    impossible = [config_status(outcome) is ConfigStatus.IMPOSSIBLE for outcome in outcomes]
    assert [status is ConfigStatus.IMPOSSIBLE for status in statuses] == impossible
    assert sum(impossible) == 4


def test_failed_write_keeps_the_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "t4.json"
    path.write_text("before")
    log = one_of_each()
    bad = Result(outcome=CompileFailed(reason="x"), conditions={"timestamp": object()})
    with pytest.raises(TypeError):
        write(
            TuningLog(names=("b",), rows=(*log.rows, RecordedTrial(config=Config({"b": 9}), result=bad))),
            path,
            "t4",
        )
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["t4.json"]
    with pytest.raises(InputError, match="cannot be written"):
        write(log, tmp_path / "nowhere" / "t4.json", "t4")
    with pytest.raises(InputError, match="Known: kernel-tuner, t4"):
        write(log, path, "csv")


def test_t4_follows_its_schema(tmp_path: Path) -> None:
    """The file follows the rules of schema 1.0.0 for results."""
    write(one_of_each(), tmp_path / "t4.json", "t4")
    data = json.loads((tmp_path / "t4.json").read_text())
    words = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
    assert data["schema_version"] == "1.0.0"
    for result in data["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= set(result)
        assert result["configuration"]
        assert result["invalidity"] in words
        assert isinstance(result["correctness"], int)
        assert isinstance(result["times"]["runtimes"], list)
        assert all(isinstance(v, float) for name, v in result["times"].items() if name != "runtimes")
        assert result["objectives"] == ["time"]
        (measurement,) = result["measurements"]
        assert isinstance(measurement["value"], float if result["invalidity"] == "correct" else str)
        assert isinstance(measurement["unit"], str)


def test_t4_follows_its_schema_as_published(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    spec = importlib.util.find_spec("kernel_tuner")
    if spec is None or spec.origin is None:
        pytest.skip("the schema comes with kernel_tuner, which is not installed")
    schema = Path(spec.origin).parent / "schema" / "T4" / "1.0.0" / "results-schema.json"
    write(one_of_each(), tmp_path / "t4.json", "t4")
    validator = jsonschema.validators.validator_for(published := json.loads(schema.read_text()))(published)
    assert list(validator.iter_errors(json.loads((tmp_path / "t4.json").read_text()))) == []
