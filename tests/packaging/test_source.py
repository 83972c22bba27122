"""Rules for every source file and every public module: imports, `__all__` and forbidden text."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tunebench
from tests.packaging.distribution import LINKED, ROOT
from tests.packaging.imports import OF_TORCH
from tunebench._figure import significant

FOLDERS = ("tunebench", *LINKED, "tests", "benchmarks", "docs")
OWN_FILES = ("README.md", "CHANGELOG.md", "noxfile.py", "setup.py", "pyproject.toml", ".ci/run")


def files(*suffixes: str) -> list[Path]:
    """Return the files of the project; files in linked folders appear once."""
    found = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
        if folder != "tunebench" or path.relative_to(ROOT).parts[1] not in LINKED
    ]
    return sorted({*found, *(ROOT / name for name in OWN_FILES if Path(name).suffix in suffixes)})


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Keep the trees for the tests of this file; the collector, which would visit them each time, is off."""
    gc.disable()
    yield
    parse.cache_clear()
    gc.enable()


def public_modules() -> list[str]:
    names = (m.name for m in pkgutil.walk_packages(tunebench.__path__, "tunebench.", onerror=lambda _: None))
    return ["tunebench", *(name for name in names if not re.search(r"\._|\.migrations", name))]


def test_files_and_modules_are_found() -> None:
    assert len(files(".py")) > 50
    assert "tunebench.kernels.softmax.numba_cpu" in public_modules()


def test_linked_folders_are_imported_by_full_names() -> None:
    """A bare `import kernels` would load the registry a second time."""
    wrong = []
    for path in files(".py"):
        for node in ast.walk(parse(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            wrong += [f"{path}:{node.lineno}" for name in names if name.partition(".")[0] in LINKED]
    assert not wrong


@pytest.mark.parametrize("name", public_modules())
def test_all_lists_public_names(name: str) -> None:
    if name.startswith(OF_TORCH) or name == "tunebench.training":
        pytest.importorskip("torch", reason="torch is not installed")
    module = importlib.import_module(name)
    if re.match(r"tunebench\.kernels\.(?!common\.)\w+\.", name):
        assert module.VARIANT.key, "a variant's module is known by its VARIANT"
        return
    public = getattr(module, "__all__", None)
    if public is None:
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
        assert not defined, "a module that defines public names lists them in __all__"
        return
    assert sorted(set(public)) == sorted(public)
    for attribute in public:
        assert getattr(module, attribute) is not None


def test_no_public_name_is_shadowed_by_module() -> None:
    """Importing `package.name` rebinds `name` in the package to the module."""
    there = importlib.util.find_spec("torch") is not None
    for name in public_modules():
        if not there and (name.startswith(OF_TORCH) or name == "tunebench.training"):
            continue
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", ()):
            assert not isinstance(getattr(module, attribute), ModuleType), f"{name}.{attribute}"


def test_no_machine_paths_registries_or_unfinished_work() -> None:
    # The patterns are split, so that this file does not match itself.
    paths = r"(?:^|[\s\"'(`])/(?:work|root|home)/"
    marks = r"\bTO" + r"DO\b|\bFIX" + r"ME\b|raise NotImple" + r"mented"
    registries = r"\bpy" + r"pi\.org|pythonhos" + r"ted\.org"
    wrong = re.compile(f"{paths}|{marks}|{registries}")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(".py", ".md", ".toml", ".cuh", ".h", "")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if wrong.search(line)
    ]
    assert not found


KNOWN_CYCLES: tuple[set[str], ...] = ()
"""Modules of each import cycle that is still allowed. Only remove entries."""


def package_sources() -> dict[str, Path]:
    """Return the file of each module of tunebench, by its import name."""
    roots = {"tunebench": ROOT / "tunebench"} | {f"tunebench.{name}": ROOT / name for name in LINKED}
    found = {}
    for prefix, root in roots.items():
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if prefix != "tunebench" or parts[0] not in LINKED:
                found[".".join([prefix, *parts]).removesuffix(".__init__")] = path
    return found


def imported(module: str, path: Path, modules: Collection[str]) -> set[str]:
    """Return the modules of tunebench that a module imports, in functions too, except for type checking."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    pending: list[ast.AST] = [parse(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.expr):  # expressions contain no imports
            continue
        checks_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        pending += node.orelse if checks_types else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found.add(submodule if submodule in modules else source)
    return found & set(modules)


def test_no_circular_imports() -> None:
    """Modules form no import cycle, deferred imports included."""
    sources = package_sources()
    graph = {module: imported(module, path, sources) for module, path in sources.items()}

    def reachable(start: str) -> set[str]:
        seen, pending = set[str](), [start]
        while pending:
            new = graph[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    reached = {module: reachable(module) for module in graph}
    cycles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    new = [cycle for cycle in cycles if not any(cycle <= known for known in KNOWN_CYCLES)]
    listed = "\n".join(" <-> ".join(sorted(cycle)) for cycle in new)
    assert not new, f"import cycles; move what both sides need to a third module:\n{listed}"
    gone = [known for known in KNOWN_CYCLES if not any(cycle <= known for cycle in cycles)]
    assert not gone, f"remove from KNOWN_CYCLES what is no cycle any more: {gone}"


def private_module(name: str) -> str | None:
    """Return the outermost private module of a dotted name; those directly in tunebench are shared."""
    parts = name.split(".")
    if parts[0] != "tunebench":
        return None
    for depth, part in enumerate(parts[2:], start=3):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:depth])
    return None


def private_imports(module: str, path: Path) -> list[str]:
    """Return the private modules that a module imports from outside the package that contains them."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += (
                [f"{source}.{alias.name}" for alias in node.names] if not private_module(source) else [source]
            )
    private = [name for name in map(private_module, names) if name is not None]
    return [name for name in private if not f"{package}.".startswith(name.rpartition(".")[0] + ".")]


def test_private_modules_are_imported_only_inside_their_package() -> None:
    """A module `_x.py` is private to its folder: make it public, or move it to where it is used."""
    edges = [
        f"{module} imports {private}"
        for module, path in package_sources().items()
        for private in private_imports(module, path)
    ]
    assert not edges


@pytest.mark.parametrize(
    ("module", "statement", "private"),
    [
        ("tunebench.tuning.run", "from tunebench.measure._gpu import Gpu", ["tunebench.measure._gpu"]),
        ("tunebench.tuning.run", "from tunebench.measure import _gpu", ["tunebench.measure._gpu"]),
        ("tunebench.tuning.run", "import tunebench.measure._gpu", ["tunebench.measure._gpu"]),
        ("tunebench.tuning.run", "from ..measure._gpu import Gpu", ["tunebench.measure._gpu"]),
        ("tunebench.measure.cuda", "from tunebench.measure._gpu import Gpu", []),
        ("tunebench.measure.part.torch", "from tunebench.measure import _gpu", []),
        (
            "tunebench.measure.cuda",
            "from tunebench.libraries._x import x",
            ["tunebench.libraries._x"],
        ),
        ("tunebench.measured", "from tunebench.measure._gpu import Gpu", ["tunebench.measure._gpu"]),
        ("tunebench.tuning.run", "from tunebench._figure import significant", []),
        ("tunebench.tuning.run", "from tunebench import _figure, __version__", []),
        ("tunebench.tuning.run", "from torch.utils._pytree import tree_map", []),
    ],
)
def test_imports_of_private_modules_are_found(
    module: str, statement: str, private: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "module.py"
    path.write_text(statement, encoding="utf-8")
    assert private_imports(module, path) == private


def test_numbers_are_shown_without_exponents() -> None:
    """`significant` formats them; the format g writes 1070 with three digits as 1.07e+03."""
    known = {"tunebench/_device.py", "tunebench/_figure.py", "tunebench/forecast/table.py"}  # keys and data
    found = {
        str(path.relative_to(ROOT))
        for folder in ("tunebench", "workloads", "kernels", "db")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"[^{]\{[^{}]*:(\.\d|\.\{digits\})?g\}", path.read_text(encoding="utf-8"))
    }
    assert found - known == set()
    assert [significant(1070.4, 3), significant(1e-5), significant(2.5e6)] == ["1070", "0.00001", "2500000"]
    assert [significant(0.0), significant(float("nan")), significant(5e-324, 6)] == [
        "0",
        "nan",
        "4.94066e-324",
    ]


def docstring_faults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the lines of Args that are neither a parameter nor its continuation, and what is missing."""
    arguments = function.args
    named = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    parameters = {argument.arg for argument in named if argument is not None}
    described = set()
    section = ""
    for line in (ast.get_docstring(function) or "").splitlines():
        if line and not line.startswith(" "):
            section = line
        elif section == "Args:" and line:
            item = re.match(r" {4}\*{0,2}(\w+)(?: \(.*?\))?: ", line)
            if item is not None:
                described.add(item[1])
            elif not re.match(r" {8}\S", line):
                yield line
    if described:
        yield from (f"{name} is no parameter" for name in described - parameters)
        yield from (
            f"{name} is not described" for name in parameters - described - {"self", "cls"} if name[0] != "_"
        )


def test_arguments_in_docstrings_are_indented_and_complete() -> None:
    """The reference shows a continued item with another indent than 8 as an item of its own."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {fault}"
        for path in files(".py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for fault in docstring_faults(node)
    ]
    assert not wrong, "\n".join(wrong)
