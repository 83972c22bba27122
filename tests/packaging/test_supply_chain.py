"""What others' code runs in continuous integration, and the licences of what users install."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging import licences

ROOT = Path(__file__).resolve().parents[2]


def test_actions_are_pinned_by_the_hash_of_a_commit() -> None:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    used = [line for file in files for line in re.findall(r"uses:\s*(.+)", file.read_text(encoding="utf-8"))]
    assert used
    loose = [line for line in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}\s+# v[\d.]+", line)]
    assert loose == []


def test_every_required_package_states_its_licence(capsys: pytest.CaptureFixture[str]) -> None:
    core = licences.closure(frozenset())
    assert {"llvmlite", "numpy", "sqlalchemy", "typer"} <= {name for name, _, _ in core}
    assert licences.licence_of("no-such-package") == ("no-such-package", "", "")
    restrictive = [entry for entry in core if re.search(r"\bA?GPL|Affero|SSPL", entry[2])]
    assert restrictive == []
    licences.main(["dashboard"])
    printed = capsys.readouterr().out
    assert re.search(r"^tunebench \S+ +Apache-2\.0$", printed, re.MULTILINE)
