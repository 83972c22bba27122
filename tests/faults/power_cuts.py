"""Simulated power cuts, from a trace of the writes and flushes of a tuner.

`strace` records every write, truncation, deletion and flush. A cut is a moment of the trace. Data flushed
before it is on the disk; of data written since the last flush of its file, any part may be, in any order,
down to single sectors. Each simulated disk is opened, and the database must contain the flushed part of the
journal.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import ROOT, journaled_tuning
from tests.faults.journal_check import FaultCounts, JournalCheck
from tunebench.db import disk, engine
from tunebench.db.store import open_store

__all__ = ["SimulatedDisk", "cuts", "operations", "trace"]

SECTOR = 512
_CALLS = "openat,close,write,pwrite64,ftruncate,fsync,fdatasync,unlink"
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')

Operation = tuple[str, str, Any, Any]
"""Kind of operation, name of the file, bytes written or new size, offset."""


def trace(folder: Path, trials: int, *, synchronous: str | None = None, network: bool = False) -> Path:
    """Run a tuner under strace and return the path of the trace.

    Args:
        folder: Folder of the database and the journal.
        trials: Number of trials.
        synchronous: SQLite's `synchronous` setting, in place of tunebench's; a weaker one must lose data.
        network: Whether to treat the folder as one of a network file system (rollback journal instead of
            WAL).
    """
    script = (
        "from tests.faults import power_cuts; "
        f"power_cuts.tune({str(folder)!r}, {trials}, {synchronous!r}, {network!r})"
    )
    command = ["strace", "-f", "-xx", "-s", "1000000", "-e", f"trace={_CALLS}", "-e", "signal=none"]
    trace_file = folder / "trace"
    program = [sys.executable, "-c", script]
    subprocess.run([*command, "-o", str(trace_file), *program], cwd=ROOT, check=True)
    return trace_file


def tune(folder: str, trials: int, synchronous: str | None, network: bool) -> None:
    """Tune a workload: the program that `trace` runs."""
    if network:
        disk.network_file_system = lambda path: "nfs4"
    if synchronous is not None:
        real = engine.configure_durability

        def weaker(connection: Any) -> str | None:
            result = real(connection)
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            return result

        engine.configure_durability = weaker
    with journaled_tuning.journaled_store(f"{folder}/power.db", Path(folder, "journal")) as store:
        journaled_tuning.tune(store, journaled_tuning.workload(0), 1, trials=trials)


def operations(trace_file: Path, folder: Path) -> Iterator[Operation]:
    """Yield the operations on the files of a folder, in order, without those on shared memory."""
    names: dict[str, str] = {}
    for line in trace_file.read_text(encoding="ascii", errors="replace").splitlines():
        match = _CALL.match(line)
        if match is None or match[3].startswith("-"):
            continue
        call, arguments, returned = match.groups()
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(arguments)]
        first, last = arguments.split(",")[0], arguments.rsplit(",", 1)[-1].strip()
        if call == "openat":
            path = Path(texts[0].decode("utf-8", "replace"))
            names.pop(returned, None)
            if path == folder or path.parent == folder:
                names[returned] = path.name if path != folder else "."
        elif call == "unlink":
            path = Path(texts[0].decode("utf-8", "replace"))
            if path.parent == folder:
                yield ("unlink", path.name, None, None)
        elif first in names and not names[first].endswith("-shm"):
            yield from _of_file(call, names[first], texts, last)
            if call == "close":
                del names[first]


def _of_file(call: str, name: str, texts: Sequence[bytes], last: str) -> Iterator[Operation]:
    if call in ("fsync", "fdatasync"):
        yield ("flush", name, None, None)
    elif call == "ftruncate":
        yield ("truncate", name, int(last), None)
    elif call == "pwrite64":
        yield ("write", name, texts[0], int(last))
    elif call == "write":  # only the journal is written by write(), to append
        yield ("write", name, texts[0], None)


@dataclass(slots=True)
class SimulatedDisk:
    """State of the files after some operations: flushed content and pending operations.

    Attributes:
        sure: Flushed content, by file name.
        pending: Operations since the last flush, by file name.
        unlinked: Deleted files whose folder was not flushed since.
    """

    sure: dict[str, bytearray] = field(default_factory=dict)
    pending: dict[str, list[Operation]] = field(default_factory=dict)
    unlinked: dict[str, bytearray] = field(default_factory=dict)

    def do(self, operation: Operation) -> None:
        """Apply one operation."""
        kind, name, _, _ = operation
        if kind == "flush" and name == ".":
            self.unlinked.clear()
        elif kind == "flush":
            data = self.sure.setdefault(name, bytearray())
            for write in self.pending.pop(name, []):
                _apply(data, write)
        elif kind == "unlink":
            self.pending.pop(name, None)
            if name in self.sure:
                self.unlinked[name] = self.sure.pop(name)
        else:
            self.unlinked.pop(name, None)
            self.pending.setdefault(name, []).append(operation)

    def cut(self, folder: Path, draw: random.Random) -> None:
        """Write the files to a folder as a power cut could leave them."""
        contents = {name: bytearray(data) for name, data in self.sure.items()}
        contents |= {name: bytearray(data) for name, data in self.unlinked.items() if draw.random() < 0.5}
        for name, pending in self.pending.items():
            data = contents.setdefault(name, bytearray())
            share = draw.choice((0.0, 0.3, 0.7, 1.0))
            for write in pending:
                for part in _parts(write):
                    if draw.random() < share:
                        _apply(data, part)
        for name, data in contents.items():
            (folder / name).write_bytes(data)


def _parts(operation: Operation) -> Iterator[Operation]:
    """Yield the parts of an operation that may reach the disk independently: its sectors."""
    kind, name, data, offset = operation
    if kind != "write" or offset is None:
        yield operation
        return
    start = 0
    while start < len(data):
        end = min(len(data), start + SECTOR - (offset + start) % SECTOR)
        yield ("write", name, data[start:end], offset + start)
        start = end


def _apply(data: bytearray, operation: Operation) -> None:
    kind, _, value, offset = operation
    if kind == "truncate":
        data[value:] = bytes(max(0, value - len(data)))
    else:
        offset = len(data) if offset is None else offset
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(value)] = value


def cuts(
    folder: Path,
    count: int,
    *,
    seed: int = 0,
    trials: int = 240,
    synchronous: str | None = None,
    network: bool = False,
) -> dict[str, Any]:
    """Cut the power at random moments of one run, and look for the flushed journal lines in the database.

    Args:
        folder: Folder for the files.
        count: Number of cuts.
        seed: Seed of the moments.
        trials: Number of trials of the run.
        synchronous: See `trace`.
        network: See `trace`.

    Returns:
        Operations, flushes, journaled measurements, and the number of `faults` and their kinds.
    """
    if shutil.which("strace") is None:
        return {"skipped": "strace is not installed"}
    draw, home = random.Random(seed), folder / "traced"
    home.mkdir(parents=True)
    done = list(operations(trace(home, trials, synchronous=synchronous, network=network), home))
    first = next(index for index, disk_operation in enumerate(done) if disk_operation[1] == "journal")
    moments = sorted(draw.randrange(first, len(done)) for _ in range(count))
    simulated, counts, journalled = SimulatedDisk(), FaultCounts(), 0
    for index, operation in enumerate(done):
        simulated.do(operation)
        while moments and moments[0] == index:
            moments.pop(0)
            journalled += _look(simulated, folder / f"cut{len(moments)}", counts, draw)
    return {
        "operations": len(done),
        "flushes": sum(disk_operation[0] == "flush" for disk_operation in done),
        **{name: getattr(counts, name) for name in ("kills", "lost", "duplicates", "damaged")},
        "journalled": journalled,
        "faults": counts.lost + counts.duplicates + counts.damaged,
    }


def _look(simulated: SimulatedDisk, folder: Path, counts: FaultCounts, draw: random.Random) -> int:
    """Cut the power, check the database, and return the number of flushed journal lines."""
    folder.mkdir()
    simulated.cut(folder, draw)
    sure = folder / "sure"  # only the flushed part of the journal
    sure.write_bytes(simulated.sure.get("journal", bytearray()))
    counts.kills += 1
    try:
        with open_store(folder / "power.db") as store:
            JournalCheck(store, sure, counts).check(everything=True)
    except Exception as error:  # a database that cannot be opened after a cut is a fault
        counts.damaged += 1
        print(f"  {error}", file=sys.stderr)
    shutil.rmtree(folder)
    return simulated.sure.get("journal", bytearray()).count(b"\n")
