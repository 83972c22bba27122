"""Replacement of parts of a model: its modules (`model`, `modules`) or its function calls (`functions`)."""
