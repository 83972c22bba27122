"""Soak tests: tuners or servers are killed at random while readers run lookups; no record may be lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults import ROOT, journaled_tuning
from tests.faults.journal_check import FaultCounts, JournalCheck
from tunebench import device as devices
from tunebench.answer import lookup_workload
from tunebench.db import lookup_index
from tunebench.db.store import open_store
from tunebench.errors import DatabaseError, LookupMiss
from tunebench.outcome import Measured
from tunebench.testing.postgres import Server

__all__ = ["cli_soak", "server_soak", "sqlite_soak"]

TUNERS, READERS, ENDLESS = 4, 2, 10**6


# -- processes -------------------------------------------------------------------------------------


def read_forever(db: str, seconds_between: float, results: Any, until: Any) -> None:
    """Run lookups until the event is set, and put the counts of their results into a queue.

    Args:
        db: Path or URL of the database.
        seconds_between: Refresh interval of the lookup index.
        results: Queue for the counts.
        until: Event that ends the loop.
    """
    lookup_index.REFRESH_S = seconds_between
    journaled_tuning.register_variant()
    warnings.simplefilter("ignore", RuntimeWarning)  # the server is killed on purpose
    device, draw, counts = devices.local_cpu(), random.Random(os.getpid()), Counter[str]()
    newest = 0
    over = False
    while not over:
        over = until.is_set()
        workload = journaled_tuning.workload(draw.randint(max(0, newest - 2), newest + 1))
        try:
            answer = lookup_workload(workload, device=device, db=db, strict=True)
            outcome = journaled_tuning.outcome_of(str(workload), answer.config)
            right = isinstance(outcome, Measured) and (outcome.median_us, outcome.ci_us) == (
                answer.expected_us,
                answer.ci_us,
            )
            counts["lookups" if right else f"wrong: {answer}"] += 1
            newest = max(newest, workload.cols - 1)
        except LookupMiss:
            counts["lookups"] += 1
        except DatabaseError as error:
            counts[f"refused: {error}"] += 1
        except Exception as error:  # anything but the errors above is a fault, which the soak reports
            counts[f"wrong: {type(error).__name__}: {error}"] += 1
        time.sleep(0.002)
    results.put(counts)


class TunersAndReaders:
    """Tuner and reader processes on one database.

    Args:
        db: Path or URL of the database.
        journal: The journal file.
        counts: The counts to increase.
        refresh_s: Refresh interval of the readers' lookup index, in seconds.
    """

    def __init__(self, db: str, journal: Path, counts: FaultCounts, *, refresh_s: float) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.journaled_tuning", "tests.faults.soak"])
        self._db, self._journal, self._counts = db, journal, counts
        self._until, self._results = self._context.Event(), self._context.Queue()
        self._seed = 0
        self._tuners = [self._tuner() for _ in range(TUNERS)]
        self._readers = [
            self._context.Process(target=read_forever, args=(db, refresh_s, self._results, self._until))
            for _ in range(READERS)
        ]
        for reader in self._readers:
            reader.start()

    def _tuner(self) -> Any:
        self._seed += 1
        arguments = (self._db, self._journal, self._seed, ENDLESS)
        tuner = self._context.Process(target=journaled_tuning.tune_forever, args=arguments)
        tuner.start()
        return tuner

    def kill(self, index: int) -> None:
        """Kill one tuner; `replace` starts another one."""
        self.replace_dead()
        os.kill(self._tuners[index].pid, signal.SIGKILL)
        self._tuners[index].join()
        self._counts.kills += 1

    def replace(self, index: int) -> None:
        """Start a tuner in place of a killed one."""
        self._tuners[index] = self._tuner()

    def replace_dead(self) -> None:
        """Count and replace tuners that ended without being killed."""
        for index, tuner in enumerate(self._tuners):
            if not tuner.is_alive():
                self._counts.deaths += 1
                self.replace(index)

    def close(self) -> None:
        """Kill the tuners, end the readers, and add the readers' counts."""
        self.replace_dead()
        for tuner in self._tuners:
            tuner.kill()
            tuner.join()
        self._until.set()
        for _ in self._readers:
            self._add(self._results.get(timeout=120))
        for reader in self._readers:
            reader.join()

    def _add(self, counts: Counter[str]) -> None:
        for fault, count in counts.items():
            kind = fault.partition(":")[0]
            setattr(self._counts, kind, getattr(self._counts, kind) + count)
            if kind != "lookups":
                print(f"  {count} x {fault}", file=sys.stderr)


# -- soaks -----------------------------------------------------------------------------------------


def sqlite_soak(folder: Path, kills: int, *, seed: int = 0, pause_s: float = 1.0) -> FaultCounts:
    """Kill one of four tuners of a SQLite file, again and again.

    Args:
        folder: Folder for the database and the journal.
        kills: Number of kills.
        seed: Seed of the moments.
        pause_s: Longest time between kills, in seconds.
    """
    draw = random.Random(seed)

    def kill_tuner(group: TunersAndReaders, check: JournalCheck, _number: int) -> None:
        time.sleep(draw.uniform(0, pause_s))
        index = draw.randrange(TUNERS)
        group.kill(index)
        check.claim_trials_of_the_dead()
        check.check()
        group.replace(index)

    return _soak(str(folder / "soak.db"), folder / "journal", kills, kill_tuner)


def server_soak(
    server: Server, folder: Path, kills: int, *, seed: int = 0, pause_s: float = 1.0
) -> FaultCounts:
    """Kill and restart the PostgreSQL server of four tuners, again and again.

    Args:
        server: The server.
        folder: Folder for the journal.
        kills: Number of kills.
        seed: Seed of the moments.
        pause_s: Longest time between kills, in seconds.
    """
    draw = random.Random(seed)

    def kill_server(group: TunersAndReaders, check: JournalCheck, number: int) -> None:
        time.sleep(draw.uniform(0, pause_s))
        server.kill() if number % 2 else server.stop("immediate")
        check.counts.kills += 1
        time.sleep(draw.uniform(0, pause_s / 2))
        server.start()
        _wait_for(check.journal, check.journal.stat().st_size + 1)
        group.replace_dead()
        check.check()

    return _soak(server.new_database(), folder / "journal", kills, kill_server, refresh_s=0.5)


def _soak(
    db: str,
    journal: Path,
    kills: int,
    kill: Callable[[TunersAndReaders, JournalCheck, int], None],
    *,
    refresh_s: float = 0.1,
) -> FaultCounts:
    """Run tuners and readers, call `kill` with the number of each kill, and check the database at the end."""
    counts = FaultCounts()
    with open_store(db) as store:
        check = JournalCheck(store, journal, counts)
        with contextlib.closing(TunersAndReaders(db, journal, counts, refresh_s=refresh_s)) as group:
            _wait_until(lambda: store.stats().runs >= TUNERS)
            for number in _with_progress(range(kills), counts):
                kill(group, check, number)
        check.check(everything=True)
        check.claim_trials_of_the_dead()
        check.finish(seed=9)
    return counts


COMMAND = ("tune", "--workload", "softmax:rows=33,cols=65,dtype=f32", "--device", "cpu", "--trials", "30")
QUICK = ("--workers", "1", "--no-baselines", "--sampler", "bound")


def cli_soak(folder: Path, kills: int, *, seed: int = 0) -> FaultCounts:
    """Kill `tunebench tune` and all its processes, again and again; then run it to its end.

    Args:
        folder: Folder for the database and the journal.
        kills: Number of kills.
        seed: Seed of the moments.
    """
    counts, draw = FaultCounts(), random.Random(seed)
    db, journal = folder / "cli.db", folder / "cli-journal"
    program = [sys.executable, "-m", "tests.faults", "journal"]
    command = [*program, str(db), str(journal), *COMMAND, *QUICK]
    with open_store(db) as store:
        check = JournalCheck(store, journal, counts)
        for _ in _with_progress(range(kills), counts):
            size = journal.stat().st_size if journal.exists() else 0
            tuner = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
            _wait_for(journal, size + 1)
            time.sleep(draw.uniform(0, 1.0))
            counts.deaths += tuner.poll() is not None
            os.killpg(tuner.pid, signal.SIGKILL)
            tuner.wait()
            counts.kills += 1
            check.claim_trials_of_the_dead()
            check.check()
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600, check=False)
        counts.unfinished += ended.returncode != 0
        check.check(everything=True)
        counts.held += store.stats().claimed
    return counts


def _wait_for(journal: Path, size: int) -> None:
    """Wait until a journal has at least `size` bytes, which shows that a tuner is running."""
    _wait_until(lambda: journal.exists() and journal.stat().st_size >= size)


def _wait_until(reached: Callable[[], bool], *, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"expected a record within {limit_s:.0f} s, got none")
        time.sleep(0.01)


def _with_progress(rounds: Sequence[int], counts: FaultCounts) -> Iterator[int]:
    """Yield the rounds and print progress every 20."""
    for number in rounds:
        if number % 20 == 0 and len(rounds) > 20:
            print(f"  {number}/{len(rounds)}: {counts}", file=sys.stderr, flush=True)
        yield number
