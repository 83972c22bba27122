"""All errors that tunebench raises deliberately, and their exit codes on the command line.

TunebenchError                 1  base class; catch this to catch all
├── InputError                 2  an argument or input file is invalid
│   ├── UnknownName            2  a workload, variant, device, sampler … that does not exist
│   ├── ConfigError            2  a configuration outside its space
│   ├── EnvironmentFault       2  a disk, memory, a folder or a compiler failed, not a kernel
│   │   └── SuspectedFault     2  the machine lacked a resource, or the kernel exhausted it
│   ├── NoCompiler             6  the compiler of every variant for a workload is missing or does not work
│   └── VariantError           2  the code of a variant failed, or returned something else
│       └── CodeTimeout        2  the code of a variant or an operator did not return in time
├── LookupMiss                 3  no result is known for this workload on this device
├── DatabaseError              4  the database cannot be read or written
│   ├── SchemaError            4  its schema revision is unknown to this version
│   └── DatabaseUnavailable    4  it is locked, or its server does not answer
├── DeviceError                5  the device is absent or refuses
│   └── ClusterLost            5  the measuring cluster cannot be reached, or its workers are gone
├── MissingDependency          6  an optional dependency is not installed
│   └── BrokenDependency       6  an optional dependency is installed, but does not work
├── RankFailed                 1  a process of a pipeline raised, was killed, or did not answer in time
├── TaskUnreadable             1  a task or its result cannot be passed between processes
└── WorkerUnusable             1  no worker process starts

Expected failures of tuning (a kernel that does not compile, hangs, crashes or is wrong) are not
errors but values: an `Outcome` (see `tunebench.outcome`).
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

__all__ = [
    "BrokenDependency",
    "ClusterLost",
    "CodeTimeout",
    "ConfigError",
    "DatabaseError",
    "DatabaseUnavailable",
    "DeviceError",
    "EnvironmentFault",
    "InputError",
    "LookupMiss",
    "MissingDependency",
    "NoCompiler",
    "RankFailed",
    "SchemaError",
    "SuspectedFault",
    "TaskUnreadable",
    "TunebenchError",
    "UnknownName",
    "VariantError",
    "WorkerUnusable",
    "close_names",
    "describe_error",
    "install_command",
    "message_of",
    "quoted",
    "user_place",
]

LONGEST_QUOTE = 200
"""Longest quoted value in a message, in characters."""

LONGEST_MESSAGE = 2000
"""Longest description of an exception, in characters."""


class TunebenchError(Exception):
    """Base class of all deliberate errors; the message states the remedy."""

    exit_code: ClassVar[int] = 1


class InputError(TunebenchError):
    """An argument or input file is invalid."""

    exit_code = 2


class UnknownName(InputError):
    """A name that does not exist; the message lists the valid ones.

    Args:
        kind: Kind of the name, such as ``"operator"``.
        name: The unknown name.
        known: All valid names.
        hint: A further remedy, as a sentence.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        close = close_names(name, names)
        guess = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        more = f" {hint}" if hint else ""
        super().__init__(f"unknown {kind} {quoted(name)}.{guess} Known: {', '.join(names) or 'none'}.{more}")
        self.kind, self.name, self.known, self.hint = kind, name, tuple(names), hint

    def __reduce__(self) -> tuple[type[UnknownName], tuple[str, str, tuple[str, ...], str]]:
        return (UnknownName, (self.kind, self.name, self.known, self.hint))


class ConfigError(InputError):
    """A configuration that is not a valid point of its space."""


class VariantError(InputError):
    """The code of a variant failed, or returned something else than its base class asks for."""


class CodeTimeout(VariantError):
    """The code of a variant or an operator did not return within its time limit.

    Args:
        message: The message.
        conditions: The limit and the load of the machine, as of `tunebench.outcome.TimedOut`.
    """

    def __init__(self, message: str, conditions: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.conditions = dict(conditions)

    def __reduce__(self) -> tuple[type[CodeTimeout], tuple[str, dict[str, Any]]]:
        return (CodeTimeout, (str(self), self.conditions))


class TaskUnreadable(TunebenchError):
    """A task or its result cannot be passed between processes, such as one with a class of a user's file."""


class RankFailed(TunebenchError):
    """A process of a pipeline raised, was killed, or did not answer; the message names rank and action.

    Attributes:
        is_reported: Whether this rank has reported the failure to all ranks.
    """

    is_reported = False


class WorkerUnusable(TunebenchError):
    """No worker process starts."""


class NoCompiler(InputError):
    """The compiler of every variant that could do a workload is missing or does not work."""

    exit_code = 6


class EnvironmentFault(InputError):
    """Something other than the kernel failed: a disk, memory, a folder, a compiler that is not installed."""


class SuspectedFault(EnvironmentFault):
    """A resource ran out: of the machine, or of one process because of its kernel; a retry decides."""


class LookupMiss(TunebenchError):
    """No result is known for this workload on this device."""

    exit_code = 3


class DatabaseError(TunebenchError):
    """The database cannot be read or written."""

    exit_code = 4


class SchemaError(DatabaseError):
    """The schema revision of the database is unknown to this version of tunebench."""


class DatabaseUnavailable(DatabaseError):
    """The database cannot be read now: another program has locked it, or its server does not answer."""


class DeviceError(TunebenchError):
    """The device is absent or refuses to work."""

    exit_code = 5


class ClusterLost(DeviceError):
    """The measuring cluster cannot be reached, or its workers are gone and none has returned."""


class MissingDependency(TunebenchError):
    """An optional dependency is not installed.

    Args:
        package: The missing package.
        extra: The extra of tunebench that installs it.
    """

    exit_code = 6

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: {install_command(extra)}")
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[type[MissingDependency], tuple[str, ...]]:
        return (MissingDependency, (self.package, self.extra))


class BrokenDependency(MissingDependency):
    """An optional dependency is installed, but cannot be used.

    Args:
        package: The package, with its version.
        extra: The extra of tunebench that installs it.
        fault: What it does instead, and with which other versions.
        remedy: What to do.
    """

    def __init__(self, package: str, extra: str, fault: str, remedy: str) -> None:
        TunebenchError.__init__(self, f"{package} {fault}; {remedy}")
        self.package, self.extra, self._fault, self._remedy = package, extra, fault, remedy

    def __reduce__(self) -> tuple[type[MissingDependency], tuple[str, ...]]:
        return (BrokenDependency, (self.package, self.extra, self._fault, self._remedy))


def close_names(name: str, valid_names: Iterable[str]) -> list[str]:
    """Return the valid names that an unknown one may be meant for; case and separators do not matter.

    Args:
        name: The unknown name.
        valid_names: All valid names.
    """
    plain = {valid: re.sub(r"[\s_-]+", "-", valid.lower()) for valid in valid_names}
    plain_name = re.sub(r"[\s_-]+", "-", name.lower())
    longer = [valid for valid, text in plain.items() if len(name) > 1 and text.startswith(plain_name)]
    if longer:
        return longer[:4]
    alike = difflib.get_close_matches(plain_name, list(dict.fromkeys(plain.values())), n=3)
    ratios = [difflib.SequenceMatcher(None, text, plain_name).ratio() for text in alike]
    alike = [text for text, ratio in zip(alike, ratios, strict=True) if ratio > max(ratios) - 0.01]
    return [valid for text in alike for valid in plain if plain[valid] == text]


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, by their own names.

    Args:
        extra: An extra of tunebench, such as ``"cuda"``.
    """
    from importlib import metadata

    try:
        required = metadata.requires("tunebench") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        required = []
    requirements = [text.partition(";") for text in required]
    packages = [
        name.strip() for name, _, when in requirements if re.search(rf"extra == ['\"]{extra}['\"]", when)
    ]
    if not packages:
        return f"pip install '.[{extra}]' in a checkout of tunebench"
    return f"pip install {' '.join(map(shlex.quote, packages))}"


def quoted(value: object) -> str:
    """Return the quoted form of a value for a message; the middle of a long one is left out.

    Args:
        value: A value that a user gave, such as a text.
    """
    text = repr(value)
    return (
        text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE // 2]}…{text[-LONGEST_QUOTE // 4 :]}"
    )


def describe_error(error: BaseException) -> str:
    """Return class and message of an exception of any code, as text that can be stored and printed.

    Characters that not every database and terminal accepts are escaped: NUL and lone surrogates.

    Args:
        error: The exception; its `__str__` may fail.
    """
    message, name = message_of(error), type(error).__name__
    text = message if isinstance(error, TunebenchError) else f"{name}: {message}" if message else name
    location = user_place(error)
    text += f" ({location})" if location else ""
    return text[:LONGEST_MESSAGE].replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """Return the message of an exception of any code.

    Args:
        error: The exception; its `__str__` may fail.
    """
    try:
        return str(error)
    except Exception as failed:  # code of a user, which may raise anything
        return f"(its text raises {type(failed).__name__})"


_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of installed packages, also outside of the prefix: those of a user, or on PYTHONPATH."""


def user_place(error: BaseException) -> str:
    """Return the file and line of a user's code that raised an exception; empty if it is of no user's code.

    Args:
        error: The exception.
    """
    if isinstance(error, TunebenchError | SyntaxError):
        return ""
    import traceback

    package = Path(__file__).resolve().parent
    folders = (package, *(package.joinpath(name).resolve() for name in ("workloads", "kernels", "db")))
    ours = (*map(str, folders), sys.prefix, sys.base_prefix, "<")
    frames = traceback.extract_tb(error.__traceback__)
    users = (
        frame
        for frame in reversed(frames)
        if not frame.filename.startswith(ours) and _PACKAGES.isdisjoint(Path(frame.filename).parts)
    )
    frame = next(users, None)
    return "" if frame is None else f"{frame.filename}, line {frame.lineno}"
