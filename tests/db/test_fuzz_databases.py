"""Damaged databases: a few dozen here, and each defect that a fuzz run of 10,000 found."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.fuzz import databases
from tunebench.answer import lookup_workload
from tunebench.answer._reader import AnswerReader
from tunebench.db import locate, open_store
from tunebench.db.engine import translate_errors
from tunebench.errors import DatabaseError


@pytest.mark.slow
def test_damaged_databases_are_read_or_refused(tmp_path: Path) -> None:
    outcomes = databases.fuzz(tmp_path, 0, range(20))
    assert outcomes["failed"] == 0, outcomes
    assert outcomes["lookup: refused"] > 0
    assert outcomes["lookup: true"] > 0
    assert sum(outcomes.values()) == 4 * 20


def test_reason_that_quotes_a_damaged_table_is_one_short_line(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    open_store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    path.write_bytes(path.read_bytes().replace(b"CHECK (", b"CHECK `", 1))
    with pytest.raises(DatabaseError, match=r"is damaged.*malformed database schema") as refusal:
        open_store(path)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 700


def test_row_of_a_damaged_size_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> NoReturn:
        raise MemoryError  # as SQLite, for file 5683 of seed 0

    path, message = tmp_path / "x.db", "is damaged.*a row does not fit into memory"
    open_store(path).close()
    with pytest.raises(DatabaseError, match=message), translate_errors(locate(path)):
        too_large()
    monkeypatch.setattr(AnswerReader, "_current", too_large)
    with pytest.raises(DatabaseError, match=message):
        lookup_workload(databases.WORKLOAD, device="cpu", db=path)
