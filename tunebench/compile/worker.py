"""Worker process that compiles, so that a crash or hang of the compiler costs one configuration."""

from __future__ import annotations

import gc
from pathlib import Path

from tunebench.binary.compiled import Binary
from tunebench.compile import compile_config
from tunebench.compile.cache import BinaryCache
from tunebench.errors import CodeTimeout, describe_error
from tunebench.fault import environment_fault
from tunebench.kernels import preload
from tunebench.outcome import CompileFailed
from tunebench.task import Task

__all__ = ["compile_task", "start"]

_cache: BinaryCache | None = None
_is_new_worker = False
"""Whether `start` has made this process a worker, which has compiled nothing yet."""

_GC_THRESHOLDS = (10_000, 20, 20)
"""Thresholds of garbage collection. With Python's own, a full collection visits the modules and caches of a
compiler after every few thousand new objects, an eighth of the time of 20 Numba compilations."""


def start(cache_folder: Path, variant_files: tuple[str, ...]) -> None:
    """Prepare this process.

    Args:
        cache_folder: Folder of the binary cache.
        variant_files: Users' Python files with variants, to load.
    """
    global _cache, _is_new_worker
    gc.set_threshold(*_GC_THRESHOLDS)
    preload(variant_files)
    _cache, _is_new_worker = BinaryCache(cache_folder), True


def compile_task(task: Task) -> Binary | CompileFailed:
    """Compile one configuration; return the binary, or the reason of the failure.

    Raises:
        EnvironmentFault: The failure is not that of the configuration or the compiler.
    """
    if _cache is None:
        raise RuntimeError("compile_task needs a binary cache: call start(cache_folder, variant_files) first")
    try:
        task.variant.revision(task.workload, task.config)  # a result without a source could never be stale
        return compile_config(task.variant, task.workload, task.config, task.device, _cache)
    except BaseException as error:  # a user's variant may raise anything while it generates its source
        if fault := environment_fault(error):
            raise fault from error
        if isinstance(error, CodeTimeout):
            return CompileFailed(reason=describe_error(error), refused=False, conditions=error.conditions)
        return CompileFailed(reason=describe_error(error))
    finally:
        _exempt_compiler()


def _exempt_compiler() -> None:
    """Exempt the compiler, which the first compilation of this worker imports, from garbage collection."""
    global _is_new_worker
    if _is_new_worker:
        gc.collect()
        gc.freeze()
        _is_new_worker = False
