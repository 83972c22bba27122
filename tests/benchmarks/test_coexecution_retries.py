"""Saved results of benchmarks of co-execution: runs that failed are run again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

from benchmarks import coexecution_divergence, coexecution_memory
from benchmarks.coexecution import engine_revision, save

ERROR = {"error": "exit status 1: No module named 'sklearn'"}


def test_failed_memory_run_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "memory.jsonl"
    save(out, {"program": "vae", "mode": "eager", "steps": 4, "revision": engine_revision(), **ERROR})
    assert coexecution_memory._saved(out) == {}


def test_failed_window_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result: dict[str, Any] = {"differences": [], "beyond tolerance": [], "versions": [], "reached": []}
    monkeypatch.setattr(coexecution_divergence, "run_apart", lambda *arguments: result)
    out = tmp_path / "divergence.jsonl"
    save(out, {"program": "vae", "first": 0, "revision": engine_revision(), **ERROR})
    coexecution_divergence._run_missing("vae", argparse.Namespace(out=out, timeout_s=1.0))
    assert "error" not in coexecution_divergence._saved(out)["vae", 0]
