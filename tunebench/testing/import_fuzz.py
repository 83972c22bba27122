"""Imports of corrupt files: each goes in, or in part, or is refused, and leaves a database that is sound.

    python -m tunebench.testing.import_fuzz [--files 100000] [--seed 0] [--first 0] [--out DIR]

Kernel Tuner's cache files, T4 and JSON Lines, plain and compressed, to which this and that was done (see
`_fuzz_files.py`). After each import:

- it ended within the time and the memory that it may take, with what it reports or a `TunebenchError`;
- the database has as many measurements as were reported, and nothing of a file that was refused;
- every row keeps the rules of the schema, and can be read back (`tunebench db verify`).

File number N of a seed is always the same. What fails is kept in DIR, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from tunebench.db import open_store
from tunebench.db.exchange import import_file
from tunebench.db.integrity import NOTES, Integrity, check_rows, check_rules
from tunebench.db.record import MAX_FAULTS
from tunebench.db.schema import device_table, measurement_table, run_table, trial_table
from tunebench.db.store import Store
from tunebench.errors import TunebenchError
from tunebench.testing.corrupt_files import corrupt

TIME_LIMIT_S = 30.0
"""Wall time of one file, on a machine that others use."""
MEMORY_BYTES = 3 << 30
"""Address space of the whole process; the libraries alone take half a GiB of it."""
ALLOWED = {*NOTES, "bound"}
"""What `verify` may find: a file may well tell of a time below its bound, and it is told."""
GIVE_UP = 20

_TABLES = (measurement_table, trial_table, run_table, device_table)


class ImportTooSlow(BaseException):
    """One file took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `ImportTooSlow` when the time is up."""

    def ring(number: int, frame: object) -> None:
        raise ImportTooSlow(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def import_outcome(store: Store, path: Path) -> str:
    """Import a file into an empty database, look at what became of it, and empty it again.

    Returns:
        ``"whole"``, ``"with faults"`` or ``"refused"``.

    Raises:
        AssertionError: if the database does not hold what was reported, or is not sound.
    """
    try:
        done = import_file(store, path)
    except TunebenchError:
        done = None
    with store._read() as connection:
        counts = [
            connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in _TABLES
        ]
        found = Integrity()
        check_rules(connection, found)
        check_rows(connection, found, lambda done, total: None)
    wrong = {kind: [*map(str, first)] for kind, first in found.first.items() if kind not in ALLOWED}
    assert not wrong, f"not sound: {wrong}"
    if done is None:
        assert counts == [0, 0, 0, 0], f"rows of a file that was refused: {counts}"
    else:
        assert counts[0] == done.added, f"{done.added} reported, {counts[0]} there"
        assert len(done.faults) == min(done.refused, MAX_FAULTS), "faults are not those that are counted"
    with store._write() as connection:
        for table in _TABLES:
            connection.execute(table.delete())
    return "refused" if done is None else "with faults" if done.refused else "whole"


def fuzz(store: Store, folder: Path, seed: int, numbers: range, failed: Path | None = None) -> Counter[str]:
    """Import files, and return how many ended how; what fails is told, and kept.

    Args:
        store: An empty database.
        folder: For the files.
        seed: Of the files.
        numbers: Which of them.
        failed: Where those that failed are kept.
    """
    became: Counter[str] = Counter()
    path = folder / "fuzzed"
    slowest = (0.0, 0)
    for number in numbers:
        path.write_bytes(corrupt(random.Random(f"{seed}:{number}")))
        began = time.perf_counter()
        try:
            with time_limit(TIME_LIMIT_S):
                became[import_outcome(store, path)] += 1
        except (Exception, ImportTooSlow):
            became["failed"] += 1
            print(f"file {number} of seed {seed} failed:\n{traceback.format_exc(limit=-6)}", flush=True)
            if failed is not None:
                failed.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, failed / f"{seed}-{number}")
            with store._write() as connection:
                for table in _TABLES:
                    connection.execute(table.delete())
            if became["failed"] >= GIVE_UP:
                break
        slowest = max(slowest, (time.perf_counter() - began, number))
        if number % 1000 == 999:
            print(f"{number + 1}: {dict(became)}, slowest {slowest[0]:.2f} s (file {slowest[1]})", flush=True)
    return became


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="where files that fail are kept")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, open_store(Path(name) / "fuzz.db") as store:
        numbers = range(arguments.first, arguments.first + arguments.files)
        became = fuzz(store, Path(name), arguments.seed, numbers, arguments.out)
    took_s = time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{sum(became.values())} files in {took_s:.0f} s, at most {peak_mib} MiB: {dict(became)}")
    return 1 if became["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
