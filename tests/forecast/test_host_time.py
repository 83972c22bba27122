"""Host time in measured operators: fits of its law, and its estimates where it cannot be fitted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tunebench.forecast.library.roofline_model import LAUNCH_US
from tunebench.forecast.model_training.host import HostTime, OperatorTable, fit_law, separate

pytestmark = pytest.mark.usefixtures("learns")

RATES = {"narrow": 0.05, "wide": 0.2}


def products(
    floor_us: float, lead_us: float, *, device: str = "a", operator: str = "bmm", rows: int = 400
) -> OperatorTable:
    """Return products that take 3 us and a time per step, measured behind a host with 1 % of noise."""
    rng = np.random.default_rng(0)
    work = rng.integers(4, 1024, rows).astype(float)
    kind = np.array(list(RATES))[rng.integers(0, 2, rows)]
    kernel_us = LAUNCH_US + work * np.array([RATES[name] for name in kind])
    us = np.maximum(floor_us, lead_us + kernel_us) * rng.normal(1, 0.01, rows)
    us[:4] *= 3  # outliers
    return OperatorTable(
        device=device,
        operator=operator,
        part="train",
        family="product",
        us=us,
        peak_us=np.full(rows, LAUNCH_US),
        work=work,
        waves=np.ones(rows),
        kind=kind,
    )


def unfittable(table: OperatorTable, **changed: object) -> OperatorTable:
    return dataclasses.replace(table, work=np.full_like(table.us, np.nan), **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("floor_us", "lead_us"), [(48.0, 20.0), (32.0, 21.0), (95.0, 67.0)])
def test_host_is_separated_from_the_kernel(floor_us: float, lead_us: float) -> None:
    table = products(floor_us, lead_us)
    (separated,) = separate([table])
    assert separated.host.floor_us == pytest.approx(floor_us, rel=0.01)
    assert separated.host.lead_us == pytest.approx(lead_us, abs=1.5)
    expected = LAUNCH_US + table.work * np.array([RATES[name] for name in table.kind])
    assert np.abs(separated.kernel_us - expected)[4:].max() < 0.04 * table.us.max()
    hidden = table.us < 1.1 * floor_us
    assert hidden.any()
    assert np.abs(separated.kernel_us - expected)[hidden].max() < 1.5  # read from the line, so without noise


def test_law_without_a_floor_is_a_line() -> None:
    work = np.linspace(1e7, 5e8, 150)
    us = 17 + work / 8e5
    law = fit_law(us, work, np.zeros(150, dtype=np.int64), floor=False)
    assert (law.floor_us, law.lead_us) == (0.0, pytest.approx(17, abs=0.1))
    assert law.us(work, np.zeros(150, dtype=np.int64)) == pytest.approx(us, rel=1e-3)


def test_kernels_of_a_kind_that_is_always_hidden_are_unknown() -> None:
    table = products(48.0, 20.0)
    short = table.kind == "narrow"
    (separated,) = separate([dataclasses.replace(table, us=np.where(short, 48.0, table.us))])
    assert np.isnan(separated.kernel_us[short]).all()
    assert np.isfinite(separated.kernel_us[~short]).all()


def test_table_without_a_fit_gets_the_lead_of_a_similar_table() -> None:
    fittable = [
        products(48.0, 20.0),
        products(60.0, 40.0, device="b"),
        products(70.0, 50.0, operator="linear"),
    ]
    rows = dataclasses.replace(products(0.0, 15.0, operator="add"), family="elementwise")
    asked = {
        "same operator, other part": (unfittable(fittable[1], part="test"), 40),
        "same operator, other devices": (unfittable(fittable[0], device="c"), 30),
        "rows, from rows of the device": (unfittable(rows, operator="softmax", family="softmax"), 15),
        "nothing known": (unfittable(rows, operator="softmax", family="softmax", device="c"), 0),
    }
    separated = separate([*fittable, rows, *(table for table, _ in asked.values())])[4:]
    for times, (name, (_, lead_us)) in zip(separated, asked.items(), strict=True):
        assert times.host == HostTime(0.0, pytest.approx(lead_us, abs=1.5)), name


def test_lead_from_elsewhere_leaves_kernels_their_time_at_peak_rates() -> None:
    fittable = products(60.0, 40.0)
    short = unfittable(fittable, part="test", us=np.full(400, 45.0), peak_us=np.full(400, 15.0))
    assert separate([fittable, short])[1].host == HostTime(0.0, 30.0)


def test_too_few_rows_are_left_as_measured() -> None:
    (separated,) = separate([products(48.0, 20.0, rows=20)])
    assert separated.host == HostTime()
