"""Suites in a user's file, in the form of the bundled suites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunebench._foreign_file import read_table
from tunebench.errors import InputError, quoted

__all__ = ["is_file", "read"]

_ENTRY = {"workload", "count", "scales"}

MOST = 1_000_000_000
"""Largest count of a workload."""


def is_file(name: str | Path) -> bool:
    """Return whether a suite is given by the path of a file."""
    return isinstance(name, Path) or name.endswith(".toml")


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file, with `workload`, `count` and `scales` for every layer.

    Raises:
        InputError: if the file cannot be read, or a layer is invalid.
    """
    content = read_table(path, "suite ")
    layers = content.get("layer")
    if not isinstance(layers, dict) or not layers:
        raise InputError(f"suite {path} has no layers: it must have tables [layer.NAME] with a workload each")
    return {"layer": {name: _entry(f"{path}: layer {name}", entry) for name, entry in layers.items()}}


def _entry(location: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("workload"), str):
        raise InputError(f"{location} must be a table with `workload`, the text of one")
    if unknown := entry.keys() - _ENTRY:
        raise InputError(
            f"{location} has {', '.join(sorted(unknown))}; known are {', '.join(sorted(_ENTRY))}"
        )
    count, scales = entry.get("count", 1), entry.get("scales", "")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
        raise InputError(f"{location}: count must be a whole number from 1 to {MOST}, got {quoted(count)}")
    if not isinstance(scales, str):
        raise InputError(f"{location}: scales must be the name of a dimension, got {scales!r}")
    return {"workload": entry["workload"], "count": count, "scales": scales}
