"""Coverage: how many workloads of each operator have a time on each device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tunebench.db.browse import DeviceEntry
from tunebench.report.dashboard.catalogue import Snapshot

__all__ = ["Cell", "coverage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Workloads of an operator on a device, by how their best time is known.

    Attributes:
        measured: Workloads with a measured time.
        predicted: Workloads with a predicted time only.
        imported: Workloads with a time that was measured and not verified, such as recorded tuning spaces.
        failed: Workloads without a time, because every configuration failed.
        known: Workloads of the operator in the database, on any device.
    """

    measured: int
    predicted: int
    imported: int
    failed: int
    known: int

    @property
    def is_empty(self) -> bool:
        """Whether the device has no workload of the operator that was run or predicted."""
        return not (self.measured or self.predicted or self.imported or self.failed)


def coverage_of(snapshot: Snapshot) -> tuple[list[str], list[tuple[DeviceEntry, list[Cell]]]]:
    """Return the operators, and for each device a cell per operator."""
    workloads: dict[str, set[str]] = {}
    counts: Counter[tuple[int, str, str]] = Counter()
    for line in snapshot.lines:
        workloads.setdefault(line.operator, set()).add(line.entry.workload)
        known_by = "measured" if line.fastest("measured") is not None else line.how
        counts[line.device.id, line.operator, known_by or ""] += 1
    operators = sorted(workloads)
    used = {line.device.id for line in snapshot.lines}
    return operators, [
        (
            device,
            [
                Cell(
                    measured=counts[device.id, operator, "measured"],
                    predicted=counts[device.id, operator, "predicted"],
                    imported=counts[device.id, operator, "unverified"],
                    failed=counts[device.id, operator, "failed"],
                    known=len(workloads[operator]),
                )
                for operator in operators
            ],
        )
        for device in snapshot.devices.values()
        if device.id in used
    ]
