"""Fault injection: tuners and servers are killed at random, and every committed record must survive.

    python -m tunebench.testing.faults [PART ...] [--kills 200]

The parts are:

- ``sqlite``: four tuners write to one file; SIGKILL ends one of them at a random moment, again and again.
- ``postgresql``: four tuners write to one server; the server is killed and restarted.
- ``cli``: ``tunebench tune --device cpu`` is killed with all its processes.
- ``signals``: ``tunebench tune`` is ended by SIGKILL (a half of the times), SIGTERM or SIGINT; no process,
  temporary file or claim may remain (see `signal_soak`).
- ``power``: the power is cut at random moments of a trace of a tuner (see `power_cuts`).
- ``kernels``: no tuner is killed, but kernels fail in every way (see `kernel_faults`).
- ``busy``: eight programs use all processors while right kernels are tuned (see `kernel_faults`).

Each tuner writes every committed measurement to a journal (see `journaled_tuning`). After every kill the
database is checked, and each line of the journal must be in it exactly once. Two readers run lookups
meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tunebench import device as devices
from tunebench.answer import lookup_workload
from tunebench.db import lookup_index
from tunebench.db.store import open_store
from tunebench.errors import DatabaseError, LookupMiss
from tunebench.outcome import Measured
from tunebench.testing import journaled_tuning
from tunebench.testing.journal_check import FaultCounts, JournalCheck
from tunebench.testing.postgres import Server, serving, unavailable
from tunebench.testing.signal_soak import signal_soak

__all__ = ["FaultCounts", "cli_soak", "server_soak", "sqlite_soak"]

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
        self._context.set_forkserver_preload(
            ["tunebench.testing.journaled_tuning", "tunebench.testing.faults"]
        )
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

    def kill(self, place: int) -> None:
        """Kill one tuner; `replace` starts another one."""
        self.replace_dead()
        os.kill(self._tuners[place].pid, signal.SIGKILL)
        self._tuners[place].join()
        self._counts.kills += 1

    def replace(self, place: int) -> None:
        """Start a tuner in place of a killed one."""
        self._tuners[place] = self._tuner()

    def replace_dead(self) -> None:
        """Count and replace tuners that ended without being killed."""
        for place, tuner in enumerate(self._tuners):
            if not tuner.is_alive():
                self._counts.deaths += 1
                self.replace(place)

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
        for what, count in counts.items():
            kind = what.partition(":")[0]
            setattr(self._counts, kind, getattr(self._counts, kind) + count)
            if kind != "lookups":
                print(f"  {count} x {what}", file=sys.stderr)


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
        place = draw.randrange(TUNERS)
        group.kill(place)
        check.claim_trials_of_the_dead()
        check.check()
        group.replace(place)

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
    program = [sys.executable, "-m", "tunebench.testing.faults", "journal"]
    command = [*program, str(db), str(journal), *COMMAND, *QUICK]
    with open_store(db) as store:
        check = JournalCheck(store, journal, counts)
        for _ in _with_progress(range(kills), counts):
            size = journal.stat().st_size if journal.exists() else 0
            tuner = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
            _wait_for(journal, size + 1)
            time.sleep(draw.uniform(0, 1.0))
            counts.deaths += tuner.poll() is not None
            os.killpg(tuner.pid, signal.SIGKILL)
            tuner.wait()
            counts.kills += 1
            check.claim_trials_of_the_dead()
            check.check()
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=600, check=False)
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


def main() -> None:
    """Print the counts of each part as JSON; exit with 1 if a fault was found."""
    if sys.argv[1:2] == ["journal"]:
        sys.exit(journaled_tuning.run_cli(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help="parts (default: all)")
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--json", type=Path, help="file for the counts (default: none)")
    options = parser.parse_args()
    parts = options.parts or ["sqlite", "postgresql", "cli", "signals", "power", "kernels", "busy"]
    found: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as name:
            os.environ["TUNEBENCH_CACHE"] = str(Path(name) / "cache")
            found[part] = _run(part, Path(name), options.kills, options.seed)
        print(part, json.dumps(found[part]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(bool(re.search(r'"faults": [1-9]', json.dumps(found))))


def _run(part: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    if part == "power":
        from tunebench.testing import power_cuts

        return {
            name: power_cuts.cuts(folder / name, kills, seed=seed, network=name == "rollback")
            for name in ("log", "rollback")
        }
    if part == "kernels":
        from tunebench.testing.kernel_faults import kernel_faults

        ended = kernel_faults(folder, every=True)
        print(ended.table(), *ended.wrong, sep="\n")
        return {
            "kernels": len(ended.outcomes),
            "exit_codes": ended.exit_codes,
            "repeated": ended.repeated,
            "processor_s": round(ended.processor_s),
            "faults": len(ended.wrong),
        }
    if part == "busy":
        from tunebench.testing.kernel_faults import busy_machine

        busy = busy_machine(folder)
        return {**dataclasses.asdict(busy), "faults": len(busy.lost) + sum(map(bool, busy.exit_codes))}
    if part == "postgresql":
        reason = unavailable()
        if reason is not None:
            return {"skipped": reason}
        with serving(flushed=True) as server:
            return _figures(server_soak(server, folder, kills, seed=seed))
    if part == "signals":
        signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT] * math.ceil(kills / 4)
        return _figures(signal_soak(folder, signals[:kills], seed=seed))
    soak: Callable[..., FaultCounts] = {"sqlite": sqlite_soak, "cli": cli_soak}[part]
    return _figures(soak(folder, kills if part == "sqlite" else max(1, kills // 40), seed=seed))


def _figures(counts: FaultCounts) -> dict[str, Any]:
    return {**{name: getattr(counts, name) for name in counts.__slots__}, "faults": counts.faults}


if __name__ == "__main__":
    main()
