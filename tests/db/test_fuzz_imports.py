"""Imports of corrupt files: a few hundred here, and each defect that a fuzz run of 100,000 found."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import command, imports
from tests.fuzz import corrupt_files as files
from tunebench.db import open_store
from tunebench.db.exchange import import_file
from tunebench.db.store import Store
from tunebench.errors import InputError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store.db") as opened:
        yield opened


@pytest.mark.slow
def test_corrupt_files_are_imported_partly_or_refused(store: Store, tmp_path: Path) -> None:
    outcomes = imports.fuzz(store, tmp_path, 0, range(240))
    assert outcomes["failed"] == 0
    assert min(outcomes[outcome] for outcome in ("whole", "with faults", "refused")) > 20


def test_failing_file_is_reported_and_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lying(store: Store, path: Path) -> Any:
        done = import_file(store, path)
        return type(done)(
            **{name: getattr(done, name) for name in done.__slots__} | {"added": done.added + 1}
        )

    monkeypatch.setattr(imports, "import_file", lying)
    outcomes = imports.fuzz(store, tmp_path, 0, range(4), tmp_path / "failed")
    assert outcomes["failed"] > 0
    assert "reported" in capsys.readouterr().out
    assert len(list((tmp_path / "failed").iterdir())) == outcomes["failed"]


def test_slow_file_is_reported() -> None:
    with pytest.raises(command.TimeLimitExceeded, match=r"more than 0\.05 s"), command.time_limit(0.05):
        threading.Event().wait()


def test_valid_files_are_imported_completely(store: Store, tmp_path: Path) -> None:
    for form in files.FORMATS:
        path = tmp_path / form
        path.write_bytes(files.encoded(files.good(form)))
        assert imports.import_outcome(store, path) == "whole"


# -- what was found --------------------------------------------------------------------------------


def _lines(**changes: Any) -> list[dict[str, Any]]:
    device, measurement = files.good("jsonl")[:2]
    return [device | changes.pop("device", {}), measurement | changes]


BAD_LINES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a rate beyond the range of floats": (_lines(device={"dram_gb_s": 10**40}), "plain JSON data"),
    "a float for an integer": (_lines(device={"sm_count": 132.0}), "device fields must be numbers"),
    "true for an integer": (_lines(device={"l2_bytes": True}), "device fields must be numbers"),
    "a surrogate in the name of a rate": (
        _lines(device={"mma_flop_per_clock": {"\ud800": 1.0}}),
        "plain JSON data",
    ),
    "an infinite condition": (_lines(conditions={"clock_mhz": 1e400}), "plain JSON data"),
    "a huge condition": (_lines(conditions={"clock_mhz": 10**400}), "plain JSON data"),
    "a surrogate in a condition": (_lines(conditions={"host": "\ud800"}), "plain JSON data"),
    "a NUL in a comparison": (_lines(comparison={"a": "\0"}), "plain JSON data"),
    "a deep condition": (_lines(conditions=json.loads('{"a":' * 100 + "1" + "}" * 100)), "plain JSON data"),
    "a time before 1970": (_lines(recorded_at="0001-01-01T00:00:00+14:00"), "between 1970 and now"),
    "a time in the future": (_lines(recorded_at="2999-01-01T00:00:00+00:00"), "between 1970 and now"),
    "a workload that is not canonical": (
        _lines(workload="softmax:cols=64,rows=64,dtype=f32"),
        "must be written as softmax:rows=64",
    ),
    "an invalid workload": (_lines(workload="softmax:rows=0,cols=64,dtype=f32"), "rows"),
    "a deeply nested expression": (
        _lines(workload="elementwise:rows=1,cols=1,dtype=f32,expression=" + "-" * 1500 + "x"),
        "",
    ),
    "a descending interval": (
        _lines(outcome=files.good("jsonl")[1]["outcome"] | {"ci_us": [2.0, 1.0]}),
        "in ascending order",
    ),
    "a true seed": (_lines(seed=True), "seed must be"),
    "true registers": (_lines(resources={"registers": True}), "resources must be"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_line_that_cannot_be_stored_is_rejected_alone(bad: str, store: Store, tmp_path: Path) -> None:
    lines, reason = BAD_LINES[bad]
    good = files.good("jsonl")[:3]
    path = tmp_path / "in.jsonl"
    path.write_bytes(files.encoded([*lines, *good]).replace(b"Infinity", b"1e999"))
    done = import_file(store, path)
    assert done.refused >= 1
    assert reason in done.faults[0].reason
    assert done.faults[0].place in ("line 1", "line 2")
    assert done.added == 2


def test_configuration_outside_the_installed_space_is_stale(store: Store, tmp_path: Path) -> None:
    """A configuration that violates the constraints has no source."""
    lines = files.good("jsonl")[:3]
    workload = {"workload": "gemm:m=64,n=64,k=64,dtype=f16"}
    path = tmp_path / "in.jsonl"
    path.write_bytes(files.encoded([lines[0], lines[2] | workload]))  # a softmax kernel for a gemm workload
    assert import_file(store, path).added == 1
    assert store.stats().stale == 1


MANY = {
    "blank lines": (files.encoded(files.good("jsonl")) + b"\n" * 200_000, "blank or unusable"),
    "unusable lines": (files.encoded(files.good("jsonl")) + b"\n1" * 200_000, "blank or unusable"),
    "a decompression bomb": (b'{"results": [' + b" " * (60 << 20), "times its size"),
    "an endless value": (b'{"results": ["' + b"x" * (5 << 20), "longer than 4 Mi"),
    "an endless name": (b'{"cache": {"' + b"x" * (5 << 20), "longer than 4 Mi"),
    "endless lists": (b'{"results": [' + b"[" * 200_000, "nested too deeply"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MANY)
def test_oversized_files_are_refused_early(what: str, store: Store, tmp_path: Path) -> None:
    text, reason = MANY[what]
    path = tmp_path / "in.json.gz"
    path.write_bytes(gzip.compress(text, 1))
    with pytest.raises(InputError, match=reason):
        import_file(store, path)
    assert store.stats().devices == ()


def test_too_long_line_counts_as_one_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebench.db.jsonl_file.MAX_LINE_BYTES", 4096)
    device, first, second, *_ = files.encoded(files.good("jsonl")).splitlines()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join((device, first, b"9" * 10_000, second)))
    done = import_file(store, path)
    assert (done.added, [str(fault) for fault in done.faults]) == (2, ["line 3: it is longer than 0 MiB"])


def test_duplicate_name_in_an_object_is_refused(store: Store, tmp_path: Path) -> None:
    text = files.encoded(files.good("kernel-tuner"))
    path = tmp_path / "in.json"
    path.write_bytes(text.replace(b'"b": 8', b'"b": 8, "b": 9', 1))
    cache = import_file(store, path)
    assert [fault.reason for fault in cache.faults] == ["it contains 'b' twice"]
    path.write_bytes(text.replace(b'"objective"', b'"kernel_name"'))
    with pytest.raises(InputError, match="contains 'kernel_name' twice"):
        import_file(store, path)
    device, *lines = files.encoded(files.good("jsonl")).splitlines()
    path.write_bytes(b"\n".join((device, lines[0].replace(b'"seed"', b'"bound_us"'), lines[1])))
    assert "a name twice" in import_file(store, path).faults[0].reason


def test_irregular_file_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a regular file"):
        import_file(store, tmp_path)
    with pytest.raises(InputError, match="not a regular file"):
        import_file(store, Path("/dev/zero"))


def test_damaged_first_line_does_not_hide_the_others(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{\n" + files.encoded(files.good("jsonl")))
    done = import_file(store, path)
    assert (done.refused, done.added) == (1, 7)


def test_a_file_is_read_in_pieces_of_any_size(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebench.cache_file import _stream, scan

    path = tmp_path / "in.json"
    data = files.good("kernel-tuner") | {"kernel_name": "é" * 40, "problem_size": 123456789}
    path.write_bytes(json.dumps(data, ensure_ascii=False).encode())
    expected = scan(path)
    assert expected[0].problem == (123456789,)
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(_stream, "CHUNK", size)
        assert scan(path) == expected
