"""Pages about stored results: search histories, and comparisons of two databases or devices.

Names are imported at their first use: a table of records needs neither charts nor the kernel registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebench._lazy import lazy_names

if TYPE_CHECKING:
    from tunebench.report.best_kernel import BestKernel, with_best_kernels
    from tunebench.report.comparison import ComparedTime, DatabaseComparison, compare_databases
    from tunebench.report.comparison_view import comparison_page
    from tunebench.report.history import (
        ParameterEffect,
        SearchHistory,
        best_records,
        search_histories,
        search_history,
    )
    from tunebench.report.history_view import SuiteCounts, history_page
    from tunebench.report.replayed_search import replay_history

__all__ = [
    "BestKernel",
    "ComparedTime",
    "DatabaseComparison",
    "ParameterEffect",
    "SearchHistory",
    "SuiteCounts",
    "best_records",
    "compare_databases",
    "comparison_page",
    "history_page",
    "replay_history",
    "search_histories",
    "search_history",
    "with_best_kernels",
]

_MODULES = {
    "best_kernel": ("BestKernel", "with_best_kernels"),
    "comparison": ("ComparedTime", "DatabaseComparison", "compare_databases"),
    "comparison_view": ("comparison_page",),
    "history": ("ParameterEffect", "SearchHistory", "best_records", "search_histories", "search_history"),
    "history_view": ("SuiteCounts", "history_page"),
    "replayed_search": ("replay_history",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
