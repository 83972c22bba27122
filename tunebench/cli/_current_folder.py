"""The current folder, which may be a stranger's: libraries run no code and read no settings there.

The folder is no part of the import path of `tunebench`, but libraries look there by themselves: Numba for a
file of settings, which can name a cache of pickled functions; Matplotlib for another one; setuptools, which
PyTorch imports, for the mark of a build of Python; and PyTorch starts Python processes that import from it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tunebench._child import WORKING_FOLDER

__all__ = ["distrust"]

_READ_AT_IMPORT = {
    ".numba_config.yaml": ("numba.core.config", "numba.cuda"),
    "matplotlibrc": ("matplotlib",),
    "pybuilddir.txt": ("setuptools",),
}
"""Files that modules look for in the current folder when they are imported."""


def distrust() -> None:
    """Let this process and its children ignore the code and the settings in the current folder."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # for Python processes that libraries start
    for name, modules in _READ_AT_IMPORT.items():
        if Path(name).exists():
            warnings.warn(f"{name} in this folder is ignored", stacklevel=2)
            with _elsewhere():
                for module in modules:
                    _import_without_file(module)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Enter another folder for a moment; the process must have one thread."""
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        os.chdir(WORKING_FOLDER)
        yield
    finally:
        os.chdir(folder)
        os.close(folder)


def _import_without_file(name: str) -> None:
    with contextlib.suppress(ImportError), warnings.catch_warnings(action="ignore"):
        importlib.import_module(name)
    module = sys.modules.get(name)
    if hasattr(module, "_config_fname"):  # Numba looks for its file again before each compilation
        module._config_fname = os.devnull  # type: ignore[union-attr]
