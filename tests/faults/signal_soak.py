"""Signals at random moments of `tunebench tune`: its records must remain, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa

from tests.faults import ROOT
from tests.faults.journal_check import FaultCounts, JournalCheck
from tunebench.db.schema import trial_table
from tunebench.db.store import Store, open_store

__all__ = ["COMMAND", "LATEST_S", "signal_soak"]

COMMAND = (
    *("tune", "--workload", "softmax:rows=33,cols=65,dtype=f32", "--device", "cpu", "--trials", "100000"),
    *("--workers", "1", "--no-baselines", "--finalists", "1", "--json"),
)

LATEST_S = 3.0
"""Latest moment of a signal after the start of the tuner or its first record, in seconds."""

SEARCHING = 0.5
"""Fraction of the signals that come after the first record; the others come while the tuner starts."""

_PROGRAM = (
    "import sys; from tests.faults.journaled_tuning import journal_of_cli; "
    "journal_of_cli(sys.argv.pop(1)); from tunebench.__main__ import main; main()"
)

_MARK = "TUNEBENCH_SOAK"
_GONE_S = 10.0
_END_S = 60.0


def signal_soak(
    folder: Path, signals: Sequence[signal.Signals], *, seed: int = 0, latest_s: float = LATEST_S
) -> FaultCounts:
    """Start a tuner for each signal, and send it at a random moment; compare the records with the journal.

    After SIGKILL, the claims of the tuner must be free for others. After any other signal, there must be
    none, and the tuner must have printed its report or that it was interrupted.

    Args:
        folder: Folder for the database, the journal and temporary files.
        signals: The signals, one for each tuner.
        seed: Seed of the moments.
        latest_s: Latest moment of a signal after the start or the first record, in seconds.
    """
    counts, draw = FaultCounts(), random.Random(seed)
    db, journal, scratch = folder / "signals.db", folder / "signals-journal", folder / "tmp"
    scratch.mkdir()
    with open_store(db) as store:
        check = JournalCheck(store, journal, counts)
        for number in signals:
            mark = secrets.token_hex(8)
            environment = {**os.environ, _MARK: mark, "TMPDIR": str(scratch)}
            program = [sys.executable, "-c", _PROGRAM, str(journal)]
            size = journal.stat().st_size if journal.exists() else 0
            tuner = subprocess.Popen(
                [*program, *COMMAND, "--db", str(db)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            if draw.random() < SEARCHING:
                _await_growth(journal, size)
            time.sleep(draw.uniform(0, latest_s))
            _send(tuner, number, counts)
            leftovers = _left(mark, scratch)
            counts.leftovers += len(leftovers)
            for line in leftovers:
                print(f"left by {number.name}: {line}", file=sys.stderr)
            if number is signal.SIGKILL:
                check.claim_trials_of_the_dead()
            counts.held += _claims(store)
            check.check()
        check.check(everything=True)
    return counts


def _send(tuner: subprocess.Popen[str], number: signal.Signals, counts: FaultCounts) -> None:
    """Send the signal, wait for the end of the tuner, and judge its status and output."""
    tuner.send_signal(number)
    counts.kills += 1
    try:
        out, err = tuner.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        counts.unfinished += 1
        tuner.kill()
        tuner.communicate()
        return
    if number is signal.SIGKILL:
        return
    report = True
    with contextlib.suppress(ValueError):
        report = not out or bool(json.loads(out)["interrupted"])
    clean = not any(sign in err for sign in ("Traceback", "Fatal", "Exception ignored"))
    # Until tunebench runs, Python itself ends the process.
    early = tuner.returncode in (-number, 1) and not out and "tunebench/__main__" not in err
    if not (report and clean and tuner.returncode == 130) and not early:
        counts.wrong += 1
        message = f"after {number.name}: status {tuner.returncode}, {out[:200]!r}, {err[-2000:]}"
        print(message, file=sys.stderr)


def _await_growth(journal: Path, size: int) -> None:
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and (not journal.exists() or journal.stat().st_size <= size):
        time.sleep(0.02)


def _left(mark: str, scratch: Path) -> list[str]:
    """Return the processes with a mark in their environment, and the temporary files, that do not vanish."""
    deadline = time.monotonic() + _GONE_S
    while True:
        leftovers = [*_marked(mark), *map(str, scratch.iterdir())]
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        time.sleep(0.05)


def _marked(mark: str) -> list[str]:
    marked = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                marked.append(f"process {process.name}: {(process / 'cmdline').read_bytes()[:100]!r}")
    return marked


def _claims(store: Store) -> int:
    query = sa.select(sa.func.count()).where(trial_table.c.state == "claimed")
    with store.reading() as connection:
        return int(connection.execute(query).scalar_one())
