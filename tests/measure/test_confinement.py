"""Processes that run kernels cannot reach those that judge them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, subprocess, sys
from pathlib import Path
from tunebench.measure._confinement import confine

def denied(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False

outside = int(sys.argv[1])
before = denied(lambda: os.kill(outside, 0)) or denied(lambda: Path(f"/proc/{outside}/mem").open("rb"))
if not confine() or before:
    sys.exit("unsupported")
assert denied(lambda: os.kill(outside, 0))
assert denied(lambda: os.kill(outside, signal.SIGSTOP))
assert denied(lambda: Path(f"/proc/{outside}/mem").open("r+b"))
own = subprocess.Popen(["sleep", "60"])
own.kill()
assert own.wait() == -signal.SIGKILL
"""


def test_confined_process_signals_and_traces_its_own_children_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(os.getpid())], capture_output=True, text=True, check=False
    )
    if "unsupported" in done.stderr:
        pytest.skip("needs Linux 6.12 with Landlock")
    assert done.returncode == 0, done.stderr
