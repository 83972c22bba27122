"""Tables of the demand of programs and of the database's origin, by which merges distinguish databases."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Upgrade to revision 0004."""
    origin = op.create_table(
        "origin",
        sa.Column("id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_origin")),
    )
    op.bulk_insert(origin, [{"id": uuid.uuid4().hex}])
    op.create_table(
        "demand",
        sa.Column("id", _BIG, nullable=False),
        sa.Column("device_id", sa.Integer, nullable=False),
        sa.Column("workload", sa.Text, nullable=False),
        sa.Column("origin", sa.String(32), nullable=False),
        sa.Column("calls", _BIG, nullable=False),
        sa.Column("time_us", sa.Double, nullable=False),
        sa.Column("first_noted_at", _TIME, nullable=False),
        sa.Column("last_noted_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_demand")),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=op.f("fk_demand_device_id")),
        sa.UniqueConstraint("device_id", "workload", "origin", name=op.f("uq_demand_key")),
        sa.CheckConstraint("calls > 0 AND time_us >= 0", name=op.f("ck_demand_amount")),
    )


def downgrade() -> None:
    """Downgrade to revision 0003; the demand of programs is lost."""
    op.drop_table("demand")
    op.drop_table("origin")
