"""Public lookup functions, and the answers that a process caches.

A repeated lookup costs a dictionary access and a clock reading. Every `FRESH_S`, and after each write of this
process, the files are checked for commits, which clear all cached answers. So does a user's kernel that is
loaded or replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from marshal import dumps
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from tunebench import _environment, kernels
from tunebench.answer._answer import Answer, Unmeasured
from tunebench.answer._query import LookupQuery
from tunebench.answer._reader import AnswerReader
from tunebench.db import lookup_index, write_count
from tunebench.db.location import Location, locate
from tunebench.device import Device
from tunebench.errors import DatabaseError, DatabaseUnavailable
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads import workload as make_workload

__all__ = [
    "FRESH_S",
    "answers_state",
    "generation",
    "lookup",
    "lookup_workload",
    "recorded",
    "records_state",
    "timed",
    "tried_operators",
]

FRESH_S = 0.25
"""Delay in seconds until records of other processes are returned; those of this process are at once."""

_raw_database = _environment.raw_database

CACHED = 4096
"""Answers that are kept in memory; a repeated lookup of another one reads the files again."""

OPEN_FILES = 32
"""Databases and indexes that are kept open; a multiple of those that one lookup reads."""

K = TypeVar("K")
V = TypeVar("V")


def lookup(
    operator: str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    strict: bool = False,
    objective: str | None = None,
    require: Sequence[str] = (),
    **dimensions: Any,
) -> Answer:
    """Return the best known answer: `lookup("gemm", m=64, n=64, k=64, dtype="f16", device="h100-sxm")`.

    An answer without a measurement of this workload raises the warning `Unmeasured`, once per process.

    Args:
        operator: Name of the operator, or the text of a workload (`"gemm:m=64,n=64,k=64,dtype=f16"`) or of a
            layer of a suite (`"resnet50/conv2_1"`), whose dimensions may be changed by `dimensions`.
        device: A device, its name (see `tunebench.device.find`), its stored key, or None: the first GPU, or
            the CPU if there is none.
        db: Path, URL, or None: `TUNEBENCH_DB`, or else the user's database. A server is read through a local
            index, which is at most a minute old.
        strict: Accept only measurements of this workload, on this device or another of its architecture.
        objective: Another objective than the time, such as ``"energy_j"`` or ``"GFLOP/s:max"``. Only records
            of this workload on this device count, and the database is read.
        require: What the answer must satisfy, such as ``"error<=1e-3"``; as `objective`.
        dimensions: Dimensions of the operator; those with a default are optional.

    Raises:
        InputError: if the operator, a dimension or the device is unknown, missing or out of range, or no
            variant supports the workload on the device.
        LookupMiss: if there is no answer; the message contains the command that tunes the workload.
        DatabaseError: if the database cannot be read.
    """
    if objective is not None or require:
        text = str(_made(operator, dimensions))
        return lookup_workload(text, device=device, db=db, objective=objective, require=require)
    named = device.key if isinstance(device, Device) else device
    database = db if db is not None else _raw_database()
    if (  # as in `refresh`, without a call
        monotonic() >= lookup_cache.due
        or write_count.writes != lookup_cache.writes
        or kernels.file_changes != lookup_cache.kernel_changes
    ):
        lookup_cache.look()
    try:
        # As bytes, 1, 1.0 and True differ; version 1 depends on values alone, not on shared objects.
        asked = (operator, named, database, strict, dumps(dimensions, 1))
        answer = lookup_cache.asked.get(asked)
    except (TypeError, ValueError):  # a value that is neither a number nor text, such as an expression
        return _lookup(str(_made(operator, dimensions)), device, db, strict=strict)
    if answer is None:
        answer = _lookup(str(_made(operator, dimensions)), device, db, strict=strict)
        lookup_cache.keep(lookup_cache.asked, asked, answer)
    return answer


def lookup_workload(
    workload: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    variant: str | None = None,
    strict: bool = False,
    quiet: bool = False,
    wait_s: float = lookup_index.SERVER_S,
    objective: str | None = None,
    require: Sequence[str] = (),
    reproducible: bool = False,
) -> Answer:
    """Return the best known answer for a workload object or text; see `lookup`.

    Args:
        workload: The workload.
        device: As in `lookup`.
        db: As in `lookup`.
        variant: Key of the only variant to consider.
        strict: As in `lookup`.
        quiet: Do not warn of answers without a measurement, or of a database that cannot be read now.
        wait_s: Longest wait for a server that has not answered yet, in seconds.
        objective: As in `lookup`.
        require: As in `lookup`.
        reproducible: Accept only configurations whose results have the same bits in every run.
    """
    if objective is not None or require:
        return _of_goal(_text(workload), device, db, variant, objective, require, reproducible=reproducible)
    lookup_cache.refresh()
    return _lookup(
        _text(workload),
        device,
        db,
        variant,
        strict=strict,
        quiet=quiet,
        wait_s=wait_s,
        reproducible=reproducible,
    )


def _of_goal(
    text: str,
    device: Device | str | None,
    db: str | Path | None,
    variant: str | None,
    objective: str | None,
    require: Sequence[str],
    *,
    reproducible: bool,
) -> Answer:
    """Return the best record by an objective; only this needs NumPy and SQLAlchemy."""
    from tunebench.answer._objective import lookup_goal
    from tunebench.objective import Goal

    goal = Goal.parse(objectives=() if objective is None else (objective,), require=require)
    return lookup_goal(text, device, db, goal, variant, reproducible=reproducible)


def timed(
    workload: Workload | str, *, device: Device | str | None = None, reproducible: bool = False
) -> Answer | None:
    """Return an answer from measurements on this architecture, of this workload or its neighbours; else None.

    Args:
        workload: The workload.
        device: As in `lookup`.
        reproducible: As in `lookup_workload`.

    Raises:
        DatabaseError: if the default database cannot be read.
    """
    with _question(_text(workload), device, reproducible=reproducible) as question:
        return question.timed()


def tried_operators(device: Device | str | None = None) -> set[str]:
    """Return the operators for which `timed` may have an answer: others have no trial on this architecture.

    Args:
        device: As in `lookup`.

    Raises:
        DatabaseError: if the default database cannot be read.
    """
    with _question("", device) as question:
        return question.tried_operators()


def records_state(device: Device | str | None = None) -> str:
    """Return a text that differs when a result was recorded that lookups on a device may return.

    It is the same in every process, unlike `generation`.

    Args:
        device: As in `lookup`.

    Raises:
        DatabaseError: if the default database cannot be read.
    """
    with _question("", device) as question:
        return question.records_state()


def answers_state(
    workloads: Iterable[Workload | str],
    device: Device | str | None = None,
    *,
    reproducible: bool = False,
) -> str:
    """Return a hash that differs when the stored answer of one of some workloads does.

    Unlike `records_state`, it stays the same when a result of another workload is recorded.

    Args:
        workloads: The workloads.
        device: As in `lookup`.
        reproducible: As in `lookup_workload`.

    Raises:
        DatabaseError: if the default database cannot be read.
        LookupMiss: if only variants were measured whose files are not loaded.
    """
    state = hashlib.sha256()
    for text in sorted(map(_text, workloads)):
        answer = recorded(text, device=device, reproducible=reproducible)
        state.update(f"{text}\0{answer and answer.to_json()}\0".encode())
    return state.hexdigest()


def recorded(
    workload: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    variant: str | None = None,
    reproducible: bool = False,
) -> Answer | None:
    """Return the stored answer for this workload, measured or else predicted; None if there is none.

    Args:
        workload: The workload.
        device: As in `lookup`.
        db: As in `lookup`.
        variant: Key of the only variant to consider.
        reproducible: As in `lookup_workload`.

    Raises:
        DatabaseError: if the database cannot be read.
        LookupMiss: if only variants were measured whose files are not loaded.
    """
    with _question(_text(workload), device, db, variant, reproducible=reproducible) as question:
        return question.recorded()


@contextlib.contextmanager
def _question(
    text: str,
    device: Device | str | None,
    db: str | Path | None = None,
    variant: str | None = None,
    *,
    reproducible: bool = False,
) -> Iterator[LookupQuery]:
    """Yield a query of the current files, whose answer is not cached."""
    lookup_cache.refresh()
    _await_server(db)
    with lookup_cache.reading() as view_of:
        yield LookupQuery(text, device, db, variant, view_of, reproducible=reproducible)


def generation() -> int:
    """Return a number that changes whenever answers may have changed, for callers that cache a result of one.

    It costs a clock reading between checks of the files.
    """
    lookup_cache.refresh()
    return lookup_cache.generation


def _made(operator: str, dimensions: dict[str, Any]) -> Workload:
    """Return a workload from an operator and its dimensions, or from a text and changes."""
    if ":" not in operator and "/" not in operator:
        return make_workload(operator, **dimensions)
    named = parse(operator)
    return named.changed(**dimensions) if dimensions else named


def _text(workload: Workload | str) -> str:
    return str(workload if isinstance(workload, Workload) else parse(workload))


# -- the cache of a process ---------------------------------------------------------------------------


class LookupCache:
    """Cached answers and open files of a process; safe for threads and signal handlers."""

    def __init__(self) -> None:
        self.due = 0.0
        """Time of the next check of the files, on the monotonic clock."""
        self.writes = -1
        self.kernel_changes = -1
        self.generation = 0
        self.asked: dict[Any, Answer] = {}
        """By all arguments of `lookup`."""
        self.answers: dict[Any, Answer] = {}
        """By workload, target, database, variant, strictness and reproducibility."""
        self.views: dict[Path, AnswerReader] = {}
        self.warned: dict[tuple[str, ...], None] = {}
        """Lookups that have warned."""
        self.lock = threading.RLock()
        self.is_reading = False
        self._database: str | None = None

    def refresh(self) -> None:
        """Check the files for commits, if it is time."""
        if (
            monotonic() >= self.due
            or write_count.writes != self.writes
            or kernels.file_changes != self.kernel_changes
        ):
            self.look()

    def look(self) -> None:
        """Check all open files for commits, and clear the cached answers if there are any.

        While another thread looks up, only a write of this process, or of its kernels, is waited for.
        """
        own_change = write_count.writes != self.writes or kernels.file_changes != self.kernel_changes
        if not self.lock.acquire(blocking=own_change):
            return
        try:
            if self.is_reading:  # a signal handler interrupts a lookup of its thread
                return
            self.due, writes = monotonic() + FRESH_S, write_count.writes
            database, kernel_changes = _environment.database(), kernels.file_changes
            news = [database != self._database, writes != self.writes]
            news.append(kernel_changes != self.kernel_changes)
            news += [self._has_news(path) for path in list(self.views)]
            self._database, self.writes, self.kernel_changes = database, writes, kernel_changes
            if any(news):
                self.generation += 1
                self.asked, self.answers = {}, {}
        finally:
            self.lock.release()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[Path, Location], AnswerReader]]:
        """Yield the function that returns the reader of a file, while no other thread reads.

        A signal handler may interrupt a lookup of its own thread, in the middle of a transaction. It gets
        readers of its own.
        """
        with self.lock:
            if self.is_reading:
                with contextlib.ExitStack() as stack:
                    yield lambda path, location: stack.enter_context(AnswerReader(path, location))
                return
            self.is_reading = True
            try:
                yield self.view
            finally:
                self.is_reading = False

    def keep(self, cache: dict[K, V], key: K, value: V) -> None:
        """Add an item to a cache; without room for it, the oldest items are removed."""
        with self.lock:
            while len(cache) >= CACHED:
                cache.pop(next(iter(cache)))
            cache[key] = value

    def _has_news(self, path: Path) -> bool:
        view = self.views[path]
        try:
            if view.location.url is not None:
                lookup_index.refresh_in_thread(view.location)
            return view.changed()
        except DatabaseUnavailable:  # locked: what was read before stays valid
            return False
        except DatabaseError:  # the next lookup of this file raises the error
            del self.views[path]
            return True

    def view(self, path: Path, location: Location) -> AnswerReader:
        """Return the reader of a file."""
        if path not in self.views:
            if len(self.views) >= OPEN_FILES:
                self.views.pop(next(iter(self.views))).close()
            self.views[path] = AnswerReader(path, location)
            with contextlib.suppress(DatabaseUnavailable):  # a lookup reads a copy
                self.views[path].changed()
        return self.views[path]

    def after_fork(self) -> None:
        """Replace the lock of the parent process; cached answers stay valid."""
        self.lock, self.due = threading.RLock(), 0.0
        self.is_reading = False


lookup_cache = LookupCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lookup_cache.after_fork)


# -- one lookup ------------------------------------------------------------------------------------


def _lookup(
    text: str,
    device: Device | str | None,
    db: str | Path | None,
    variant: str | None = None,
    *,
    strict: bool = False,
    quiet: bool = False,
    wait_s: float = lookup_index.SERVER_S,
    reproducible: bool = False,
) -> Answer:
    _await_server(db, wait_s)
    with lookup_cache.reading() as view_of:
        question = LookupQuery(text, device, db, variant, view_of, reproducible=reproducible)
        asked = (text, question.target, question.location, variant, strict, reproducible)
        answer = lookup_cache.answers.get(asked)
        if answer is None:
            answer = question.answer(strict=strict)
            lookup_cache.keep(lookup_cache.answers, asked, answer)
    if answer.warning is not None and not quiet:
        _warn_once((str(question.location), "cannot be read"), answer.warning, RuntimeWarning)
    if not answer.exact and not quiet:
        message = f"{text} was not measured on {answer.device}: {answer.because}"
        _warn_once((text, question.target.key, str(question.location)), message, Unmeasured)
    return answer


def _warn_once(key: tuple[str, ...], text: str, kind: type[Warning]) -> None:
    if key not in lookup_cache.warned:
        lookup_cache.keep(lookup_cache.warned, key, None)
        warnings.warn(text, kind, stacklevel=4)


def _await_server(db: str | Path | None, wait_s: float = lookup_index.SERVER_S) -> None:
    """Refresh the index of a server before a lookup, while other threads may look up."""
    location = locate(db)
    if location.url is not None:
        lookup_index.refresh_in_thread(location, wait_s=wait_s)
