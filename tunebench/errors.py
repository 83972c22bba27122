"""Every error tunebench raises on purpose, and the exit code the command line gives it.

TunebenchError                 1  anything below; catch this to catch all
├── InputError                 2  what was typed or passed cannot be used
│   ├── UnknownName            2  a workload, variant, device, sampler … that does not exist
│   └── ConfigError            2  a configuration outside its space
├── LookupMiss                 3  nothing is known for this problem on this device
├── DatabaseError              4  the database cannot be read or written
│   └── SchemaError            4  it has another schema revision than this version knows
├── DeviceError                5  the device is absent or refuses
│   └── ClusterLost            5  the cluster that measures cannot be reached, or its workers are gone
└── MissingDependency          6  an optional dependency is not installed

What tuning expects to go wrong (a kernel that does not compile, hangs, crashes or is wrong) is no
error: it is an `Outcome` (see `tunebench.outcome`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "ClusterLost",
    "ConfigError",
    "DatabaseError",
    "DeviceError",
    "InputError",
    "LookupMiss",
    "MissingDependency",
    "SchemaError",
    "TunebenchError",
    "UnknownName",
]


class TunebenchError(Exception):
    """Base of all errors raised on purpose; the message says what to do."""

    exit_code: ClassVar[int] = 1


class InputError(TunebenchError):
    """What was typed or passed cannot be used."""

    exit_code = 2


class UnknownName(InputError):
    """A name that does not exist; the message lists the ones that do.

    Args:
        kind: What was looked for, such as ``"operator"``.
        name: What was given.
        known: All valid names.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")
        self.kind, self.name, self.known = kind, name, tuple(names)

    def __reduce__(self) -> tuple[type[UnknownName], tuple[str, str, tuple[str, ...]]]:
        return (UnknownName, (self.kind, self.name, self.known))


class ConfigError(InputError):
    """A configuration that is not a valid point of its space."""


class LookupMiss(TunebenchError):
    """No result is known for this workload on this device."""

    exit_code = 3


class DatabaseError(TunebenchError):
    """The database cannot be read or written."""

    exit_code = 4


class SchemaError(DatabaseError):
    """The database has another schema revision than this version of tunebench knows."""


class DeviceError(TunebenchError):
    """The device is absent or refuses to work."""

    exit_code = 5


class ClusterLost(DeviceError):
    """The cluster that measures cannot be reached, or its workers are gone and none has returned."""


class MissingDependency(TunebenchError):
    """An optional dependency is not installed.

    Args:
        package: The missing package.
        extra: The extra of tunebench that installs it.
    """

    exit_code = 6

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'tunebench[{extra}]'")
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[type[MissingDependency], tuple[str, str]]:
        return (MissingDependency, (self.package, self.extra))
