"""Files and folders that only this user may write: files of the cache folder are executed.

The checks follow OpenSSH's of its key files. Files and folders must belong to this user or root, and no other
user may write them. A system without user numbers (Windows) is not checked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path

from tunebench.errors import EnvironmentFault, InputError

__all__ = [
    "check_folder",
    "create_folder",
    "distrust",
    "forget_unused",
    "is_private",
    "read_private",
    "replaceable",
    "require_replaceable",
    "write_private",
]

_REMEDY = "use a folder of your own: set TUNEBENCH_CACHE, or delete this one"


def check_folder(folder: Path) -> None:
    """Check that no other user can add or replace files of a folder; a missing folder passes.

    Raises:
        EnvironmentFault: if it belongs to another user, or if another user may write it or move it away.
    """
    with contextlib.suppress(OSError):  # missing; the first use reports any other error
        _require_trust(folder, folder.stat())
    for above in folder.absolute().parents:
        try:
            mode = above.stat().st_mode
        except OSError:
            continue
        if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise EnvironmentFault(
                f"cache folder {folder} is in {above}, where every user can replace it: "
                f"run chmod o-w {above}, or set TUNEBENCH_CACHE to a folder of your own"
            )


def create_folder(root: Path, *names: str) -> Path:
    """Create a folder and its missing parents for this user only, and return its path.

    Args:
        root: A folder that `check_folder` accepts.
        *names: Names of the folders below it, from the outside in.

    Raises:
        EnvironmentFault: if one of the folders belongs to another user, or if another user may write it.
        OSError: if the folder cannot be created.
    """
    for above in reversed(root.absolute().parents):
        above.mkdir(mode=0o700, exist_ok=True)
    for depth in range(len(names) + 1):
        folder = root.joinpath(*names[:depth])
        folder.mkdir(mode=0o700, exist_ok=True)
        _require_trust(folder, folder.stat())
    return root.joinpath(*names)


def _require_trust(folder: Path, status: os.stat_result) -> None:
    reason = distrust(status)
    if reason is not None:
        raise EnvironmentFault(f"cache folder {folder} {reason}: its kernels cannot be trusted; {_REMEDY}")


def is_private(path: Path) -> bool:
    """Return whether a file exists, belongs to this user or root, and no other user may write it."""
    try:
        return distrust(path.stat()) is None
    except OSError:
        return False


def read_private(path: Path) -> bytes:
    """Return the contents of a file that only this user may write.

    Raises:
        OSError: if the file cannot be read, or if another user may write it.
    """
    with path.open("rb") as file:
        reason = distrust(os.fstat(file.fileno()))
        if reason is not None:
            raise PermissionError(f"{path} {reason}")
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once, readable by this user only: a reader sees the old content or the new one.

    Raises:
        OSError: if the file cannot be written, for example to a full disk; nothing is left of it then.
    """
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def replaceable(path: Path) -> Path:
    """Return the file that an output path names, through links, for a new file to replace it.

    Raises:
        InputError: if the path is a device or a pipe: renaming would put a file in its place. Renaming over
            a folder fails by itself.
    """
    path = path.resolve()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} must be a regular file, because the output replaces it; name another path")
    return path


def require_replaceable(path: Path) -> None:
    """Raise InputError before long work whose output could not be written to a path."""
    if path.is_dir():
        raise InputError(f"cannot write to {path}: it is a folder, expected the name of a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"cannot write to {path}: there is no folder {path.absolute().parent}")
    replaceable(path)


KEPT_S = 30 * 86400.0
"""Time in seconds after which a remembered file that was not used again is forgotten."""


def forget_unused(folder: Path) -> None:
    """Delete files that no process has used for `KEPT_S`, by their times of modification."""
    oldest_s = time.time() - KEPT_S
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process has deleted it
            if path.stat().st_mtime < oldest_s:
                path.unlink()


def distrust(status: os.stat_result) -> str | None:
    """Return why others may have written a file or a folder, or None if only this user and root can.

    Args:
        status: Its status.
    """
    if os.name != "posix":
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, not to you ({os.geteuid()})"
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or (writers == stat.S_IWGRP and _is_private_group(status.st_gid)):
        return None
    return "can be written by other users"


def _is_private_group(group: int) -> bool:
    """Return whether a group is this user's alone, as where each user has a group and the umask is 002."""
    import grp
    import pwd

    try:
        user, owner_group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        group == user.pw_gid
        and owner_group.gr_name == user.pw_name
        and set(owner_group.gr_mem) <= {user.pw_name}
    )
