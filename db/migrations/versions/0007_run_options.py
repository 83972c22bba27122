"""The options of a run: an interrupted run is resumed only by the same ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade to revision 0007; the options of earlier runs are unknown."""
    op.add_column("run", sa.Column("options", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Downgrade to revision 0006; the options of runs are lost."""
    op.drop_column("run", "options")
