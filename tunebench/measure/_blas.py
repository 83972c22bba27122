"""Single-threaded NumPy products, for processes that verify while others compile.

OpenBLAS threads spin while they wait for each other, which is slow next to busy processes: with two threads
on two busy cores a block of `tunebench.measure.sampled` took 0.2 to 0.35 s, and 6 ms with one thread.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["in_one_thread"]

_SETTINGS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FUNCTIONS = ("openblas_set_num_threads", "openblas_set_num_threads64_")


def in_one_thread() -> None:
    """Use one thread from now on, whether NumPy is loaded already or not."""
    os.environ.update(dict.fromkeys(_SETTINGS, "1"))  # for a library that is not loaded yet
    for path in _loaded():
        library = ctypes.CDLL(path)
        for name in (*_FUNCTIONS, *(f"scipy_{function}" for function in _FUNCTIONS)):
            if hasattr(library, name):
                getattr(library, name)(1)


def _loaded() -> set[str]:
    """Return the OpenBLAS libraries loaded in this process (on Linux; empty elsewhere)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5].strip() for line in maps.splitlines() if line.count("/") > 1)
    return {path for path in paths if "openblas" in Path(path).name}
