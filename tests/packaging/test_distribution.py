"""Contents of the wheel and the source distribution, and imports of an installed wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.distribution import (
    LINKED,
    ROOT,
    build,
    copy_tree,
    files_of_package,
    files_of_wheel,
    unpack_sdist,
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_contains_every_file_once(wheel: Path) -> None:
    assert files_of_wheel(wheel) == files_of_package()


def test_wheel_contains_data_files(wheel: Path) -> None:
    contents = set(files_of_wheel(wheel))
    assert {"tunebench/py.typed", "tunebench/devices.toml", "tunebench/links.toml"} <= contents
    assert "tunebench/emulate/shim/cuda.h" in contents
    assert "tunebench/workloads/suites/resnet50.toml" in contents
    assert "tunebench/workloads/networks/gpt2-large.toml" in contents
    assert any(name.startswith("tunebench/kernels/") and name.endswith(".cuh") for name in contents)
    assert any(name.startswith("tunebench/db/migrations/versions/") for name in contents)
    assert not any(name.startswith(LINKED) for name in contents)


def test_wheel_contains_contract_suites_but_no_fault_injection(wheel: Path) -> None:
    prefix = "tunebench/testing/"
    suites = {name.removeprefix(prefix) for name in files_of_wheel(wheel) if name.startswith(prefix)}
    contracts = {"executor_contract.py", "sampler_contract.py", "variant_contract.py"}
    assert suites == contracts | {"__init__.py", "executor_stages.py", "postgres.py"}


def test_sdist_builds_identical_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    folder = unpack_sdist(sdist, tmp_path / "unpacked")
    (tmp_path / "again").mkdir()
    assert files_of_wheel(build("wheel", folder, tmp_path / "again")) == files_of_wheel(wheel)


def test_sdist_contains_test_files(sdist: Path, tmp_path: Path) -> None:
    folder = unpack_sdist(sdist, tmp_path / "unpacked")
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "noxfile.py", "tests/conftest.py", "docs/index.md"):
        assert (folder / name).is_file(), name


def test_top_level_folders_are_linked_into_package() -> None:
    for name in LINKED:
        link = ROOT / "tunebench" / name
        assert link.is_symlink(), f"{link} must be a link, for type checkers and editors"
        assert link.readlink() == Path("..") / name


NO_EXTRAS = """
import sys

class Refusing:
    refused = {"cuda", "numba_cuda", "torch", "triton", "psycopg", "ray", "matplotlib", "pynvml", "pytest"}
    refused |= {"jinja2", "starlette", "uvicorn"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.refused:
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Refusing())
sys.path.insert(0, sys.argv[1])
"""


def run(code: str, folder: Path, cwd: Path) -> str:
    """Run code against an installed wheel, in a process where no optional dependency can be imported."""
    command = [sys.executable, "-c", NO_EXTRAS + code, str(folder)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_wheel_imports_without_extras(installed: Path, tmp_path: Path) -> None:
    code = """
import tunebench, tunebench.kernels, tunebench.workloads, tunebench.db
for package in (tunebench, tunebench.kernels, tunebench.workloads, tunebench.db):
    print(package.__file__)
assert "gemm" in tunebench.workloads.all_operators()
assert tunebench.kernels.variants("softmax")
assert tunebench.workloads.suite("resnet50")
"""
    paths = run(code, installed, tmp_path).split()
    assert [Path(path).is_relative_to(installed) for path in paths] == [True] * 4


def test_installed_wheel_creates_and_upgrades_database(installed: Path, tmp_path: Path) -> None:
    code = """
import tunebench.db
before, after = tunebench.db.upgrade("new.db")
assert before is None
assert tunebench.db.upgrade("new.db") == (after, after)
"""
    run(code, installed, tmp_path)


def test_every_module_imports_without_extras_and_gpu(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib, pathlib
from tunebench.errors import MissingDependency
root = pathlib.Path(sys.argv[1])
for path in sorted(root.rglob("tunebench/**/*.py")):
    if "migrations" in path.parts or path.stem.endswith("_contract"):
        continue  # only Alembic runs the former, and the contract suites need pytest
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except MissingDependency as missing:  # functions for torch or Triton are of no use without it, and say so
        users = {"torch": ("tunebench.torch", "tunebench.training"), "triton": ("tunebench.triton",)}
        assert name.startswith(users[missing.package]), name
    print(name)
"""
    imported = set(run(code, installed, tmp_path).split())
    assert {"tunebench.cli.doctor", "tunebench.kernels.softmax.numba_cpu", "tunebench.db.store"} <= imported


def test_kernels_and_workloads_import_neither_cuda_nor_numba(installed: Path, tmp_path: Path) -> None:
    code = """
import tunebench.kernels, tunebench.workloads
tunebench.kernels.variants()
tunebench.workloads.all_operators()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    loaded = set(run(code, installed, tmp_path).split())
    assert "tunebench" in loaded
    assert loaded.isdisjoint({"numba", "llvmlite", "optuna", "sqlalchemy", "alembic"})
