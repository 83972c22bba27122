"""Defaults of options from a file: `tunebench.toml`, or the table `[tool.tunebench]` of `pyproject.toml`.

The nearest file counts: from the working folder upwards, then `tunebench.toml` in the user's configuration
folder. `TUNEBENCH_CONFIG` names another file, or `none`. The command line and the environment come first.

A file of a folder that somebody else made must be harmless. Its values are plain data, no key loads code or
connects to a machine, and a server as the database is accepted only from the user's own files. A file that
another user owns or may write is skipped with a warning, as files of the cache are: everyone can put one into
a folder above, such as /tmp.
"""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench import _environment, datasheet
from tunebench._foreign_file import read_table
from tunebench._private_file import distrust
from tunebench.errors import InputError, UnknownName

__all__ = ["KEYS", "DefaultsFile", "Key", "apply", "find", "is_trusted"]

NAME = "tunebench.toml"
MAX_BYTES = 1 << 20
"""Largest size of a file."""

_TUNE = ("tune",)
_ON_DEVICE = (
    *("tune", "lookup", "explain", "export", "predict", "compare", "extract"),
    *("plan memory", "plan pipeline"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of the file.

    Attributes:
        meaning: What its value means.
        kinds: Accepted types of the value.
        commands: Commands whose option of this name it is the default of.
        unless: Options that replace the default when they are given.
    """

    meaning: str
    kinds: tuple[type, ...]
    commands: tuple[str, ...] = _TUNE
    unless: tuple[str, ...] = ()


_NUMBER = (int, float)

KEYS = {
    "db": Key(meaning="database of all commands, a path relative to the file", kinds=(str,), commands=()),
    "device": Key(
        meaning="device of commands that would use that of this machine; a name, or a file with a device",
        kinds=(str,),
        commands=_ON_DEVICE,
        unless=("arch", "cluster", "devices", "costs"),
    ),
    "price": Key(
        meaning="table of prices of one device per hour, such as h100-sxm = 2.5",
        kinds=(dict,),
        commands=("compare",),
    ),
    "tolerance": Key(
        meaning='slowdown that is no regression, such as "5%"',
        kinds=(str, *_NUMBER),
        commands=("check", "report"),
    ),
    "baseline": Key(meaning="baseline file, a path relative to the file", kinds=(str,), commands=("check",)),
    "trials": Key(meaning="configurations to launch per workload", kinds=(int,), unless=("suite",)),
    "minutes": Key(meaning="time limit of a search in minutes", kinds=_NUMBER),
    "sampler": Key(meaning="sampler: surrogate, bound, random, tpe or nsga2", kinds=(str,)),
    "seed": Key(meaning="seed of the search and of the inputs", kinds=(int,)),
    "stop-at-gap": Key(meaning="optimality gap at which the search stops", kinds=_NUMBER),
    "audit": Key(meaning="fraction of bound-pruned configurations to run anyway", kinds=_NUMBER),
    "warm": Key(meaning="whether to warm-start", kinds=(bool,)),
    "learned-pruner": Key(
        meaning="whether to postpone configurations that are unlikely to win", kinds=(bool,)
    ),
    "cache": Key(meaning="cache state, cold or warm", kinds=(str,)),
    "timeout": Key(meaning="time limit of one configuration in seconds", kinds=_NUMBER),
    "workers": Key(meaning="number of compile processes", kinds=(int,)),
    "finalists": Key(meaning="number of fastest configurations to time again", kinds=(int,)),
    "baselines": Key(meaning="whether to time NumPy and torch", kinds=(bool,)),
}
"""Every key of the file; an underscore may be written for a hyphen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsFile:
    """A file of defaults.

    Attributes:
        path: The file.
        values: Its values by key; paths are absolute.
    """

    path: Path
    values: Mapping[str, Any]


def find() -> DefaultsFile | None:
    """Return the file that is in force; None without one.

    Raises:
        InputError: the file cannot be read, or has an unknown key or a wrong value.
    """
    named = _environment.config()
    if named is not None:
        return (
            None
            if named in ("none", os.devnull)
            else _read(_environment.expanded(named, "TUNEBENCH_CONFIG"), user_file=True)
        )
    current_folder = Path.cwd()
    for folder in (current_folder, *current_folder.parents):
        for name in (NAME, "pyproject.toml"):
            path = folder / name
            if is_trusted(path) and (defaults_file := _read(path, user_file=False)) is not None:
                return defaults_file
    user = _environment.config_folder()
    return _read(user / NAME, user_file=True) if user is not None and (user / NAME).is_file() else None


def _read(path: Path, *, user_file: bool) -> DefaultsFile | None:
    """Return the defaults of a file; None for a `pyproject.toml` without `[tool.tunebench]`."""
    project = path.name == "pyproject.toml"
    if project and b"tunebench" not in _first_bytes(path):
        return None
    try:
        data: Any = read_table(path, largest_bytes=MAX_BYTES, longest_text=MAX_BYTES)
    except InputError:
        if project and b"tool.tunebench" not in _first_bytes(path):
            return None
        raise
    if project:
        tool = data.get("tool")
        data = tool.get("tunebench") if isinstance(tool, dict) else None
        if data is None:
            return None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected tool.tunebench to be a table")
    return DefaultsFile(path=path, values=dict(_checked(path, data, user_file=user_file)))


def is_trusted(path: Path) -> bool:
    """Return whether a file exists and no other user may have written it; warn about one that has defaults.

    Args:
        path: The file.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    reason = distrust(status)
    if reason is not None and (path.name == NAME or b"tool.tunebench" in _first_bytes(path)):
        warnings.warn(f"{path} is ignored: it {reason}; to use it, name it by TUNEBENCH_CONFIG", stacklevel=2)
    return reason is None


def _first_bytes(path: Path) -> bytes:
    """Return the beginning of a file, in which a table for tunebench may be; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError:
        return b""


def _checked(path: Path, data: Mapping[str, Any], *, user_file: bool) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file, with absolute paths."""
    value: Any
    for written, value in data.items():
        name = written.replace("_", "-")
        if name not in KEYS:
            raise UnknownName(f"key in {path}:", written, KEYS)
        kinds: Any = KEYS[name].kinds
        if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
            expected = " or ".join(_KIND_NAMES[kind] for kind in kinds)
            raise InputError(f"{path}: {written} must be {expected}, got {value!r}")
        if name == "db":
            value = _database(path, value, user_file=user_file)
        elif name == "baseline" or (name == "device" and datasheet.is_file(value)):
            value = str(path.parent / _environment.expanded(value, f"{path}: {written}"))
        elif name == "price":
            value = _prices(path, value)
        yield name, value


_KIND_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}


def _database(path: Path, text: str, *, user_file: bool) -> str:
    """Return the location of a database; a server only from the user's own files.

    libpq sends the password in PGPASSWORD to any server that a location names.
    """
    if "://" not in text and "=" not in text:
        return str(path.parent / _environment.expanded(text, f"{path}: db"))
    if not user_file:
        raise InputError(
            f"{path}: db must be a file: name a server by TUNEBENCH_DB, or in {NAME} of your configuration "
            "folder, so that the file of an unknown folder cannot send passwords to a server"
        )
    return text


def _prices(path: Path, table: Mapping[str, Any]) -> str:
    for name, price in table.items():
        if isinstance(price, bool) or not isinstance(price, _NUMBER) or not 0 < price < math.inf:
            raise InputError(f"{path}: the price of {name} must be a positive number, got {price!r}")
    return ",".join(f"{name}={price}" for name, price in table.items())


def apply(
    defaults_file: DefaultsFile, context: Any, name: str, command: Any, arguments: Sequence[str]
) -> None:
    """Make the values of a file the defaults of a command, and its database that of this process.

    Args:
        defaults_file: The file.
        context: Context of the command group; its `default_map` is set.
        name: Name of the command.
        command: The command, or a group of commands.
        arguments: Its arguments: some of them replace a default.
    """
    if "db" in defaults_file.values:
        context.with_resource(_environment.default_database(defaults_file.values["db"]))
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        defaults = _defaults_of(defaults_file, name, command, arguments)
    else:
        defaults = {
            sub: _defaults_of(defaults_file, f"{name} {sub}", subcommand, arguments)
            for sub, subcommand in subcommands.items()
        }
    context.default_map = {name: defaults}


def _defaults_of(
    defaults_file: DefaultsFile, name: str, command: Any, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return the values of a file by parameter of a command."""
    options = {argument.partition("=")[0] for argument in arguments}
    defaults = {}
    for param in command.params:
        key = max(param.opts, key=len).removeprefix("--")
        if key not in defaults_file.values or name not in KEYS[key].commands:
            continue
        if "--repeat" in options and key != "db":  # the run has its own options
            continue
        if options.isdisjoint(f"--{option}" for option in KEYS[key].unless):
            value = defaults_file.values[key]
            defaults[param.name] = [value] if getattr(param, "multiple", False) else value
    return defaults
