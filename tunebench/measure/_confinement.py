"""Confinement of a process that runs kernels: it cannot reach into the processes that judge it.

A kernel has the rights of its user, which include signals to that user's processes, `ptrace`, and writes to
their memory (`/proc/PID/mem`). A Landlock domain takes away these three for processes outside of it: those
that the confined process did not start.

Source: Documentation/userspace-api/landlock.rst of Linux, "Ptrace restrictions" and "IPC scoping";
linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import struct
import sys

__all__ = ["confine"]

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""System calls; their numbers are equal on all architectures."""
_VERSION = 1
_SCOPE_SIGNAL = 1 << 1
_FIRST_WITH_SCOPES = 6
"""Version of the interface from which a domain needs no rule for files (Linux 6.12)."""
_PR_SET_NO_NEW_PRIVS = 38


def confine() -> bool:
    """Deny this thread, and all threads and processes it starts, to signal or to trace other processes.

    Returns:
        Whether the system supports it: Linux from 6.12 on with Landlock.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION) < _FIRST_WITH_SCOPES:
        return False
    ruleset = struct.pack("QQQ", 0, 0, _SCOPE_SIGNAL)  # files, network, scopes
    descriptor = libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    if descriptor < 0:
        return False
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
    confined: bool = libc.syscall(_RESTRICT_SELF, descriptor, 0) == 0
    libc.close(descriptor)
    return confined
