"""Limits of the values of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from tunebench import Plan
from tunebench.errors import InputError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("trials", 0), ("trials", 10**23), ("finalists", 10**22), ("workers", -1), ("workers", 10**6)),
        *(("seed", -1), ("seed", 2**32), ("timeout_s", 0), ("timeout_s", 1e300), ("timeout_s", float("nan"))),
        *(("stop_at_gap", 0.5), ("stop_at_gap", float("inf")), ("minutes", float("inf")), ("audit", 1.5)),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InputError, match=name):
        Plan(**options)
