"""The page of operators and their kernels lists what there is."""

from __future__ import annotations

import re
from pathlib import Path

from tunebench import kernels, workloads

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "operators.md"


def tables() -> list[dict[str, str]]:
    """Return each table of the page: what follows an operator in its row."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        rows = re.findall(r"^\| `(\w+)` \|(.*)$", table, flags=re.MULTILINE)
        found.append(dict(rows))
    return found


def test_both_tables_list_every_operator() -> None:
    known = workloads.operators().items()
    shipped = {name for name, cls in known if cls.__module__.startswith("tunebench.workloads.")}
    assert [set(table) for table in tables()] == [shipped] * 2


def test_table_lists_every_variant() -> None:
    listed = {
        f"{operator}/{name}" for operator, row in tables()[1].items() for name in re.findall(r"`(\w+)`", row)
    }
    shipped = (v for v in kernels.variants() if type(v).__module__.startswith("tunebench.kernels."))
    assert listed == {variant.key for variant in shipped}
