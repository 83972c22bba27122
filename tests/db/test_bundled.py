"""Bundled records: which are exported, how they are read, and which files are skipped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.db.support import DEVICE, TWIN, WORKLOAD, begin, measured
from tunebench import cli, kernels
from tunebench.answer._reader import AnswerReader
from tunebench.answer._target import LookupTarget
from tunebench.cli.doctor import checks
from tunebench.db import Location, TrialKey, Verdict, bundled, open_store
from tunebench.device import Device
from tunebench.errors import DatabaseError
from tunebench.outcome import Predicted, Result, Verification
from tunebench.workloads import parse

VARIANT = "softmax/cuda_block"


def record(
    path: Path, us: float, *, device: Device = DEVICE, how: Any = "reference", revision: str | None = None
) -> None:
    """Store a measurement of the variant's default."""
    variant, workload = kernels.variant(VARIANT), parse(WORKLOAD)
    config = variant.default(workload, device)
    outcome = measured(us, verification=Verification(how=how, detail="all elements"))
    key = TrialKey(
        device=device.key,
        workload=WORKLOAD,
        variant=VARIANT,
        revision=revision or variant.revision(workload, config),
        config=config,
    )
    with open_store(path) as store:
        begin(store, device)
        verdict = Verdict(comparison={"libraries": {"torch": {"ratio": 1.5, "low": 1.4, "high": 1.6}}})
        store.record(key, Result(outcome=outcome, conditions={"host": "node7"}), verdict=verdict)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package's own."""
    monkeypatch.setattr(bundled, "FOLDER", tmp_path / "bundled")
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "bundled"


def export(database: Path, folder: Path) -> list[tuple[Path, int]]:
    with open_store(database, read_only=True) as store:
        return bundled.export_bundled(store, folder)


def test_measured_answers_are_bundled_and_looked_up_from_an_index(folder: Path, tmp_path: Path) -> None:
    record(tmp_path / "a.db", 5.0)
    assert export(tmp_path / "a.db", folder) == [(folder / "sm_90.jsonl", 1)]
    before = (folder / "sm_90.jsonl").read_bytes()
    assert b"node7" not in before
    [path] = bundled.indexes("sm_90")
    assert bundled.indexes() == [path]
    assert bundled.indexes("sm_80") == []
    view = AnswerReader(path, Location(path=path))
    [row] = view.rows(WORKLOAD, LookupTarget(DEVICE.key, "sm_90", DEVICE.name, DEVICE.sm_count), None)
    assert (row.time_us, row.device, row.variant, row.predicted) == (5.0, DEVICE.key, VARIANT, False)
    assert view.details(row).figures.baselines["torch"].ratio == 1.5
    assert Device(**dict(view.descriptor(DEVICE.key) or {})) == DEVICE
    assert view.workloads("softmax") == [(DEVICE.key, WORKLOAD)]
    view.close()
    assert (folder / "sm_90.jsonl").read_bytes() == before
    assert [p.name for p in folder.iterdir()] == ["sm_90.jsonl"]


def test_export_adds_to_a_bundled_file_and_keeps_the_newer_record(folder: Path, tmp_path: Path) -> None:
    record(tmp_path / "old.db", 5.0)
    record(tmp_path / "new.db", 6.0)
    record(tmp_path / "new.db", 7.0, device=TWIN)
    export(tmp_path / "old.db", folder)
    assert export(tmp_path / "new.db", folder) == [(folder / "sm_90.jsonl", 2)]
    text = (folder / "sm_90.jsonl").read_text()
    export(tmp_path / "old.db", folder)  # an older record does not replace a newer one
    assert (folder / "sm_90.jsonl").read_text() == text
    bundle = bundled.read(folder / "sm_90.jsonl")
    assert sorted(record["time_us"] for record in bundle.records.values()) == [6.0, 7.0]
    assert set(bundle.devices) == {DEVICE.key, TWIN.key}


def test_predicted_emulated_and_stale_records_are_not_bundled(folder: Path, tmp_path: Path) -> None:
    record(tmp_path / "a.db", 5.0, how="emulated")
    record(tmp_path / "a.db", 5.0, device=TWIN, revision="another")
    with open_store(tmp_path / "a.db") as store:
        begin(store)
        [key] = {entry.key for entry in store.history(WORKLOAD, DEVICE.key)}
        right = Verification(how="reference", detail="")
        store.record(key, Result(outcome=Predicted(predicted_us=1.0, verification=right)))
        own_key = dataclasses.replace(key, variant="softmax/mine")
        store.record(own_key, Result(outcome=Predicted(predicted_us=1.0, verification=right)))
    assert export(tmp_path / "a.db", folder) == []
    assert cli.run(["db", "export-bundled", "--db", str(tmp_path / "a.db"), "--out", str(folder)]) == 2
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"format":1', '"format":2'), "has format 2, and this version reads 1"),
        (lambda text: text[: len(text) // 2], "is skipped: it cannot be read"),
        (lambda text: "[]\n", "is skipped: it cannot be read"),
        (lambda text: text.replace('"time_us"', '"time"'), "is skipped: "),
    ],
    ids=["format", "cut off", "nothing", "a field"],
)
def test_unusable_bundled_file_is_skipped_and_reported_by_doctor(
    change: Any, said: str, folder: Path, tmp_path: Path
) -> None:
    record(tmp_path / "a.db", 5.0)
    [(path, _)] = export(tmp_path / "a.db", folder)
    path.write_text(change(path.read_text()))
    with pytest.raises(DatabaseError, match=said):
        bundled.index_of(path)
    assert bundled.indexes("sm_90") == []
    [check] = [check for check in checks() if check.subject == "bundled records"]
    assert (check.status, said in check.found) == ("absent", True)


def test_doctor_counts_bundled_records(folder: Path, tmp_path: Path) -> None:
    [check] = [check for check in checks() if check.subject == "bundled records"]
    assert (check.status, check.found) == ("ok", "this version has none")
    record(tmp_path / "a.db", 5.0)
    assert cli.run(["db", "export-bundled", "--db", str(tmp_path / "a.db"), "--out", str(folder)]) == 0
    [check] = [check for check in checks() if check.subject == "bundled records"]
    assert (check.status, check.found) == ("ok", "1 of sm_90")


def test_all_bundled_files_of_the_package_can_be_read() -> None:
    for path in bundled.files():
        assert bundled.read(path).architecture == path.stem
        json.loads(path.read_text(encoding="utf-8").splitlines()[0])
