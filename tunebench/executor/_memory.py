"""The memory of a worker and of what it started, and its limit.

No limit of the system fits: `RLIMIT_AS` counts reserved addresses, and CUDA and sanitizers reserve more than
there is memory. `RLIMIT_DATA` counts those of sanitizers too. Both count each process by itself, and not
every user may make a control group. The supervisor of a worker therefore compares the memory
in use with the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tunebench import _environment

__all__ = ["SHARE", "available_bytes", "exceeds", "limit_bytes"]

SHARE = 0.75
"""Limit as a share of the memory of the machine, or of the control group of this process."""

LOW_SHARE = 0.05
"""Share of the machine's memory: a worker with much memory ends when less is available."""

MUCH_SHARE = 0.25
"""Share of the machine's memory that counts as much."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_HELD = re.compile(rb"^(?:Pss_Anon|Pss_Shmem|SwapPss): +(\d+) kB", re.MULTILINE)
"""Memory without files, in kB; pages that processes share count once."""


def limit_bytes() -> int:
    """Return the memory that a worker and the processes it started may hold together, in bytes.

    Raises:
        InputError: if `TUNEBENCH_WORKER_MEMORY` is no number of GB.
    """
    given_gb = _environment.worker_memory_gb()
    if given_gb is not None:
        return round(1e9 * given_gb)
    return int(SHARE * min(_total_bytes(), *_group_limits()))


def exceeds(find_processes: Callable[[], Collection[int]], limit: int) -> bool:
    """Return whether processes hold more memory than their limit, or much while the machine has little left.

    Returns False on systems without /proc.

    Args:
        find_processes: Returns process ids. It is called only if so much memory of the machine is in use.
        limit: Limit, in bytes.
    """
    with contextlib.suppress(OSError):
        total, available = _total_bytes(), available_bytes()
        max_bytes = min(limit, int(MUCH_SHARE * total)) if available < LOW_SHARE * total else limit
        # Cheap upper bounds first: this runs during measurements, and the exact figure walks all pages.
        if total - available > max_bytes:
            processes = find_processes()
            if sum(map(_resident_bytes, processes)) > max_bytes:
                return sum(map(_held_bytes, processes)) > max_bytes
    return False


def _total_bytes() -> int:
    return _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    match = re.search(rb"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_bytes(), re.MULTILINE)
    return _total_bytes() if match is None else 1024 * int(match[1])


def _group_limits() -> Iterator[int]:
    """Yield the memory limits of the control groups of this process, and an upper bound of any."""
    yield 1 << 62
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, kinds, group = line.split(":", 2)
            if kinds not in ("", "memory"):
                continue
            root = Path("/sys/fs/cgroup", kinds)
            group_folder = root.joinpath(group.lstrip("/"))
            for folder in (
                group_folder,
                *(above for above in group_folder.parents if above.is_relative_to(root)),
            ):
                with contextlib.suppress(OSError, ValueError):  # no limit is the word max
                    name = "memory.limit_in_bytes" if kinds else "memory.max"
                    yield int(folder.joinpath(name).read_text(encoding="ascii"))


def _resident_bytes(pid: int) -> int:
    try:
        return _PAGE_BYTES * int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):  # it has ended
        return 0


def _held_bytes(pid: int) -> int:
    try:
        return 1024 * sum(map(int, _HELD.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes())))
    except OSError:
        return 0
