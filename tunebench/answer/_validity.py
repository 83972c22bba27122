"""Validity of a record: its variant is installed, its source is unchanged, and it can run on the device.

Checking a variant imports it and NumPy, and generates its source. Valid records are therefore remembered in
the cache folder until a file of this package changes, so that the next process can skip the check.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from tunebench import _environment
from tunebench._private_file import create_folder, read_private
from tunebench._source_state import source_state
from tunebench.answer._reader import AnswerRow
from tunebench.answer._target import LookupTarget
from tunebench.device import Device
from tunebench.errors import TunebenchError
from tunebench.space import Config

__all__ = ["check_variant", "reason_invalid", "reason_irreproducible", "signature"]

_PACKAGE = Path(__file__).resolve().parents[1]


def reason_invalid(row: AnswerRow, target: LookupTarget, device: Callable[[], Device]) -> str | None:
    """Return why a record cannot be used for its workload on a device, or None if it is valid.

    Args:
        row: The record.
        target: Device of the lookup.
        device: Returns the description of that device; called only if the variant must be checked.
    """
    note = _marker(row, target) if _is_packaged(row.variant) else None
    if note is None:
        return check_variant(row, device)
    state = _state(row.variant)
    if _read(note) == state:
        return None
    reason = check_variant(row, device)
    if reason is None:
        _write(note, state)
    return reason


def reason_irreproducible(workload: str, variant: str, config: Config) -> str | None:
    """Return why equal inputs may give other bits in another run, or None if they do not.

    Args:
        workload: Text of the workload.
        variant: Key of a variant that is loaded.
        config: Its configuration.
    """
    from tunebench.kernels import variant as find_variant
    from tunebench.workloads import parse

    if find_variant(variant).is_reproducible(parse(workload), config):
        return None
    return f"the results of {variant} with {config} depend on the order of atomic additions"


def _state(variant: str) -> str:
    """Return a hash of what decides whether records of a variant of this package are valid."""
    name = variant.rpartition("/")[2]
    if not name.startswith("library_"):
        return signature()
    from tunebench.variant import NVIDIA_BINDINGS, NVIDIA_LIBRARIES, installed_version

    of_gpus = ("torch", *NVIDIA_BINDINGS, *NVIDIA_LIBRARIES)
    packages = ("torch", "numpy") if name == "library_cpu" else of_gpus
    versions = (str(installed_version(package)) for package in packages)
    return hashlib.sha256(" ".join((signature(), *versions)).encode()).hexdigest()


def check_variant(row: AnswerRow, device: Callable[[], Device]) -> str | None:
    from tunebench.kernels import variant as find_variant
    from tunebench.workloads import parse

    try:
        variant, workload, on = find_variant(row.variant), parse(row.workload), device()
        reason = variant.refuses(workload, on)
        if reason is not None:
            return reason
        variant.space.check(row.config, workload=workload, device=on)
        today = variant.revision(workload, row.config)
    except TunebenchError as error:
        return str(error)
    return None if today == row.revision else f"the source of {row.variant} has changed since it was measured"


def _marker(row: AnswerRow, target: LookupTarget) -> Path:
    asked = "\0".join((row.variant, str(row.config), row.revision, row.workload, target.key))
    name = hashlib.sha256(asked.encode()).hexdigest()[:32]
    return _environment.cache_folder() / "standing" / name[:2] / name


def _read(note: Path) -> str | None:
    try:
        return read_private(note).decode("ascii")
    except (OSError, ValueError):
        return None


def _write(note: Path, text: str) -> None:
    """Write a marker file; if that fails, the next process checks again."""
    try:
        create_folder(note.parents[2], *note.parts[-3:-1])
        handle, name = tempfile.mkstemp(dir=note.parent)
        with open(handle, "w", encoding="ascii") as file:
            file.write(text)
        Path(name).replace(note)
    except OSError:
        return


def _is_packaged(variant: str) -> bool:
    """Return whether a variant is a file of this package; others may change without notice."""
    operator, _, name = variant.partition("/")
    return f"{operator}{name}".isidentifier() and (_PACKAGE / "kernels" / operator / f"{name}.py").is_file()


@functools.cache
def signature() -> str:
    """Return a hash of names, sizes and times of all files on which validity depends."""
    return source_state([_PACKAGE], [_PACKAGE / "kernels", _PACKAGE / "workloads"])
