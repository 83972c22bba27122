"""Columns for the comparison with the default and for the fastest sample; `answer_v1` uses the comparison."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tunebench.db.migrations.answer_view import ANSWER_VIEWS

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


_FASTEST = {
    "sqlite": "SELECT MIN(value) FROM json_each(samples_us)",
    "postgresql": "SELECT MIN(value::double precision) FROM json_array_elements_text(samples_us) AS value",
}


def upgrade() -> None:
    """Upgrade to revision 0003."""
    op.execute("DROP VIEW answer_v1")
    with op.batch_alter_table("measurement") as table:
        table.add_column(sa.Column("fastest_us", sa.Double, nullable=True))
        table.add_column(sa.Column("versus_default", sa.String(10), nullable=True))
        table.add_column(sa.Column("comparison", sa.JSON, nullable=True))
        table.create_check_constraint(
            op.f("ck_measurement_versus_default"), "versus_default IN ('itself', 'faster', 'not faster')"
        )
    fastest = _FASTEST[op.get_bind().dialect.name]
    op.execute(f"UPDATE measurement SET fastest_us = ({fastest}) WHERE samples_us IS NOT NULL")  # noqa: S608 (a constant)
    op.execute(ANSWER_VIEWS["0003"])


def downgrade() -> None:
    """Downgrade to revision 0002."""
    op.execute("DROP VIEW answer_v1")
    with op.batch_alter_table("measurement") as table:
        table.drop_constraint(op.f("ck_measurement_versus_default"), type_="check")
        for name in ("fastest_us", "versus_default", "comparison"):
            table.drop_column(name)
    op.execute(ANSWER_VIEWS["0002"])
