"""Alembic environment: runs migrations on the connection that `tunebench.db.migrate` opened.

The caller owns the transaction, also on SQLite, where Alembic would commit after each step.
"""

from __future__ import annotations

from alembic import context

from tunebench.db.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite changes a table by rebuilding it
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
