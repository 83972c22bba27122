"""Fuzzing of database files: a damaged SQLite file is read, or refused with one clear error.

    python -m tests.fuzz.databases [--files 10000] [--seed 0] [--first 0] [--out DIR]

A database of a finished run is damaged at random: flipped bits, overwritten, exchanged and cut pages, an
edited header or schema, and a damaged write-ahead log. Then a lookup, a report of its contents, an integrity
check and a new record must each end within the time limit, with a result or a `DatabaseError`. A lookup must
not return a configuration that was never measured. SQLite has no checksums: a time whose bits were flipped
can be returned, and is counted as ``altered``.

The damage of file N of a seed is always the same; the database differs in its timestamps. Failing files are
kept in DIR, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults import journaled_tuning
from tests.fuzz import command
from tunebench import device as devices
from tunebench.answer import lookup_workload
from tunebench.db import open_store
from tunebench.db.integrity import examine
from tunebench.db.migrations import HEAD
from tunebench.db.owner import new_owner
from tunebench.db.record import NewMeasurement, RunStart, TrialKey
from tunebench.errors import DatabaseError, LookupMiss
from tunebench.outcome import Measured, Result
from tunebench.space import Config

__all__ = ["check", "damage", "fuzz", "valid_database"]

TIME_LIMIT_S = 60.0
"""Time limit of all checks of one file, on a busy machine."""

WORKLOAD = journaled_tuning.workload(0)
TRIALS = 60

_SCHEMA_WORDS = (
    *(b"CREATE", b"VIEW", b"TABLE", b"answer_v1", b"measurement", b"JOIN", b"SELECT"),
    *(HEAD.encode(), b"trial"),
)
_VALUES = (b"measured", b"stand_in", b"softmax", b"reference", b'"a"', b"cold", b"2026", b"{", b"search")


def valid_database(folder: Path) -> tuple[bytes, bytes]:
    """Return the file of a database with a finished run, and its write-ahead log with the last trials."""
    path, journal = folder / "valid.db", folder / "journal"
    with journaled_tuning.journaled_store(str(path), journal) as store:
        journaled_tuning.tune(store, WORKLOAD, 0, trials=TRIALS)
    with journaled_tuning.journaled_store(str(path), journal) as store:
        journaled_tuning.tune(store, WORKLOAD, 1, trials=20)
        # Copied while it is open: closing the last connection merges the log into the file.
        return path.read_bytes(), Path(f"{path}-wal").read_bytes()


def damage(database: bytes, log: bytes, draw: random.Random) -> tuple[bytes, bytes]:
    """Return a damaged copy of a database file and of its log; the log is empty for most files."""
    damaged, damaged_log = bytearray(database), bytearray(log if draw.random() < 0.3 else b"")
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        target = damaged_log if damaged_log and draw.random() < 0.7 else damaged
        draw.choice(_KINDS)(target, draw)
        if not target:
            break
    return bytes(damaged), bytes(damaged_log)


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 3, 30))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _header(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 4))):
        data[draw.randrange(min(108, len(data)))] = draw.choice((0, 1, 2, 127, 255, draw.randrange(256)))


def _overwrite(data: bytearray, draw: random.Random) -> None:
    size = draw.choice((1, 8, 64, 512, 4096))
    position = draw.randrange(len(data))
    piece = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size)))
    data[position : position + size] = piece[: len(data) - position]


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.choice((draw.randrange(len(data)), len(data) // 4096 // 2 * 4096)) :]


def _exchange_pages(data: bytearray, draw: random.Random) -> None:
    pages = max(1, len(data) // 4096)
    first, second = (4096 * draw.randrange(pages) for _ in range(2))
    piece = bytes(data[first : first + 4096])
    if draw.random() < 0.5:
        data[first : first + 4096] = data[second : second + 4096]
    data[second : second + 4096] = piece


def _shift(data: bytearray, draw: random.Random) -> None:
    position, size = draw.randrange(len(data)), draw.choice((1, 7, 4096))
    if draw.random() < 0.5:
        del data[position : position + size]
    else:
        data[position:position] = draw.randbytes(size)


def _replace_text(data: bytearray, draw: random.Random) -> None:
    word = draw.choice(_SCHEMA_WORDS + _VALUES)
    positions = _places(bytes(data), word)
    if positions:
        position = draw.choice(positions)
        replacement = draw.choice((draw.randbytes(len(word)), bytes(len(word)), word[::-1], b"9" * len(word)))
        data[position : position + len(word)] = replacement


def _places(data: bytes, word: bytes) -> list[int]:
    positions: list[int] = []
    position = data.find(word)
    while position >= 0 and len(positions) < 1000:
        positions.append(position)
        position = data.find(word, position + 1)
    return positions


_KINDS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _flip, _header, _overwrite, _overwrite),
    *(_cut, _exchange_pages, _shift, _replace_text, _replace_text),
)


def check(path: Path) -> list[str]:
    """Look up, report, verify and write a database; return the outcome of each, such as ``"lookup: true"``.

    Raises:
        AssertionError: if a lookup returned a configuration that was never measured.
        Exception: anything but a `DatabaseError` that one of them raised.
    """
    steps = {"lookup": _look_up, "report": _report, "verify": _verify, "write": _write}
    return [f"{name}: {_result(step, path)}" for name, step in steps.items()]


def _result(step: Callable[[Path], str], path: Path) -> str:
    try:
        return step(path)
    except DatabaseError as error:
        message = str(error)
    assert "\n" not in message, message
    return "refused"


def _look_up(path: Path) -> str:
    try:
        answer = lookup_workload(WORKLOAD, device=devices.local_cpu(), db=path, strict=True, quiet=True)
    except LookupMiss:
        return "miss"
    true = journaled_tuning.outcome_of(str(WORKLOAD), answer.config)
    assert isinstance(true, Measured), f"{answer.config} was never measured"
    return "true" if answer.expected_us == true.median_us else "altered"


def _report(path: Path) -> str:
    with open_store(path, read_only=True) as store:
        store.stats()
        store.best(str(WORKLOAD), devices.local_cpu().key)
        store.history(str(WORKLOAD))
        return "read"


def _verify(path: Path) -> str:
    with open_store(path, read_only=True) as store:
        return "clean" if examine(store).clean else "findings"


def _write(path: Path) -> str:
    config = Config({"a": 3, "b": 5})
    key = TrialKey(
        device=devices.local_cpu().key,
        workload=str(WORKLOAD),
        variant=journaled_tuning.VARIANT.key,
        revision="fuzzed",
        config=config,
    )
    with open_store(path) as store:
        store.begin_run(
            RunStart(
                device=devices.local_cpu(),
                workload=str(WORKLOAD),
                sampler="random",
                seed=0,
                host=new_owner(),
                versions={},
            )
        )
        store.claim(key, new_owner())
        result = Result(outcome=journaled_tuning.outcome_of(str(WORKLOAD), config))
        store.record_together([NewMeasurement(key=key, result=result)])
        return "written"


def fuzz(folder: Path, seed: int, numbers: range, failed: Path | None = None) -> Counter[str]:
    """Check damaged databases and count the outcomes; failures are printed.

    Args:
        folder: Folder for the files.
        seed: Seed of the files.
        numbers: Numbers of the files.
        failed: Folder that keeps the failing files; None keeps none.

    Returns:
        Number of files by outcome of each step, such as ``"lookup: true"``, and ``"failed"``.
    """
    journaled_tuning.register_variant()
    database, log = valid_database(folder)
    current = folder / "current"

    def check_file(number: int) -> list[str]:
        shutil.rmtree(current, ignore_errors=True)
        current.mkdir()
        path = current / f"{seed}-{number}.db"
        damaged, damaged_log = damage(database, log, random.Random(f"{seed}:{number}"))
        path.write_bytes(damaged)
        if damaged_log:
            Path(f"{path}-wal").write_bytes(damaged_log)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(path)

    def fail(number: int) -> str:
        if failed is not None:
            shutil.copytree(current, failed, dirs_exist_ok=True)
        return f"file {number} of seed {seed}"

    return command.count_outcomes(numbers, check_file, fail, limit_s=TIME_LIMIT_S)


def _fuzz(folder: Path, arguments: argparse.Namespace) -> Counter[str]:
    print(f"SQLite {sqlite3.sqlite_version}")
    return fuzz(folder, arguments.seed, arguments.numbers, arguments.out)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, "files", 10_000, _fuzz, keeps=True))
