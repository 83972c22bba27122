"""Public measurements: the whole sets in `shared/data` next to the checkout, or else the committed sample.

Checks that need every row ask `IS_WHOLE`; all others run on the sample, too (`tests/data/public/README.md`).
"""

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

WHOLE = Path(__file__).resolve().parents[2] / "shared" / "data"
SAMPLE = Path(__file__).resolve().parent / "data" / "public"
IS_WHOLE = WHOLE.is_dir()
DATA = WHOLE if IS_WHOLE else SAMPLE


def found(relative: str) -> Path:
    """Return the path of a file or folder of the measurements."""
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
