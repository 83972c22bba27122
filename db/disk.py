"""The file of an SQLite database on its disk: by which names it goes, and what its file system can do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tunebench.errors import DatabaseError

__all__ = ["file_identity", "network_file_system", "refuse_hard_links"]

_MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afs|ceph|lustre|gpfs|beegfs|orangefs|glusterfs"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|gcsfuse|rclone|mfs|juicefs)"
)
"""File systems of several machines, which share no memory. Source: https://sqlite.org/wal.html, section 1."""


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one that takes its name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def refuse_hard_links(path: Path) -> None:
    """Refuse to write a file that goes by several names: each would have a log of its own beside it.

    A symbolic link is none: SQLite goes by what it points to. Source: https://sqlite.org/howtocorrupt.html,
    section 2.4.

    Raises:
        DatabaseError: if it has a hard link, or is mounted by itself.
    """
    try:
        links = 0 if path.is_dir() else path.stat().st_nlink
    except OSError:
        return  # there is none yet, or SQLite says what is wrong
    if links > 1:
        raise DatabaseError(
            f"database {path} has {links} names (hard links), and two logs would damage it; "
            "remove the other names, or tune into a copy of it"
        )
    if links and path.resolve() in dict(_mounts()):
        raise DatabaseError(
            f"database {path} is a file mounted by itself, without the log that belongs beside it; "
            "mount the folder that it is in"
        )


def network_file_system(path: Path) -> str | None:
    """Return the kind of file system that a file is on, if it is one of several machines."""
    place = path.resolve()
    mounts = dict(_mounts())  # of two mounts at one place, the later one covers the other
    above = [mounted for mounted in mounts if place.is_relative_to(mounted)]
    kind = mounts[max(above, key=lambda mounted: len(mounted.parts))] if above else ""
    return kind if _NETWORK.fullmatch(kind) else None


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield place and kind of what is mounted, oldest first; nothing where the system does not tell."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # 36 35 98:0 /root /place options optional-fields - kind source options
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        yield Path(place), line.partition(" - ")[2].split()[0]
