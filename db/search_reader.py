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

    @retrying
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

    @retrying
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

    @retrying
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

    @retrying
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
