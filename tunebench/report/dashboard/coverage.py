"""Coverage: how many workloads of each operator have a time on each device."""

from __future__ import annotations

from dataclasses import dataclass

from tunebench.db.browse import DeviceEntry
from tunebench.report.dashboard.catalogue import Snapshot

__all__ = ["Cell", "coverage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Workloads of an operator on a device: measured, only predicted, and all that the database knows."""

    measured: int
    predicted: int
    known: int


def coverage_of(found: Snapshot) -> tuple[list[str], list[tuple[DeviceEntry, list[Cell]]]]:
    """Return the operators, and for each device a cell per operator."""
    known: dict[str, set[str]] = {}
    measured: dict[tuple[int, str], int] = {}
    predicted: dict[tuple[int, str], int] = {}
    for line in found.lines:
        known.setdefault(line.operator, set()).add(line.entry.workload)
        if line.fastest("measured") is not None:
            measured[line.device.id, line.operator] = measured.get((line.device.id, line.operator), 0) + 1
        elif line.fastest("predicted") is not None:
            predicted[line.device.id, line.operator] = predicted.get((line.device.id, line.operator), 0) + 1
    operators = sorted(known)
    used = {line.device.id for line in found.lines}
    return operators, [
        (
            device,
            [
                Cell(
                    measured=measured.get((device.id, operator), 0),
                    predicted=predicted.get((device.id, operator), 0),
                    known=len(known[operator]),
                )
                for operator in operators
            ],
        )
        for device in found.devices.values()
        if device.id in used
    ]
