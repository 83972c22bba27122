"""Worker process that compiles, so that a crash or hang of the compiler costs one configuration."""

from __future__ import annotations

from pathlib import Path

from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile import compile_config
from tunebench.compile.cache import BinaryCache
from tunebench.kernels import load_file
from tunebench.outcome import CompileFailed
from tunebench.task import Task

__all__ = ["compile_task", "start"]

_cache: BinaryCache | None = None


def start(cache_folder: Path, variant_files: tuple[str, ...]) -> None:
    """Prepare this process.

    Args:
        cache_folder: Folder of the binary cache.
        variant_files: Users' Python files with variants, to load.
    """
    global _cache
    for path in variant_files:
        load_file(path)
    _cache = BinaryCache(cache_folder)


def compile_task(task: Task) -> Binary | CompileFailed:
    """Compile one configuration; return the binary, or the reason of the failure."""
    if _cache is None:
        raise RuntimeError("compile_task needs a binary cache: call start(cache_folder, variant_files) first")
    try:
        return compile_config(task.variant, task.workload, task.config, task.device, _cache)
    except CompileError as error:
        return CompileFailed(reason=str(error))
    except Exception as error:  # a user's variant may raise anything while it generates its source
        return CompileFailed(reason=f"{type(error).__name__}: {error}"[:2000])
