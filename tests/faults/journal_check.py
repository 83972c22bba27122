"""Comparison of a database with the journal of its tuners, and the counts of the findings."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.faults import journaled_tuning
from tunebench import device as devices
from tunebench.answer import lookup_workload
from tunebench.db import lookup_index
from tunebench.db.owner import is_dead, new_owner
from tunebench.db.record import TrialKey
from tunebench.db.store import Store
from tunebench.space import Config

__all__ = ["FaultCounts", "JournalCheck", "is_damaged"]


@dataclass(slots=True, kw_only=True)
class FaultCounts:
    """Counts of a soak test; those from `lost` on must be zero.

    Attributes:
        kills: Processes or servers killed.
        journalled: Measurements that a tuner knew to be committed.
        unheard: Committed measurements that are not in the journal, because the tuner was killed in between.
        freed: Trials claimed by dead tuners that a survivor could claim at once.
        lookups: Answers and misses of the readers.
        refused: Lookups that raised a `DatabaseError`.
        lost: Journaled measurements that are missing or changed.
        duplicates: Trials with more than one measurement of the search.
        held: Trials claimed by dead tuners that a survivor could not claim.
        damaged: Failed integrity checks of the database.
        deaths: Tuners that ended without being killed.
        wrong: Answers that differ from the records, exceptions other than `DatabaseError`, and interrupted
            tuners without a report.
        unfinished: Workloads that a new tuner did not finish with the right answer, and tuners that a signal
            did not end.
        leftovers: Processes and temporary files that remained after a tuner.
    """

    kills: int = 0
    journalled: int = 0
    unheard: int = 0
    freed: int = 0
    lookups: int = 0
    refused: int = 0
    lost: int = 0
    duplicates: int = 0
    held: int = 0
    damaged: int = 0
    deaths: int = 0
    wrong: int = 0
    unfinished: int = 0
    leftovers: int = 0

    @property
    def faults(self) -> int:
        """Number of faults found."""
        zero = ("lost", "duplicates", "held", "damaged", "deaths", "wrong", "unfinished", "leftovers")
        return sum(getattr(self, name) for name in zero)


_STORED = """
SELECT m.id, t.workload, t.config, m.purpose, m.kind, m.median_us
FROM measurement AS m JOIN trial AS t ON t.id = m.trial_id WHERE m.id BETWEEN :first AND :last
"""
_TWICE = """
SELECT COUNT(*) FROM (
    SELECT 1 FROM measurement WHERE purpose = 'search' GROUP BY trial_id HAVING COUNT(*) > 1
    UNION ALL
    SELECT 1 FROM measurement WHERE purpose <> 'search' GROUP BY trial_id, run_id HAVING COUNT(*) > 1
) AS twice
"""
_CLAIMED = """
SELECT d.key, t.workload, t.variant, t.revision, t.config_values, t.claim_owner
FROM trial AS t JOIN device AS d ON d.id = t.device_id WHERE t.state = 'claimed'
"""


@dataclass(slots=True)
class JournalCheck:
    """Compares a database with the journal of its tuners.

    Attributes:
        store: The database, opened before the first kill.
        journal: The journal file.
        counts: The counts to increase.
    """

    store: Store
    journal: Path
    counts: FaultCounts
    _read: int = 0
    _journalled: dict[int, list[Any]] = field(default_factory=dict)

    def check(self, *, everything: bool = False) -> None:
        """Look for each journal line since the last check (or each one, if `everything`) in the database."""
        new = self._news()
        self._journalled |= new
        self._lost(self._journalled if everything else new)
        with self.store.reading() as connection:
            stored = connection.execute(sa.text("SELECT COUNT(*) FROM measurement")).scalar_one()
            self.counts.duplicates = connection.execute(sa.text(_TWICE)).scalar_one()
        self.counts.journalled = len(self._journalled)
        self.counts.unheard = stored - len(self._journalled) if everything else 0
        if self.store.location.path is not None:
            self.counts.damaged += is_damaged(self.store.location.path)

    def _news(self) -> dict[int, list[Any]]:
        with contextlib.suppress(FileNotFoundError), self.journal.open("rb") as file:
            file.seek(self._read)
            text = file.read()
            lines = text[: text.rfind(b"\n") + 1]
            self._read += len(lines)
            return {line[0]: line for line in map(json.loads, lines.splitlines())}
        return {}

    def _lost(self, lines: dict[int, list[Any]]) -> None:
        if lines:
            with self.store.reading() as connection:
                span = {"first": min(lines), "last": max(lines)}
                stored = {row[0]: list(row) for row in connection.execute(sa.text(_STORED), span)}
            self.counts.lost += sum(stored.get(number) != line for number, line in lines.items())

    def claim_trials_of_the_dead(self) -> None:
        """Claim and release each trial that a dead tuner has claimed."""
        me = new_owner()
        for key, holder in self._claims():
            if is_dead(holder):
                if self.store.claim(key, me):
                    self.store.release(key, me)
                    self.counts.freed += 1
                else:
                    self.counts.held += (key, holder) in self._claims()

    def _claims(self) -> list[tuple[TrialKey, str]]:
        with self.store.reading() as connection:
            rows = list(connection.execute(sa.text(_CLAIMED)))
        return [
            (TrialKey(device=d, workload=w, variant=v, revision=r, config=Config(_values(values))), owner)
            for d, w, v, r, values, owner in rows
        ]

    def finish(self, seed: int) -> None:
        """Finish every workload with a new tuner, and check that lookup returns the best configuration."""
        workloads = self.store.stats().workloads
        with journaled_tuning.journaled_store(_name(self.store), self.journal) as store:
            for number in range(workloads):
                journaled_tuning.tune(store, journaled_tuning.workload(number), seed)
        journaled_tuning.register_variant()
        if self.store.location.url is not None:  # on a server, the lookup index may be a minute old
            lookup_index.export_index(self.store, lookup_index.index_path(self.store.location))
        for number in range(workloads):
            self.counts.unfinished += not is_best(_name(self.store), number)
        self.check(everything=True)
        self.counts.held += self.store.stats().claimed


def _values(values: Any) -> dict[str, Any]:
    return dict(json.loads(values) if isinstance(values, str) else values)


def _name(store: Store) -> str:
    return store.location.url or str(store.location.path)


def is_damaged(path: Path) -> bool:
    """Return whether SQLite's integrity or foreign key check of a file fails."""
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
        report = connection.execute("PRAGMA integrity_check").fetchall()
        return report != [("ok",)] or bool(connection.execute("PRAGMA foreign_key_check").fetchall())


def is_best(db: str, number: int) -> bool:
    """Return whether lookup returns the best of all configurations for a workload."""
    workload = journaled_tuning.workload(number)
    times = (getattr(outcome, "median_us", None) for outcome in journaled_tuning.outcomes(workload))
    answer = lookup_workload(workload, device=devices.local_cpu(), db=db, strict=True)
    return bool(answer.expected_us == min(us for us in times if us is not None))
