"""Report of an acceptance run: a folder, and a tar file of it that is rewritten while results come."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ARCHIVE", "DATABASE", "AcceptanceReport"]

_print = functools.partial(print, flush=True)

ARCHIVE = "acceptance.tar.gz"
DATABASE = "acceptance.db"
PACK_EVERY_S = 2.0
PACK_SHARE = 0.05
"""Largest share of the time spent on writing the tar file."""


class AcceptanceReport:
    """A folder with `report.json` (an entry per step), `STEP.jsonl` (a line per configuration), a database.

    An existing report is continued: steps that run again replace their entry. With `archive`, the folder is
    also written to a tar file, every few seconds while results come, and always whole: a run that is killed
    loses a few seconds of results.

    Args:
        folder: Folder of the report; created if missing.
        archives: Tar files to write, all with the same content.
        without: Names in the folder that the tar files leave out.
        say: Called with each progress line.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        archives: Sequence[Path] = (),
        without: Iterable[str] = (),
        say: Callable[[str], object] = _print,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self._archives, self._say, self._now = folder, archives, say, now
        self._without = frozenset(without)
        self._started = now()
        self._packed_s, self._packing_s = -1e9, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "report.json"
        self.steps: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        if self._path.is_file():
            self.steps = json.loads(self._path.read_text(encoding="utf-8"))

    @staticmethod
    def unpack(archive: Path, folder: Path) -> None:
        """Extract the tar file of an earlier run.

        Args:
            archive: The tar file, compressed or not.
            folder: Folder to extract to; created if missing.

        Raises:
            tarfile.TarError, OSError: It cannot be read, or its files would leave the folder.
        """
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")

    def begin(self, step: str) -> None:
        """Delete the lines and the entry of a step; `before` keeps the entry.

        The first `put` of the step writes the report, so that a run that is killed before keeps the entry.
        """
        self.before[step] = self.steps.get(step, {})
        self.steps[step] = {"complete": False}
        (self.folder / f"{step}.jsonl").unlink(missing_ok=True)

    def put(self, step: str, **facts: Any) -> None:
        """Add facts to a step's entry and write the report."""
        self.steps.setdefault(step, {"complete": False}).update(facts)
        self._write()

    def line(self, step: str, row: Mapping[str, Any]) -> None:
        """Append one line to a step's file."""
        with (self.folder / f"{step}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def text(self, name: str, text: str) -> None:
        """Write a text file of the report."""
        _replace(self.folder / name, lambda half: half.write_text(text, encoding="utf-8"))

    def say(self, text: str) -> None:
        """Report progress, with the seconds since the start."""
        self._say(f"[{self._now() - self._started:6.1f} s] {text}")

    def problems(self, steps: Iterable[str]) -> list[str]:
        """Return the problems of the given steps."""
        return [f"{step}: {text}" for step in steps for text in self.steps[step].get("problems", [])]

    def _write(self) -> None:
        self.text("report.json", json.dumps(self.steps, indent=1) + "\n")
        since_s = self._now() - self._packed_s
        if since_s >= max(PACK_EVERY_S, self._packing_s / PACK_SHARE):
            self.pack()

    def pack(self) -> None:
        """Write the tar files now."""
        begun = time.monotonic()
        for archive in self._archives:
            archive.parent.mkdir(parents=True, exist_ok=True)
            _replace(archive, self._pack)
        self._packed_s, self._packing_s = self._now(), time.monotonic() - begun

    def _pack(self, half: Path) -> None:
        with tarfile.open(half, "w:gz", compresslevel=1) as file:
            for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                name = str(path.relative_to(self.folder))
                if path.relative_to(self.folder).parts[0] in self._without:
                    continue
                if name == DATABASE:
                    with _copied(path) as copy:
                        file.add(copy, name)
                elif not name.startswith(DATABASE) and path.suffix != ".tmp":
                    file.add(path, name)


@contextlib.contextmanager
def _copied(database: Path) -> Any:
    """Return a consistent copy of a database that another process may be writing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        with (
            contextlib.closing(sqlite3.connect(database)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        yield copy


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name and rename it, so that a reader or a kill sees all of it or none."""
    half = path.with_name(f"{path.name}.tmp")
    write(half)
    half.replace(path)
