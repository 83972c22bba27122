"""Building the fake CUDA driver (see fake_driver.cpp) and running programs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["build_driver", "seen_by"]

HERE = Path(__file__).parent


def build_driver(folder: Path, name: str) -> Path:
    """Build the driver in a folder under a library name, and return the folder; skip the test without g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the driver with")
    source, library = str(HERE / "fake_driver.cpp"), str(folder / name)
    build = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(build, check=True)
    return folder


def seen_by(program: str, folder: Path) -> dict[str, Any]:
    """Build the driver in a folder, run a program of this folder on it, and return its JSON output."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    build_driver(folder, "libcuda.so.1")
    ran = subprocess.run(
        [sys.executable, str(HERE / program)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, Any] = json.loads(ran.stdout)
    return seen
