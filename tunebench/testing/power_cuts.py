"""Power cuts for `faults.py`: from a trace of what a tuner wrote and flushed, any disk that it could leave.

`strace` records every write, truncation, deletion and flush of a tuner. A cut is a moment of it. What was
flushed by then is on the disk; of what was written since the last flush of its file, any part may be, in any
order, down to single sectors: the disk keeps its word on flushes, and promises nothing else. The disk is put
together, and opened: all the journal that was flushed by then must be in the database.
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

from tunebench.db import disk, engine
from tunebench.db.store import open_store
from tunebench.testing import journaled_tuning
from tunebench.testing.journal_check import FaultCounts, JournalCheck

__all__ = ["SimulatedDisk", "cuts", "operations", "trace"]

SECTOR = 512
_CALLS = "openat,close,write,pwrite64,ftruncate,fsync,fdatasync,unlink"
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')

Operation = tuple[str, str, Any, Any]
"""What was done, to which file, with which bytes or size, at which place."""


def trace(folder: Path, trials: int, *, synchronous: str | None = None, network: bool = False) -> Path:
    """Run a tuner under strace, and return the trace.

    Args:
        folder: Where its database and its journal are.
        trials: How many configurations it tries.
        synchronous: What SQLite is told in place of what it is told: to see that it matters.
        network: Whether the folder passes for one of a network file system.
    """
    script = (
        "from tunebench.testing import power_cuts; "
        f"power_cuts.tune({str(folder)!r}, {trials}, {synchronous!r}, {network!r})"
    )
    command = ["strace", "-f", "-xx", "-s", "1000000", "-e", f"trace={_CALLS}", "-e", "signal=none"]
    told = folder / "trace"
    subprocess.run([*command, "-o", str(told), sys.executable, "-c", script], check=True)
    return told


def tune(folder: str, trials: int, synchronous: str | None, network: bool) -> None:
    """Tune a problem; what `trace` traces."""
    if network:
        disk.network_file_system = lambda path: "nfs4"
    if synchronous is not None:
        real = engine._configure_durability

        def weaker(connection: Any) -> str | None:
            told = real(connection)
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            return told

        engine._configure_durability = weaker
    with journaled_tuning.journaled_store(f"{folder}/power.db", Path(folder, "journal")) as store:
        journaled_tuning.tune(store, journaled_tuning.workload(0), 1, trials=trials)


def operations(told: Path, folder: Path) -> Iterator[Operation]:
    """Yield what was done to the files of a folder, in its order, but to shared memory, which is not kept."""
    names: dict[str, str] = {}
    for line in told.read_text(encoding="ascii", errors="replace").splitlines():
        match = _CALL.match(line)
        if match is None or match[3].startswith("-"):
            continue
        call, arguments, returned = match.groups()
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(arguments)]
        first, last = arguments.split(",")[0], arguments.rsplit(",", 1)[-1].strip()
        if call == "openat":
            place = Path(texts[0].decode("utf-8", "replace"))
            names.pop(returned, None)
            if place == folder or place.parent == folder:
                names[returned] = place.name if place != folder else "."
        elif call == "unlink":
            place = Path(texts[0].decode("utf-8", "replace"))
            if place.parent == folder:
                yield ("unlink", place.name, None, None)
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
    elif call == "write":  # only the journal, which is appended to
        yield ("write", name, texts[0], None)


@dataclass(slots=True)
class SimulatedDisk:
    """Files as they are after some operations: what is sure, and what may be.

    Attributes:
        sure: What was flushed, by name.
        pending: What was done to a file since, by name.
        unlinked: Files that were deleted, and whose folder was not flushed since.
    """

    sure: dict[str, bytearray] = field(default_factory=dict)
    pending: dict[str, list[Operation]] = field(default_factory=dict)
    unlinked: dict[str, bytearray] = field(default_factory=dict)

    def do(self, operation: Operation) -> None:
        """Do one more."""
        what, name, _, _ = operation
        if what == "flush" and name == ".":
            self.unlinked.clear()
        elif what == "flush":
            data = self.sure.setdefault(name, bytearray())
            for each in self.pending.pop(name, []):
                _apply(data, each)
        elif what == "unlink":
            self.pending.pop(name, None)
            if name in self.sure:
                self.unlinked[name] = self.sure.pop(name)
        else:
            self.unlinked.pop(name, None)
            self.pending.setdefault(name, []).append(operation)

    def cut(self, folder: Path, draw: random.Random) -> None:
        """Write down what a power cut could leave."""
        left = {name: bytearray(data) for name, data in self.sure.items()}
        left |= {name: bytearray(data) for name, data in self.unlinked.items() if draw.random() < 0.5}
        for name, pending in self.pending.items():
            data = left.setdefault(name, bytearray())
            share = draw.choice((0.0, 0.3, 0.7, 1.0))
            for each in pending:
                for part in _parts(each):
                    if draw.random() < share:
                        _apply(data, part)
        for name, data in left.items():
            (folder / name).write_bytes(data)


def _parts(operation: Operation) -> Iterator[Operation]:
    """Yield what of an operation may be on the disk without the rest: its sectors."""
    what, name, data, place = operation
    if what != "write" or place is None:
        yield operation
        return
    start = 0
    while start < len(data):
        end = min(len(data), start + SECTOR - (place + start) % SECTOR)
        yield ("write", name, data[start:end], place + start)
        start = end


def _apply(data: bytearray, operation: Operation) -> None:
    what, _, given, place = operation
    if what == "truncate":
        data[given:] = bytes(max(0, given - len(data)))
    else:
        place = len(data) if place is None else place
        data.extend(bytes(max(0, place - len(data))))
        data[place : place + len(given)] = given


def cuts(
    folder: Path,
    count: int,
    *,
    seed: int = 0,
    trials: int = 240,
    synchronous: str | None = None,
    network: bool = False,
) -> dict[str, Any]:
    """Cut the power at random moments of one run, and look for what was flushed of its journal by then."""
    if shutil.which("strace") is None:
        return {"skipped": "strace is not installed"}
    draw, home = random.Random(seed), folder / "traced"
    home.mkdir(parents=True)
    done = list(operations(trace(home, trials, synchronous=synchronous, network=network), home))
    first = next(place for place, each in enumerate(done) if each[1] == "journal")
    moments = sorted(draw.randrange(first, len(done)) for _ in range(count))
    left, counts, told = SimulatedDisk(), FaultCounts(), 0
    for place, operation in enumerate(done):
        left.do(operation)
        while moments and moments[0] == place:
            moments.pop(0)
            told += _look(left, folder / f"cut{len(moments)}", counts, draw)
    found = {name: getattr(counts, name) for name in ("kills", "lost", "duplicates", "damaged")}
    return {
        "operations": len(done),
        "flushes": sum(each[0] == "flush" for each in done),
        **found,
        "journalled": told,
        "faults": counts.lost + counts.duplicates + counts.damaged,
    }


def _look(left: SimulatedDisk, folder: Path, counts: FaultCounts, draw: random.Random) -> int:
    folder.mkdir()
    left.cut(folder, draw)
    sure = folder / "sure"  # what was flushed of the journal, not what may be there of it besides
    sure.write_bytes(left.sure.get("journal", bytearray()))
    counts.kills += 1
    try:
        with open_store(folder / "power.db") as store:
            JournalCheck(store, sure, counts).check(everything=True)
    except Exception as error:  # any refusal of what a cut leaves is a fault
        counts.damaged += 1
        print(f"  {error}", file=sys.stderr)
    shutil.rmtree(folder)
    return left.sure.get("journal", bytearray()).count(b"\n")
