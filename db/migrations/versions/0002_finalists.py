"""In `answer_v1`, single measurements of a search no longer supersede finalists measured after them."""

from __future__ import annotations

from alembic import op

from tunebench.db.migrations.answer_view import ANSWER_VIEWS

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade to revision 0002."""
    op.execute("DROP VIEW answer_v1")
    op.execute(ANSWER_VIEWS["0002"])


def downgrade() -> None:
    """Downgrade to revision 0001."""
    op.execute("DROP VIEW answer_v1")
    op.execute(ANSWER_VIEWS["0001"])
