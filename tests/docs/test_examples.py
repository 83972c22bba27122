"""Run every example of the README and of docs/ in the order of its page.

The language of a fenced block decides how it is run:

- ``console``: bash runs each line after ``$``, which must succeed. The lines below it are the expected
  output: ``...`` matches any text, and white space is ignored. Without such lines, any output is accepted.
- ``python``: run as a program.
- ``python torch``: run as a program if torch is installed.
- ``python`` or ``toml`` whose first line is ``# file: NAME``: saved under that name.
- ``console norun``: not run, because it changes the machine; a comment before it gives the reason.

The blocks of a page share a folder and a database. Pages share only the cache of compiled kernels, that of
all tests.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tunebench import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"console", "console norun", "python", "python torch", "toml", "sql", "text", "yaml"}

HAS_TORCH = importlib.util.find_spec("torch") is not None

_BLOCK = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block with its language, text and first line."""

    language: str
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["language"].strip(), match["body"], text.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(text)
    ]


def commands(body: str) -> list[tuple[str, str]]:
    """Split a console block into commands, each with the output shown below it."""
    joined = re.sub(r"\s*\\\n\s*", " ", body)
    parts = re.split(r"^\$ (.*)\n?", joined, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with a command"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def run(command: list[str], folder: Path) -> str:
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "TUNEBENCH_DB": str(folder / "tunebench.db"),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def same(shown: str, printed: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown.strip() + "\n", printed.strip() + "\n", flags)


def test_output_check_accepts_matching_and_refuses_other_output() -> None:
    assert commands("$ a \\\n  b\nout\n$ c\n") == [("a b", "out\n"), ("c", "")]
    assert same("one ... three\n...", "one two  three\nfour")
    assert not same("one", "two")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_names_its_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_target_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


RUN = {"console", "python", *(["python torch"] if HAS_TORCH else [])}
RUNNABLE = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_page_run(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "console":
            for command, shown in commands(block.body):
                printed = run(["bash", "-c", command], tmp_path)
                assert not shown.strip() or same(shown, printed), f"{where}: $ {command}\n{printed}"
        elif block.language == "toml" or block.language in RUN:
            named = re.match(r"# file: (\S+)\n", block.body)
            if block.language == "toml" and not named:
                continue
            target = tmp_path / (named[1] if named else f"example_{block.line}.py")
            target.write_text(block.body.removeprefix(named[0]) if named else block.body, encoding="utf-8")
            if not named:
                run([sys.executable, str(target)], tmp_path)


def test_workflow_for_users_runs_known_commands() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, of the extra `docs`, is not installed")
    (block,) = (b for b in blocks(ROOT / "docs" / "guide" / "ci.md") if b.language == "yaml")
    steps = yaml.safe_load(block.body)["jobs"]["check"]["steps"]
    (script,) = (step["run"] for step in steps if "tunebench check" in step.get("run", ""))
    (command,) = re.findall(r"tunebench (check [^|]*)", script)
    assert cli.run([*command.split(), "--help"]) == 0  # an unknown option is refused before


def test_guide_shows_kernel_of_examples_folder() -> None:
    guide = ROOT / "docs" / "guide" / "own-kernel.md"
    shown = [b.body for b in blocks(guide) if b.body.startswith("# file: my_kernel.py\n")]
    example = (ROOT / "docs" / "examples" / "my_kernel.py").read_text(encoding="utf-8")
    assert [body.split("\n", 1)[1] for body in shown] == [example]
