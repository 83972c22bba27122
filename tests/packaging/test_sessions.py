"""Consistency of nox sessions with the README, the documentation and continuous integration."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

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
    listed = set(re.findall(r"`([\w.-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    existing = sessions()
    assert {name for name in existing if not name.startswith("gpu-")} <= listed
    assert any(name.startswith("gpu-") for name in listed & existing)


@pytest.mark.parametrize("session", ["quick", "tests"])
def test_ci_runs_test_commands_of_readme(session: str) -> None:
    (command,) = re.findall(rf"^\$ (.*\bnox -s {session})$", README, re.MULTILINE)
    assert command in CI.splitlines()


@pytest.mark.parametrize("page", [README, (ROOT / "docs" / "index.md").read_text(encoding="utf-8")])
def test_readme_and_site_open_with_the_commands_that_tune_and_test(page: str) -> None:
    title, sentence, block = page.split("\n\n")[:3]
    assert title.startswith("# ")
    assert sentence.count(". ") == 0
    fence, tune, test, end = block.splitlines()
    assert (fence, end) == ("```console norun", "```")
    assert "pip install -q . && .venv/bin/tunebench tune " in tune
    assert test.endswith("nox -s quick")
    for command in (tune, test):
        assert command.startswith("$ python3 -m venv .venv && ")
    assert "![" in page


@functools.cache  # nox warns if a session is registered twice
def load_noxfile() -> Any:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    return noxfile


def distributions(extras: set[str]) -> set[str]:
    """Return the normalised names of what installing tunebench with these extras installs."""
    installed: set[tuple[str, str]] = set()
    waiting = [("tunebench", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in installed:
            continue
        installed.add((name, extra))
        try:
            requirements = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:
            continue
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                dependency = normalised(requirement.name)
                waiting += [(dependency, chosen) for chosen in ("", *requirement.extras)]
    return {name for name, _ in installed}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


HIDING = """
import sys

class Hiding:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *arguments, **named):
        hidden = name.split(".")[0] in sys.argv[1].split(",")
        return None if hidden else self.finder.find_spec(name, *arguments, **named)
    def __getattr__(self, name): return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
import pytest

# numba-cuda's redirector stays installed, and warns that it does not find its package.
quiet = ["-W", "ignore:Couldn't get spec for numba:UserWarning"]
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:xdist", *quiet, *sys.argv[2:]]))
"""
"""Collects tests in a process that does not find the packages of its first argument."""


def collected(hidden: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDING, ",".join(sorted(hidden)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive  # the session `quick` collects them in such an environment
def test_collection_needs_no_package_that_quick_does_not_install(tmp_path: Path) -> None:
    """Every module of tests is imported where only the packages of the session `quick` are found."""
    session = GpuSession()
    load_noxfile().nox.registry.get()["quick"].func(session)
    ((*_, target),) = (command for command in session.commands if "-e" in command)
    extras = set(target.removeprefix(".[").removesuffix("]").split(","))
    present = distributions(extras)
    assert "pytest" in present
    assert "torch" not in present
    modules = metadata.packages_distributions()
    hidden = {name for name, owners in modules.items() if not present & set(map(normalised, owners))}
    assert {"torch", "pandas", "ray"} & modules.keys() <= hidden
    arguments = [word for word in session.commands[-1] if word.startswith("--ignore")]
    completed = collected(hidden, *arguments)
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    unguarded = tmp_path / "test_unguarded.py"
    unguarded.write_text("import torch\n", encoding="utf-8")
    (tmp_path / "pytest.ini").touch()
    completed = collected({"torch"}, "--noconftest", "-c", str(tmp_path / "pytest.ini"), str(unguarded))
    assert completed.returncode == 2, completed.stdout
    assert "No module named 'torch'" in completed.stdout


class GpuSession:
    """Session of nox that keeps its commands; the machine has an H100."""

    def __init__(self, *posargs: str) -> None:
        self.posargs, self.commands = list(posargs), list[tuple[str, ...]]()

    def install(self, *arguments: str) -> None:
        self.commands.append(("install", *arguments))

    def run_install(self, *arguments: str) -> None:
        self.commands.append(arguments)

    def run(self, *arguments: str, silent: bool = False, env: dict[str, str] | None = None) -> str:
        self.commands.append(arguments)
        return json.dumps([{"architecture": "sm_90", "known": "here"}])

    def error(self, text: str) -> None:
        raise ValueError(text)


def test_gpu_session_installs_torch_and_needs_no_network_with_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noxfile = load_noxfile()
    monkeypatch.setattr(noxfile, "_has_driver", lambda: True)
    accept = noxfile.nox.registry.get()["gpu-sm_90"].func
    online = GpuSession("--run", "1")
    accept(online)
    assert online.commands[0] == ("install", ".[cuda,dev]", "torch", "triton")
    assert online.commands[-1][-4:] == ("--arch", "sm_90", "--run", "1")
    offline = GpuSession("--offline", str(tmp_path), "--run", "1")
    accept(offline)
    assert offline.commands[0][:4] == ("install", "--no-index", "--find-links", str(tmp_path))
    assert offline.commands[-1][-4:] == ("--arch", "sm_90", "--run", "1")
    with pytest.raises(ValueError, match="needs a folder of wheels"):
        accept(GpuSession("--offline"))


@pytest.mark.slow
def test_every_architecture_with_bf16_has_gpu_session() -> None:
    """Earlier architectures are described for bounds and forecasts only."""
    from tunebench import device

    architectures = [
        name for name in device.architectures() if device.representative(name).compute_capability >= (8, 0)
    ]
    assert {f"gpu-{name}" for name in architectures} == {
        name for name in sessions() if name.startswith("gpu-")
    }


def test_tests_that_passed_in_one_session_are_left_out_of_the_next(tmp_path: Path) -> None:
    module = tmp_path / "test_four.py"
    module.write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 'MENDED' in os.environ\n"
        "def test_skips(): 'MENDED' in os.environ or pytest.skip()\n"
        "@pytest.fixture\n"
        "def broken(): yield; assert 'MENDED' in os.environ\n"
        "def test_fails_later(broken): pass\n",
        encoding="utf-8",
    )
    passed = tmp_path / "passed.txt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.passed",
        "-c",
        os.devnull,
        "-q",
        f"--passed={passed}",
    ]
    counts = []
    for further in ({}, {"MENDED": "1"}, {"MENDED": "1"}):
        completed = subprocess.run(
            [*command, "-p", "no:cacheprovider", str(module)],
            cwd=tmp_path, env={**environment, **further}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        counts.append(completed.stdout.splitlines()[-1].rpartition(" in ")[0])
    assert counts == ["1 failed, 2 passed, 1 skipped, 1 error", "3 passed, 1 deselected", "4 deselected"]
