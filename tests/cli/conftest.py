"""Fixtures that run a command and return its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tunebench import cli

Run = Callable[..., Any]


@pytest.fixture
def run_text(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed and return what it prints."""

    def run(*arguments: str) -> str:
        assert cli.run(arguments) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def run_json(run_text: Run) -> Run:
    """Run a command with `--json` and return its value."""
    return lambda *arguments: json.loads(run_text(*arguments, "--json"))


@pytest.fixture
def run_refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must fail with one line of error and no output, and return the line."""

    def run(*arguments: str, exit_code: int = 2) -> str:
        capsys.readouterr()
        assert cli.run(arguments) == exit_code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run
