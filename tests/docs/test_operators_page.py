"""Tables of operators and variants in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import package_variants
from tunebench import workloads
from tunebench.variant import Variant

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "operators.md"


def tables() -> list[dict[str, str]]:
    """Return each table of the page as the rest of its row by operator."""
    page_tables = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        rows = re.findall(r"^\| `(\w+)` \|(.*)$", table, flags=re.MULTILINE)
        page_tables.append(dict(rows))
    return page_tables


def test_both_tables_list_every_operator() -> None:
    operators = workloads.all_operators().items()
    shipped = {name for name, cls in operators if cls.__module__.startswith("tunebench.workloads.")}
    assert [set(table) for table in tables()] == [shipped] * 2


def test_table_lists_every_variant() -> None:
    listed = {
        f"{operator}/{name}" for operator, row in tables()[1].items() for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {variant.key for variant in package_variants(Variant)}
