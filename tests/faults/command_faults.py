"""Commands on a full disk, with a clock that goes backwards, beside each other, and of two versions.

After each command the file passes SQLite's check, every row that was there is there, and the command ended
with an exit code of its own and without a traceback.
"""

from __future__ import annotations

import contextlib
import html
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.db.support import load_golden
from tunebench.db import schema, upgrade

ROOT = Path(__file__).parents[2]
WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"
TUNE = ("tune", WORKLOAD, "--device", "cpu", "--trials", "2", "--no-baselines")
LIMIT_S = 300.0
ROUNDS = 8
FREE_KIB = (0, 4, 16, 64, 256, 1024)
"""Free space on the disk, in KiB."""
MOST_PAGES = 60
"""Pages of a dashboard that are opened."""
BACK_S = (1, 60, 86_400, 400 * 86_400)
"""Seconds by which the clock goes back."""
EARLIER = ("fde50396", "711f0437", "bb6eff8e~1", "cc773acb~1")
"""Earlier commits: 10 and 50 before this module was written, the last of schema 0006 and of 0005."""


@dataclass(slots=True)
class CommandCounts:
    """Counts of commands under a fault.

    Attributes:
        runs: Commands that ran.
        succeeded: Those that ended with exit code 0.
        refused: Those that ended with a message and another exit code.
        pages: Pages that dashboards showed.
        wrong: What went wrong, one line each.
    """

    runs: int = 0
    succeeded: int = 0
    refused: int = 0
    pages: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Number of faults."""
        return len(self.wrong)

    def add(self, name: str, ended: subprocess.CompletedProcess[str]) -> None:
        """Count a command that ended."""
        self.runs += 1
        self.succeeded += ended.returncode == 0
        self.refused += ended.returncode > 0
        if "Traceback" in ended.stderr or ended.returncode < 0:
            self.wrong.append(f"{name} ended with {ended.returncode}: {ended.stderr[-600:]}")

    def check(self, name: str, database: Path, before: set[str]) -> set[str]:
        """Count a database that is damaged or lost rows; return the ids of its measurements."""
        with _copied(database) as copy, contextlib.closing(sqlite3.connect(copy)) as connection:
            check = connection.execute("PRAGMA integrity_check").fetchall()
            orphans = connection.execute("PRAGMA foreign_key_check").fetchall()
            ids = {row[0] for row in connection.execute("SELECT id FROM measurement")}
        if check != [("ok",)] or orphans or before - ids:
            self.wrong.append(f"{name}: check {check}, orphans {orphans}, lost {len(before - ids)}")
        return ids


@contextlib.contextmanager
def _copied(database: Path) -> Iterator[Path]:
    """Copy a database and its log, so that a check needs no space on its disk."""
    with tempfile.TemporaryDirectory() as folder:
        for file in database.parent.glob(f"{database.name}*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, folder)
        yield Path(folder) / database.name


def tune_new(number: int) -> Sequence[str]:
    """Return a command that tunes a workload of its own."""
    return (TUNE[0], f"softmax:rows=64,cols={65 + number},dtype=f32", *TUNE[2:])


def run(
    *arguments: str, code: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of tunebench, of the package in a folder."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "tunebench", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(code), **(environment or {})},
    )


def database_in(folder: Path, revision: str = schema.HEAD) -> Path:
    """Return a new database with the rows of a golden file."""
    path = folder / "results.db"
    load_golden(revision, path)
    if revision == schema.HEAD:
        upgrade(str(path))
    return path


# -- full disk -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """Mount a file system of a size; needs root."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def full_disk(folder: Path) -> CommandCounts:
    """Run every command that writes, and the dashboard, on disks with little free space."""
    counts, export = CommandCounts(), folder / "export.jsonl"
    run("db", "export", "--format", "jsonl", "--out", str(export), "--db", str(database_in(folder)))
    for free_kib in FREE_KIB:
        with small_disk(folder, 16 << 10) as disk:
            database = database_in(disk)
            before = counts.check("start", database, set())
            _fill(disk, free_kib)
            commands: list[Sequence[str]] = [
                (*TUNE, "--db", str(database)),
                ("db", "import", str(export), "--db", str(database)),
                ("db", "export", "--format", "jsonl", "--out", f"{disk}/out.jsonl", "--db", str(database)),
                ("db", "stats", "--db", str(database)),
                ("lookup", WORKLOAD, "--db", str(database)),
            ]
            for command in commands:
                name = f"{free_kib} KiB free: {command[0]} {command[1]}"
                counts.add(name, run(*command))
                before |= counts.check(name, database, before)
            with contextlib.suppress(sqlite3.Error):
                _vacuum(database)
            before |= counts.check(f"{free_kib} KiB free: vacuum", database, before)
            browse(counts, f"{free_kib} KiB free: dashboard", database, disk)
            before |= counts.check(f"{free_kib} KiB free: dashboard", database, before)
            (disk / "filler").unlink()
            name = f"{free_kib} KiB free, then free: tune"
            ended = run(*TUNE, "--db", str(database))
            counts.add(name, ended)
            counts.wrong += [f"{name}: {ended.stderr[-300:]}"] if ended.returncode != 0 else []
            counts.check(name, database, before)
    return counts


def browse(counts: CommandCounts, name: str, database: Path, disk: Path) -> None:
    """Open the pages of a dashboard whose database and temporary files are on a disk."""
    command = [sys.executable, "-P", "-m", "tunebench", "dashboard", "--db", str(database), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(disk)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = re.match(r"dashboard: (\S+)", server.stdout.readline())
        for path, status in _statuses(address[1].rstrip("/")) if address is not None else ():
            counts.pages += 1
            counts.wrong += [f"{name}: {path} has status {status}"] if status != 200 else []
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=LIMIT_S)
    ended = subprocess.CompletedProcess(command, server.returncode, output, errors)
    counts.add(name, ended)


def _statuses(address: str) -> Iterator[tuple[str, int]]:
    """Yield the pages that a dashboard links to, `MOST_PAGES` at most, with their statuses."""
    paths, seen = ["/"], {"/"}
    while paths and len(seen) < MOST_PAGES:
        path = paths.pop(0)
        try:
            with urllib.request.urlopen(address + path, timeout=LIMIT_S) as reply:
                text, status = reply.read().decode(errors="replace"), reply.status
        except urllib.error.HTTPError as error:
            text, status = "", error.code
        yield path, status
        new = {html.unescape(link) for link in re.findall(r'href="(/[^"#]*)"', text)} - seen
        paths += sorted(new)
        seen |= new


def _fill(disk: Path, free_kib: int) -> None:
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(max(0, free - (free_kib << 10))))


# -- clock ---------------------------------------------------------------------------------------------------


CLOCK = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long moved(void) {
  long seconds = 0;
  FILE *file = fopen(getenv("MOVED_CLOCK"), "r");
  if (file && fscanf(file, "%ld", &seconds) != 1) seconds = 0;
  if (file) fclose(file);
  return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += moved();
  return status;
}
int gettimeofday(struct timeval *now, void *zone) {
  int status = syscall(SYS_gettimeofday, now, zone);
  now->tv_sec += moved();
  return status;
}
time_t time(time_t *now) {
  struct timespec clock;
  clock_gettime(CLOCK_REALTIME, &clock);
  if (now) *now = clock.tv_sec;
  return clock.tv_sec;
}
"""
"""A library that moves the clock of a process by the seconds in a file, and leaves monotonic clocks alone."""


def backward_clock(folder: Path) -> CommandCounts:
    """Set the clock back while commands run."""
    counts, database, moved = CommandCounts(), database_in(folder), folder / "clock"
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(moved)}
    before: set[str] = set()
    for number in range(ROUNDS):
        moved.write_text("0")
        with ThreadPoolExecutor(1) as pool:
            tuning = pool.submit(run, *tune_new(number), "--db", str(database), environment=environment)
            time.sleep(random.Random(number).uniform(0.5, 8.0))
            moved.write_text(f"-{BACK_S[number % len(BACK_S)]}")
            name = f"jump {number}: tune"
            counts.add(name, tuning.result())
        before |= counts.check(name, database, before)
        for command in (("lookup", WORKLOAD), ("db", "verify"), ("db", "runs")):
            ended = run(*command, "--db", str(database), environment=environment)
            counts.add(f"jump {number}: {' '.join(command)}", ended)
            if (
                ended.returncode != 0 and "_at is" not in ended.stdout + ended.stderr
            ):  # times in the future are findings
                counts.wrong.append(f"jump {number}: {command} {ended.stdout[-300:]}{ended.stderr[-300:]}")
    return counts


# -- commands beside each other ------------------------------------------------------------------------------


def beside_each_other(folder: Path) -> CommandCounts:
    """Run tune, import, export, a vacuum and lookups on one file at once."""
    counts, other = CommandCounts(), folder / "other"
    other.mkdir()
    export = folder / "export.jsonl"
    run("db", "export", "--format", "jsonl", "--out", str(export), "--db", str(database_in(other)))
    database = database_in(folder)
    before = counts.check("start", database, set())
    for number in range(ROUNDS):
        out = folder / f"out{number}.jsonl"
        commands: list[Sequence[str]] = [
            tune_new(number),
            ("db", "import", str(export)),
            ("db", "export", "--format", "jsonl", "--out", str(out)),
            ("lookup", WORKLOAD),
            ("db", "verify"),
        ]
        with ThreadPoolExecutor(8) as pool:
            running = [(command, pool.submit(run, *command, "--db", str(database))) for command in commands]
            while not all(future.done() for _, future in running):
                _vacuum(database)
                time.sleep(0.2)
        for command, future in running:
            name = f"round {number}: {' '.join(command[:2])}"
            counts.add(name, future.result())
            if future.result().returncode not in (0, 1 if command[0] == "lookup" else 0):
                counts.wrong.append(f"{name}: {future.result().stderr[-300:]}")
        before = counts.check(f"round {number}", database, before)
    return counts


def _vacuum(database: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(database, timeout=1)) as connection,
        contextlib.suppress(sqlite3.OperationalError),  # another process writes, or the disk is full
    ):
        connection.execute("VACUUM")


# -- two versions --------------------------------------------------------------------------------------------


def two_versions(folder: Path) -> CommandCounts:
    """Use one file with this version and with earlier ones, in both orders."""
    counts = CommandCounts()
    for commit in EARLIER:
        older = folder / commit
        older.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
        with tempfile.TemporaryFile() as file:
            file.write(archive.stdout)
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                tar.extractall(older, filter="data")
        for first, second in ((ROOT, older), (older, ROOT)):
            names = " then ".join("this" if code == ROOT else commit for code in (first, second))
            database = folder / f"{commit}{first == ROOT}.db"
            counts.add(f"{names}: first tune", run(*TUNE, "--db", str(database), code=first))
            before = counts.check(names, database, set())
            for command in (TUNE, ("lookup", WORKLOAD), ("db", "stats"), ("db", "verify")):
                ended = run(*command, "--db", str(database), code=second)
                counts.add(f"{names}: {' '.join(command[:2])}", ended)
                before = counts.check(f"{names}: {' '.join(command[:2])}", database, before)
            ended = run("db", "verify", "--db", str(database), code=first)
            counts.add(f"{names}: verify by the first", ended)
    return counts


COMMAND_FAULTS: Mapping[str, Callable[[Path], CommandCounts]] = {
    "disk": full_disk,
    "clock": backward_clock,
    "beside": beside_each_other,
    "versions": two_versions,
}
"""What each part of `tests.faults` runs in a new folder."""
