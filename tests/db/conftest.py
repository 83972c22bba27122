"""Databases of each kind, for contract tests of the store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import needs_postgres
from tunebench.db import open_store
from tunebench.db.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgres)])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Location of a new database of each kind: a path or a URL."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    return str(request.getfixturevalue("server").new_database())


@pytest.fixture
def store(db: str) -> Iterator[Store]:
    """An open new database of each kind."""
    with open_store(db) as opened:
        yield opened


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's folders are private."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)
