"""Networks that are lists of workloads: a suite, or a file of counts and workloads."""

from __future__ import annotations

import csv
import io
from typing import Any

from tunebench.errors import InputError, quoted
from tunebench.workloads import Layer, parse
from tunebench.workloads.networks.network_run import Network, NetworkRun, Operation, merged

__all__ = ["ListedNetwork", "from_csv", "from_list"]

ENTRY = ("workload", "count", "part", "scales")

MOST = 1_000_000_000
"""Largest count of a workload."""


class ListedNetwork(Network):
    """A network known only by its list of workloads: inference on one device."""

    def __init__(self, name: str, entries: tuple[Layer, ...]) -> None:
        self.name = name
        self.layers = 1
        self.entries = entries

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return the workloads, at the batch and type of the run (see `Network.operations`)."""
        if run.trains or run.tensor != 1 or run.layers not in (None, (0, 1)):
            raise InputError(
                f"{self.name} is a list of workloads: it can be run with mode=infer on one device, as a whole"
            )
        if run.seq:
            raise InputError(f"{self.name} is a list of workloads of given sizes; leave seq out")
        return merged(_operation(entry.at_batch(run.batch), run) for entry in self.entries)

    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Raise: a list of workloads has no number of parameters."""
        raise InputError(f"{self.name} is a list of workloads, whose number of parameters is unknown")

    def boundary_elements(self, run: NetworkRun) -> int:
        """Raise: a list of workloads has no layers to divide."""
        raise InputError(f"{self.name} is a list of workloads, which has no layers to divide")


def _operation(entry: Layer, run: NetworkRun) -> Operation:
    """Return the operation of an entry at the dtype of a run; integers and 8-bit floats keep theirs."""
    work = entry.workload
    if work.dtype in ("f32", "f16", "bf16") and work.dtype != run.dtype:
        out = {"out": None} if "out" in work.dimensions() else {}
        work = work.changed(dtype=run.dtype, **out)
    return Operation(workload=work, count=entry.count, part=entry.name)


def from_csv(name: str, text: str) -> ListedNetwork:
    """Return a network from the text of a CSV file with the columns that `from_list` names.

    Raises:
        InputError: with the invalid entry.
    """
    try:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(io.StringIO(text))]
    except csv.Error as error:
        raise InputError(f"{name}: {error}") from None
    return from_list(name, rows)


def from_list(name: str, rows: Any) -> ListedNetwork:
    """Return a network from a list of workloads.

    Each entry has `workload`, and optionally `count` (default 1), `part` (default the operator) and `scales`:
    columns of a CSV file, or keys of ``[[operation]]`` tables of a TOML file.

    Raises:
        InputError: with the invalid entry.
    """
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{name}: no workload in the list")
    return ListedNetwork(
        name, tuple(_entry(f"{name}, entry {index}", row) for index, row in enumerate(rows, 1))
    )


def _entry(where: str, row: dict[str, Any]) -> Layer:
    """Return one entry after validation."""
    if not isinstance(row, dict) or None in row or set(row) - set(ENTRY) or "workload" not in row:
        raise InputError(f"{where}: must have workload and may have count, part and scales; got {row}")
    try:
        count = int(row.get("count", 1))
    except (TypeError, ValueError):
        count = 0
    if not 1 <= count <= MOST:
        raise InputError(
            f"{where}: count must be a whole number from 1 to {MOST}, got {quoted(row['count'])}"
        )
    try:
        work = parse(str(row["workload"]))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    scales = str(row.get("scales", ""))
    if scales and not isinstance(getattr(work, scales, None), int):
        raise InputError(f"{where}: scales={scales} is no size of {work}")
    return Layer(name=str(row.get("part", work.operator)), text=str(work), count=count, scales=scales)
