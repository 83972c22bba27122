"""Plans of a folder, as `tunebench plan cluster --out FILE` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunebench._foreign_file import read_bytes, read_table
from tunebench.errors import InputError

__all__ = ["PlanEntry", "check_folder", "read_plans"]

MOST_FILES = 1000
"""Most files of a folder that are read."""

LARGEST_BYTES = 64 << 10
"""Largest file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """A plan file.

    Attributes:
        name: Path below the folder.
        job: Values of its table ``[job]``.
        plan: Values of its table ``[plan]``.
        predicted: Values of its table ``[predicted]``.
        arguments: Arguments for Megatron-LM.
        problem: Reason why the file cannot be read; empty if it can.
    """

    name: str
    job: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    problem: str = ""

    @property
    def step_us(self) -> float | None:
        """Predicted time of a training step, in microseconds; None without one."""
        return self.number("step_us")

    def number(self, name: str) -> float | None:
        """Return a predicted number; None without one."""
        value = self.predicted.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def check_folder(folder: Path) -> Path:
    """Return a folder of plans.

    Raises:
        InputError: if it is not a folder.
    """
    if not folder.is_dir():
        raise InputError(f"--plans must be a folder with plans as TOML files, got {folder}")
    return folder


def read_plans(folder: Path) -> list[PlanEntry]:
    """Return the plans of a folder and its subfolders, and damaged TOML files that look like plans.

    Args:
        folder: The folder.
    """
    plans = []
    for path in sorted(folder.rglob("*.toml"))[:MOST_FILES]:
        name = str(path.relative_to(folder))
        try:
            entry = _read(path, name)
        except InputError as error:
            entry = PlanEntry(name=name, problem=f"cannot be read: {error}")
        if entry is not None:
            plans.append(entry)
    return plans


def _read(path: Path, name: str) -> PlanEntry | None:
    """Return the plan of a file; None if the file is something else."""
    if b"[plan]" not in read_bytes(path)[:LARGEST_BYTES]:
        return None
    values = read_table(path, largest_bytes=LARGEST_BYTES)
    tables = [values.get(table) for table in ("job", "plan", "predicted")]
    if not all(isinstance(table, dict) for table in tables):
        return PlanEntry(name=name, problem="lacks a table [job], [plan] or [predicted]")
    job, plan, predicted = (dict(table) for table in tables if isinstance(table, dict))
    megatron = values.get("megatron")
    arguments = megatron.get("arguments", []) if isinstance(megatron, dict) else []
    return PlanEntry(
        name=name,
        job=job,
        plan=plan,
        predicted=predicted,
        arguments=tuple(map(str, arguments)) if isinstance(arguments, list) else (),
    )
