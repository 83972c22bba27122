"""Queries of a search: outcomes to resume from, spaces to warm-start from, and interrupted runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from tunebench.db.database import Database, retrying
from tunebench.db.owner import is_dead
from tunebench.db.record import FastestSample, MeasuredSpace, TrialOutcome, config_from_row, outcome_from_row
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import of_space
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.outcome import CacheState, Resources
from tunebench.space import Config

__all__ = ["SearchReader"]


class SearchReader(Database):
    """Queries that `tune` makes before and during a search."""

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
        with self._read() as connection:
            return [MeasuredSpace(**row) for row in connection.execute(query).mappings()]

    @retrying
    def config_times(
        self, place: MeasuredSpace, *, cache: CacheState, exclude: tuple[str, str]
    ) -> list[tuple[Config, float]]:
        """Return the time of each configuration of a space, in microseconds: the newest of its newest source.

        A failure is infinite, and an aborted measurement counts as its fastest sample. Predictions and the
        other cache state are left out.

        Args:
            place: One of `measured_spaces`.
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
                *of_space(place.device, place.workload, place.variant),
                *_elsewhere(exclude),
                sa.or_(measurement.cache.is_(None), measurement.cache == cache),
            )
            .order_by(_trial.c.stale.desc(), measurement.id)
        )
        with self._read() as connection:
            newest = {row["config"]: row for row in connection.execute(query).mappings()}
            return [(config_from_row(row), _took_us(row)) for row in newest.values()]

    @retrying
    def interrupted_trials(self, device: str, workload: str, *, sampler: str, seed: int) -> int:
        """Return the number of search trials of interrupted runs; they count against the next run's budget.

        An interrupted run has the same arguments, started after the last finished run, and its process has
        ended.

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
        """Return the workloads with a finished run on a device, given by its key."""
        query = (
            sa.select(_run.c.workload)
            .join(_device)
            .where(_device.c.key == device, _run.c.finished_at.is_not(None))
            .distinct()
        )
        with self._read() as connection:
            return set(connection.execute(query).scalars())


def _followed(run: Mapping[Any, Any], *, by: Mapping[Any, Any]) -> bool:
    """Return whether another run is later: by ids of measurements, since the clock may have been set back."""
    if run["newest"] is not None and by["newest"] is not None:
        return bool(by["newest"] > run["newest"])
    return bool(by["started_at"] > run["started_at"])


def _elsewhere(exclude: tuple[str, str]) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that leave out current trials of a device and workload, and predictions."""
    device, workload = exclude
    here = (_device.c.key == device) & (_trial.c.workload == workload)
    return (_measurement.c.kind.not_in(("predicted", "pruned")), sa.not_(here) | _trial.c.stale)


def _took_us(row: Mapping[Any, Any]) -> float:
    if row["kind"] == "aborted":
        return float(min(row["samples_us"]))
    return math.inf if row["median_us"] is None else float(row["median_us"])
