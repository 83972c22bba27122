"""Queries of records, answers, demand and statistics of a database."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tunebench.db import schema
from tunebench.db.record import RECORDED, Demand, Record, SpaceKey, Stats, record_from_row
from tunebench.db.schema import demand_table, of_space
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.db.search_reader import SearchReader
from tunebench.outcome import Effort

__all__ = ["Reader"]


class Reader(SearchReader):
    """Every query of a database; `Store` adds the methods that write."""

    def history(self, workload: str, device: str | None = None, variant: str | None = None) -> list[Record]:
        """Return every measurement of a workload, oldest first.

        Args:
            workload: Canonical text.
            device: `Device.key` of the only device; None for all.
            variant: `Variant.key` of the only variant; None for all.
        """
        narrower = ((_device.c.key, device), (_trial.c.variant, variant))
        return self._records(
            _trial.c.workload == workload,
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
        """Return the parameter names of a space, in order; None if it has no trial."""
        query = sa.select(_trial.c.config_values).join(_device)
        query = query.where(*of_space(space.device, space.workload, space.variant)).limit(1)
        with self._read() as connection:
            values = connection.execute(query).scalar()
        return None if values is None else tuple(values)

    def descriptors(self) -> dict[str, Mapping[str, Any]]:
        """Return the stored fields of every device, by key."""
        with self._read() as connection:
            rows = connection.execute(sa.select(_device.c.key, _device.c.descriptor).order_by(_device.c.key))
            return {row["key"]: row["descriptor"] for row in rows.mappings()}

    def best(self, workload: str, device: str | None = None, limit: int = 10) -> list[Record]:
        """Return the trials that `lookup` would return: the best of each variant, device and cache state.

        The order is: measured before predicted, current before stale, cold before warm caches, then by time.

        Args:
            workload: Canonical text.
            device: `Device.key` of the only device; None for all.
            limit: Largest number of trials.
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
        found = {entry.id: entry for entry in self._records(_measurement.c.id.in_(ids))}
        return [found[i] for i in ids]

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
        with self._read() as connection:
            return [Demand(**row) for row in connection.execute(query).mappings()]

    def answers(self) -> list[Mapping[str, Any]]:
        """Return all rows of the view `answer_v1`, the source of a lookup index."""
        with self._read() as connection:
            return [dict(row) for row in connection.execute(sa.select(schema.answer_v1)).mappings()]

    def answer_details(
        self, measurements: Sequence[int]
    ) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any] | None]]:
        """Return id, detail and comparison of measurements, for a lookup index.

        Args:
            measurements: Measurement ids of `answers`; by now the view may contain others.
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

        It sums the ids of stale trials: as many may become stale as become current, so their number alone is
            not enough.
        """
        stale = sa.select(
            sa.func.count(), sa.func.sum(_trial.c.id), sa.func.sum(_trial.c.id * _trial.c.id % 1000003)
        ).where(_trial.c.stale)
        recorded = sa.select(sa.func.count(), sa.func.max(_measurement.c.id))
        with self._read() as connection:
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
        with self._read() as connection:
            return [record_from_row(row) for row in connection.execute(query).mappings()]


def _pairs(connection: sa.Connection, query: sa.Select[str, int]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in connection.execute(query)]
