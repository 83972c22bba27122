"""Cache folders and files: nothing that another user may write is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebench import _environment
from tunebench._private_file import create_folder, is_private, read_private, replaceable
from tunebench.binary.compiled import Binary
from tunebench.compile import BinaryCache
from tunebench.errors import InputError

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files have no owners on this system")


def _give_away(path: Path, patch: Patch) -> None:
    """Make a file or folder belong to another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        other_user = os.geteuid() + 1
        patch.setattr(os, "geteuid", lambda: other_user)


def _open_up(path: Path, _patch: Patch) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(_give_away, "belongs to user"), (_open_up, "can be written by other users")]
)
def test_cache_folder_of_others_is_refused(
    tmp_path: Path, monkeypatch: Patch, spoil: Callable[[Path, Patch], None], reason: str
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TUNEBENCH_CACHE", str(folder))
    assert _environment.cache_folder() == folder
    spoil(folder, monkeypatch)
    with pytest.raises(InputError, match=f"cache folder .*{reason}.*TUNEBENCH_CACHE"):
        _environment.cache_folder()


def test_cache_folder_below_a_folder_of_everyone_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "shared" / "cache"))
    create_folder(tmp_path / "shared" / "cache")
    (tmp_path / "shared").chmod(0o1777)  # as /tmp: nobody can rename the files of others
    _environment.cache_folder()
    (tmp_path / "shared").chmod(0o777)
    for name in ("cache", "missing"):
        monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "shared" / name))
        with pytest.raises(InputError, match="every user can replace it"):
            _environment.cache_folder()


@pytest.mark.parametrize("spoil", [_give_away, _open_up])
def test_cached_binary_of_others_is_not_loaded(
    tmp_path: Path, monkeypatch: Patch, spoil: Callable[[Path, Patch], None]
) -> None:
    cache = BinaryCache(tmp_path / "binaries")
    binary = Binary(key="ab12", language="numba-cpu", target="t", payload=b"code")
    cache.put(binary)
    path = tmp_path / "binaries" / "ab" / "ab12"
    assert cache.get("ab12") == binary
    assert read_private(path)
    spoil(path, monkeypatch)
    assert cache.get("ab12") is None
    assert not is_private(path)


def test_new_cache_folders_are_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = create_folder(tmp_path / "cache", "emulated", "ab")
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (made, made.parent, made.parent.parent)] == [
        0o700
    ] * 3


def test_folder_that_others_planted_in_the_cache_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    planted = create_folder(tmp_path / "cache", "emulated")
    _open_up(planted, monkeypatch)
    with pytest.raises(InputError, match="cannot be trusted"):
        create_folder(tmp_path / "cache", "emulated", "ab")


def test_user_without_home_has_a_cache_and_must_name_a_database(tmp_path: Path, monkeypatch: Patch) -> None:
    import pwd

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    for name in ("HOME", "TUNEBENCH_CACHE", "TUNEBENCH_DB", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert _environment.cache_folder().parent == tmp_path
    with pytest.raises(InputError, match="no home folder for a database: name a database by --db"):
        _environment.data_folder()
    with pytest.raises(InputError, match=r"database '~/x\.db': there is no such home folder"):
        _environment.expanded("~/x.db", "database")


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "target.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "target.csv")
    assert replaceable(tmp_path / "link.csv") == (tmp_path / "target.csv").resolve()
    os.mkfifo(tmp_path / "pipe")
    for refused in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(InputError, match="must be a regular file"):
            replaceable(refused)
