"""Tables, the view `answer_v1`, and the schema revisions.

A change of the schema needs a migration in `migrations/versions`, its number in `REVISIONS`, and a golden
file of the new revision in `tests/golden`. A test compares the result of the migrations with the tables here.
See "Add a column to the measurement table" in docs/development.md.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tunebench.db.migrations import HEAD, REVISIONS
from tunebench.db.migrations.answer_view import ANSWER_VIEWS
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

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcTime(sa.TypeDecorator[datetime]):
    """A time in UTC: text with microseconds in SQLite, `timestamptz` in PostgreSQL."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Return the time in UTC; refuse one without a time zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Return the time with its time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_JSON = sa.JSON(none_as_null=True)
_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite: only INTEGER aliases the row id
_REAL: sa.Double[float] = sa.Double()


def _partial_index(name: str, *columns: str, sqlite: str, postgresql: str) -> sa.Index:
    """Return an index of the rows with a condition, which is written for each dialect."""
    return sa.Index(name, *columns, sqlite_where=sa.text(sqlite), postgresql_where=sa.text(postgresql))


class Base(DeclarativeBase):
    """Base of the tables. Every constraint has a name, so that migrations can change it."""

    metadata = sa.MetaData(naming_convention=_NAMING)
    type_annotation_map = {
        str: sa.Text(),
        float: _REAL,
        datetime: UtcTime(),
        dict[str, Any]: _JSON,
        list[float]: _JSON,
    }


class DeviceRow(Base):
    """A device. `key` differs between devices whose times cannot be compared."""

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
    """One run of `tune` on one workload; `finished_at` is NULL if the run was killed."""

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
    budget_trials: Mapped[int | None] = mapped_column(_BIG)


_CLAIMED = "claim_owner IS NOT NULL"

TRIAL_KEY = ("device_id", "workload", "variant", "config", "revision")
"""Columns that identify a trial. Without the last one they find all revisions of a configuration."""


class TrialRow(Base):
    """One configuration of one source revision of one variant, for one workload on one device.

    A claimed trial has no measurement yet. `config` is the text of the configuration and part of the key.
    `config_values` stores the values with their types, so that reading them does not need the variant.
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
        # Few trials are claimed or stale, so that these indexes stay small.
        _partial_index("ix_trial_claim_owner", "claim_owner", sqlite=_CLAIMED, postgresql=_CLAIMED),
        _partial_index(
            "ix_trial_stale", "device_id", "workload", "variant", sqlite="stale = 1", postgresql="stale"
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
    """One measurement of a trial: its outcome, and everything needed to judge and reproduce it."""

    __tablename__ = "measurement"
    __table_args__ = (
        sa.CheckConstraint(f"kind IN ('measured', 'predicted', 'aborted', 'pruned', {_FAILED})", name="kind"),
        sa.CheckConstraint("purpose IN ('search', 'finalist', 'audit')", name="purpose"),
        # Only a success has a time, and a prediction never fills a column of a measured time.
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
        sa.Index("ix_measurement_run_id", "run_id", "id"),
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
    """Id of this database in those it is merged into: one row, inserted when the tables are created."""

    __tablename__ = "origin"

    id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)


class DemandRow(Base):
    """Calls of a workload by programs on a device, and their total time.

    A database adds only to rows of its own `origin`. A merge copies the rows of other origins and keeps the
    greater of two rows with the same key, so that repeating a merge changes nothing.
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
"""Column values of a trial with a measurement."""

ANSWER_VIEW = ANSWER_VIEWS["0005"]
"""Best configuration of each variant for each workload, device and cache state.

Measured and predicted times are ranked separately. A trial is represented by its newest success in a cache
state, unless a later measurement failed or any measurement had a wrong result. Once finalists were measured,
earlier search measurements do not count: the minimum of many single measurements is biased low. A
configuration that does not beat its variant's default significantly is left out: by the stored comparison, or
without one where the confidence intervals overlap. A time without verification, or below its lower bound,
never counts as measured, and a prediction of an unverified kernel ranks after verified ones.
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
"""Columns of the view for SQLAlchemy queries; not part of `Base`."""


def of_space(device: str, workload: str, variant: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that select the trials of one variant for one workload on one device.

    Args:
        device: `Device.key`.
        workload: Canonical text.
        variant: `Variant.key`.
    """
    return (
        device_table.c.key == device,
        trial_table.c.workload == workload,
        trial_table.c.variant == variant,
    )
