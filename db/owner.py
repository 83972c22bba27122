"""Who holds a claim: a name that tells whether its process is still alive, if it runs on this machine."""

from __future__ import annotations

import functools
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


@functools.cache
def _boot() -> str:
    """Return what tells one start of this machine from another; nothing where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine did; nothing if that is not told."""
    try:
        # The name of the program, in parentheses, may hold anything; 20 fields after it comes the start.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def new_owner() -> str:
    """Return a name for one tuner in this process; no other has it.

    It tells when the process started, since its number is given to another one some day: after a power cut,
    within minutes.
    """
    pid = os.getpid()
    return f"{_process_space()}:{pid}:{_boot()}.{_started(pid)}.{secrets.token_hex(4)}"


def is_dead(owner: str) -> bool:
    """Tell whether an owner's process certainly ended; False for other machines and for foreign names."""
    place, _, token = owner.rpartition(":")
    space, _, pid = place.rpartition(":")
    if space != _process_space() or not pid.isdigit():
        return False
    if os.name == "nt":  # there, signal 0 would end the process
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    except OverflowError:
        return False
    return _is_another(int(pid), token)


def _is_another(pid: int, token: str) -> bool:
    """Tell whether a living process is not the one that a token was made in, but has its number."""
    boot, _, rest = token.partition(".")
    started, _, nonce = rest.partition(".")
    if not nonce or not boot or not started:  # of an earlier version, or of a system that tells less
        return False
    return (boot, started) != (_boot(), _started(pid) or started)
