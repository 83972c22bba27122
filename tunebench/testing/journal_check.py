"""What the soaks of `faults.py` count, and how a database is held against its writers' journal."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunebench import device as devices
from tunebench.answer import lookup_workload
from tunebench.db import lookup_index
from tunebench.db.owner import is_dead, new_owner
from tunebench.db.record import TrialKey
from tunebench.db.store import Store
from tunebench.space import Config
from tunebench.testing import journaled_tuning

__all__ = ["FaultCounts", "JournalCheck", "is_damaged"]


@dataclass(slots=True, kw_only=True)
class FaultCounts:
    """What a soak saw; those that must be zero come last.

    Attributes:
        kills: How often something was killed.
        journalled: Measurements that a tuner was told are stored.
        unheard: Measurements that are stored and nobody was told: the tuner died in between.
        freed: Claims of dead tuners that a survivor, open since before, could take at once.
        lookups: Answers and misses that the readers got.
        refused: Lookups that ended in a `DatabaseError`.
        lost: Journalled measurements that are not there, or not as they were.
        duplicates: Trials with more than one measurement of the search.
        held: Claims of dead tuners that a survivor could not take.
        damaged: Checks of the database that found something.
        deaths: Tuners that ended by themselves.
        wrong: Answers that are not what was recorded, and exceptions of any other kind.
        unfinished: Problems that a new tuner could not finish with the right answer.
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

    @property
    def faults(self) -> int:
        """How much of what must not be was seen."""
        zero = ("lost", "duplicates", "held", "damaged", "deaths", "wrong", "unfinished")
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
    """Holds a database against the journal of those who wrote it.

    Attributes:
        store: Open since before the first kill.
        journal: What was written beside it.
        counts: Is counted up.
    """

    store: Store
    journal: Path
    counts: FaultCounts
    _read: int = 0
    _told: dict[int, list[Any]] = field(default_factory=dict)

    def check(self, *, everything: bool = False) -> None:
        """Look for what was written down since the last check, or ever."""
        new = self._news()
        self._told |= new
        self._lost(self._told if everything else new)
        with self.store._read() as connection:
            stored = connection.execute(sa.text("SELECT COUNT(*) FROM measurement")).scalar_one()
            self.counts.duplicates = connection.execute(sa.text(_TWICE)).scalar_one()
        self.counts.journalled = len(self._told)
        self.counts.unheard = stored - len(self._told) if everything else 0
        if self.store.location.path is not None:
            self.counts.damaged += is_damaged(self.store.location.path)

    def _news(self) -> dict[int, list[Any]]:
        with contextlib.suppress(FileNotFoundError), self.journal.open("rb") as file:
            file.seek(self._read)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            return {told[0]: told for told in map(json.loads, whole.splitlines())}
        return {}

    def _lost(self, told: dict[int, list[Any]]) -> None:
        if told:
            with self.store._read() as connection:
                span = {"first": min(told), "last": max(told)}
                found = {row[0]: list(row) for row in connection.execute(sa.text(_STORED), span)}
            self.counts.lost += sum(found.get(number) != line for number, line in told.items())

    def claim_trials_of_the_dead(self) -> None:
        """Claim what dead tuners hold, as one who has been at work since before; and give it back."""
        me = new_owner()
        for key, holder in self._claims():
            if is_dead(holder):
                if self.store.claim(key, me):
                    self.store.release(key, me)
                    self.counts.freed += 1
                else:
                    self.counts.held += (key, holder) in self._claims()

    def _claims(self) -> list[tuple[TrialKey, str]]:
        with self.store._read() as connection:
            rows = list(connection.execute(sa.text(_CLAIMED)))
        return [
            (TrialKey(device=d, workload=w, variant=v, revision=r, config=Config(_values(values))), owner)
            for d, w, v, r, values, owner in rows
        ]

    def finish(self, seed: int) -> None:
        """Let a new tuner finish every problem, and hold what is served then against all there is."""
        problems = self.store.stats().workloads
        with journaled_tuning.journaled_store(_name(self.store), self.journal) as store:
            for number in range(problems):
                journaled_tuning.tune(store, journaled_tuning.workload(number), seed)
        journaled_tuning.register_variant()
        if self.store.location.url is not None:  # or it may be a minute old
            lookup_index.export_index(self.store, lookup_index.index_path(self.store.location))
        for number in range(problems):
            self.counts.unfinished += not is_best(_name(self.store), number)
        self.check(everything=True)
        self.counts.held += self.store.stats().claimed


def _values(values: Any) -> dict[str, Any]:
    return dict(json.loads(values) if isinstance(values, str) else values)


def _name(store: Store) -> str:
    return store.location.url or str(store.location.path)


def is_damaged(path: Path) -> bool:
    """Tell whether SQLite finds anything wrong with a file."""
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
        whole = connection.execute("PRAGMA integrity_check").fetchall()
        return whole != [("ok",)] or bool(connection.execute("PRAGMA foreign_key_check").fetchall())


def is_best(db: str, number: int) -> bool:
    """Tell whether what is served for a problem is the best of all its configurations."""
    problem = journaled_tuning.workload(number)
    times = (getattr(outcome, "median_us", None) for outcome in journaled_tuning.outcomes(problem))
    answer = lookup_workload(problem, device=devices.local_cpu(), db=db, strict=True)
    return bool(answer.expected_us == min(us for us in times if us is not None))
