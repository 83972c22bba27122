"""Lookups, and what a process keeps of them: the hot path.

A lookup that was made before costs a dictionary and a look at the clock. Every `FRESH_S`, and whenever this
process has written to a database, the files are asked whether anything was committed since; if so, all
answers are forgotten.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from pathlib import Path
from time import monotonic
from typing import Any

from tunebench import _environment
from tunebench.answer._answer import Answer, Unmeasured
from tunebench.answer._query import LookupQuery
from tunebench.answer._reader import AnswerReader
from tunebench.db import lookup_index, write_count
from tunebench.db.location import Location
from tunebench.device import Device
from tunebench.errors import DatabaseError
from tunebench.workload import Workload
from tunebench.workloads import parse, workload

__all__ = ["FRESH_S", "generation", "lookup", "lookup_workload", "recorded", "timed"]

FRESH_S = 0.25
"""What other processes have recorded is served after so many seconds at most; of this process, at once."""


def lookup(
    operator: str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    strict: bool = False,
    **dimensions: Any,
) -> Answer:
    """Return the best that is known: `lookup("gemm", m=64, n=64, k=64, dtype="f16", device="h100-sxm")`.

    An answer that rests on no measurement of this very problem is warned of (`Unmeasured`), once a process.

    Args:
        operator: Name of the operator.
        device: A device, its name (see `tunebench.device.find`), its stored key, or None: the first GPU, or
            the CPU if there is none.
        db: A path, a URL, or None: what `TUNEBENCH_DB` says, else the user's database. A server is read
            through a local index, at most a minute old.
        strict: Whether only what was timed for this problem, on this device or another of its architecture,
            is an answer.
        dimensions: Of the operator; those with defaults may be left out.

    Raises:
        InputError: if the operator, a dimension or the device is unknown, missing or out of range; or if no
            variant can do the problem there.
        LookupMiss: if there is no answer; the message names the command that would tune it.
        DatabaseError: if the database cannot be read.
    """
    named = device.key if isinstance(device, Device) else device
    database = db if db is not None else _environment.database()
    asked = (operator, named, database, strict, *dimensions.items(), *map(type, dimensions.values()))
    try:
        _cache.refresh()
        found = _cache.asked.get(asked)
    except TypeError:  # a dimension that cannot be hashed cannot be right either: have it named
        workload(operator, **dimensions)
        raise
    if found is None:
        found = _lookup(str(workload(operator, **dimensions)), device, db, strict=strict)
        _cache.asked[asked] = found
    return found


def lookup_workload(
    problem: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    variant: str | None = None,
    strict: bool = False,
    quiet: bool = False,
) -> Answer:
    """Return the best that is known for a workload, given as such or as text; otherwise as `lookup`.

    Args:
        problem: What to compute.
        device: As for `lookup`.
        db: As for `lookup`.
        variant: Key of the only variant to consider.
        strict: As for `lookup`.
        quiet: Whether to warn of nothing: for whoever tells by itself how an answer is known.
    """
    _cache.refresh()
    return _lookup(_text(problem), device, db, variant, strict=strict, quiet=quiet)


def timed(problem: Workload | str, *, device: Device | str | None = None) -> Answer | None:
    """Return what rests on times of this architecture, of this problem or its neighbours; None if nothing.

    Args:
        problem: What to compute.
        device: As for `lookup`.

    Raises:
        DatabaseError: if the default database cannot be read.
    """
    _cache.refresh()
    with _cache.lock:
        return LookupQuery(_text(problem), device, None, None, _cache.view).timed()


def recorded(
    problem: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    variant: str | None = None,
) -> Answer | None:
    """Return what a database has for this very problem, a recorded prediction at worst; None if nothing.

    Args:
        problem: What was computed.
        device: As for `lookup`.
        db: As for `lookup`.
        variant: Key of the only variant to consider.

    Raises:
        DatabaseError: if the database cannot be read.
    """
    _cache.refresh()
    with _cache.lock:
        return LookupQuery(_text(problem), device, db, variant, _cache.view).recorded()


def generation() -> int:
    """Return a number that changes whenever answers may have changed.

    Whoever keeps what was made of an answer compares it; that costs no more than a look at the clock.
    """
    _cache.refresh()
    return _cache.generation


def _text(problem: Workload | str) -> str:
    return str(problem if isinstance(problem, Workload) else parse(problem))


# -- what a process keeps --------------------------------------------------------------------------


class _LookupCache:
    """Answers that were given, and the files they are from; safe among threads."""

    def __init__(self) -> None:
        self.due = 0.0
        """When the files are to be asked again, by the monotonic clock."""
        self.writes = -1
        self.generation = 0
        self.asked: dict[Any, Answer] = {}
        """By everything that `lookup` was called with."""
        self.answers: dict[Any, Answer] = {}
        """By problem, target, database, variant and strictness."""
        self.views: dict[Path, AnswerReader] = {}
        self.warned: set[tuple[str, ...]] = set()
        self.refreshing: threading.Thread | None = None
        self.lock = threading.RLock()
        self._database: str | None = None

    def refresh(self) -> None:
        """Ask the files for news, if that is due."""
        if monotonic() >= self.due or write_count.writes != self.writes:
            self.look()

    def look(self) -> None:
        """Ask every file that was read whether anything was committed since; forget all answers if so."""
        with self.lock:
            self.due, writes = monotonic() + FRESH_S, write_count.writes
            database = _environment.database()
            news = [database != self._database, writes != self.writes]
            news += [self._has_news(path) for path in list(self.views)]
            self._database, self.writes = database, writes
            if any(news):
                self.generation += 1
                self.asked, self.answers = {}, {}

    def _has_news(self, path: Path) -> bool:
        view = self.views[path]
        try:
            if view.location.url is not None and lookup_index.refresh_due(view.location):
                self._refresh(view.location)
            return view.changed()
        except DatabaseError:  # whoever asks for it is told
            del self.views[path]
            return True

    def _refresh(self, location: Location) -> None:
        """Bring the index of a server up to date, in a thread: serving does not wait for it."""
        if self.refreshing is None or not self.refreshing.is_alive():
            self.refreshing = threading.Thread(target=_try_to_refresh, args=(location,), daemon=True)
            self.refreshing.start()

    def view(self, path: Path, location: Location) -> AnswerReader:
        """Return what reads a file."""
        if path not in self.views:
            self.views[path] = AnswerReader(path, location)
            self.views[path].changed()
        return self.views[path]

    def after_fork(self) -> None:
        """Begin anew with what threads of the parent may have held; the answers stand."""
        self.lock, self.due, self.refreshing = threading.RLock(), 0.0, None


def _try_to_refresh(location: Location) -> None:
    """Refresh an index; where that fails it serves on, and the next lookup that needs it says why."""
    with contextlib.suppress(DatabaseError):
        lookup_index.refresh(location)


_cache = _LookupCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cache.after_fork)


# -- one lookup ------------------------------------------------------------------------------------


def _lookup(
    text: str,
    device: Device | str | None,
    db: str | Path | None,
    variant: str | None = None,
    *,
    strict: bool = False,
    quiet: bool = False,
) -> Answer:
    question = LookupQuery(text, device, db, variant, _cache.view)
    asked = (text, question.target, question.location, variant, strict)
    with _cache.lock:
        found = _cache.answers.get(asked)
        if found is None:
            found = _cache.answers[asked] = question.answer(strict=strict)
    told = (text, question.target.key, str(question.location))
    if not found.exact and not quiet and told not in _cache.warned:
        _cache.warned.add(told)
        warnings.warn(f"{text} was not timed on {found.device}: {found.because}", Unmeasured, stacklevel=3)
    return found
