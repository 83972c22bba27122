"""`tunebench doctor`: checks of the installation and this machine, with remedies."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from tunebench import _environment, device
from tunebench._child import WORKING_FOLDER
from tunebench._console import is_verbose
from tunebench.cli._option import Database, Json
from tunebench.cli._output import emit, plain
from tunebench.errors import InputError, TunebenchError, install_command

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EnvironmentCheck", "checks", "command"]

Status = Literal["ok", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """The result of one check.

    Attributes:
        subject: What was checked.
        status: ``"ok"``; ``"absent"`` if only some commands need it; ``"broken"`` if every command needs it.
        found: What was found, or the consequence of its absence.
        remedy: What to do; empty if nothing.
    """

    subject: str
    status: Status
    found: str
    remedy: str = ""


def command(db: Database = None, as_json: Json = False) -> None:
    """Check the installation and this machine, and name the remedy for what is missing.

    Passed checks take one line; --verbose also shows versions, paths and values. The exit code is 1 if
    something that every command needs is broken. Missing optional parts, such as a GPU, do not change the
    exit code.
    """
    with contextlib.ExitStack() as stack:
        defaults = _defaults_file(stack)
        results = [*checks(db), defaults]
    emit(as_json, plain(results), lambda console: _render(console, results))
    if any(check.status == "broken" for check in results):
        raise typer.Exit(1)


def _render(console: Console, results: list[EnvironmentCheck]) -> None:
    """Print every check that failed, with its remedy; those that passed by name, or in full if verbose."""
    shown = [check for check in results if is_verbose() or check.status != "ok"]
    width = max((len(check.subject) for check in shown), default=0)
    colours = {"ok": "green", "absent": "yellow", "broken": "red"}
    if not is_verbose():
        passed = ", ".join(check.subject for check in results if check.status == "ok")
        console.print(f"{'ok':<7}", style=colours["ok"], end="")
        console.print(f"{passed} (details: tunebench doctor --verbose)", soft_wrap=True)
    for check in shown:
        console.print(f"{check.status:<7}", style=colours[check.status], end="")
        console.print(f"{check.subject:<{width}}  {check.found}", soft_wrap=True)
        if check.remedy:
            console.print(f"{'':<{width + 9}}{check.remedy}", soft_wrap=True)


def checks(db: str | None = None) -> Iterator[EnvironmentCheck]:
    """Yield the result of one check after the other.

    Args:
        db: Database to check; None for the default one.
    """
    python = f"{platform.python_version()} on {platform.platform(terse=True)}, {sys.executable}"
    yield EnvironmentCheck("Python", "ok", python)
    yield _processor()
    yield _graphics()
    yield _compiler()
    extras = _requirements()
    yield _core(extras.pop("", []))
    for extra, packages in extras.items():
        yield _extra(extra, packages)
    yield _plugins()
    yield _database(db)
    yield _shipped()
    yield _cache()


def _processor() -> EnvironmentCheck:
    cpu = device.local_cpu()
    return EnvironmentCheck("processor", "ok", f"{cpu.name}, {cpu.architecture}, {cpu.sm_count} cores")


def _graphics() -> EnvironmentCheck:
    offline = "tune on the CPU, or for an absent GPU with --arch sm_90"
    driver = _driver_version()
    if driver is None:
        return EnvironmentCheck("GPU", "absent", "no NVIDIA driver (libcuda.so.1) found", offline)
    gpus = device.local_gpus()
    if not gpus:
        reason = f"driver for CUDA {driver}, but no GPU that this process can use"
        return EnvironmentCheck("GPU", "absent", reason, f"run nvidia-smi to see why; {offline}")
    names = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in gpus)
    return EnvironmentCheck("GPU", "ok", f"{names}; driver for CUDA {driver}")


def _driver_version() -> str | None:
    """Return the newest CUDA version that the driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _compiler() -> EnvironmentCheck:
    from tunebench.emulate.emulator import find_compiler

    subject = "C++ compiler"
    try:
        path = find_compiler()
    except InputError as error:
        return EnvironmentCheck(subject, "absent", str(error))
    if path is None:
        reason = "no g++ found: without a GPU, CUDA C++ kernels cannot be verified"
        return EnvironmentCheck(subject, "absent", reason, "install g++, for example by apt-get install g++")
    asked = subprocess.run(
        [path, "--version"], capture_output=True, text=True, cwd=WORKING_FOLDER, timeout=60, check=False
    )
    version = asked.stdout.partition("\n")[0]
    return EnvironmentCheck(subject, "ok", f"{version}, {path}")


def _requirements() -> dict[str, list[str]]:
    """Return the required packages by extra; those without an extra under ``""``."""
    requirements: dict[str, list[str]] = {}
    for requirement in metadata.requires("tunebench") or []:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        if name is not None:
            requirements.setdefault(extra[1] if extra else "", []).append(name[0])
    return requirements


def _core(packages: list[str]) -> EnvironmentCheck:
    """Import the required packages: an installed package can still be broken."""
    broken = []
    for package in packages:
        try:
            importlib.import_module(package.replace("-", "_"))
        except (ImportError, OSError) as error:
            broken.append(f"{package}: {' '.join(str(error).split())}")
    if broken:
        remedy = "reinstall tunebench: pip install --force-reinstall, from where it was installed"
        return EnvironmentCheck("core packages", "broken", "; ".join(broken), remedy)
    return EnvironmentCheck("core packages", "ok", _versions(packages))


def _extra(extra: str, packages: list[str]) -> EnvironmentCheck:
    missing = [package for package in packages if _version(package) is None]
    subject = f"extra {extra}"
    if missing:
        fault_text = f"not installed: {', '.join(missing)}"
        return EnvironmentCheck(subject, "absent", fault_text, install_command(extra))
    if extra == "cuda" and (fault := _compiler_fault()):
        fault_text, _, remedy = fault.partition("; ")
        return EnvironmentCheck(subject, "absent", fault_text, remedy)
    return EnvironmentCheck(subject, "ok", _versions(packages))


def _compiler_fault() -> str | None:
    """Return why an installed compiler for GPUs fails, with the remedy; None if all of them work."""
    from tunebench.compile import unavailable

    return unavailable("cuda") or unavailable("numba-cuda")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions(packages: list[str]) -> str:
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _defaults_file(stack: contextlib.ExitStack) -> EnvironmentCheck:
    """Check the file of defaults, and use its database; state the values that are in force."""
    from tunebench.cli import _defaults
    from tunebench.db import locate

    subject = "defaults"
    try:
        file = _defaults.find()
    except (InputError, OSError) as error:
        remedy = "correct the file, or set TUNEBENCH_CONFIG to another one or to none"
        return EnvironmentCheck(subject, "broken", " ".join(str(error).split()), remedy)
    if file is None:
        return EnvironmentCheck(subject, "ok", "built in: no tunebench.toml in this folder or above it")
    values = dict(file.values)
    if "db" in values:
        stack.enter_context(_environment.default_database(values["db"]))
        replaced = _environment.database() != values["db"]
        values["db"] = f"{locate(values['db'])}{' (TUNEBENCH_DB is used instead)' if replaced else ''}"
    listed = ", ".join(f"{name} = {value}" for name, value in values.items()) or "no value"
    return EnvironmentCheck(subject, "ok", f"{file.path}: {listed}")


def _database(db: str | None) -> EnvironmentCheck:
    from tunebench.db import locate, open_store

    try:
        location = locate(db)
        if location.path is not None and not location.path.exists():
            state = "does not exist yet; the first `tunebench tune` creates it"
            return _place("database", location.path, state)
        with open_store(db, read_only=True) as store:
            stats = store.stats()
    except TunebenchError as error:
        return EnvironmentCheck("database", "broken", " ".join(str(error).split()))
    state = f"schema {stats.revision}, {stats.trials} trials of {stats.workloads} workloads"
    if location.path is not None:
        return _place("database", location.path, state)
    return EnvironmentCheck("database", "ok", f"{location}: {state}")


def _plugins() -> EnvironmentCheck:
    """Check that the packages that offer variants or samplers can be imported."""
    from tunebench import kernels
    from tunebench.search import registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check states the reasons
        broken = (*kernels.broken_plugins(), *registry.broken_samplers())
    if broken:
        remedy = "these variants and samplers are skipped: repair or uninstall their packages"
        return EnvironmentCheck("plug-ins", "broken", "; ".join(broken), remedy)
    groups = (kernels.ENTRY_POINTS, registry.ENTRY_POINTS)
    names = sorted(entry.name for group in groups for entry in metadata.entry_points(group=group))
    return EnvironmentCheck("plug-ins", "ok", ", ".join(names) or "none installed")


def _shipped() -> EnvironmentCheck:
    """Check the bundled records, and name the files that are skipped with the reason."""
    from tunebench.db import bundled
    from tunebench.errors import DatabaseError

    subject, bundled_counts, skipped = "bundled records", [], []
    for path in bundled.files():
        try:
            bundled.index_of(path)
            bundled_counts.append(f"{len(bundled.read(path).records)} of {path.stem}")
        except (DatabaseError, InputError) as error:
            skipped.append(" ".join(str(error).split()))
    if skipped:
        remedy = "reinstall tunebench, and make TUNEBENCH_CACHE writable"
        return EnvironmentCheck(subject, "absent", "; ".join([*bundled_counts, *skipped]), remedy)
    return EnvironmentCheck(subject, "ok", ", ".join(bundled_counts) or "this version has none")


def _cache() -> EnvironmentCheck:
    try:
        folder = _environment.cache_folder()
    except InputError as error:
        return EnvironmentCheck("kernel cache", "broken", str(error))
    return _place("kernel cache", folder, "compiled kernels; can be deleted at any time")


def _place(subject: str, path: Path, state: str) -> EnvironmentCheck:
    """Check whether a file or folder, or its nearest existing parent folder, is writable."""
    nearest = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    if os.access(nearest, os.W_OK):
        return EnvironmentCheck(subject, "ok", f"{path}: {state}")
    remedy = f"make {nearest} writable, or set TUNEBENCH_DB and TUNEBENCH_CACHE to other places"
    return EnvironmentCheck(subject, "broken", f"{path}: {nearest} is read-only", remedy)
