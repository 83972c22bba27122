"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Database", "Json", "Problem"]

Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH|URL",
        help="Database: a file, or an SQLAlchemy URL. Default: TUNEBENCH_DB, or else the user data folder.",
        show_default=False,
    ),
]
"""Which database; None where it is not given."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value, and nothing else, on stdout.")]
"""Whether to print JSON instead of text for people."""

Problem = Annotated[
    str,
    typer.Option(
        "--workload", "-w", help="What to compute: operator:dimension=value,… or suite/layer,dimension=value."
    ),
]
"""Text of a workload."""
