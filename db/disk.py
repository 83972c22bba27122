"""The file of an SQLite database on disk: its identity, hard links, and file system."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tunebench.errors import DatabaseError

__all__ = ["MOUNTS", "file_identity", "network_file_system", "refuse_hard_links"]

MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afs|ceph|lustre|gpfs|beegfs|orangefs|glusterfs"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|gcsfuse|rclone|mfs|juicefs)"
)
"""Network file systems: machines share no memory. Source: https://sqlite.org/wal.html, section 1."""


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, which change if it is replaced; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def refuse_hard_links(path: Path) -> None:
    """Refuse to write a file that has several names: each name would have a separate write-ahead log.

    Symbolic links are allowed: SQLite resolves them.
    Source: https://sqlite.org/howtocorrupt.html, section 2.4.

    Raises:
        DatabaseError: if it has a hard link, or is a mount point itself.
    """
    try:
        links = 0 if path.is_dir() else path.stat().st_nlink
    except OSError:
        return  # the file does not exist yet, or SQLite reports the error
    if links > 1:
        raise DatabaseError(
            f"database {path} has {links} hard links, and a write-ahead log per name would corrupt it; "
            "remove the other links, or tune into a copy of it"
        )
    if links and path.resolve() in dict(_mounts()):
        raise DatabaseError(
            f"database {path} is mounted as a single file, without its write-ahead log; "
            "mount the folder that contains it"
        )


def network_file_system(path: Path) -> str | None:
    """Return the name of the network file system that a file is on; None for local file systems."""
    resolved = path.resolve()
    mounts = dict(_mounts())  # of two mounts at one place, the later hides the earlier
    above = [mounted for mounted in mounts if resolved.is_relative_to(mounted)]
    kind = mounts[max(above, key=lambda mounted: len(mounted.parts))] if above else ""
    return kind if _NETWORK.fullmatch(kind) else None


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield mount point and type of each file system, oldest first; nothing if they are not listed."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # 36 35 98:0 /root /place options optional-fields - kind source options
        mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        yield Path(mount_point), line.partition(" - ")[2].split()[0]
