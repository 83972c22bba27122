"""Fuzzing of imports: a corrupt file is imported whole, in part, or refused, and the database stays valid.

    python -m tests.fuzz.imports [--files 100000] [--seed 0] [--first 0] [--out DIR]

The files are Kernel Tuner cache files, T4 files and JSON Lines exports, plain and compressed, corrupted at
random (see `corrupt_files`). After each import:

- it ended within the limits of time and memory, with its report or a `TunebenchError`;
- the database has as many measurements as reported, and none from a refused file;
- every row satisfies the schema and can be read (`tunebench db verify`).

File N of a seed is always the same. Failing files are kept in DIR, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path

import sqlalchemy as sa

from tests.fuzz import command
from tests.fuzz.corrupt_files import corrupt
from tunebench.db import open_store
from tunebench.db.exchange import import_file
from tunebench.db.integrity import NOTES, Integrity, check_rows, check_rules
from tunebench.db.record import MAX_FAULTS
from tunebench.db.schema import device_table, measurement_table, run_table, trial_table
from tunebench.db.store import Store
from tunebench.errors import TunebenchError

__all__ = ["fuzz", "import_outcome"]

TIME_LIMIT_S = 30.0
"""Time limit of one import, on a busy machine."""
MEMORY_BYTES = 3 << 30
"""Limit of the process's address space; the libraries alone need half a GiB."""
ALLOWED = {*NOTES, "bound"}
"""Findings of `verify` that are allowed: a file may contain times below their lower bound."""

_TABLES = (measurement_table, trial_table, run_table, device_table)


def import_outcome(store: Store, path: Path) -> str:
    """Import a file into an empty database, check the result, and empty the database again.

    Returns:
        ``"whole"``, ``"with faults"`` or ``"refused"``.

    Raises:
        AssertionError: The database differs from the report, or violates the schema.
    """
    try:
        done = import_file(store, path)
    except TunebenchError:
        done = None
    with store.reading() as connection:
        counts = [
            connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in _TABLES
        ]
        integrity = Integrity()
        check_rules(connection, integrity)
        check_rows(connection, integrity, lambda done, total: None)
    wrong = {kind: [*map(str, first)] for kind, first in integrity.first.items() if kind not in ALLOWED}
    assert not wrong, f"expected a valid database, found {wrong}"
    if done is None:
        assert counts == [0, 0, 0, 0], f"expected no rows of a refused file, found {counts}"
    else:
        assert counts[0] == done.added, f"{done.added} measurements reported, {counts[0]} stored"
        assert len(done.faults) == min(done.refused, MAX_FAULTS), "the number of faults differs from the list"
    _empty(store)
    return "refused" if done is None else "with faults" if done.refused else "whole"


def _empty(store: Store) -> None:
    with store.writing() as connection:
        for table in _TABLES:
            connection.execute(table.delete())


def fuzz(store: Store, folder: Path, seed: int, numbers: range, failed: Path | None = None) -> Counter[str]:
    """Import corrupt files and count their outcomes; failures are printed.

    Args:
        store: An empty database.
        folder: Folder for the files.
        seed: Seed of the files.
        numbers: Numbers of the files.
        failed: Folder that keeps the failing files; None keeps none.

    Returns:
        Number of files by outcome: whole, with faults, refused, failed.
    """
    path = folder / "fuzzed"

    def check(number: int) -> list[str]:
        path.write_bytes(corrupt(random.Random(f"{seed}:{number}")))
        return [import_outcome(store, path)]

    def fail(number: int) -> str:
        if failed is not None:
            failed.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, failed / f"{seed}-{number}")
        _empty(store)
        return f"file {number} of seed {seed}"

    return command.count_outcomes(numbers, check, fail, limit_s=TIME_LIMIT_S)


def _fuzz(folder: Path, arguments: argparse.Namespace) -> Counter[str]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with open_store(folder / "fuzz.db") as store:
        outcomes = fuzz(store, folder, arguments.seed, arguments.numbers, arguments.out)
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    return outcomes


if __name__ == "__main__":
    sys.exit(command.main(__doc__, "files", 100_000, _fuzz, keeps=True))
