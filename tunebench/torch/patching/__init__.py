"""Replacement of what a model calls: its modules (`model`, `modules`) or its function calls (`functions`)."""
