"""Queries for people who browse a database: what it contains, a page at a time, and what runs now.

Every query of a page is limited: by an index and a number of rows, or to the trials of one workload. It ends
with an error after `QUERY_S`, because a database may come from anyone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from time import monotonic
from typing import Any, Literal

import sqlalchemy as sa

from tunebench.db import schema
from tunebench.db.browse.entry import (
    Answer,
    Changes,
    Cursor,
    DeviceEntry,
    FailureEntry,
    HistoryPoint,
    RunEntry,
    RunProgress,
    StaleGroup,
    TrialEntry,
    TrialFilter,
    TrialPage,
    WorkloadEntry,
)
from tunebench.db.browse.trial_page import TRIAL_ORDERS, beyond, representatives, selected, trial_row
from tunebench.db.database import Database
from tunebench.db.disk import file_identity
from tunebench.db.figures import Figures
from tunebench.db.location import locate
from tunebench.db.reader import Reader
from tunebench.db.record import Record
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.outcome import FAILURES

__all__ = ["MOST_POINTS", "QUERY_S", "Browser", "open_browser"]

QUERY_S = 30.0
"""Seconds after which a query fails."""

MOST_POINTS = 20_000
"""Most measurements of a search history; of a longer one, the newest."""

_OVERLAP = 1000
"""Measurements before the newest known one that are read again: PostgreSQL may commit ids out of order."""

_FAILED = tuple(failure.kind for failure in FAILURES)


def open_browser(db: str | None = None) -> Browser:
    """Open an existing database for reading only.

    Args:
        db: As in `tunebench.db.open_store`.

    Raises:
        InputError: if `db` names neither a file nor a supported server.
        SchemaError: if its schema is older or newer than that of this version.
        DatabaseError: if it does not exist, or cannot be read.
    """
    location = locate(db)
    location.require()
    return Browser(location, read_only=True)


_Span = Literal["after", "before"]


class Browser(Reader):
    """Queries for pages about a database. Open it with `open_browser`."""

    _file: tuple[int, int] | None = None

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Yield a connection with the limits of this browser; see `Reader.reading`."""
        if self.location.path is not None and (file := file_identity(self.location.path)) != self._file:
            self._engine.dispose()  # the file was replaced: its connections would read the old one
            self._file = file
        with super().reading() as connection, _limited(self, connection):
            yield connection

    def now(self) -> datetime:
        """Return the time of the database, with which it stamps its records."""
        return self._now()

    # -- what there is -------------------------------------------------------------------------------

    def devices(self) -> list[DeviceEntry]:
        """Return the devices, by key."""
        names = ("id", "key", "kind", "architecture", "product", "sm_count", "descriptor")
        query = sa.select(*(_device.c[name] for name in names)).order_by(_device.c.key)
        with self.reading() as connection:
            return [DeviceEntry(**row) for row in connection.execute(query).mappings()]

    def workloads(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return every workload with the ids of the devices that have a trial of it, by text.

        Jumps from one entry of an index to the next different one, so that its time depends on the number of
        workloads, not of trials.
        """
        first = sa.select(sa.func.min(_trial.c.workload)).where(_trial.c.device_id == _device.c.id)
        walk = sa.select(_device.c.id.label("device_id"), first.scalar_subquery().label("workload")).cte(
            "walk", recursive=True
        )
        later = sa.select(sa.func.min(_trial.c.workload)).where(
            _trial.c.device_id == walk.c.device_id, _trial.c.workload > walk.c.workload
        )
        walk = walk.union_all(
            sa.select(walk.c.device_id, later.scalar_subquery()).where(walk.c.workload.is_not(None))
        )
        device_ids: dict[str, list[int]] = {}
        with self.reading() as connection:
            query = sa.select(walk).where(walk.c.workload.is_not(None))
            for device_id, workload in connection.execute(query):
                device_ids.setdefault(workload, []).append(device_id)
        return [(workload, tuple(sorted(device_ids[workload]))) for workload in sorted(device_ids)]

    def entries(self, workload: str) -> list[WorkloadEntry]:
        """Return the entries of a workload, one per device.

        Args:
            workload: Canonical text.
        """
        trial, measurement, count = _trial.c, _measurement.c, sa.func.count()
        trials = (
            sa.select(
                trial.device_id,
                count.label("trials"),
                _number(trial.stale).label("stale"),
                _number(trial.state == "claimed").label("claimed"),
            )
            .where(trial.workload == workload)
            .group_by(trial.device_id)
        )
        measurements = (
            sa.select(
                trial.device_id,
                count.label("measurements"),
                _number(measurement.kind == "measured").label("measured"),
                _number(measurement.kind == "predicted").label("predicted"),
                _number(measurement.kind.in_(_FAILED)).label("failed"),
                sa.func.min(measurement.median_us).label("fastest_us"),
                sa.func.min(measurement.bound_us).label("least_bound_us"),
                sa.func.max(measurement.recorded_at, type_=schema.UtcTime()).label("newest_at"),
            )
            .join_from(_trial, _measurement, measurement.trial_id == trial.id)
            .where(trial.workload == workload)
            .group_by(trial.device_id)
        )
        with self.reading() as connection:
            counts_of = {row["device_id"]: dict(row) for row in connection.execute(trials).mappings()}
            for row in connection.execute(measurements).mappings():
                if row["device_id"] in counts_of:
                    counts_of[row["device_id"]] |= row
            answers: dict[int, list[Answer]] = {}
            for row in connection.execute(_answers_of(workload)).mappings():
                answers.setdefault(row["device_id"], []).append(_answer(row))
        return [
            WorkloadEntry(workload=workload, answers=tuple(answers.get(device_id, ())), **figures)
            for device_id, figures in counts_of.items()
        ]

    def changes(self) -> Changes:
        """Return the state of the database, for `changed_workloads`."""
        stale = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_trial.c.id), 0)).where(
            _trial.c.stale
        )
        claimed = sa.select(sa.func.count()).where(_trial.c.claim_owner.is_not(None))
        with self.reading() as connection:
            number, total = connection.execute(stale).one()
            newest = sa.select(sa.func.max(_measurement.c.id))
            return Changes(
                file=self._file,
                newest=connection.execute(newest).scalar() or 0,
                runs=connection.execute(sa.select(sa.func.count()).select_from(_run)).scalar_one(),
                stale=(int(number), int(total)),
                claimed=connection.execute(claimed).scalar_one(),
            )

    def changed_workloads(self, since: Changes, runs: set[str]) -> set[str]:
        """Return the workloads with measurements, runs or claims that are new since a state.

        Workloads whose trials only became stale or current are found by `stale_groups`.

        Args:
            since: The state.
            runs: Ids of the runs that are known; new ones are added.
        """
        trial, measurement = _trial.c, _measurement.c
        new = (
            sa.select(trial.workload)
            .join_from(_measurement, _trial, trial.id == measurement.trial_id)
            .where(measurement.id > since.newest - _OVERLAP)
        )
        claimed = sa.select(trial.workload).where(trial.claim_owner.is_not(None))
        with self.reading() as connection:
            changed = set(connection.execute(sa.union(new, claimed)).scalars())
            for run_id, workload in connection.execute(sa.select(_run.c.id, _run.c.workload)):
                if run_id not in runs:
                    runs.add(run_id)
                    changed.add(workload)
        return changed

    def stale_groups(self) -> list[StaleGroup]:
        """Return the number of stale trials of each search space with one."""
        columns = (_trial.c.device_id, _trial.c.workload, _trial.c.variant)
        query = sa.select(*columns, sa.func.count().label("trials")).where(_trial.c.stale).group_by(*columns)
        with self.reading() as connection:
            return [StaleGroup(**row) for row in connection.execute(query).mappings()]

    # -- one workload --------------------------------------------------------------------------------

    def points(self, device_id: int, workload: str) -> list[HistoryPoint]:
        """Return the measurements of a workload on a device, oldest first, at most `MOST_POINTS`.

        Args:
            device_id: Id of the device's row.
            workload: Canonical text.
        """
        where = (_trial.c.device_id == device_id, _trial.c.workload == workload)
        return self._points(where)

    def run_points(self, run_id: str) -> list[HistoryPoint]:
        """Return the measurements of a run, oldest first, at most `MOST_POINTS`."""
        return self._points((_measurement.c.run_id == run_id,))

    def _points(self, where: Sequence[sa.ColumnElement[bool]]) -> list[HistoryPoint]:
        measurement, trial = _measurement.c, _trial.c
        time_us = sa.func.coalesce(
            measurement.median_us,
            measurement.predicted_us,
            sa.case((measurement.kind == "aborted", measurement.fastest_us)),
        )
        query = (
            sa.select(
                *(measurement.id, measurement.trial_id, trial.variant, trial.config),
                *(measurement.purpose, measurement.kind, time_us.label("time_us")),
            )
            .join_from(_trial, _measurement, measurement.trial_id == trial.id)
            .where(*where)
            .order_by(measurement.id.desc())
            .limit(MOST_POINTS)
        )
        with self.reading() as connection:
            return [HistoryPoint(**row) for row in connection.execute(query).mappings()][::-1]

    def variants(self, device_id: int, workload: str) -> list[str]:
        """Return the keys of the variants with a trial of a workload on a device."""
        query = sa.select(_trial.c.variant).distinct().order_by(_trial.c.variant)
        query = query.where(_trial.c.device_id == device_id, _trial.c.workload == workload)
        with self.reading() as connection:
            return list(connection.execute(query).scalars())

    def trials(
        self,
        device_id: int,
        workload: str,
        *,
        select: TrialFilter | None = None,
        order: str = "time",
        descending: bool = False,
        place: tuple[_Span, Cursor] | None = None,
        limit: int = 50,
    ) -> TrialPage:
        """Return a page of the trials of a workload on a device.

        Args:
            device_id: Id of the device's row.
            workload: Canonical text.
            select: Selection of trials; None for all.
            order: Column to order by, one of `TRIAL_ORDERS`.
            descending: Whether the largest value is first; missing times are last in ascending order.
            place: Which page: the rows before or after a cursor; None for the first page.
            limit: Most rows.
        """
        rows = representatives(device_id, workload)
        key = TRIAL_ORDERS[order](rows.c).label("key")
        span, cursor = place or ("after", None)
        downwards = descending != (span == "before")
        query = sa.select(rows, key).where(*selected(rows.c, select or TrialFilter()))
        if cursor is not None:
            query = query.where(beyond(key, rows.c.id, cursor, downwards=downwards))
        direction = sa.desc if downwards else sa.asc
        query = query.order_by(direction(key), direction(rows.c.id)).limit(limit + 1)
        with self.reading() as connection:
            page = [trial_row(row) for row in connection.execute(query).mappings()]
        more, page = len(page) > limit, page[:limit]
        if span == "before":
            return TrialPage(rows=tuple(page[::-1]), before=more, after=True)
        return TrialPage(rows=tuple(page), before=cursor is not None, after=more)

    def trial(self, trial_id: int) -> TrialEntry | None:
        """Return a trial; None if there is none with this id."""
        query = sa.select(*(_trial.c[name] for name in TrialEntry.__dataclass_fields__))
        with self.reading() as connection:
            row = connection.execute(query.where(_trial.c.id == trial_id)).mappings().first()
        return None if row is None else TrialEntry(**row)

    def trial_records(self, trial_id: int) -> list[Record]:
        """Return the measurements of a trial, oldest first."""
        return self._records(_trial.c.id == trial_id)

    # -- runs ----------------------------------------------------------------------------------------

    def runs(
        self,
        *,
        before: tuple[datetime, str] | None = None,
        pair: tuple[int, str] | None = None,
        workload: str | None = None,
        device_ids: Collection[int] | None = None,
        state: str = "",
        limit: int = 25,
    ) -> list[RunEntry]:
        """Return runs with their progress, the newest first.

        Args:
            before: Start and id of a run: only earlier ones are returned.
            pair: Device id and workload of the runs; None for all.
            workload: Canonical text of the workload; None for all.
            device_ids: Ids of the devices; None for all.
            state: ``"tuned"`` for runs of `tune`, ``"finished"`` for those that ended with a time,
                ``"failed"`` for those that ended without one, ``"imported"``, or empty for all.
            limit: Most runs.
        """
        query = _runs().order_by(_run.c.started_at.desc(), _run.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(beyond(_run.c.started_at, _run.c.id, before, downwards=True))
        if pair is not None:
            query = query.where(_run.c.device_id == pair[0], _run.c.workload == pair[1])
        if workload is not None:
            query = query.where(_run.c.workload == workload)
        if device_ids is not None:
            query = query.where(_run.c.device_id.in_(device_ids))
        if state == "tuned":
            query = query.where(_run.c.sampler != "import")
        elif state in ("finished", "failed"):
            query = query.where(_run.c.finished_at.is_not(None), _run.c.sampler != "import")
            query = query.where(_has_failed() if state == "failed" else ~_has_failed())
        elif state == "imported":
            query = query.where(_run.c.sampler == "import")
        return self._runs(query)

    def unfinished_runs(self, limit: int = 200) -> list[RunEntry]:
        """Return runs without an end with their progress, the newest first: active or interrupted ones."""
        query = _runs().where(_run.c.finished_at.is_(None), _run.c.sampler != "import")
        return self._runs(query.order_by(_run.c.started_at.desc(), _run.c.id.desc()).limit(limit))

    def run(self, run_id: str) -> RunEntry | None:
        """Return a run with its progress; None if there is none with this id."""
        return next(iter(self._runs(_runs().where(_run.c.id == run_id))), None)

    def first_failures(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        """Return the reason of the first failure of each run that has one, by id of the run.

        Args:
            run_ids: Ids of the runs.
        """
        measurement = _measurement.c
        first_ids = (
            sa.select(sa.func.min(measurement.id))
            .where(measurement.run_id.in_(run_ids), measurement.kind.in_(_FAILED))
            .group_by(measurement.run_id)
        )
        query = sa.select(measurement.run_id, measurement.reason).where(measurement.id.in_(first_ids))
        with self.reading() as connection:
            return {row.run_id: row.reason for row in connection.execute(query)}

    def failures(self, run_id: str, limit: int = 20) -> list[FailureEntry]:
        """Return the failures of a run by outcome class and reason, the most frequent first.

        Args:
            run_id: Id of the run.
            limit: Most entries.
        """
        kind, reason, count = _measurement.c.kind, _measurement.c.reason, sa.func.count()
        query = sa.select(kind, reason, count.label("count")).group_by(kind, reason)
        query = query.where(_measurement.c.run_id == run_id, kind.in_(_FAILED))
        query = query.order_by(count.desc(), kind, reason).limit(limit)
        with self.reading() as connection:
            return [FailureEntry(**row) for row in connection.execute(query).mappings()]

    def _runs(self, query: sa.Select[Any]) -> list[RunEntry]:
        measurement = _measurement.c
        with self.reading() as connection:
            rows = connection.execute(query).mappings().all()
            progress = {
                row["run_id"]: row
                for row in connection.execute(
                    sa.select(
                        measurement.run_id,
                        sa.func.count().label("measurements"),
                        _number(measurement.purpose == "search").label("searched"),
                        _number(measurement.kind.in_(_FAILED)).label("failed"),
                        _best_of_run().label("best_us"),
                        sa.func.min(measurement.bound_us).label("least_bound_us"),
                        sa.func.max(measurement.recorded_at, type_=schema.UtcTime()).label("newest_at"),
                    )
                    .where(measurement.run_id.in_([row["id"] for row in rows]))
                    .group_by(measurement.run_id)
                ).mappings()
            }
            bounds = self._run_bounds(connection, [row["id"] for row in rows])
            owner = _trial.c.claim_owner
            claimed = sa.select(owner, sa.func.count()).where(owner.is_not(None)).group_by(owner)
            claims = {row[0]: int(row[1]) for row in connection.execute(claimed)}
        return [
            RunEntry(
                **row,
                progress=RunProgress(
                    **{name: value for name, value in progress.get(row["id"], {}).items() if name != "run_id"}
                    | bounds.get(row["id"], {}),
                    claimed=claims.get(row["host"], 0),
                ),
            )
            for row in rows
        ]

    @staticmethod
    def _run_bounds(connection: sa.Connection, runs: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the lower bound of all configurations of each run, as its newest measurement states it."""
        measurement = _measurement.c
        newest = (
            sa.select(sa.func.max(measurement.id))
            .where(measurement.run_id.in_(runs), measurement.comparison.is_not(None))
            .group_by(measurement.run_id)
        )
        query = sa.select(measurement.run_id, measurement.comparison).where(measurement.id.in_(newest))
        bounds = {}
        for run_id, comparison in connection.execute(query):
            bound_us = Figures.of(comparison, None).bound_us
            if bound_us is not None:
                bounds[run_id] = {"bound_us": bound_us}
        return bounds


@contextmanager
def _limited(database: Database, connection: sa.Connection) -> Iterator[None]:
    """Let queries of a connection fail after `QUERY_S`."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {QUERY_S * 1000:.0f}")
        yield
        return
    raw: Any = connection.connection.dbapi_connection
    deadline = monotonic() + QUERY_S
    raw.set_progress_handler(lambda: monotonic() > deadline, 100_000)
    try:
        yield
    finally:
        raw.set_progress_handler(None, 0)


def _has_failed() -> sa.ColumnElement[bool]:
    """Return the condition of runs with a failure and without a time, new or known before."""
    of_run, kind = _measurement.c.run_id == _run.c.id, _measurement.c.kind
    timed = sa.exists().where(of_run, kind.in_(("measured", "predicted")))
    return (_run.c.cached == 0) & sa.exists().where(of_run, kind.in_(_FAILED)) & ~timed


def _number(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    """Return the number of rows with a condition."""
    return sa.func.sum(sa.case((condition, 1), else_=0), type_=sa.Integer())


def _best_of_run() -> sa.ColumnElement[float]:
    """Return the best time of a run: of its finalists that are no slower than their default, once it has any.

    The minimum of single measurements of a search is biased low.
    """
    measurement = _measurement.c
    eligible = (measurement.purpose == "finalist") & (
        sa.func.coalesce(measurement.versus_default, "") != "not faster"
    )
    columns = (measurement.median_us, measurement.predicted_us)
    least = [sa.func.min(sa.case((eligible, column))) for column in columns]
    return sa.func.coalesce(*least, *map(sa.func.min, columns))


def _answers_of(workload: str) -> sa.Select[Any]:
    """Return the query of what `lookup` may return for a workload, best first, as `Reader.best` orders it."""
    view = schema.answer_v1.c
    return (
        sa.select(
            _trial.c.device_id,
            _measurement.c.trial_id,
            _measurement.c.versus_default,
            *(view.variant, view.config, view.stale, view.kind, view.cache, view.verification),
            *(view.time_us, view.ci_low_us, view.ci_high_us, view.bound_us, view.recorded_at),
            _measurement.c.comparison,
        )
        .join_from(schema.answer_v1, _measurement, _measurement.c.id == view.measurement_id)
        .join(_trial, _trial.c.id == _measurement.c.trial_id)
        .where(view.workload == workload)
        .order_by(*schema.answers_in_order())
    )


def _answer(row: Mapping[Any, Any]) -> Answer:
    values = {name: row[name] for name in Answer.__dataclass_fields__ if name in row}
    return Answer(
        **values,
        is_default=row["versus_default"] == "itself",
        figures=Figures.of(row["comparison"], row["time_us"]),
        ci_us=None if row["ci_low_us"] is None else (row["ci_low_us"], row["ci_high_us"]),
    )


def _runs() -> sa.Select[Any]:
    names = [name for name in RunEntry.__dataclass_fields__ if name != "progress"]
    return sa.select(*(_run.c[name] for name in names))
