"""Report of an acceptance run, written after every step so that an interrupted run keeps its results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["AcceptanceReport"]


class AcceptanceReport:
    """A folder with `report.json` (an entry per step) and `STEP.jsonl` (a line per configuration).

    An existing report is continued: steps that run again replace their entry.

    Args:
        folder: Folder of the report; created if missing.
        say: Called with each progress line.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self, folder: Path, *, say: Callable[[str], object] = print, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._say, self._now = folder, say, now
        self._started = now()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "report.json"
        self.steps: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        if self._path.is_file():
            self.steps = json.loads(self._path.read_text(encoding="utf-8"))

    def begin(self, step: str) -> None:
        """Delete the lines and the entry of a step; `before` keeps the entry."""
        self.before[step] = self.steps.get(step, {})
        self.steps[step] = {"complete": False}
        (self._folder / f"{step}.jsonl").unlink(missing_ok=True)
        self._write()

    def rows_of_others(self, step: str, workloads: Iterable[str]) -> list[dict[str, Any]]:
        """Return the rows of a step's previous run for workloads other than the given ones."""
        done = set(workloads)
        return [row for row in self.before.get(step, {}).get("rows", []) if row["workload"] not in done]

    def put(self, step: str, **facts: Any) -> None:
        """Add facts to a step's entry and write the report."""
        self.steps.setdefault(step, {"complete": False}).update(facts)
        self._write()

    def line(self, step: str, row: Mapping[str, Any]) -> None:
        """Append one line to a step's file."""
        with (self._folder / f"{step}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def say(self, text: str) -> None:
        """Report progress, with the seconds since the start."""
        self._say(f"[{self._now() - self._started:6.1f} s] {text}")

    def problems(self, steps: Iterable[str]) -> list[str]:
        """Return the problems of the given steps."""

        return [f"{step}: {text}" for step in steps for text in self.steps[step].get("problems", [])]

    def _write(self) -> None:
        half = self._path.with_suffix(".tmp")
        half.write_text(json.dumps(self.steps, indent=1) + "\n", encoding="utf-8")
        half.replace(self._path)
