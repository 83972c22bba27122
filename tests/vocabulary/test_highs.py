"""HiGHS: solvers that print nothing, made in one place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tunebench

pytest.importorskip("highspy", reason="the extra `torch` is not installed")

SOLVE = """
import os
from tunebench._highs import silent_solver
from tunebench.training.integer_program import IntegerProgram
print("before", flush=True)
os.write(1, b"written\\n")
solver = silent_solver()
solver.addVars(1, [0.0], [1.0])
solver.run()
program = IntegerProgram()
program.variable(cost=-1.0, integer=True)
assert program.solve(10.0).values == [1.0]
print("after", flush=True)
"""


@pytest.mark.parametrize("closed", [(), (1, 2)], ids=["open", "closed"])
def test_solvers_print_nothing(closed: tuple[int, ...]) -> None:
    """The banner is printed once per process, and below Python's streams: a new process shows it."""

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    program = SOLVE.replace("os.write", "#") if closed else SOLVE
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, preexec_fn=close
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert ran.stdout == ("" if closed else "before\nwritten\nafter\n")


def test_only_one_module_makes_solvers() -> None:
    root = Path(tunebench.__file__).resolve().parent
    folders = (root, *(root.parent / name for name in ("workloads", "kernels", "db", "benchmarks")))
    files = {path for folder in folders for path in folder.rglob("*.py")}
    makers = {path.name for path in files if re.search(r"\bHighs\(", path.read_text(encoding="utf-8"))}
    assert makers == {"_highs.py"}
