"""The option `--passed FILE` of pytest: leave out the tests in a file, and add those that pass.

Several sessions with the same file run each test once, whichever of them has what the test needs.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--passed",
        type=Path,
        help="file of tests that passed: those in it are left out, and those that pass are added",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests in the file."""
    passed = _read(config)
    if passed:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def _read(config: pytest.Config) -> frozenset[str]:
    """Return the tests that passed in an earlier session (see `--passed`)."""
    file: Path | None = config.getoption("--passed")
    if file is None or not file.exists():
        return frozenset()
    return frozenset(file.read_text(encoding="utf-8").splitlines())


_passed_here: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the tests that passed; with xdist, the controller gets the reports of all processes."""
    if report.when == "call" and report.passed:
        _passed_here.add(report.nodeid)
    elif report.failed:
        _passed_here.discard(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add the tests that passed to the file of `--passed`."""
    file: Path | None = session.config.getoption("--passed")
    if file is not None and not hasattr(session.config, "workerinput"):
        passed = sorted(_passed_here | _read(session.config))
        file.write_text("".join(f"{test}\n" for test in passed), encoding="utf-8")
