"""Metrics of a measurement: observed and computed quantities besides its time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade to revision 0008; earlier measurements have no metrics."""
    op.add_column("measurement", sa.Column("metrics", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Downgrade to revision 0007; metrics are lost."""
    op.drop_column("measurement", "metrics")
