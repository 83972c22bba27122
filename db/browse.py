"""Queries for people who browse a database: what it contains, a page at a time, and what runs now.

Every query of a page is limited: by an index and a number of rows, or to the trials of one workload. It ends
with an error after `QUERY_S`, because a database may come from anyone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, Literal

import sqlalchemy as sa

from tunebench.db import schema
from tunebench.db.database import Database
from tunebench.db.location import locate
from tunebench.db.reader import Reader
from tunebench.db.record import Record
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.outcome import FAILURES

__all__ = [
    "MOST_POINTS",
    "QUERY_S",
    "TRIAL_ORDERS",
    "Answer",
    "Browser",
    "Changes",
    "Cursor",
    "DeviceEntry",
    "HistoryPoint",
    "RunEntry",
    "RunProgress",
    "StaleGroup",
    "TrialFilter",
    "TrialPage",
    "TrialRow",
    "WorkloadEntry",
    "open_browser",
]

QUERY_S = 30.0
"""Seconds after which a query fails."""

MOST_POINTS = 20_000
"""Most measurements of a search history; of a longer one, the newest."""

_OVERLAP = 1000
"""Measurements before the newest known one that are read again: PostgreSQL may commit ids out of order."""

_FAILED = tuple(failure.kind for failure in FAILURES)

_LATE = 1e300
"""Sort key in place of a missing number."""

Cursor = tuple[Any, int]
"""Place in an ordered list: the value it is ordered by, and the id of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """A device: id of its row, `Device.key`, kind, architecture, product, SMs, and stored fields."""

    id: int
    key: str
    kind: str
    architecture: str
    product: str
    sm_count: int
    descriptor: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row of the view `answer_v1`: what `lookup` may return for a workload on a device.

    Attributes:
        trial_id: Id of the trial.
        variant: `Variant.key`.
        config: Text of the configuration.
        stale: Whether the source has changed since.
        kind: ``"measured"`` or ``"predicted"``.
        cache: Cache state; None for a prediction.
        verification: How the result was verified.
        time_us: Time, in microseconds.
        ci_us: 95 % confidence interval; None for a prediction.
        bound_us: Lower bound of the configuration; None if unknown.
        recorded_at: Time of the record.
        comparison: Ratios of the times of the default and of libraries to this time.
    """

    trial_id: int
    variant: str
    config: str
    stale: bool
    kind: str
    cache: str | None
    verification: str | None
    time_us: float
    ci_us: tuple[float, float] | None
    bound_us: float | None
    recorded_at: datetime
    comparison: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadEntry:
    """What a database contains of one workload on one device.

    Attributes:
        device_id: Id of the device's row.
        workload: Canonical text.
        trials: Number of trials; `stale` and `claimed` are parts of it.
        stale: Trials whose source has changed since.
        claimed: Trials that a tuner has claimed and not measured.
        measurements: Number of measurements; `measured`, `predicted` and `failed` are parts of it.
        measured: Measurements with a measured time.
        predicted: Measurements with a predicted time.
        failed: Measurements that failed.
        fastest_us: Fastest measured time, verified or not; None without one.
        least_bound_us: Lowest lower bound of any measurement; None if unknown.
        newest_at: Time of the newest measurement; None without one.
        answers: What `lookup` may return, best first.
    """

    device_id: int
    workload: str
    trials: int = 0
    stale: int = 0
    claimed: int = 0
    measurements: int = 0
    measured: int = 0
    predicted: int = 0
    failed: int = 0
    fastest_us: float | None = None
    least_bound_us: float | None = None
    newest_at: datetime | None = None
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """State of a database, to find later which workloads have changed.

    Attributes:
        newest: Id of the newest measurement; 0 without one.
        runs: Number of runs.
        stale: Number of stale trials, and sum of their ids.
        claimed: Number of claimed trials.
    """

    newest: int = 0
    runs: int = 0
    stale: tuple[int, int] = (0, 0)
    claimed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleGroup:
    """Number of stale trials of one variant for one workload on one device."""

    device_id: int
    workload: str
    variant: str
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """One measurement in the history of a workload; `time_us` of an aborted one is its fastest sample."""

    id: int
    trial_id: int
    variant: str
    config: str
    purpose: str
    kind: str
    time_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """Selection of trials; an empty text selects all.

    Attributes:
        variant: `Variant.key`.
        kind: Outcome class, or ``"claimed"``.
        source: ``"current"`` or ``"stale"``.
        config: Part of the text of the configuration.
        run: Id of the run that measured them.
    """

    variant: str = ""
    kind: str = ""
    source: str = ""
    config: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial with one of its measurements: the newest finalist with a time, or else the newest with a time.

    The columns of the measurement are None, and `kind` is ``"claimed"``, if there is none yet.
    """

    id: int
    variant: str
    config: str
    stale: bool
    kind: str
    purpose: str | None
    time_us: float | None
    ci_us: tuple[float, float] | None
    bound_us: float | None
    reason: str | None
    recorded_at: datetime | None
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """A page of trials, and whether there are more before and after it."""

    rows: tuple[TrialRow, ...]
    before: bool
    after: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """What a run has done so far.

    Attributes:
        measurements: Number of its measurements.
        searched: Measurements of its search: without finalists and audits.
        failed: Measurements that failed.
        best_us: Fastest measured time, else predicted time; None without one.
        least_bound_us: Lowest lower bound; None if unknown.
        newest_at: Time of the newest measurement; None without one.
        claimed: Configurations that are compiled or measured now.
    """

    measurements: int = 0
    searched: int = 0
    failed: int = 0
    best_us: float | None = None
    least_bound_us: float | None = None
    newest_at: datetime | None = None
    claimed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run of `tune`, or an import; `budget_trials` is None if the run has no such budget."""

    id: str
    device_id: int
    workload: str
    sampler: str
    seed: int
    host: str
    versions: Mapping[str, Any]
    started_at: datetime
    finished_at: datetime | None
    budget_trials: int | None
    masked: int
    cached: int
    wall_s: float
    progress: RunProgress = field(default_factory=RunProgress)


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

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        with super()._read() as connection, _limited(self, connection):
            yield connection

    def now(self) -> datetime:
        """Return the time of the database, with which it stamps its records."""
        return self._now()

    # -- what there is -------------------------------------------------------------------------------

    def devices(self) -> list[DeviceEntry]:
        """Return the devices, by key."""
        names = ("id", "key", "kind", "architecture", "product", "sm_count", "descriptor")
        query = sa.select(*(_device.c[name] for name in names)).order_by(_device.c.key)
        with self._read() as connection:
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
        found: dict[str, list[int]] = {}
        with self._read() as connection:
            query = sa.select(walk).where(walk.c.workload.is_not(None))
            for device_id, workload in connection.execute(query):
                found.setdefault(workload, []).append(device_id)
        return [(workload, tuple(sorted(found[workload]))) for workload in sorted(found)]

    def entries(self, workload: str) -> list[WorkloadEntry]:
        """Return what the database contains of a workload, one entry per device.

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
        with self._read() as connection:
            found = {row["device_id"]: dict(row) for row in connection.execute(trials).mappings()}
            for row in connection.execute(measurements).mappings():
                if row["device_id"] in found:
                    found[row["device_id"]] |= row
            answers: dict[int, list[Answer]] = {}
            for row in connection.execute(_answers_of(workload)).mappings():
                answers.setdefault(row["device_id"], []).append(_answer(row))
        return [
            WorkloadEntry(workload=workload, answers=tuple(answers.get(device_id, ())), **figures)
            for device_id, figures in found.items()
        ]

    def changes(self) -> Changes:
        """Return the state of the database, for `changed_workloads`."""
        stale = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_trial.c.id), 0)).where(
            _trial.c.stale
        )
        claimed = sa.select(sa.func.count()).where(_trial.c.claim_owner.is_not(None))
        with self._read() as connection:
            number, total = connection.execute(stale).one()
            newest = sa.select(sa.func.max(_measurement.c.id))
            return Changes(
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
        with self._read() as connection:
            found = set(connection.execute(sa.union(new, claimed)).scalars())
            for run_id, workload in connection.execute(sa.select(_run.c.id, _run.c.workload)):
                if run_id not in runs:
                    runs.add(run_id)
                    found.add(workload)
        return found

    def stale_groups(self) -> list[StaleGroup]:
        """Return the number of stale trials of each search space with one."""
        columns = (_trial.c.device_id, _trial.c.workload, _trial.c.variant)
        query = sa.select(*columns, sa.func.count().label("trials")).where(_trial.c.stale).group_by(*columns)
        with self._read() as connection:
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
        with self._read() as connection:
            return [HistoryPoint(**row) for row in connection.execute(query).mappings()][::-1]

    def variants(self, device_id: int, workload: str) -> list[str]:
        """Return the keys of the variants with a trial of a workload on a device."""
        query = sa.select(_trial.c.variant).distinct().order_by(_trial.c.variant)
        query = query.where(_trial.c.device_id == device_id, _trial.c.workload == workload)
        with self._read() as connection:
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
        rows = _representatives(device_id, workload)
        key = TRIAL_ORDERS[order](rows.c).label("key")
        span, cursor = place or ("after", None)
        downwards = descending != (span == "before")
        query = sa.select(rows, key).where(*_selected(rows.c, select or TrialFilter()))
        if cursor is not None:
            query = query.where(_beyond(key, rows.c.id, cursor, downwards=downwards))
        direction = sa.desc if downwards else sa.asc
        query = query.order_by(direction(key), direction(rows.c.id)).limit(limit + 1)
        with self._read() as connection:
            found = [_trial_row(row) for row in connection.execute(query).mappings()]
        more, found = len(found) > limit, found[:limit]
        if span == "before":
            return TrialPage(rows=tuple(found[::-1]), before=more, after=True)
        return TrialPage(rows=tuple(found), before=cursor is not None, after=more)

    def trial(self, trial_id: int) -> tuple[int, str, str, bool] | None:
        """Return device id, workload, state and staleness of a trial; None if there is none with this id."""
        columns = (_trial.c.device_id, _trial.c.workload, _trial.c.state, _trial.c.stale)
        with self._read() as connection:
            found = connection.execute(sa.select(*columns).where(_trial.c.id == trial_id)).first()
        return None if found is None else (found[0], found[1], found[2], bool(found[3]))

    def trial_records(self, trial_id: int) -> list[Record]:
        """Return the measurements of a trial, oldest first."""
        return self._records(_trial.c.id == trial_id)

    # -- runs ----------------------------------------------------------------------------------------

    def runs(
        self,
        *,
        before: tuple[datetime, str] | None = None,
        pair: tuple[int, str] | None = None,
        limit: int = 25,
    ) -> list[RunEntry]:
        """Return runs with their progress, the newest first.

        Args:
            before: Start and id of a run: only earlier ones are returned.
            pair: Device id and workload of the runs; None for all.
            limit: Most runs.
        """
        query = _runs().order_by(_run.c.started_at.desc(), _run.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(_beyond(_run.c.started_at, _run.c.id, before, downwards=True))
        if pair is not None:
            query = query.where(_run.c.device_id == pair[0], _run.c.workload == pair[1])
        return self._runs(query)

    def unfinished_runs(self, limit: int = 200) -> list[RunEntry]:
        """Return runs without an end with their progress, the newest first: active or interrupted ones."""
        query = _runs().where(_run.c.finished_at.is_(None), _run.c.sampler != "import")
        return self._runs(query.order_by(_run.c.started_at.desc(), _run.c.id.desc()).limit(limit))

    def run(self, run_id: str) -> RunEntry | None:
        """Return a run with its progress; None if there is none with this id."""
        return next(iter(self._runs(_runs().where(_run.c.id == run_id))), None)

    def _runs(self, query: sa.Select[Any]) -> list[RunEntry]:
        measurement = _measurement.c
        with self._read() as connection:
            rows = connection.execute(query).mappings().all()
            progress = {
                row["run_id"]: row
                for row in connection.execute(
                    sa.select(
                        measurement.run_id,
                        sa.func.count().label("measurements"),
                        _number(measurement.purpose == "search").label("searched"),
                        _number(measurement.kind.in_(_FAILED)).label("failed"),
                        sa.func.coalesce(
                            sa.func.min(measurement.median_us), sa.func.min(measurement.predicted_us)
                        ).label("best_us"),
                        sa.func.min(measurement.bound_us).label("least_bound_us"),
                        sa.func.max(measurement.recorded_at, type_=schema.UtcTime()).label("newest_at"),
                    )
                    .where(measurement.run_id.in_([row["id"] for row in rows]))
                    .group_by(measurement.run_id)
                ).mappings()
            }
            owner = _trial.c.claim_owner
            claimed = sa.select(owner, sa.func.count()).where(owner.is_not(None)).group_by(owner)
            claims = {row[0]: int(row[1]) for row in connection.execute(claimed)}
        return [
            RunEntry(
                **row,
                progress=RunProgress(
                    **{
                        name: value for name, value in progress.get(row["id"], {}).items() if name != "run_id"
                    },
                    claimed=claims.get(row["host"], 0),
                ),
            )
            for row in rows
        ]


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


def _number(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    """Return the number of rows with a condition."""
    return sa.func.sum(sa.case((condition, 1), else_=0), type_=sa.Integer())


def _answers_of(workload: str) -> sa.Select[Any]:
    """Return the query of what `lookup` may return for a workload, best first, as `Reader.best` orders it."""
    view = schema.answer_v1.c
    unproved = view.verification == "not verified"
    return (
        sa.select(
            _trial.c.device_id,
            _measurement.c.trial_id,
            *(view.variant, view.config, view.stale, view.kind, view.cache, view.verification),
            *(view.time_us, view.ci_low_us, view.ci_high_us, view.bound_us, view.recorded_at),
            _measurement.c.comparison,
        )
        .join_from(schema.answer_v1, _measurement, _measurement.c.id == view.measurement_id)
        .join(_trial, _trial.c.id == _measurement.c.trial_id)
        .where(view.workload == workload)
        .order_by(view.kind, view.stale, view.cache, unproved, view.time_us, view.measurement_id)
    )


def _answer(row: Mapping[Any, Any]) -> Answer:
    values = {name: row[name] for name in Answer.__dataclass_fields__ if name in row}
    return Answer(
        **values | {"comparison": row["comparison"] if isinstance(row["comparison"], dict) else {}},
        ci_us=None if row["ci_low_us"] is None else (row["ci_low_us"], row["ci_high_us"]),
    )


def _representatives(device_id: int, workload: str) -> sa.Subquery:
    """Return the trials of a workload on a device, each with one measurement (see `TrialRow`)."""
    trial, measurement = _trial.c, _measurement.c
    time_us = sa.func.coalesce(measurement.median_us, measurement.predicted_us)
    place = sa.func.row_number().over(
        partition_by=trial.id,
        order_by=(
            sa.case((time_us.is_not(None), 0), else_=1),
            sa.case((measurement.purpose == "finalist", 0), else_=1),
            measurement.id.desc(),
        ),
    )
    ranked = (
        sa.select(
            *(trial.id, trial.variant, trial.config, trial.stale, measurement.run_id),
            *(measurement.purpose, time_us.label("time_us"), measurement.id.label("measurement_id")),
            sa.func.coalesce(measurement.kind, trial.state).label("kind"),
            *(measurement.ci_low_us, measurement.ci_high_us, measurement.bound_us),
            *(measurement.reason, measurement.recorded_at, place.label("place")),
        )
        .join_from(_trial, _measurement, measurement.trial_id == trial.id, isouter=True)
        .where(trial.device_id == device_id, trial.workload == workload)
        .subquery()
    )
    return sa.select(ranked).where(ranked.c.place == 1).subquery()


TRIAL_ORDERS: Mapping[str, Any] = {
    "time": lambda c: sa.func.coalesce(c.time_us, _LATE),
    "bound": lambda c: sa.func.coalesce(c.bound_us, _LATE),
    "variant": lambda c: c.variant,
    "config": lambda c: c.config,
    "outcome": lambda c: c.kind,
    "recorded": lambda c: sa.func.coalesce(c.measurement_id, 0),
}
"""Columns that trials can be ordered by, with the expression of each."""


def _selected(columns: Any, select: TrialFilter) -> Iterator[sa.ColumnElement[bool]]:
    if select.variant:
        yield columns.variant == select.variant
    if select.kind:
        yield columns.kind == select.kind
    if select.source:
        yield columns.stale if select.source == "stale" else sa.not_(columns.stale)
    if select.config:
        yield columns.config.icontains(select.config, autoescape=True)
    if select.run:
        yield columns.run_id == select.run


def _beyond(key: Any, row_id: Any, cursor: tuple[Any, Any], *, downwards: bool) -> sa.ColumnElement[bool]:
    value, last = cursor
    further = key < value if downwards else key > value
    tied = row_id < last if downwards else row_id > last
    return sa.or_(further, sa.and_(key == value, tied))


def _trial_row(row: Mapping[Any, Any]) -> TrialRow:
    return TrialRow(
        id=row["id"],
        variant=row["variant"],
        config=row["config"],
        stale=bool(row["stale"]),
        kind=row["kind"],
        purpose=row["purpose"],
        time_us=row["time_us"],
        ci_us=None if row["ci_low_us"] is None else (row["ci_low_us"], row["ci_high_us"]),
        bound_us=row["bound_us"],
        reason=row["reason"],
        recorded_at=row["recorded_at"],
        cursor=(row["key"], row["id"]),
    )


def _runs() -> sa.Select[Any]:
    names = [name for name in RunEntry.__dataclass_fields__ if name != "progress"]
    return sa.select(*(_run.c[name] for name in names))
