"""The tables, the view that answers are read from, and the revision they are at.

Changing anything here needs a migration in `migrations/versions`, its number in `REVISIONS`, and a golden
file of the new revision in `tests/golden`; a test compares what migrations make with what is declared here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tunebench.outcome import FAILURES

__all__ = [
    "ANSWER_VIEW",
    "DONE",
    "HEAD",
    "REVISIONS",
    "TRIAL_KEY",
    "Base",
    "UtcTime",
    "answer_v1",
    "demand_table",
    "device_table",
    "measurement_table",
    "of_space",
    "run_table",
    "trial_table",
]

REVISIONS = ("0001", "0002", "0003", "0004")
"""Every revision this version knows, oldest first."""
HEAD = REVISIONS[-1]

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcTime(sa.TypeDecorator[datetime]):
    """A moment, stored in UTC: as text with microseconds in SQLite, as `timestamptz` in PostgreSQL."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Refuse moments without a time zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Return the moment with its time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_JSON = sa.JSON(none_as_null=True)
_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # only an INTEGER key is an alias of the row id
_REAL: sa.Double[float] = sa.Double()


class Base(DeclarativeBase):
    """Base of the tables; every constraint has a name, so that a migration can change it."""

    metadata = sa.MetaData(naming_convention=_NAMING)
    type_annotation_map = {
        str: sa.Text(),
        float: _REAL,
        datetime: UtcTime(),
        dict[str, Any]: _JSON,
        list[float]: _JSON,
    }


class DeviceRow(Base):
    """A device results were stored for; `key` tells apart what makes times incomparable."""

    __tablename__ = "device"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    architecture: Mapped[str] = mapped_column(index=True)
    product: Mapped[str]
    sm_count: Mapped[int]
    power_limit_w: Mapped[float | None]
    descriptor: Mapped[dict[str, Any]]


class RunRow(Base):
    """One tuner at work on one workload, from start to end; `finished_at` is empty if it was killed."""

    __tablename__ = "run"

    id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    device_id: Mapped[int] = mapped_column(sa.ForeignKey("device.id"))
    workload: Mapped[str]
    sampler: Mapped[str]
    seed: Mapped[int] = mapped_column(_BIG)
    host: Mapped[str]
    versions: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    masked: Mapped[int] = mapped_column(_BIG, default=0)
    cached: Mapped[int] = mapped_column(_BIG, default=0)
    wall_s: Mapped[float] = mapped_column(default=0.0)
    compile_s: Mapped[float] = mapped_column(default=0.0)
    verify_s: Mapped[float] = mapped_column(default=0.0)
    measure_s: Mapped[float] = mapped_column(default=0.0)
    overhead_s: Mapped[float] = mapped_column(default=0.0)


TRIAL_KEY = ("device_id", "workload", "variant", "config", "revision")
"""Columns that identify a trial; the index without the last one finds every revision of a configuration."""


class TrialRow(Base):
    """One configuration of one source revision of one variant, for one workload on one device.

    A claimed trial has no measurement yet. `config` is its text form and part of the key;
    `config_values` keeps the types of the values, so that it can be read without the variant.
    """

    __tablename__ = "trial"
    __table_args__ = (
        sa.UniqueConstraint(*TRIAL_KEY, name="uq_trial_key"),
        sa.CheckConstraint("state IN ('claimed', 'done')", name="state"),
        sa.CheckConstraint(
            "(state = 'claimed') = (claim_owner IS NOT NULL) "
            "AND (state = 'claimed') = (claim_expires_at IS NOT NULL)",
            name="claim",
        ),
    )

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    device_id: Mapped[int] = mapped_column(sa.ForeignKey("device.id"))
    workload: Mapped[str] = mapped_column(index=True)
    variant: Mapped[str]
    revision: Mapped[str]
    config: Mapped[str]
    config_values: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(sa.String(8))
    claim_owner: Mapped[str | None]
    claim_expires_at: Mapped[datetime | None]
    stale: Mapped[bool] = mapped_column(default=False)


_FAILED = ", ".join(f"'{failure.kind}'" for failure in FAILURES)


class MeasurementRow(Base):
    """One time a trial was run, or tried to: its outcome with what is needed to believe and repeat it."""

    __tablename__ = "measurement"
    __table_args__ = (
        sa.CheckConstraint(f"kind IN ('measured', 'predicted', 'aborted', 'pruned', {_FAILED})", name="kind"),
        sa.CheckConstraint("purpose IN ('search', 'finalist', 'audit')", name="purpose"),
        # Only a success holds a time, and what is measured never stands where a belief does.
        sa.CheckConstraint(
            "(kind = 'measured') = (median_us IS NOT NULL) "
            "AND (kind = 'measured') = (ci_low_us IS NOT NULL) "
            "AND (kind = 'measured') = (ci_high_us IS NOT NULL) "
            "AND (kind = 'measured') = (cache IS NOT NULL) "
            "AND (kind IN ('measured', 'aborted')) = (samples_us IS NOT NULL) "
            "AND (kind = 'predicted') = (predicted_us IS NOT NULL) "
            "AND (kind IN ('measured', 'predicted')) = (verification IS NOT NULL)",
            name="time",
        ),
        sa.CheckConstraint(f"(kind IN ({_FAILED})) = (reason IS NOT NULL)", name="reason"),
        sa.CheckConstraint("cache IN ('cold', 'warm')", name="cache"),
        sa.CheckConstraint("versus_default IN ('itself', 'faster', 'not faster')", name="versus_default"),
    )

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    trial_id: Mapped[int] = mapped_column(_BIG, sa.ForeignKey("trial.id"), index=True)
    run_id: Mapped[str | None] = mapped_column(sa.String(32), sa.ForeignKey("run.id"))
    purpose: Mapped[str] = mapped_column(sa.String(8))
    kind: Mapped[str] = mapped_column(sa.String(16))
    median_us: Mapped[float | None]
    ci_low_us: Mapped[float | None]
    ci_high_us: Mapped[float | None]
    predicted_us: Mapped[float | None]
    cache: Mapped[str | None] = mapped_column(sa.String(4))
    verification: Mapped[str | None] = mapped_column(sa.String(16))
    reason: Mapped[str | None]
    bound_us: Mapped[float | None]
    samples_us: Mapped[list[float] | None]
    detail: Mapped[dict[str, Any]]
    resources: Mapped[dict[str, Any]]
    conditions: Mapped[dict[str, Any]]
    compile_s: Mapped[float]
    verify_s: Mapped[float]
    measure_s: Mapped[float]
    seed: Mapped[int | None] = mapped_column(_BIG)
    recorded_at: Mapped[datetime]
    fastest_us: Mapped[float | None]
    versus_default: Mapped[str | None] = mapped_column(sa.String(10))
    comparison: Mapped[dict[str, Any] | None]


class OriginRow(Base):
    """What this database is called in others that it is merged into: one row, made with the tables."""

    __tablename__ = "origin"

    id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)


class DemandRow(Base):
    """How often programs ran a workload on a device, and how long it took them in all.

    Each database adds to rows of its own `origin` alone, and never takes from them. Merging takes over the
    rows of another origin, and of two with one key the greater: to merge again changes nothing.
    """

    __tablename__ = "demand"
    __table_args__ = (
        sa.UniqueConstraint("device_id", "workload", "origin", name="uq_demand_key"),
        sa.CheckConstraint("calls > 0 AND time_us >= 0", name="amount"),
    )

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    device_id: Mapped[int] = mapped_column(sa.ForeignKey("device.id"))
    workload: Mapped[str]
    origin: Mapped[str] = mapped_column(sa.String(32))
    calls: Mapped[int] = mapped_column(_BIG)
    time_us: Mapped[float]
    first_noted_at: Mapped[datetime]
    last_noted_at: Mapped[datetime]


device_table = cast(sa.Table, DeviceRow.__table__)
run_table = cast(sa.Table, RunRow.__table__)
trial_table = cast(sa.Table, TrialRow.__table__)
measurement_table = cast(sa.Table, MeasurementRow.__table__)
demand_table = cast(sa.Table, DemandRow.__table__)

DONE = {"state": "done", "claim_owner": None, "claim_expires_at": None}
"""Columns of a trial that has a measurement."""

ANSWER_VIEW = """
CREATE VIEW answer_v1 AS
SELECT device, device_kind, architecture, product, sm_count, workload, variant, revision, config,
       config_values, stale, measurement_id, kind, cache, verification, time_us, ci_low_us, ci_high_us,
       bound_us, recorded_at
FROM (
    SELECT compared.*,
           ROW_NUMBER() OVER (
               PARTITION BY workload, device_id, variant, stale, kind, cache
               ORDER BY CASE verification WHEN 'not verified' THEN 1 ELSE 0 END, time_us, measurement_id
           ) AS place
    FROM (
        SELECT speaking.*,
               MAX(CASE versus_default WHEN 'itself' THEN ci_low_us END) OVER (
                   PARTITION BY workload, device_id, variant, stale, kind, cache
               ) AS default_low_us
        FROM (
            SELECT d.key AS device, d.kind AS device_kind, d.architecture, d.product, d.sm_count, t.workload,
                   t.device_id, t.variant, t.revision, t.config, t.config_values, t.stale,
                   m.id AS measurement_id, m.kind, m.purpose, m.cache, m.verification,
                   COALESCE(m.median_us, m.predicted_us) AS time_us, m.ci_low_us, m.ci_high_us, m.bound_us,
                   m.recorded_at, m.versus_default,
                   MAX(CASE m.purpose WHEN 'finalist' THEN m.id ELSE 0 END) OVER (
                       PARTITION BY t.workload, t.device_id, t.stale, m.kind, m.cache
                   ) AS last_final
            FROM measurement AS m
            JOIN trial AS t ON t.id = m.trial_id
            JOIN device AS d ON d.id = t.device_id
            WHERE (m.kind = 'predicted' OR (m.kind = 'measured' AND m.verification <> 'not verified'))
              AND NOT EXISTS (
                  SELECT 1 FROM measurement AS other
                  WHERE other.trial_id = m.trial_id
                    AND (other.kind = 'wrong_result'
                         OR (other.id > m.id
                             AND (other.kind IN ('compile_failed', 'launch_failed', 'timed_out', 'crashed')
                                  OR (other.kind = m.kind
                                      AND COALESCE(other.cache, '') = COALESCE(m.cache, '')))))
              )
        ) AS speaking
        WHERE purpose = 'finalist' OR measurement_id > last_final
    ) AS compared
    WHERE default_low_us IS NULL
       OR versus_default IN ('itself', 'faster')
       OR (versus_default IS NULL AND ci_high_us < default_low_us)
) AS placed
WHERE place = 1
"""
"""The best of each variant for each workload, device and cache state, measured and predicted apart.

A trial speaks through its newest success in a cache state (a finalist's careful timing replaces the
search's), unless a later run of it failed or any run of it was ever wrong. What the search timed once speaks
until finalists have been timed: of many hasty times the least is a lucky one. What does not beat its
variant's default beyond noise stands back for it: by the verdict on the finalists, and without one where the
intervals of the two meet. A time whose result was not verified never counts as measured, and a prediction for
an unverified kernel comes after verified ones.
"""

answer_v1 = sa.Table(
    "answer_v1",
    sa.MetaData(),
    *(sa.Column(name, sa.Text) for name in ("device", "device_kind", "architecture", "product")),
    sa.Column("sm_count", sa.Integer),
    *(sa.Column(name, sa.Text) for name in ("workload", "variant", "revision", "config")),
    sa.Column("config_values", _JSON),
    sa.Column("stale", sa.Boolean),
    sa.Column("measurement_id", _BIG),
    *(sa.Column(name, sa.Text) for name in ("kind", "cache", "verification")),
    *(sa.Column(name, _REAL) for name in ("time_us", "ci_low_us", "ci_high_us", "bound_us")),
    sa.Column("recorded_at", UtcTime),
)
"""The view's columns, for queries through SQLAlchemy; it is no table of `Base`."""


def of_space(device: str, workload: str, variant: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Return what selects the trials of one variant for one workload on one device."""
    return (
        device_table.c.key == device,
        trial_table.c.workload == workload,
        trial_table.c.variant == variant,
    )
