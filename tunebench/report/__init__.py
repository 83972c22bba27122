"""Pages about stored results: search histories, and comparisons of two databases or devices."""

from tunebench.report.best_kernel import BestKernel, with_best_kernels
from tunebench.report.comparison import ComparedTime, DatabaseComparison, compare_databases
from tunebench.report.comparison_page import comparison_page
from tunebench.report.history import (
    ParameterEffect,
    SearchHistory,
    best_records,
    search_histories,
    search_history,
)
from tunebench.report.history_page import SuiteCounts, history_page
from tunebench.report.replay_history import replay_history

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
