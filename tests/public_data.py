"""Public measurements outside the package, in `shared/data` next to the checkout if present."""

from __future__ import annotations

import csv
import functools
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def found(relative: str) -> Path:
    path = DATA / relative
    if not path.exists():
        pytest.skip(f"needs public measurements: no {relative} in {DATA}")
    return path


@functools.cache
def table(relative: str) -> Columns:
    """Return a compressed CSV file as columns; columns of numbers are floats, with NaN for empty fields."""
    with gzip.open(found(relative), "rt", newline="") as file:
        reader = csv.reader(file)
        names = next(reader)
        rows = list(reader)
    return {name: _column([row[i] for row in rows]) for i, name in enumerate(names)}


def _column(values: list[str]) -> NDArray[Any]:
    try:
        return np.array([float(value) if value else np.nan for value in values])
    except ValueError:
        return np.array(values)
