"""Units of columns of times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.report.page import data_table, time_cell
from tunebench.report.unit import unit_of


@pytest.mark.parametrize(
    ("times_us", "name", "texts"),
    [
        ([13188.67, 1004.6, 4.194], "ms", ["13.189", "1.005", "0.00419"]),
        ([13188.67, 12115.0], "ms", ["13.19", "12.12"]),
        ([1.5, 2.0, 60.0], "us", ["1.500", "2.000", "60.000"]),
        ([5e6, 9e7], "s", ["5.00", "90.00"]),
        ([2e10, None, 9e9], "h", ["5.556", "2.500"]),
        ([1e7], "s", ["10.00"]),
        ([2500.0, 0.0], "ms", ["2.500", "0.000"]),
        ([], "us", []),
    ],
)
def test_median_chooses_unit_and_decimals(times_us: list[float | None], name: str, texts: list[str]) -> None:
    unit = unit_of(times_us)
    assert unit.name == name
    assert [unit.text(us) for us in times_us if us is not None] == texts


@given(st.lists(st.floats(1e-6, 1e15), min_size=1))
def test_texts_have_three_significant_digits(times_us: list[float]) -> None:
    unit = unit_of([*times_us, None, math.inf])
    for us in times_us:
        shown = float(unit.text(us).replace(",", "")) * unit.us
        assert shown == pytest.approx(us, rel=6e-3)


def test_table_of_a_report_names_the_unit_once() -> None:
    table = data_table(
        ("name", ">time", ">mixed"), [("a", time_cell(9e5), time_cell(1.0)), ("b", "", "none")]
    )
    assert ">time, ms<" in table
    assert '<data value="900000.0">900.0</data>' in table
    assert ">mixed<" in table
    assert "1 us" in table
