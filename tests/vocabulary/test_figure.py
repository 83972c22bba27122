"""Numbers as text."""

from __future__ import annotations

import pytest

from tunebench._figure import ratio


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.00"),
        (0.1, "0.10"),
        (0.004621, "0.0046"),
        (1e-6, "0.000001"),
        (0.0, "0"),
        (99.994, "99.99"),
        (13049.69, "13,050"),
    ],
)
def test_ratios_keep_two_significant_digits(value: float, text: str) -> None:
    assert ratio(value) == text
