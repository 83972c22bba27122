"""Tables of devices, runs, trials and measurements, and the view `answer_v1`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tunebench.db.migrations.answer_view import ANSWER_VIEWS

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TIME = sa.DateTime(timezone=True)
_FAILED = "'compile_failed', 'launch_failed', 'wrong_result', 'timed_out', 'crashed'"


def upgrade() -> None:
    """Upgrade to revision 0001."""
    op.create_table(
        "device",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("architecture", sa.Text, nullable=False),
        sa.Column("product", sa.Text, nullable=False),
        sa.Column("sm_count", sa.Integer, nullable=False),
        sa.Column("power_limit_w", sa.Double, nullable=True),
        sa.Column("descriptor", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device"),
        sa.UniqueConstraint("key", name="uq_device_key"),
    )
    op.create_index("ix_device_architecture", "device", ["architecture"])
    _create_run()
    _create_trial()
    _create_measurement()
    op.execute(ANSWER_VIEWS["0001"])


def _create_run() -> None:
    op.create_table(
        "run",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("device_id", sa.Integer, nullable=False),
        sa.Column("workload", sa.Text, nullable=False),
        sa.Column("sampler", sa.Text, nullable=False),
        sa.Column("seed", _BIG, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("versions", sa.JSON, nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME, nullable=True),
        sa.Column("masked", _BIG, nullable=False),
        sa.Column("cached", _BIG, nullable=False),
        *(
            sa.Column(name, sa.Double, nullable=False)
            for name in ("wall_s", "compile_s", "verify_s", "measure_s", "overhead_s")
        ),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name="fk_run_device_id"),
    )


def _create_trial() -> None:
    op.create_table(
        "trial",
        sa.Column("id", _BIG, nullable=False),
        sa.Column("device_id", sa.Integer, nullable=False),
        sa.Column("workload", sa.Text, nullable=False),
        sa.Column("variant", sa.Text, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("config_values", sa.JSON, nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("claim_owner", sa.Text, nullable=True),
        sa.Column("claim_expires_at", _TIME, nullable=True),
        sa.Column("stale", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trial"),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name="fk_trial_device_id"),
        sa.UniqueConstraint("device_id", "workload", "variant", "config", "revision", name="uq_trial_key"),
        sa.CheckConstraint("state IN ('claimed', 'done')", name=op.f("ck_trial_state")),
        sa.CheckConstraint(
            "(state = 'claimed') = (claim_owner IS NOT NULL) "
            "AND (state = 'claimed') = (claim_expires_at IS NOT NULL)",
            name=op.f("ck_trial_claim"),
        ),
    )
    op.create_index("ix_trial_workload", "trial", ["workload"])


def _create_measurement() -> None:
    op.create_table(
        "measurement",
        sa.Column("id", _BIG, nullable=False),
        sa.Column("trial_id", _BIG, nullable=False),
        sa.Column("run_id", sa.String(32), nullable=True),
        sa.Column("purpose", sa.String(8), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        *(
            sa.Column(name, sa.Double, nullable=True)
            for name in ("median_us", "ci_low_us", "ci_high_us", "predicted_us")
        ),
        sa.Column("cache", sa.String(4), nullable=True),
        sa.Column("verification", sa.String(16), nullable=True),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("bound_us", sa.Double, nullable=True),
        sa.Column("samples_us", sa.JSON, nullable=True),
        *(sa.Column(name, sa.JSON, nullable=False) for name in ("detail", "resources", "conditions")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("compile_s", "verify_s", "measure_s")),
        sa.Column("seed", _BIG, nullable=True),
        sa.Column("recorded_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_measurement"),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_measurement_trial_id"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_measurement_run_id"),
        sa.CheckConstraint(
            f"kind IN ('measured', 'predicted', 'aborted', 'pruned', {_FAILED})",
            name=op.f("ck_measurement_kind"),
        ),
        sa.CheckConstraint("purpose IN ('search', 'finalist', 'audit')", name=op.f("ck_measurement_purpose")),
        sa.CheckConstraint(
            "(kind = 'measured') = (median_us IS NOT NULL) "
            "AND (kind = 'measured') = (ci_low_us IS NOT NULL) "
            "AND (kind = 'measured') = (ci_high_us IS NOT NULL) "
            "AND (kind = 'measured') = (cache IS NOT NULL) "
            "AND (kind IN ('measured', 'aborted')) = (samples_us IS NOT NULL) "
            "AND (kind = 'predicted') = (predicted_us IS NOT NULL) "
            "AND (kind IN ('measured', 'predicted')) = (verification IS NOT NULL)",
            name=op.f("ck_measurement_time"),
        ),
        sa.CheckConstraint(
            f"(kind IN ({_FAILED})) = (reason IS NOT NULL)", name=op.f("ck_measurement_reason")
        ),
        sa.CheckConstraint("cache IN ('cold', 'warm')", name=op.f("ck_measurement_cache")),
    )
    op.create_index("ix_measurement_trial_id", "measurement", ["trial_id"])


def downgrade() -> None:
    """Downgrade to an empty database."""
    op.execute("DROP VIEW answer_v1")
    for table in ("measurement", "trial", "run", "device"):
        op.drop_table(table)
