"""Sections of docstrings (Google style): an item begins at one indent, and continues at the next one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tunebench", "kernels", "workloads", "db", "tests", "benchmarks")

SECTION = re.compile(r"(Args|Attributes|Raises):")
ITEM = re.compile(r" {4}[*\w.,` /()|-]+(\([^)]*\))?: \S")
SECOND_ITEM = re.compile(r"[a-z.] [a-z]+_[a-z_]+: [A-Z]")


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each module, class and function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "name", path.stem), ast.get_docstring(node) or ""


def broken_lines(text: str) -> Iterator[str]:
    """Yield the lines of sections that neither begin an item nor continue one."""
    inside = False
    for line in text.splitlines():
        if SECTION.fullmatch(line):
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside and line:
            depth = len(line) - len(line.lstrip())
            begins = depth == 4 and ITEM.match(line)
            if not (begins or depth >= 8) or SECOND_ITEM.search(line[5:]):
                yield line


@pytest.mark.parametrize("folder", FOLDERS)
def test_items_continue_at_the_next_indent(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if not any(map(Path.is_symlink, path.parents))]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}: {name}: {line}"
        for path in files
        for name, text in docstrings(path)
        for line in broken_lines(text)
    ]
    assert not wrong


def test_broken_sections_are_found() -> None:
    assert list(broken_lines("Plan.\n\nArgs:\n    top: Number of\n    plans.")) == ["    plans."]
    assert list(broken_lines("Plan.\n\nArgs:\n    top: First. cost_us: Price.")) == [
        "    top: First. cost_us: Price."
    ]
    assert not list(
        broken_lines("Plan.\n\nArgs:\n    top: Number of\n        plans.\n\nRaises:\n    ValueError: x")
    )
