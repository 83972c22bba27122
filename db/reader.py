"""Reading a database: what is known for resuming, the history, the best, and figures on the whole."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import sqlalchemy as sa

from tunebench._deprecation import warn_renamed
from tunebench.db import schema
from tunebench.db.engine import create_engine, translate_decode_errors, translate_errors
from tunebench.db.location import Location
from tunebench.db.owner import is_dead
from tunebench.db.record import (
    RECORDED,
    Demand,
    FastestSample,
    MeasuredSpace,
    Record,
    SpaceKey,
    Stats,
    TrialKey,
    TrialOutcome,
    Verdict,
    outcome_from_row,
    result_from_row,
)
from tunebench.db.retry import RetryPolicy, retry
from tunebench.outcome import CacheState, Effort, Resources
from tunebench.space import Config

__all__ = [
    "Reader",
    "config_from_row",
    "demand_table",
    "device_table",
    "measurement_table",
    "of_space",
    "run_table",
    "trial_table",
]

device_table = cast(sa.Table, schema.DeviceRow.__table__)
run_table = cast(sa.Table, schema.RunRow.__table__)
trial_table = cast(sa.Table, schema.TrialRow.__table__)
measurement_table = cast(sa.Table, schema.MeasurementRow.__table__)
demand_table = cast(sa.Table, schema.DemandRow.__table__)
_device, _run, _trial, _measurement = device_table, run_table, trial_table, measurement_table

P = ParamSpec("P")
T = TypeVar("T")


def of_space(device: str, workload: str, variant: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Return what selects the trials of one variant for one workload on one device."""
    return (_device.c.key == device, _trial.c.workload == workload, _trial.c.variant == variant)


def config_from_row(row: Mapping[Any, Any]) -> Config:
    """Rebuild a configuration from a row with `config_values`."""
    return Config(row["config_values"])


def _retrying(method: Callable[Concatenate[Reader, P], T]) -> Callable[Concatenate[Reader, P], T]:
    """Let a method that only reads wait for a database that is away, if its reader has patience."""

    def outlasting(self: Reader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return retry(self.retry_policy, self.location, lambda again: method(self, *args, **kwargs))

    functools.update_wrapper(outlasting, method)
    return outlasting


_RENAMED = {
    "fastest": "fastest_samples",
    "known": "trial_outcomes",
    "places": "measured_spaces",
    "times": "config_times",
}


class Reader:
    """The half of a `Store` that only reads.

    Attributes:
        location: Where it is.
        retry_policy: How long what a tuner asks waits for a database that goes away once it is open.
    """

    def __init__(
        self, location: Location, *, read_only: bool, retry_policy: RetryPolicy | None = None
    ) -> None:
        self.location, self.retry_policy = location, retry_policy
        self._engine = create_engine(location, read_only=read_only)
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the connections; nothing is pending."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.location}>"

    def __getattr__(self, name: str) -> Any:
        """Return a renamed method by its old name."""
        if name not in _RENAMED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"Store.{name}", f"Store.{_RENAMED[name]}")
        return getattr(self, _RENAMED[name])

    def _own_engine(self) -> sa.Engine:
        """Return the engine; after a fork, without the connections that are the parent's."""
        if os.getpid() != self._pid:
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        with (
            translate_errors(self.location),
            translate_decode_errors(self.location),
            self._own_engine().connect() as connection,
        ):
            yield connection

    @_retrying
    def trial_outcomes(
        self, device: str, workload: str, variant: str, *, cache: CacheState | None = None
    ) -> list[TrialOutcome]:
        """Return what is known of each trial, oldest first, so that a search can go on where it stopped.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            variant: `Variant.key`.
            cache: Cache state the search times in: of a trial that was timed in both, this time is returned.
        """
        place = sa.func.row_number().over(
            partition_by=_measurement.c.trial_id,
            order_by=(
                sa.case((_measurement.c.cache == cache, 0), else_=1),
                sa.case((_measurement.c.purpose == "search", 0), else_=1),
                _measurement.c.id.desc(),
            ),
        )
        ranked = (
            sa.select(_measurement.c.id, place.label("place"))
            .join(_trial, _trial.c.id == _measurement.c.trial_id)
            .join(_device)
            .where(*of_space(device, workload, variant))
            .subquery()
        )
        query = (
            sa.select(_measurement, _trial.c.config, _trial.c.config_values, _trial.c.revision)
            .join(_trial, _trial.c.id == _measurement.c.trial_id)
            .where(_measurement.c.id.in_(sa.select(ranked.c.id).where(ranked.c.place == 1)))
            .order_by(_measurement.c.id)
        )
        with self._read() as connection:
            return [
                TrialOutcome(
                    config=config_from_row(row),
                    revision=row["revision"],
                    outcome=outcome_from_row(row),
                    bound_us=row["bound_us"],
                    purpose=row["purpose"],
                    resources=Resources(**row["resources"]),
                )
                for row in connection.execute(query).mappings()
            ]

    @_retrying
    def fastest_samples(self, device: str, workload: str, variant: str) -> list[FastestSample]:
        """Return the fastest sample of every run of a variant, so that today's bound can be held against it.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            variant: `Variant.key`.
        """
        names = ("cache", "fastest_us", "bound_us", "resources")
        query = (
            sa.select(*(_measurement.c[name] for name in names), _trial.c.config_values, _trial.c.revision)
            .join(_trial, _trial.c.id == _measurement.c.trial_id)
            .join(_device)
            .where(*of_space(device, workload, variant), _measurement.c.fastest_us.is_not(None))
            .order_by(_measurement.c.id)
        )
        with self._read() as connection:
            return [
                FastestSample(
                    config=config_from_row(row),
                    revision=row["revision"],
                    cache=row["cache"],
                    fastest_us=row["fastest_us"],
                    bound_us=row["bound_us"],
                    resources=Resources(**row["resources"]),
                )
                for row in connection.execute(query).mappings()
            ]

    @_retrying
    def measured_spaces(
        self, operator: str, variants: Collection[str], *, kind: str, exclude: tuple[str, str]
    ) -> list[MeasuredSpace]:
        """Return where configurations of some variants were run, and how many.

        Args:
            operator: Name of the operator.
            variants: `Variant.key` of each.
            kind: Of the devices: ``"gpu"`` or ``"cpu"``.
            exclude: Device and workload of which only what earlier sources did counts.
        """
        trial = _trial.c
        query = (
            sa.select(
                _device.c.key.label("device"),
                *(_device.c.architecture, trial.workload, trial.variant),
                sa.func.count(sa.distinct(trial.id)).label("count"),
            )
            .join_from(_trial, _device)
            .join(_measurement, _measurement.c.trial_id == trial.id)
            .where(
                trial.workload.startswith(f"{operator}:", autoescape=True),
                *(trial.variant.in_(variants), _device.c.kind == kind),
                *_elsewhere(exclude),
            )
            .group_by(_device.c.key, _device.c.architecture, trial.workload, trial.variant)
        )
        with self._read() as connection:
            return [MeasuredSpace(**row) for row in connection.execute(query).mappings()]

    @_retrying
    def config_times(
        self, place: MeasuredSpace, *, cache: CacheState, exclude: tuple[str, str]
    ) -> list[tuple[Config, float]]:
        """Return what each configuration took at a place, in microseconds: the newest, by its newest source.

        A failure is infinite, and an aborted run took its fastest sample. Predictions and times of another
        cache state are left out.

        Args:
            place: Of `measured_spaces`.
            cache: The cache state.
            exclude: As for `measured_spaces`.
        """
        measurement = _measurement.c
        query = (
            sa.select(
                *(_trial.c.config, _trial.c.config_values, measurement.kind, measurement.median_us),
                sa.case((measurement.kind == "aborted", measurement.samples_us)).label("samples_us"),
            )
            .join_from(_trial, _device)
            .join(_measurement, measurement.trial_id == _trial.c.id)
            .where(
                *of_space(place.device, place.workload, place.variant),
                *_elsewhere(exclude),
                sa.or_(measurement.cache.is_(None), measurement.cache == cache),
            )
            .order_by(_trial.c.stale.desc(), measurement.id)
        )
        with self._read() as connection:
            newest = {row["config"]: row for row in connection.execute(query).mappings()}
            return [(config_from_row(row), _took_us(row)) for row in newest.values()]

    @_retrying
    def interrupted_trials(self, device: str, workload: str, *, sampler: str, seed: int) -> int:
        """Return how many trials were recorded by runs that ended before their budget was spent.

        Counted are runs alike that began after the last one that finished and whose process is gone: the
        next such run takes up where they stopped.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            sampler: Name of the sampler.
            seed: Seed of the run.
        """
        alike = (
            _device.c.key == device,
            _run.c.workload == workload,
            _run.c.sampler == sampler,
            _run.c.seed == seed,
        )
        newest = sa.select(sa.func.max(_measurement.c.id)).where(_measurement.c.run_id == _run.c.id)
        runs = sa.select(_run, newest.scalar_subquery().label("newest")).join(_device).where(*alike)
        with self._read() as connection:
            found = connection.execute(runs).mappings().all()
            finished = [row for row in found if row["finished_at"] is not None]
            ended = [
                row["id"]
                for row in found
                if row["finished_at"] is None
                and is_dead(row["host"])
                and not any(_followed(row, by=other) for other in finished)
            ]
            count = sa.select(sa.func.count()).where(
                _measurement.c.run_id.in_(ended), _measurement.c.purpose == "search"
            )
            return int(connection.execute(count).scalar_one())

    def finished(self, device: str) -> set[str]:
        """Return the workloads that a run on a device (by its key) has come to the end of."""
        query = (
            sa.select(_run.c.workload)
            .join(_device)
            .where(_device.c.key == device, _run.c.finished_at.is_not(None))
            .distinct()
        )
        with self._read() as connection:
            return set(connection.execute(query).scalars())

    def history(self, workload: str, device: str | None = None, variant: str | None = None) -> list[Record]:
        """Return every measurement of a workload, oldest first.

        Args:
            workload: Canonical text.
            device: `Device.key` of the only device; None is all of them.
            variant: `Variant.key` of the only variant; None is all of them.
        """
        narrower = ((_device.c.key, device), (_trial.c.variant, variant))
        return self._entries(
            _trial.c.workload == workload,
            *(column == value for column, value in narrower if value is not None),
        )

    def spaces(self) -> dict[SpaceKey, int]:
        """Return how many trials of each variant, for each workload, on each device, were run."""
        columns = (_device.c.key, _trial.c.workload, _trial.c.variant)
        query = (
            sa.select(*columns, sa.func.count())
            .join(_device, _device.c.id == _trial.c.device_id)
            .where(_trial.c.state == "done")
            .group_by(*columns)
            .order_by(*columns)
        )
        with self._read() as connection:
            return {
                SpaceKey(device=device, workload=workload, variant=variant): count
                for device, workload, variant, count in connection.execute(query)
            }

    def versions(self, workload: str, device: str) -> list[Mapping[str, str]]:
        """Return `RunStart.versions` of each run of a workload on a device (by its key), newest first."""
        query = (
            sa.select(_run.c.versions)
            .join(_device, _device.c.id == _run.c.device_id)
            .where(_run.c.workload == workload, _device.c.key == device)
            .order_by(_run.c.started_at.desc())
        )
        with self._read() as connection:
            return list(connection.execute(query).scalars())

    def parameters(self, space: SpaceKey) -> tuple[str, ...] | None:
        """Return the parameters of a space, in order; None if none of its trials is there."""
        query = sa.select(_trial.c.config_values).join(_device)
        query = query.where(*of_space(space.device, space.workload, space.variant)).limit(1)
        with self._read() as connection:
            values = connection.execute(query).scalar()
        return None if values is None else tuple(values)

    def descriptors(self) -> dict[str, Mapping[str, Any]]:
        """Return the fields of every device as they were stored, by key."""
        with self._read() as connection:
            rows = connection.execute(sa.select(_device.c.key, _device.c.descriptor).order_by(_device.c.key))
            return {row["key"]: row["descriptor"] for row in rows.mappings()}

    def best(self, workload: str, device: str | None = None, limit: int = 10) -> list[Record]:
        """Return the trials that lookup would serve: the best of each variant, device and cache state.

        Measured before predicted, current sources before stale ones, cold caches before warm ones; then
        by time.
        """
        view = schema.answer_v1.c
        unproved = view.verification == "not verified"
        query = (
            sa.select(view.measurement_id)
            .where(view.workload == workload, *([] if device is None else [view.device == device]))
            .order_by(view.kind, view.stale, view.cache, unproved, view.time_us, view.measurement_id)
            .limit(limit)
        )
        with self._read() as connection:
            ids = list(connection.execute(query).scalars())
        found = {entry.id: entry for entry in self._entries(_measurement.c.id.in_(ids))}
        return [found[i] for i in ids]

    def demand(self, device: str) -> list[Demand]:
        """Return what programs spent on workloads on a device (by its key), the most time first."""
        demand = demand_table.c
        time_us = sa.func.sum(demand.time_us).label("time_us")
        query = (
            sa.select(
                demand.workload,
                sa.cast(sa.func.sum(demand.calls), sa.BigInteger).label("calls"),
                time_us,
                sa.func.min(demand.first_noted_at, type_=schema.UtcTime()).label("first_noted_at"),
                sa.func.max(demand.last_noted_at, type_=schema.UtcTime()).label("last_noted_at"),
            )
            .join(_device, _device.c.id == demand.device_id)
            .where(_device.c.key == device)
            .group_by(demand.workload)
            .order_by(time_us.desc(), demand.workload)
        )
        with self._read() as connection:
            return [Demand(**row) for row in connection.execute(query).mappings()]

    def answers(self) -> list[Mapping[str, Any]]:
        """Return all rows of the view `answer_v1`, from which an index is made."""
        with self._read() as connection:
            return [dict(row) for row in connection.execute(sa.select(schema.answer_v1)).mappings()]

    def answer_details(
        self, measurements: Sequence[int]
    ) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any] | None]]:
        """Return of measurements what a lookup tells besides: id, details, comparisons.

        Args:
            measurements: Their ids, of `answers`: by now others may be the answers.
        """
        columns = (_measurement.c.id, _measurement.c.detail, _measurement.c.comparison)
        ids = sorted(set(measurements))
        found = []
        with self._read() as connection:
            for start in range(0, len(ids), 500):
                chosen = _measurement.c.id.in_(ids[start : start + 500])
                rows = connection.execute(sa.select(*columns).where(chosen))
                found += [(row.id, row.detail, row.comparison) for row in rows]
        return found

    def fingerprint(self) -> str:
        """Return a text that changes whenever an answer may have changed.

        As many trials may become stale as others cease to be, so that their number alone tells too little.
        """
        stale = sa.select(
            sa.func.count(), sa.func.sum(_trial.c.id), sa.func.sum(_trial.c.id * _trial.c.id % 1000003)
        ).where(_trial.c.stale)
        recorded = sa.select(sa.func.count(), sa.func.max(_measurement.c.id))
        with self._read() as connection:
            told = (*connection.execute(recorded).one(), *connection.execute(stale).one())
        return ":".join(map(str, told))

    def stats(self) -> Stats:
        """Return what the database holds."""
        state, stale = _trial.c.state, _trial.c.stale
        count = sa.func.count()
        efforts = [
            sa.func.coalesce(sa.func.sum(_measurement.c[f.name]), 0.0).label(f.name)
            for f in dataclasses.fields(Effort)
        ]
        with self._read() as connection:
            states = dict(_pairs(connection, sa.select(state, count).group_by(state)))
            foreign = _trial.c.workload.startswith(RECORDED)
            own = sa.select(*efforts).select_from(_measurement).join(_trial).where(~foreign)
            kinds = sa.select(_measurement.c.kind, count).group_by(_measurement.c.kind).order_by(count.desc())
            violations = sa.select(count).where(_measurement.c.fastest_us < _measurement.c.bound_us)
            workloads = sa.select(sa.func.count(sa.distinct(_trial.c.workload)))
            return Stats(
                database=str(self.location),
                revision=schema.HEAD,
                devices=tuple(connection.execute(sa.select(_device.c.key).order_by(_device.c.key)).scalars()),
                workloads=connection.execute(workloads).scalar_one(),
                runs=connection.execute(sa.select(count).select_from(_run)).scalar_one(),
                trials=states.get("done", 0),
                recorded=connection.execute(sa.select(count).select_from(_trial).where(foreign)).scalar_one(),
                claimed=states.get("claimed", 0),
                stale=connection.execute(sa.select(count).select_from(_trial).where(stale)).scalar_one(),
                outcomes=dict(_pairs(connection, kinds)),
                violations=connection.execute(violations).scalar_one(),
                effort=Effort(**connection.execute(own).one()._asdict()),
            )

    def _entries(self, *where: sa.ColumnElement[bool]) -> list[Record]:
        trial = _trial.c
        query = (
            sa.select(
                _measurement,
                *(_device.c.key, trial.workload, trial.variant, trial.revision),
                *(trial.config, trial.config_values, trial.stale),
            )
            .join(_trial, trial.id == _measurement.c.trial_id)
            .join(_device)
            .where(*where)
            .order_by(_measurement.c.id)
        )
        with self._read() as connection:
            return [_entry(row) for row in connection.execute(query).mappings()]


def _followed(run: Mapping[Any, Any], *, by: Mapping[Any, Any]) -> bool:
    """Tell whether another run came later: by what they recorded if both did, since clocks are set back."""
    if run["newest"] is not None and by["newest"] is not None:
        return bool(by["newest"] > run["newest"])
    return bool(by["started_at"] > run["started_at"])


def _elsewhere(exclude: tuple[str, str]) -> tuple[sa.ColumnElement[bool], ...]:
    """Return what selects runs of other places and of earlier sources; predictions are none."""
    device, workload = exclude
    here = (_device.c.key == device) & (_trial.c.workload == workload)
    return (_measurement.c.kind.not_in(("predicted", "pruned")), sa.not_(here) | _trial.c.stale)


def _took_us(row: Mapping[Any, Any]) -> float:
    if row["kind"] == "aborted":
        return float(min(row["samples_us"]))
    return math.inf if row["median_us"] is None else float(row["median_us"])


def _pairs(connection: sa.Connection, query: sa.Select[str, int]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in connection.execute(query)]


def _entry(row: Mapping[Any, Any]) -> Record:
    return Record(
        id=row["id"],
        key=TrialKey(
            device=row["key"],
            workload=row["workload"],
            variant=row["variant"],
            revision=row["revision"],
            config=config_from_row(row),
        ),
        purpose=row["purpose"],
        result=result_from_row(row),
        bound_us=row["bound_us"],
        seed=row["seed"],
        run_id=row["run_id"],
        recorded_at=row["recorded_at"],
        stale=row["stale"],
        verdict=Verdict(versus_default=row["versus_default"], comparison=row["comparison"] or {}),
    )
