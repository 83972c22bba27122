"""Owners of claims: names that show whether their process is alive, if it runs on this machine."""

from __future__ import annotations

import functools
import os
import platform
import secrets
from pathlib import Path

__all__ = ["end_owner", "is_dead", "new_owner"]

_ended: set[str] = set()
"""Owners of this process whose tuner has ended, such as by Ctrl-C in a notebook."""


def _process_space() -> str:
    """Return the host name and process namespace: containers may share one of them, but not both."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        space = 0
    return f"{platform.node()}:{space}"


@functools.cache
def _boot() -> str:
    """Return an id that changes when this machine boots; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start of a process in clock ticks since boot; empty if the system does not report it."""
    try:
        # The program's name, in parentheses, may contain anything; the start time is 20 fields after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def new_owner() -> str:
    """Return a unique owner name for one tuner in this process.

    The name contains the start time of the process, because process numbers are reused, after a reboot within
    minutes.
    """
    pid = os.getpid()
    return f"{_process_space()}:{pid}:{_boot()}.{_started(pid)}.{secrets.token_hex(4)}"


def end_owner(owner: str) -> None:
    """Note that the tuner with an owner name of this process has ended, although the process lives."""
    _ended.add(owner)


def is_dead(owner: str) -> bool:
    """Return whether the owner has certainly ended; False for other machines and unknown names."""
    if owner in _ended:
        return True
    process, _, token = owner.rpartition(":")
    space, _, pid = process.rpartition(":")
    if space != _process_space() or not pid.isdigit():
        return False
    if os.name == "nt":  # on Windows signal 0 would end the process
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
    """Return whether a process number was reused since the owner's token was created."""
    boot, _, rest = token.partition(".")
    started, _, nonce = rest.partition(".")
    if not nonce or not boot or not started:  # of an earlier version
        return False
    return (boot, started) != (_boot(), _started(pid) or started)
