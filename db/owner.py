"""Who holds a claim: a name that tells whether its process is still alive, if it runs on this machine."""

from __future__ import annotations

import os
import platform
import secrets
from pathlib import Path

__all__ = ["is_dead", "new_owner"]


def _process_space() -> str:
    """Return this host's name and its process-number space: containers may share the one, not both."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        space = 0
    return f"{platform.node()}:{space}"


def new_owner() -> str:
    """Return a name for one tuner in this process; no other has it."""
    return f"{_process_space()}:{os.getpid()}:{secrets.token_hex(4)}"


def is_dead(owner: str) -> bool:
    """Tell whether an owner's process certainly ended; False for other machines and for foreign names."""
    space, _, rest = owner.rpartition(":")[0].rpartition(":")
    if space != _process_space() or not rest.isdigit():
        return False
    if os.name == "nt":  # there, signal 0 would end the process
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
