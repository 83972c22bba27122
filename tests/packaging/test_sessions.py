"""Consistency of nox sessions with the README, the documentation and continuous integration."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.packaging.distribution import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def sessions() -> set[str]:
    command = [sys.executable, "-m", "nox", "--list", "-f", str(ROOT / "noxfile.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(re.findall(r"^[*-] (\S+) -> ", done.stdout, re.MULTILINE))


def test_every_mentioned_session_exists() -> None:
    existing = sessions()
    pages = [README, CI, *(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))]
    mentioned = {name for page in pages for name in re.findall(r"nox -s ([\w-]+)", page)}
    assert {"tests", "tune", "lint"} <= mentioned
    assert mentioned <= existing


def test_development_page_lists_every_session() -> None:
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    existing = sessions()
    assert {name for name in existing if not name.startswith("gpu-")} <= listed
    assert any(name.startswith("gpu-") for name in listed & existing)


def test_ci_runs_test_command_of_readme() -> None:
    (command,) = re.findall(r"^\$ (.* nox -s tests)$", README, re.MULTILINE)
    assert command in CI.splitlines()


def test_every_architecture_with_bf16_has_gpu_session() -> None:
    """Earlier architectures are described for bounds and forecasts only."""
    from tunebench import device

    found = [
        name for name in device.architectures() if device.representative(name).compute_capability >= (8, 0)
    ]
    assert {f"gpu-{name}" for name in found} == {name for name in sessions() if name.startswith("gpu-")}
