"""Law of the host time in public measurements of f32 operators, and its estimates.

    python -m benchmarks.host_time [--data FOLDER] [--out FILE]

Sizes are divided into five bands by the work of their kernels. Each band in turn is left out of the fits of
four laws. The table has the floor and the lead that training uses, fitted to all bands, and the mean absolute
percentage error of each law on the bands left out: medians over the operators of a group.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.predict_models import DATA
from tunebench.forecast.model_training.data import operator_tables
from tunebench.forecast.model_training.host import FEWEST, WAVES, OperatorTable, fit_law, separate

LAWS = {
    "kernel": (False, False),
    "host + kernel": (False, True),
    "max(host, kernel)": (True, False),
    "max(floor, lead + kernel)": (True, True),
}
"""Whether a law has a floor and a lead, by name."""

BANDS = 5


def main() -> None:
    """Print one line for each device and group of operators, and write one row for each operator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the public measurements")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    options = parser.parse_args()
    tables = operator_tables(options.data)
    keys = [(table.device, table.operator, table.part) for table in tables]
    figures = [
        (times.host.floor_us, times.host.lead_us, *_errors(table))
        for table, times in zip(tables, separate(tables), strict=True)
    ]
    names = ("floor_us", "lead_us", *(f"{law}, %" for law in LAWS))
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("device", "operator", "part", *names))
            writer.writerows(
                (*key, *(f"{x:.2f}" for x in row)) for key, row in zip(keys, figures, strict=True)
            )
    groups: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
    for table, (device, operator, part), row in zip(tables, keys, figures, strict=True):
        group = "elementwise" if table.family == "elementwise" else operator
        groups.setdefault((group, device, part), []).append(row)
    shown = Table("operators", "device", "part", *names)
    for key, rows_of in sorted(groups.items()):
        shown.add_row(*key, *(f"{figure:.1f}" for figure in np.median(rows_of, axis=0)))
    Console(width=150).print(shown)


def _errors(table: OperatorTable) -> Iterator[float]:
    """Yield the mean error of each law on the sizes left out, in per cent; NaN without rows to fit it to."""
    for waves in WAVES:
        rows, kind = table.fittable(waves)
        if len(rows) >= FEWEST:
            break
    for floor, lead in LAWS.values():
        missed = _left_out(table.us[rows], table.work[rows], kind, (floor, lead))
        yield 100 * float(np.mean(missed)) if len(missed) else np.nan


def _left_out(
    us: NDArray[np.float64], work: NDArray[np.float64], kind: NDArray[np.int64], law: tuple[bool, bool]
) -> NDArray[np.float64]:
    """Return the relative errors on each band of fits to the other bands."""
    if not len(us):
        return us
    band = BANDS * np.argsort(np.argsort(work, kind="stable"), kind="stable") // len(work)
    missed = []
    for omitted in range(BANDS):
        seen = band != omitted
        kinds, used = np.unique(kind[seen], return_inverse=True)
        fitted = fit_law(us[seen], work[seen], used, floor=law[0], lead=law[1])
        asked = ~seen & np.isin(kind, kinds)  # a kernel that only the band has cannot be predicted
        predicted_us = fitted.us(work[asked], np.searchsorted(kinds, kind[asked]))
        missed.append(np.abs(predicted_us / us[asked] - 1))
    return np.concatenate(missed)


if __name__ == "__main__":
    main()
