"""Schedules side by side, their traces and their plots."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tunebench.errors import InputError
from tunebench.training.pipeline import ComparedSchedule, GivenStages, compare_schedules, named_schedules
from tunebench.training.pipeline.trace import write_trace
from tunebench.training.schedules import StageCosts
from tunebench.training.schedules.registry import NamedSchedule

STAGE = StageCosts(
    forward_us=100,
    input_gradient_us=100,
    weight_gradient_us=100,
    activation_bytes=1000,
    evict_bytes=800,
    send_bytes=10,
    static_bytes=500,
)
SOURCE = GivenStages.uniform(STAGE, 8, inside=lambda nbytes: nbytes / 100)


def test_all_schedules_are_compared_and_the_fastest_that_fits_is_best() -> None:
    comparison = compare_schedules(SOURCE, 16)
    assert {schedule.name for schedule in comparison.schedules} >= set(named_schedules())
    assert not comparison.skipped
    assert comparison.best is not None
    assert comparison.best.step_us == min(schedule.step_us for schedule in comparison.schedules)
    by_name = {schedule.name: schedule for schedule in comparison.schedules}
    plain, balanced = by_name["1f1b"], by_name["1f1b balanced"]
    assert balanced.peak_bytes < plain.peak_bytes
    assert balanced.evictions > 0 == plain.evictions
    assert balanced.hidden
    tight = compare_schedules(SOURCE, 16, names=["gpipe", "1f1b"], memory_bytes=balanced.peak_bytes)
    assert tight.best is not None
    assert tight.best.name == "1f1b balanced"
    assert compare_schedules(SOURCE, 16, memory_bytes=600, balanced=False).best is None
    assert f"{comparison.best.name} (best)" in comparison._repr_html_()
    assert comparison.to_columns()["step_us"] == [schedule.step_us for schedule in comparison.schedules]


def test_impossible_schedules_are_left_out_with_a_reason() -> None:
    source = replace(SOURCE, parts=SOURCE.parts[::2])
    comparison = compare_schedules(source, 16, names=["1f1b", "interleaved-1f1b"], balanced=False)
    assert [schedule.name for schedule in comparison.schedules] == ["1f1b"]
    assert [schedule.name for schedule in comparison.skipped] == ["interleaved-1f1b"]
    assert "8 parts cannot be divided among 16 stages" in comparison.skipped[0].reason
    with pytest.raises(InputError, match="no schedule is possible: interleaved-1f1b"):
        compare_schedules(source, 16, names=["interleaved-1f1b"])
    with pytest.raises(InputError, match="unknown schedule '2f2b'"):
        compare_schedules(source, 16, names=["2f2b"])


@pytest.mark.parametrize(
    ("parts", "microbatches", "message"),
    [
        (1, 16, "8 parts cannot be divided among 16 stages"),
        (2, 100_000, "100000 micro-batches on 16 stages: expected at most 1000000 forward passes"),
    ],
)
def test_impossible_schedules_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, parts: int, microbatches: int, message: str
) -> None:
    made: list[str] = []
    monkeypatch.setattr(NamedSchedule, "make", lambda schedule, *_: made.append(schedule.name))
    source = replace(SOURCE, parts=SOURCE.parts[:: 2 // parts])
    with pytest.raises(InputError, match=message):
        compare_schedules(source, microbatches, names=["interleaved-1f1b", "zbv", "v-half", "dualpipe-v"])
    assert not made


def balanced_1f1b() -> ComparedSchedule:
    return compare_schedules(SOURCE, 10, names=["1f1b"]).schedules[1]


def test_a_trace_holds_every_pass_and_both_sides_of_every_transfer(tmp_path: Path) -> None:
    simulation = balanced_1f1b().simulation
    write_trace(simulation, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    passes = [event for event in slices if event["tid"] == 0]
    assert len(passes) == 8 * 10 * 2
    assert len(slices) - len(passes) == 2 * len(simulation.transfers)
    for rank in range(8):
        mine = sorted((event["ts"], event["dur"]) for event in passes if event["pid"] == rank)
        assert all(start + takes <= later + 1e-6 for (start, takes), (later, _) in pairwise(mine))
        counters = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert max(counters) == simulation.peak_bytes[rank]
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(simulation.step_us)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "compute",
        "send",
        "receive",
    }
    with pytest.raises(InputError, match="cannot write the trace"):
        write_trace(simulation, tmp_path)


def test_a_page_has_a_title_on_each_bar_and_nothing_from_a_network(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    from tunebench.training.pipeline.plot import draw

    balanced = balanced_1f1b()
    path = tmp_path / "plot.html"
    draw(balanced.simulation, path, title="a <model>", limit_bytes=10_000)
    page = path.read_text()
    assert "a &lt;model&gt;" in page
    copies = sum(transfer.kind in ("EVICT", "LOAD") for transfer in balanced.simulation.transfers)
    assert len(re.findall(r"<title>rank \d", page)) == 8 * 10 * 2 + 2 * copies
    assert "rank 0: forward of micro-batch 0, stage 0, 0.000 to 0.100 ms" in page
    assert not re.search(r"<script|<link|<img|@import|url\(http|(src|href)=\"http", page)


@pytest.mark.slow
def test_images_have_the_format_of_their_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    from tunebench.training.pipeline.plot import draw

    simulation = compare_schedules(SOURCE, 4, names=["interleaved-1f1b"]).schedules[0].simulation
    draw(simulation, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    draw(simulation, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="suffix of a plot"):
        draw(simulation, tmp_path / "plot.txt")
