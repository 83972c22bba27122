"""Schema migrations, run by `tunebench.db.upgrade` and `tunebench.db.downgrade`, and their revisions."""

from __future__ import annotations

__all__ = ["HEAD", "REVISIONS", "newer_schema"]

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
"""All known revisions, oldest first."""
HEAD = REVISIONS[-1]


def newer_schema(location: object, revision: object) -> str:
    """Return the message for a database with a schema revision that this version does not know."""
    return (
        f"database {location} has schema {revision}, newer than {HEAD} of this version: "
        "upgrade tunebench (`pip install --upgrade`, from where it was installed)"
    )
