"""Recorded spaces: what files of other tuners become, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunebench.errors import InputError
from tunebench.outcome import CompileFailed, LaunchFailed
from tunebench.recording import read


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


def test_a_cache_file_of_kernel_tuner(tmp_path: Path) -> None:
    recording = read(written(tmp_path / "a.json", cache()))
    table = recording.table
    assert [str(table.config(row)) for row in range(4)] == ["b=8,m=y", "b=8,m=x", "b=64,m=y", "b=64,m=x"]
    np.testing.assert_array_equal(recording.times_us, [np.nan, 4000.0, np.nan, 2000.0])
    np.testing.assert_array_equal(recording.fastest_us, [np.nan, 4000.0, np.nan, 1500.0])
    assert isinstance(recording.failures[0], CompileFailed)
    assert isinstance(recording.failures[2], LaunchFailed)
    assert recording.optimum_us == 2000.0
    assert (recording.kernel, recording.problem) == ("k", (4, 8))


def test_the_same_in_the_t4_format_and_compressed(tmp_path: Path) -> None:
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
        ([1, 2], "neither"),
        (cache(tune_params_keys=None), "tune_params_keys"),
        (cache(cache={"8": {"b": 8, "time": 1.0}}), "lacks the parameter 'm'"),
        (cache(cache={"8": {"b": 8, "m": [1], "time": 1.0}}), "numbers or text"),
        (cache(cache={"8": {"b": 8, "m": "x", "time": -1.0}}), "must be positive"),
        (cache(cache={"8": {"b": 8, "m": "x", "time": "no"}}), "no configuration of 1 has a time"),
        (cache(cache={"8": 3}), "must be an object"),
        (cache(cache={k: {"b": 8, "m": "x", "time": 1.0} for k in "ab"}), "there twice"),
        ({"results": [{}]}, "must have a configuration"),
    ],
)
def test_what_is_not_a_recording_is_refused(tmp_path: Path, data: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(written(tmp_path / "bad.json", data))


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8b broken", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read as JSON|neither"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json"):
        read(tmp_path / "none.json")
