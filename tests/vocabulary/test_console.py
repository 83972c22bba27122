"""Tables that break no word, and how much progress is shown."""

from __future__ import annotations

import pytest

from tunebench import _console
from tunebench._figure import duration
from tunebench.cli._output import note, phases, progress

CONFIG = "passes=2,chunk=256,row_block=4,exp=poly"


def shown(width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [("one", CONFIG, "measured, not faster than default"), ("two", None, "x")]
    return _console.as_text(
        lambda to: to.print(_console.table(">", "config", "how", rows=rows, title="T"))
    ).splitlines()


@pytest.mark.parametrize("width", [200, 80, 62, 40, 10])
def test_no_width_breaks_a_configuration(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(width, monkeypatch)
    assert sum(CONFIG in line for line in lines) == 1
    if width >= 62:
        assert all(len(line) <= width for line in lines)


def test_narrow_table_is_a_list_of_headers_and_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(40, monkeypatch) == [
        "T",
        "        one",
        f"config  {CONFIG}",
        "how     measured, not faster than default",
        "",
        "        two",
        "how     x",
    ]


def test_verbosity_decides_what_a_pipe_gets(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> str:
        to = _console.console(stderr=True)
        note("a note")
        with phases(to) as phase:
            phase("planning")
        with progress(to, "file") as watcher:
            for done in range(101):
                watcher(done, 100)
        return capsys.readouterr().err

    assert run() == "a note\n"
    with _console.verbosity(-1):
        assert run() == ""
    with _console.verbosity(1):
        lines = run().splitlines()
    assert lines[:3] == ["a note", "planning", "file 0 %"]
    assert lines[-1] == "file 100 %"
    assert len(lines) == 13
    assert run() == "a note\n"


def test_durations_have_readable_units() -> None:
    times_us = (0.04, 12.345, 9999.0, 13_465.0, -20_000.0, 12_000_000.0)
    assert [duration(us) for us in times_us] == [
        "0.04 us",
        "12.35 us",
        "9999 us",
        "13.46 ms",
        "-20 ms",
        "12 s",
    ]
