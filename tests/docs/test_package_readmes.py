"""The README of each package: every file, module, function and field that it names exists where it says."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tunebench"
READMES = [*sorted(PACKAGE.glob("**/README.md")), ROOT / "db" / "README.md"]

CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w./-]+\.(?:py|toml|md|npz|h)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
BEFORE = re.compile(r"((?:`[\w.]+`(?:: |, | and )?)+) \(((?:`[\w./]+\.py`(?:, )?)+)\)")
INSIDE = re.compile(r"((?:`[\w.]+`(?:, | and )?)+) in\s+(`[\w./]+\.py`)")
DENSE = ("forecast", "graph", "search", "tuning")
DENSE_OF_TRAINING = ("cluster", "coexecution", "memory", "pipeline")


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """Return the names that a file defines: alone, and behind the classes that contain them."""
    names: set[str] = set()

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = owner
            for name in names_of(child):
                names.update({name, f"{owner}.{name}"} if owner else {name})
            if isinstance(child, ast.ClassDef):
                inner = child.name
            visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return frozenset(names)


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of a syntax tree defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg


def located(room: Path, text: str) -> Path | None:
    """Return the file that a text names: relative to the README, to the project, or a module with dots."""
    if text.startswith("tunebench."):
        for parts in (text.split("."), text.split(".")[:-1]):
            module = ROOT.joinpath(*parts)
            if module.with_suffix(".py").is_file():
                return module.with_suffix(".py")
            if (module / "__init__.py").is_file():
                return module / "__init__.py"
        return None
    return next((place / text for place in (room, ROOT) if (place / text).exists()), None)


def sources(readme: Path, text: str) -> list[Path]:
    """Return the Python files of a room, and those that its README names elsewhere."""
    named = (located(readme.parent, code) for code in CODE.findall(text))
    return [*readme.parent.rglob("*.py"), *(path for path in named if path and path.suffix == ".py")]


def test_every_dense_package_has_a_page() -> None:
    folders = [
        *(PACKAGE / name for name in DENSE),
        *(PACKAGE / "training" / name for name in DENSE_OF_TRAINING),
    ]
    missing = [folder for folder in folders if folder / "README.md" not in READMES]
    assert not missing


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_files_and_modules_exist(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    paths = [
        code
        for code in CODE.findall(text)
        if FILE.fullmatch(code) or code.endswith("/") or "tunebench/" in code
    ]
    modules = [code for code in CODE.findall(text) if re.fullmatch(r"tunebench(\.\w+)+", code)]
    shim = readme.parent / "shim"
    absent = [
        code
        for code in (*paths, *modules)
        if located(readme.parent, code) is None and not (shim / code).is_file()
    ]
    assert not absent


@pytest.mark.parametrize(
    "readme", [path for path in READMES if path.parent.name != "emulate"], ids=lambda path: path.parent.name
)
def test_names_are_defined(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    defined_names = frozenset().union(*map(defined, sources(readme, text)))
    unknown = [
        code
        for code in CODE.findall(text)
        if NAME.fullmatch(code) and not FILE.fullmatch(code) and not code.startswith("tunebench.")
        if code not in defined_names and located(readme.parent, code) is None
    ]
    assert not unknown


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_names_are_in_the_file_beside_them(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    wrong = []
    for names, files in (*BEFORE.findall(text), *INSIDE.findall(text)):
        places = [located(readme.parent, code) for code in CODE.findall(files)]
        listed_names = frozenset().union(*(defined(path) for path in places if path is not None))
        wrong += [
            f"{name} in {files}"
            for name in CODE.findall(names)
            if not FILE.fullmatch(name) and name not in listed_names
        ]
    assert not wrong
