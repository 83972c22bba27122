"""What Alembic runs: migrations on the connection that `tunebench.db.migrate` opened.

The transaction is the caller's, on SQLite too, where Alembic by itself would commit step by step.
"""

from __future__ import annotations

from alembic import context

from tunebench.db.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes a table by rebuilding it
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
