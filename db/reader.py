"""Queries of a database: those of a search, records, answers, demand and statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import sqlalchemy as sa

from tunebench._command import command_line
from tunebench._deprecation import warn_renamed
from tunebench.db import schema
from tunebench.db.database import Database, retrying
from tunebench.db.owner import is_dead
from tunebench.db.record import (
    RECORDED,
    Demand,
    FastestSample,
    InterruptedRun,
    MeasuredSpace,
    Record,
    RunSummary,
    SpaceKey,
    Stats,
    StoredRun,
    TrialOutcome,
    outcome_from_row,
    record_from_row,
)
from tunebench.db.schema import demand_table, of_space
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.errors import InputError, quoted
from tunebench.outcome import CacheState, Effort, Resources
from tunebench.space import Config

__all__ = ["MOST_ANSWERS", "Reader", "Resumes"]

MOST_ANSWERS = 1000
"""Most rows of the view `answer_v1` that are read of one workload on one device."""

Resumes = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""Whether a run with the first stored options may resume one with the second."""

_EFFORT = ("compile_s", "verify_s", "measure_s")


class Reader(Database):
    """Every query of a database; `Store` adds the methods that write."""

    # -- a search: outcomes to resume from, spaces to warm-start from, interrupted runs ---------------

    @retrying
    def trial_outcomes(
        self, device: str, workload: str, variant: str, *, cache: CacheState | None = None
    ) -> list[TrialOutcome]:
        """Return one outcome per trial, oldest first, for a search to resume from.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            variant: `Variant.key`.
            cache: Cache state of the search; preferred for trials that were measured in both.
        """
        rank = sa.func.row_number().over(
            partition_by=_measurement.c.trial_id,
            order_by=(
                sa.case((_measurement.c.cache == cache, 0), else_=1),
                sa.case((_measurement.c.purpose == "search", 0), else_=1),
                _measurement.c.id.desc(),
            ),
        )
        ranked = (
            sa.select(_measurement.c.id, rank.label("place"))
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
        with self.reading() as connection:
            return [
                TrialOutcome(
                    config=Config(row["config_values"]),
                    revision=row["revision"],
                    outcome=outcome_from_row(row),
                    bound_us=row["bound_us"],
                    purpose=row["purpose"],
                    resources=Resources(**row["resources"]),
                )
                for row in connection.execute(query).mappings()
            ]

    @retrying
    def fastest_samples(self, device: str, workload: str, variant: str) -> list[FastestSample]:
        """Return the fastest sample of every measurement, to check them against current lower bounds.

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
        with self.reading() as connection:
            return [
                FastestSample(
                    config=Config(row["config_values"]),
                    revision=row["revision"],
                    cache=row["cache"],
                    fastest_us=row["fastest_us"],
                    bound_us=row["bound_us"],
                    resources=Resources(**row["resources"]),
                )
                for row in connection.execute(query).mappings()
            ]

    @retrying
    def measured_spaces(
        self, operator: str, variants: Collection[str], *, kind: str, exclude: tuple[str, str]
    ) -> list[MeasuredSpace]:
        """Return the measured search spaces of some variants, with their numbers of configurations.

        Args:
            operator: Name of the operator.
            variants: `Variant.key` of each variant.
            kind: Kind of device: ``"gpu"`` or ``"cpu"``.
            exclude: Device and workload whose current trials do not count; stale trials do.
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
        with self.reading() as connection:
            return [MeasuredSpace(**row) for row in connection.execute(query).mappings()]

    @retrying
    def config_times(
        self, space: MeasuredSpace, *, cache: CacheState, exclude: tuple[str, str]
    ) -> list[tuple[Config, float]]:
        """Return the time of each configuration of a space, in microseconds: the newest of its newest source.

        A failure is infinite, and an aborted measurement counts as its fastest sample. Predictions and the
        other cache state are left out.

        Args:
            space: One of `measured_spaces`.
            cache: Cache state.
            exclude: As in `measured_spaces`.
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
                *of_space(space.device, space.workload, space.variant),
                *_elsewhere(exclude),
                sa.or_(measurement.cache.is_(None), measurement.cache == cache),
            )
            .order_by(_trial.c.stale.desc(), measurement.id)
        )
        with self.reading() as connection:
            newest = {row["config"]: row for row in connection.execute(query).mappings()}
            return [(Config(row["config_values"]), _took_us(row)) for row in newest.values()]

    @retrying
    def interrupted_runs(self, device: str, workload: str, resumes: Resumes) -> list[InterruptedRun]:
        """Return the interrupted runs of a workload that have trials, oldest first.

        The process of an interrupted run has ended, and no finished run followed that resumed it.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            resumes: Whether a run with the first stored options may resume one with the second.
        """
        newest = sa.select(sa.func.max(_measurement.c.id)).where(_measurement.c.run_id == _run.c.id)
        trials = (
            sa.select(sa.func.count())
            .join_from(_measurement, _trial, _trial.c.id == _measurement.c.trial_id)
            .where(_measurement.c.run_id == _run.c.id, _measurement.c.purpose == "search", ~_trial.c.stale)
        )
        query = (
            sa.select(
                _run,
                newest.scalar_subquery().label("newest"),
                sa.case((_run.c.finished_at.is_(None), trials.scalar_subquery()), else_=0).label("trials"),
            )
            .join(_device)
            .where(_device.c.key == device, _run.c.workload == workload, _run.c.sampler != "import")
            .order_by(_run.c.started_at, _run.c.id)
        )
        with self.reading() as connection:
            runs = connection.execute(query).mappings().all()
        finished = [run for run in runs if run["finished_at"] is not None]
        names = [field.name for field in dataclasses.fields(InterruptedRun)]
        return [
            InterruptedRun(**{name: run[name] for name in names})
            for run in runs
            if run["trials"]
            and is_dead(run["host"])
            and not any(_followed(run, by=later) and _resumed(run, later, resumes) for later in finished)
        ]

    def interrupted_trials(self, device: str, workload: str, *, sampler: str, seed: int) -> int:
        """Return the number of trials of interrupted runs with a sampler and a seed; deprecated."""
        warn_renamed("Store.interrupted_trials", "Store.interrupted_runs")
        runs = self.interrupted_runs(device, workload, lambda stored, current: True)
        return sum(run.trials for run in runs if (run.sampler, run.seed) == (sampler, seed))

    def run_of(self, prefix: str) -> StoredRun:
        """Return the run whose id starts with a text.

        Args:
            prefix: The first characters of the id.

        Raises:
            InputError: if there is no such run, or several.
        """
        query = (
            sa.select(
                *(_run.c[name] for name in ("id", "workload", "options")),
                *(_device.c.key.label("device"), _device.c.descriptor),
            )
            .join(_device)
            .where(_run.c.id.startswith(prefix, autoescape=True))
            .limit(2)
        )
        with self.reading() as connection:
            runs = connection.execute(query).mappings().all()
        if len(runs) != 1 or not prefix:
            count = "several runs" if runs else "no run"
            raise InputError(
                f"database {self.location} has {count} with an id that starts with {quoted(prefix)}; "
                f"`{command_line('db runs', db=self.location.option)}` lists them"
            )
        return StoredRun(**runs[0])

    def finished(self, device: str) -> set[str]:
        """Return the workloads with a finished run on a device, given by its key."""
        query = (
            sa.select(_run.c.workload)
            .join(_device)
            .where(_device.c.key == device, _run.c.finished_at.is_not(None))
            .distinct()
        )
        with self.reading() as connection:
            return set(connection.execute(query).scalars())

    # -- records, answers, demand and statistics ---------------------------------------------------------

    @retrying
    def history(
        self, workload: str, device: str | None = None, variant: str | None = None, *, after: int = 0
    ) -> list[Record]:
        """Return every measurement of a workload, oldest first.

        Args:
            workload: Canonical text.
            device: `Device.key` of the only device; None for all.
            variant: `Variant.key` of the only variant; None for all.
            after: Id of a measurement; only later ones are returned.
        """
        narrower = ((_device.c.key, device), (_trial.c.variant, variant))
        return self._records(
            _trial.c.workload == workload,
            _measurement.c.id > after,
            *(column == value for column, value in narrower if value is not None),
        )

    def spaces(self) -> dict[SpaceKey, int]:
        """Return the number of measured trials of each search space."""
        columns = (_device.c.key, _trial.c.workload, _trial.c.variant)
        query = (
            sa.select(*columns, sa.func.count())
            .join(_device, _device.c.id == _trial.c.device_id)
            .where(_trial.c.state == "done")
            .group_by(*columns)
            .order_by(*columns)
        )
        with self.reading() as connection:
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
        with self.reading() as connection:
            return list(connection.execute(query).scalars())

    def run_options(self, workload: str, device: str) -> Mapping[str, Any] | None:
        """Return the options of the newest run of a workload on a device (by its key); None without any."""
        query = (
            sa.select(_run.c.options)
            .join(_device, _device.c.id == _run.c.device_id)
            .where(_run.c.workload == workload, _device.c.key == device)
            .order_by(_run.c.started_at.desc())
            .limit(1)
        )
        with self.reading() as connection:
            options: Mapping[str, Any] | None = connection.execute(query).scalar()
        return options

    def run_summaries(self, workload: str, device: str) -> list[RunSummary]:
        """Return the summary of each finished run of a workload on a device (by its key), newest first."""
        columns = (_run.c[name] for name in ("masked", "cached", "wall_s", "overhead_s", *_EFFORT))
        query = (
            sa.select(*columns)
            .join(_device, _device.c.id == _run.c.device_id)
            .where(_run.c.workload == workload, _device.c.key == device, _run.c.finished_at.is_not(None))
            .order_by(_run.c.started_at.desc())
        )
        with self.reading() as connection:
            return [
                RunSummary(
                    **{name: row[name] for name in ("masked", "cached", "wall_s", "overhead_s")},
                    effort=Effort(**{name: row[name] for name in _EFFORT}),
                )
                for row in connection.execute(query).mappings()
            ]

    def parameters(self, space: SpaceKey) -> tuple[str, ...] | None:
        """Return the parameter names of a space, in order; None if it has no trial."""
        query = sa.select(_trial.c.config_values).join(_device)
        query = query.where(*of_space(space.device, space.workload, space.variant)).limit(1)
        with self.reading() as connection:
            values = connection.execute(query).scalar()
        return None if values is None else tuple(values)

    def descriptors(self) -> dict[str, Mapping[str, Any]]:
        """Return the stored fields of every device, by key."""
        with self.reading() as connection:
            rows = connection.execute(sa.select(_device.c.key, _device.c.descriptor).order_by(_device.c.key))
            return {row["key"]: row["descriptor"] for row in rows.mappings()}

    @retrying
    def best(self, workload: str, device: str | None = None, limit: int = 10) -> list[Record]:
        """Return the trials that `lookup` would return: the best of each variant, device and cache state.

        The order is: measured before predicted, current before stale, cold before warm caches, then by time.

        Args:
            workload: Canonical text.
            device: `Device.key` of the only device; None for all.
            limit: Largest number of trials.
        """
        view = schema.answer_v1.c
        query = (
            sa.select(view.measurement_id)
            .where(view.workload == workload, *([] if device is None else [view.device == device]))
            .order_by(*schema.answers_in_order())
            .limit(limit)
        )
        with self.reading() as connection:
            ids = list(connection.execute(query).scalars())
        records = {entry.id: entry for entry in self._records(_measurement.c.id.in_(ids))}
        return [records[i] for i in ids]

    def demand(self, device: str) -> list[Demand]:
        """Return the time that programs spent on each workload on a device (by its key), longest first."""
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
        with self.reading() as connection:
            return [Demand(**row) for row in connection.execute(query).mappings()]

    def answers(self) -> list[Mapping[str, Any]]:
        """Return the rows of the view `answer_v1` with detail, comparison and run, for a lookup index."""
        view, measured, run = schema.answer_v1, _measurement.c, _run.c
        query = (
            sa.select(view, measured.detail, measured.comparison, measured.run_id, run.sampler, run.versions)
            .join(_measurement, measured.id == view.c.measurement_id)
            .join(_run, run.id == measured.run_id, isouter=True)
        )
        with self.reading() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def fingerprint(self) -> str:
        """Return a text that changes whenever an answer may have changed.

        It sums the ids of stale trials: as many may become stale as become current, so their number alone is
        not enough.
        """
        stale = sa.select(
            sa.func.count(), sa.func.sum(_trial.c.id), sa.func.sum(_trial.c.id * _trial.c.id % 1000003)
        ).where(_trial.c.stale)
        recorded = sa.select(sa.func.count(), sa.func.max(_measurement.c.id))
        with self.reading() as connection:
            counts = (*connection.execute(recorded).one(), *connection.execute(stale).one())
        return ":".join(map(str, counts))

    def stats(self) -> Stats:
        """Return statistics of the database."""
        state, stale = _trial.c.state, _trial.c.stale
        count = sa.func.count()
        efforts = [
            sa.func.coalesce(sa.func.sum(_measurement.c[f.name]), 0.0).label(f.name)
            for f in dataclasses.fields(Effort)
        ]
        with self.reading() as connection:
            states = dict(_pairs(connection, sa.select(state, count).group_by(state)))
            foreign = _trial.c.workload.startswith(RECORDED)
            effort_sums = sa.select(*efforts).select_from(_measurement).join(_trial).where(~foreign)
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
                effort=Effort(**connection.execute(effort_sums).one()._asdict()),
            )

    def _records(self, *where: sa.ColumnElement[bool]) -> list[Record]:
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
        with self.reading() as connection:
            return [record_from_row(row) for row in connection.execute(query).mappings()]


def _followed(run: Mapping[Any, Any], *, by: Mapping[Any, Any]) -> bool:
    """Return whether another run is later: by ids of measurements, since the clock may have been set back."""
    if run["newest"] is not None and by["newest"] is not None:
        return bool(by["newest"] > run["newest"])
    return bool(by["started_at"] > run["started_at"])


def _resumed(run: Mapping[Any, Any], by: Mapping[Any, Any], resumes: Resumes) -> bool:
    """Return whether a later run had the options of an interrupted one; unknown options may have been any."""
    if (run["sampler"], run["seed"]) != (by["sampler"], by["seed"]):
        return False
    if run["options"] is None or by["options"] is None:
        return True
    return resumes(by["options"], run["options"])


def _elsewhere(exclude: tuple[str, str]) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that leave out current trials of a device and workload, and predictions."""
    device, workload = exclude
    excluded = (_device.c.key == device) & (_trial.c.workload == workload)
    return (_measurement.c.kind.not_in(("predicted", "pruned")), sa.not_(excluded) | _trial.c.stale)


def _took_us(row: Mapping[Any, Any]) -> float:
    if row["kind"] == "aborted":
        return float(min(row["samples_us"]))
    return math.inf if row["median_us"] is None else float(row["median_us"])


def _pairs(connection: sa.Connection, query: sa.Select[str, int]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in connection.execute(query)]
