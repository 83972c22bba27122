"""Indexes by run, claim and staleness, and the budget of a run: what a page about running searches reads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Upgrade to revision 0006."""
    op.add_column("run", sa.Column("budget_trials", _BIG, nullable=True))
    op.create_index("ix_measurement_run_id", "measurement", ["run_id", "id"])
    claimed = sa.text("claim_owner IS NOT NULL")
    op.create_index(
        "ix_trial_claim_owner", "trial", ["claim_owner"], sqlite_where=claimed, postgresql_where=claimed
    )
    op.create_index(
        "ix_trial_stale",
        "trial",
        ["device_id", "workload", "variant"],
        sqlite_where=sa.text("stale = 1"),
        postgresql_where=sa.text("stale"),
    )


def downgrade() -> None:
    """Downgrade to revision 0005; the budgets of runs are lost."""
    op.drop_index("ix_trial_stale", "trial")
    op.drop_index("ix_trial_claim_owner", "trial")
    op.drop_index("ix_measurement_run_id", "measurement")
    op.drop_column("run", "budget_trials")
