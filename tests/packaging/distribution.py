"""Builds the distributions once for all tests of this folder, from a copy of the source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "workloads", "db")
"""Top-level folders that are installed under `tunebench.`."""

_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".*_cache", ".nox", ".venv", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist"
)


def copy_tree(target: Path) -> Path:
    """Copy the source tree and keep symbolic links."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=_LEFT_OUT)
    return target


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a distribution by the backend itself, with the setuptools that is installed here.

    Args:
        kind: ``"wheel"`` or ``"sdist"``.
        source: A source tree; building leaves traces in it.
        target: Folder for the result.
    """
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, check=True, capture_output=True)
    (built,) = target.iterdir()
    return built


def files_of_wheel(wheel: Path) -> list[str]:
    """Return the files that a wheel installs, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def unpack_sdist(sdist: Path, target: Path) -> Path:
    """Unpack a source distribution and return its folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


def files_of_package() -> list[str]:
    """Return every source and data file to be installed, by its import path."""
    prefixes = {ROOT / "tunebench": "tunebench"} | {ROOT / name: f"tunebench/{name}" for name in LINKED}
    return sorted(
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for folder, prefix in prefixes.items()
        for path in folder.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.relative_to(folder).parts[0] not in LINKED
    )
