"""Threads of Numba without Numba: its extension modules of threads, loaded by themselves.

Numba's import takes longer than loading a kernel, and 80 MB. A later import of Numba in the process finds the
same library, so that both use the same threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Any

from tunebench._environment import numba_variables

__all__ = ["Threads", "default_count", "set_thread_count", "started", "threads"]

_MODULES = {"omp": "omppool", "workqueue": "workqueue"}
_DECIDE = {"NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER"}
"""Variables that this module reads; Numba itself is loaded where another one is set."""


@dataclass(frozen=True, slots=True)
class Threads:
    """Started threads.

    Attributes:
        layer: Numba's name of the implementation: ``omp`` or ``workqueue``.
        count: Number of threads.
        functions: Addresses of its functions by name.
        set_count: Limits the threads of kernels that this thread of Python calls.
    """

    layer: str
    count: int
    functions: dict[str, int]
    set_count: Callable[[int], None]


_started: Threads | None = None


def started() -> Threads | None:
    """Return the threads that `threads` has started, or None."""
    return _started


def default_count() -> int | None:
    """Return the number of threads that Numba would start; None if Numba itself must say."""
    variables = numba_variables()
    text = variables.get("NUMBA_NUM_THREADS", "")
    if not variables.keys() <= _DECIDE or Path(".numba_config.yaml").exists():
        return None
    if variables.get("NUMBA_THREADING_LAYER", "default") not in ("default", *_MODULES):
        return None
    if not text:
        return max(1, len(os.sched_getaffinity(0)))
    return int(text) if text.isdecimal() and int(text) > 0 else None


@functools.cache
def threads() -> Threads | None:
    """Start the threads and return them; None where Numba would use others, or has another version."""
    global _started
    count = default_count()
    if count is None:
        return None
    layer = numba_variables().get("NUMBA_THREADING_LAYER", "default")
    if layer == "default" and _has_tbb():
        return None
    for name in _MODULES if layer == "default" else (layer,):
        module = _extension(_MODULES[name])
        if module is not None:
            _started = _start(name, module, count)
            return _started
    return None


_limits = threading.local()
"""The last limit of each thread that calls kernels, and which implementations it reached."""


def set_thread_count(count: int) -> None:
    """Limit the threads of kernels that this thread calls, as `numba.set_num_threads` does.

    Args:
        count: Number of threads; at most those that were started.
    """
    parallel: Any = sys.modules.get("numba.np.ufunc.parallel")
    by_numba = parallel is not None and parallel._is_initialized
    limit = (count, _started is not None, by_numba)  # a start lifts the limit
    if getattr(_limits, "last", None) == limit:
        return
    if _started is not None:
        _started.set_count(min(count, _started.count))
    if by_numba:
        parallel.set_num_threads(min(count, parallel.NUM_THREADS))
    _limits.last = limit


def _has_tbb() -> bool:
    try:
        ctypes.CDLL("libtbb.so.12")
    except OSError:
        return False
    return True


def _extension(name: str) -> Any:
    """Return an extension module of Numba, loaded without its package; None if it cannot be."""
    package = importlib.util.find_spec("numba")
    if package is None or not package.submodule_search_locations:
        return None
    qualified = f"numba.np.ufunc.{name}"
    path = Path(package.submodule_search_locations[0], "np", "ufunc", name + EXTENSION_SUFFIXES[0])
    try:
        spec = importlib.util.spec_from_loader(qualified, ExtensionFileLoader(qualified, str(path)))
        assert spec is not None
        return importlib.util.module_from_spec(spec)
    except ImportError:
        return None
    finally:
        sys.modules.pop(qualified, None)  # Numba's own import must find its package first


def _start(layer: str, module: Any, count: int) -> Threads:
    """Start threads, and restore torch's thread count: both may share one OpenMP runtime."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    set_count: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_int)(module.set_num_threads)
    ctypes.CFUNCTYPE(None, ctypes.c_int)(module.launch_threads)(count)
    set_count(count)
    if torch is not None:
        torch.set_num_threads(before)
    addresses = {name: value for name, value in vars(module).items() if isinstance(value, int)}
    addresses["numba_parallel_for"] = addresses["parallel_for"]
    return Threads(layer, count, addresses, set_count)
