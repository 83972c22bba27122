"""Faults injected by `python -m tests.faults`: killed processes, power cuts, signals and failing kernels."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder from which child processes import `tests`."""
