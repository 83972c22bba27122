"""Queries for people who browse a database: what it contains, a page at a time, and what runs now."""

from __future__ import annotations

from tunebench.db.browse.browser import MOST_POINTS, QUERY_S, Browser, open_browser
from tunebench.db.browse.entry import (
    Answer,
    Changes,
    Cursor,
    DeviceEntry,
    FailureEntry,
    HistoryPoint,
    RunEntry,
    RunProgress,
    RunState,
    StaleGroup,
    TrialEntry,
    TrialFilter,
    TrialPage,
    TrialRow,
    WorkloadEntry,
)
from tunebench.db.browse.trial_page import TRIAL_ORDERS

__all__ = [
    "MOST_POINTS",
    "QUERY_S",
    "TRIAL_ORDERS",
    "Answer",
    "Browser",
    "Changes",
    "Cursor",
    "DeviceEntry",
    "FailureEntry",
    "HistoryPoint",
    "RunEntry",
    "RunProgress",
    "RunState",
    "StaleGroup",
    "TrialEntry",
    "TrialFilter",
    "TrialPage",
    "TrialRow",
    "WorkloadEntry",
    "open_browser",
]
