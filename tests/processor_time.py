"""The option `--processor-time N` of pytest: list the N files of tests that take the most processor time.

The time of a file includes that of the processes it started and waited for. Unlike the time on the clock, it
hardly depends on what else the machine runs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

_SECONDS = "processor_seconds"
"""Key of what a process of pytest-xdist hands to the controller."""

_seconds_of_file: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--processor-time", type=int, metavar="N", default=0, help="list the N files with most processor time"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add the processor time of a test, with its fixtures, to that of its file."""
    before_s = _processor_s()
    try:
        return (yield)
    finally:
        _seconds_of_file[item.nodeid.partition("::")[0]] += _processor_s() - before_s


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the times of a process of pytest-xdist to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_SECONDS] = dict(_seconds_of_file)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the times of a process of pytest-xdist that ended."""
    _seconds_of_file.update(getattr(node, "workeroutput", {}).get(_SECONDS, {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the files."""
    if count := config.getoption("--processor-time"):
        terminalreporter.section(f"processor time: {sum(_seconds_of_file.values()):.0f} s")
        for file, seconds in _seconds_of_file.most_common(count):
            terminalreporter.write_line(f"{seconds:7.1f} s {file}")
