"""Graphs without a group for tuned kernels, remembered between processes: torch compiles them without a plan.

A graph is planned again when a result was recorded, or when a version, the device or its inputs differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tunebench import __version__
from tunebench._environment import cache_folder
from tunebench._private_file import create_folder
from tunebench.answer import records_state
from tunebench.device import Device
from tunebench.errors import TunebenchError
from tunebench.kernels import loaded_files

__all__ = ["is_ungrouped", "remember_ungrouped", "ungrouped_key"]

KEPT_S = 30 * 86400.0
"""Time in seconds after which a graph that was not compiled again is forgotten."""

_FOLDER = "ungrouped"


def ungrouped_key(module: fx.GraphModule, inputs: Sequence[Any], device: Device) -> str:
    """Return a hash of everything that decides whether a graph has groups; empty if it cannot be known.

    Args:
        module: The graph that Dynamo traced.
        inputs: Its inputs.
        device: Their device.
    """
    try:
        records = records_state(device)
    except TunebenchError:
        return ""
    modules = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    parts = (
        *(__version__, torch.__version__, device.key, records, *loaded_files()),
        *(str(torch.is_grad_enabled()), str(torch.is_autocast_enabled(_type_of(inputs)))),
        *(part.code for part in modules),
        *map(_described, inputs),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _type_of(inputs: Iterable[Any]) -> str:
    return next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {value.requires_grad}"


def is_ungrouped(key: str) -> bool:
    """Return whether a graph had no groups when it was planned."""
    if not key:
        return False
    try:
        path = cache_folder() / _FOLDER / key
        is_known = path.exists()
        if is_known:
            path.touch()
    except (OSError, TunebenchError):
        return False
    return is_known


def remember_ungrouped(key: str) -> None:
    """Remember that a graph has no groups; a folder that cannot be written is ignored."""
    if not key:
        return
    with contextlib.suppress(OSError, TunebenchError):
        folder = create_folder(cache_folder(), _FOLDER)
        (folder / key).touch(mode=0o600)
        oldest = time.time() - KEPT_S
        for path in folder.iterdir():
            _delete_if_older(path, oldest)


def _delete_if_older(path: Path, oldest_s: float) -> None:
    with contextlib.suppress(OSError):  # another process has deleted it
        if path.stat().st_mtime < oldest_s:
            path.unlink()
