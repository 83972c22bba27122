"""Tables, the view `answer_v1`, and the schema revisions.

A change of the schema needs a migration in `migrations/versions`, its number in `REVISIONS`, and a golden
file of the new revision in `tests/golden`. A test compares the result of the migrations with the tables here.
See "Add a column to the measurement table" in docs/development.md.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tunebench.db.migrations import HEAD, REVISIONS
from tunebench.db.migrations.answer_view import ANSWER_VIEWS
from tunebench.outcome import FAILURES

__all__ = [
    "ANSWER_VIEW",
    "DONE",
    "HEAD",
    "METADATA",
    "REVISIONS",
    "TRIAL_KEY",
    "UtcTime",
    "answer_v1",
    "answers_in_order",
    "demand_table",
    "device_table",
    "measurement_table",
    "of_space",
    "origin_table",
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


METADATA = sa.MetaData(naming_convention=_NAMING)
"""The tables. Every constraint has a name, so that migrations can change it."""


def _column(name: str, kind: Any, *references: sa.ForeignKey, **options: Any) -> sa.Column[Any]:
    """Return a column that is never NULL."""
    return sa.Column(name, kind, *references, nullable=False, **options)


device_table = sa.Table(
    "device",
    METADATA,
    _column("id", sa.Integer, primary_key=True),
    _column("key", sa.Text, unique=True),
    _column("kind", sa.Text),
    _column("architecture", sa.Text, index=True),
    _column("product", sa.Text),
    _column("sm_count", sa.Integer),
    sa.Column("power_limit_w", _REAL),
    _column("descriptor", _JSON),
)
"""Devices. `key` differs between devices whose times cannot be compared."""

run_table = sa.Table(
    "run",
    METADATA,
    _column("id", sa.String(32), primary_key=True),
    _column("device_id", sa.Integer, sa.ForeignKey("device.id")),
    _column("workload", sa.Text),
    _column("sampler", sa.Text),
    _column("seed", _BIG),
    _column("host", sa.Text),
    _column("versions", _JSON),
    _column("started_at", UtcTime),
    sa.Column("finished_at", UtcTime),
    _column("masked", _BIG, default=0),
    _column("cached", _BIG, default=0),
    *(
        _column(name, _REAL, default=0.0)
        for name in ("wall_s", "compile_s", "verify_s", "measure_s", "overhead_s")
    ),
    sa.Column("budget_trials", _BIG),
    sa.Column("options", _JSON),
)
"""Runs of `tune` on one workload each; `finished_at` is NULL if the run was killed.

`options` has every option of the run by name; NULL for imports and for runs of earlier versions.
"""

_CLAIMED = "claim_owner IS NOT NULL"

TRIAL_KEY = ("device_id", "workload", "variant", "config", "revision")
"""Columns that identify a trial. Without the last one they find all revisions of a configuration."""

trial_table = sa.Table(
    "trial",
    METADATA,
    _column("id", _BIG, primary_key=True),
    _column("device_id", sa.Integer, sa.ForeignKey("device.id")),
    _column("workload", sa.Text, index=True),
    _column("variant", sa.Text),
    _column("revision", sa.Text),
    _column("config", sa.Text),
    _column("config_values", _JSON),
    _column("state", sa.String(8)),
    sa.Column("claim_owner", sa.Text),
    sa.Column("claim_expires_at", UtcTime),
    _column("stale", sa.Boolean, default=False),
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
"""Configurations of one source revision of one variant, for one workload on one device.

A claimed trial has no measurement yet. `config` is the text of the configuration and part of the key.
`config_values` stores the values with their types, so that reading them does not need the variant.
"""

_FAILED = ", ".join(f"'{failure.kind}'" for failure in FAILURES)

measurement_table = sa.Table(
    "measurement",
    METADATA,
    _column("id", _BIG, primary_key=True),
    _column("trial_id", _BIG, sa.ForeignKey("trial.id"), index=True),
    sa.Column("run_id", sa.String(32), sa.ForeignKey("run.id")),
    _column("purpose", sa.String(8)),
    _column("kind", sa.String(16)),
    *(sa.Column(name, _REAL) for name in ("median_us", "ci_low_us", "ci_high_us", "predicted_us")),
    sa.Column("cache", sa.String(4)),
    sa.Column("verification", sa.String(16)),
    sa.Column("reason", sa.Text),
    sa.Column("bound_us", _REAL),
    sa.Column("samples_us", _JSON),
    *(_column(name, _JSON) for name in ("detail", "resources", "conditions")),
    *(_column(name, _REAL) for name in ("compile_s", "verify_s", "measure_s")),
    sa.Column("seed", _BIG),
    _column("recorded_at", UtcTime),
    sa.Column("fastest_us", _REAL),
    sa.Column("versus_default", sa.String(10)),
    sa.Column("comparison", _JSON),
    sa.Column("metrics", _JSON),
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
"""Measurements of trials: each outcome, and everything needed to judge and reproduce it.

`metrics` has a number for each observed or computed quantity besides the time, by name; NULL without any.
"""

origin_table = sa.Table("origin", METADATA, _column("id", sa.String(32), primary_key=True))
"""Id of this database in those it is merged into: one row, inserted when the tables are created."""

demand_table = sa.Table(
    "demand",
    METADATA,
    _column("id", _BIG, primary_key=True),
    _column("device_id", sa.Integer, sa.ForeignKey("device.id")),
    _column("workload", sa.Text),
    _column("origin", sa.String(32)),
    _column("calls", _BIG),
    _column("time_us", _REAL),
    _column("first_noted_at", UtcTime),
    _column("last_noted_at", UtcTime),
    sa.UniqueConstraint("device_id", "workload", "origin", name="uq_demand_key"),
    sa.CheckConstraint("calls > 0 AND time_us >= 0", name="amount"),
)
"""Calls of a workload by programs on a device, and their total time.

A database adds only to rows of its own `origin`. A merge copies the rows of other origins and keeps the
greater of two rows with the same key, so that repeating a merge changes nothing.
"""

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
"""Columns of the view for SQLAlchemy queries; not part of `METADATA`."""


def answers_in_order() -> tuple[sa.ColumnElement[Any], ...]:
    """Return the columns by which rows of `answer_v1` are ordered, as `figures.answer_order` orders them."""
    view = answer_v1.c
    return (
        *(view.kind, view.stale, sa.func.coalesce(view.cache, "")),
        *(view.verification == "not verified", view.time_us, view.measurement_id),
    )


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
