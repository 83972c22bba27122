"""Pages about stored results: search histories and comparisons of two databases."""

from tunebench.report.comparison import ComparedTime, DatabaseComparison, compare_databases
from tunebench.report.history import ParameterEffect, SearchHistory, best_records, search_histories
from tunebench.report.page import comparison_page, history_page

__all__ = [
    "ComparedTime",
    "DatabaseComparison",
    "ParameterEffect",
    "SearchHistory",
    "best_records",
    "compare_databases",
    "comparison_page",
    "history_page",
    "search_histories",
]
