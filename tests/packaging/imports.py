"""Import every package that an installed extra of tunebench requires, and every module of tunebench.

    python -m tests.packaging.imports

A command of the nox sessions `oldest` and `newest`. Exit status: 0, or 1 if an import fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable
from importlib import metadata

import tunebench
from tunebench.errors import TunebenchError

NOT_INSTALLED = ("docs", "dev", "libraries", "peers", "triton")
"""Extras that the sessions do not install."""

TESTED_ELSEWHERE = ("torch",)
"""Packages that the sessions do not install, because the session `tests` runs with one version of them."""

NOT_IMPORTED = ("tunebench.__main__", "tunebench.db.migrations.env")
"""Modules that are only run: by Python, and by Alembic."""

OF_TORCH = (
    *("tunebench.torch", "tunebench.measure._torch"),
    *(f"tunebench.training.{room}" for room in ("coexecution", "fitting", "pipeline_runtime")),
)
"""Modules that import PyTorch at once."""

OF_TRITON = ("tunebench.triton.autotuner",)
"""Modules that import Triton at once."""


def requirements() -> dict[str, str]:
    """Return the extra that requires each package; empty for what is always required."""
    extras: dict[str, str] = {}
    for text in metadata.requires("tunebench") or []:
        name, extra = re.match(r"[\w.-]+", text), re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        if name is not None:
            extras.setdefault(name[0], extra[1] if extra else "")
    return extras


def modules(package: str) -> list[str]:
    """Return the modules that a package installs at the top level of its namespace."""
    shared_names = {"cuda-core": ["cuda.core"], "numba-cuda": ["numba.cuda"]}
    tops = {top for top, names in metadata.packages_distributions().items() if package in names}
    return shared_names.get(package) or sorted(tops - {"nvidia", "numba_cuda", "cuda"})


def main() -> int:
    """Import everything, write what was imported, and return the exit status."""
    failures, lines = [], []
    for package, extra in requirements().items():
        if extra not in NOT_INSTALLED and package not in TESTED_ELSEWHERE:
            lines.append(f"{package} {metadata.version(package)}{f' ({extra})' if extra else ''}")
            failures += _failures(module for module in modules(package) if not module.startswith("_"))
    packages = pkgutil.walk_packages(tunebench.__path__, "tunebench.", onerror=lambda name: None)
    optional = {"torch": OF_TORCH, "triton": OF_TRITON}
    absent = (names for package, names in optional.items() if importlib.util.find_spec(package) is None)
    skipped = (*NOT_IMPORTED, *(name for names in absent for name in names))
    module_names = [package.name for package in packages if not package.name.startswith(skipped)]
    failures += _failures(module_names)
    lines.append(f"{len(module_names)} modules of tunebench; {len(failures)} imports failed")
    sys.stdout.write("\n".join([*lines, *failures, ""]))
    return int(bool(failures))


def _failures(names: Iterable[str]) -> list[str]:
    """Return the module and the error of each failed import."""
    failures = []
    for name in names:
        try:
            importlib.import_module(name)
        except (TunebenchError, ImportError, AttributeError, OSError, TypeError, ValueError) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
