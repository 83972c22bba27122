"""Whether a search runs, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tunebench.db.browse import DeviceEntry, RunEntry
from tunebench.report.lower_bound import shown_bound_us, shown_ratio

__all__ = ["STATES", "Search", "search_of"]

STATES = {
    "running": "measured or claimed a configuration within the last ten minutes",
    "silent": "has no end, and measured nothing within ten minutes; its machine is another one",
    "interrupted": "its process has ended before the search",
    "failed": "has ended without a time, new or known before, and configurations failed",
    "finished": "has ended",
    "imported": "was imported from a file",
}
"""States of a search, with their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A run of `tune` with its state.

    Attributes:
        run: The run.
        device: Its device; None if its row is missing.
        state: One of `STATES`.
        elapsed_s: Time from its start to its end, or to its newest measurement if it does not run.
        per_minute: Measurements per minute; None before the first.
        remaining_s: Expected time until the budget is spent; None if it is unknown.
        reason: Reason of its first failure, if it has no time; else empty.
    """

    run: RunEntry
    device: DeviceEntry | None
    state: str
    elapsed_s: float
    per_minute: float | None
    remaining_s: float | None
    reason: str = ""

    @property
    def elapsed_us(self) -> float:
        """`elapsed_s` in microseconds, as columns of times show it."""
        return 1e6 * self.elapsed_s

    @property
    def note(self) -> str:
        """Why an ended search has no time; empty if it has one, or runs."""
        run = self.run
        if run.progress.best_us is not None or self.state == "running":
            return ""
        if self.reason:
            return self.reason
        if run.cached:
            return f"{run.cached:,} configurations were known before"
        return f"{run.masked:,} configurations were excluded by their bounds" if run.masked else ""

    @property
    def share(self) -> float | None:
        """Share of the budget that is spent, at most 1; None without a budget."""
        budget = self.run.budget_trials
        return min(1.0, self.run.progress.searched / budget) if budget else None

    @property
    def bound_us(self) -> float | None:
        """Lower bound of all its configurations, else the lowest one of its measurements.

        None if unknown, or if it rests on assumed rates of the device.
        """
        progress = self.run.progress
        return shown_bound_us(progress.bound_us, progress.least_bound_us, assumed=self._has_assumed_rates)

    @property
    def bound_ratio(self) -> float | None:
        """Best time over `bound_us`; at least 1 at measured rates, which a kernel may beat."""
        return shown_ratio(self.run.progress.best_us, self.bound_us, assumed=self._has_assumed_rates)

    @property
    def _has_assumed_rates(self) -> bool:
        return self.device is not None and self.device.has_assumed_rates


def search_of(run: RunEntry, device: DeviceEntry | None, now: datetime, reason: str = "") -> Search:
    """Return a run with its state.

    Args:
        run: The run.
        device: Its device.
        now: Time of the database.
        reason: Reason of its first failure, if it has no time.
    """
    state = run.state(now)
    newest = run.progress.newest_at or run.started_at
    end = run.finished_at or (now if state == "running" else newest)
    elapsed_s = max(0.0, (end - run.started_at).total_seconds())
    rate = run.progress.measurements / elapsed_s if elapsed_s and run.progress.measurements else None
    remaining = max(0, (run.budget_trials or 0) - run.progress.searched)
    return Search(
        run=run,
        device=device,
        state=state,
        elapsed_s=elapsed_s,
        per_minute=None if rate is None else 60 * rate,
        remaining_s=remaining / rate if state == "running" and rate and run.budget_trials else None,
        reason=reason,
    )
