"""The chart of a search: two panels, labels without overlaps, and the configuration that lookup returns."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.test_report import Outline, database
from tests.support import measured
from tunebench.db import open_store
from tunebench.db.record import Verdict
from tunebench.outcome import Aborted, CompileFailed, Predicted, Pruned, Result, Verification
from tunebench.report import SearchHistory, history_page, search_histories
from tunebench.report.label import Label, place_labels, spread
from tunebench.report.search_chart import Curve, Point, TimeLine, convergence_chart, near_range, search_chart

TIMES = st.floats(1e-3, 1e9)
LABELS = st.builds(
    Label,
    name=st.text(max_size=40),
    value=st.sampled_from(("", "12.12 ms")),
    y=st.one_of(st.just(100.0), st.floats(0.0, 320.0)),
    style=st.just("library"),
    rank=st.floats(-1e9, 1e9),
)


def point(trial: int, us: float, style: str = "measured", mark: str = "") -> Point:
    return Point(trial=trial, us=us, style=style, title=f"{trial}", mark=mark)


def panels(chart: str) -> list[str]:
    return re.findall(r"<figure>.*?</figure>", chart, re.DOTALL)


@given(st.lists(LABELS, max_size=30), st.floats(20.0, 400.0))
def test_no_two_labels_intersect_and_none_leaves_the_column(labels: list[Label], bottom: float) -> None:
    boxes = place_labels(labels, left=300.0, width=130.0, top=2.0, bottom=bottom)
    for upper, lower in pairwise(boxes):
        assert upper.bottom < lower.top
    assert all(box.top >= 2.0 - 1e-6 and box.bottom <= bottom + 1e-6 for box in boxes)
    assert len(boxes) == len(labels) or sum(label.height for label in labels) > bottom - 2.0
    assert [box.label.y for box in boxes] == sorted(box.label.y for box in boxes)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=12).map(sorted))
def test_labels_with_room_stay_at_their_lines(wanted: list[float]) -> None:
    if all(after - before >= 1.0 for before, after in pairwise(wanted)):
        assert spread(wanted, [1.0] * len(wanted), low=-1.0, high=101.0) == pytest.approx(wanted)
    centre = sum(wanted) / len(wanted)
    close = [centre] * len(wanted)
    centres = spread(close, [10.0] * len(wanted), low=-200.0, high=300.0)
    assert sum(centres) / len(centres) == pytest.approx(centre)  # half of them above, half below


def test_the_most_important_labels_are_kept() -> None:
    labels = [Label(name=name, value="", y=10.0, style="library") for name in "abcdef"]
    boxes = place_labels(labels, left=0.0, width=99.0, top=0.0, bottom=40.0)
    assert [box.name for box in boxes] == ["a", "b"]


@given(TIMES, st.lists(TIMES, max_size=20), st.lists(TIMES, max_size=5))
def test_near_range_contains_the_best_and_ends_near_it(
    best_us: float, times: list[float], lines: list[float]
) -> None:
    low, high = near_range(best_us, [max(us, best_us) for us in times], lines)
    assert low < best_us < high
    assert 0.4 * best_us < low
    assert 1.15 * best_us <= high <= 2.6 * best_us


def test_near_panel_is_not_flattened_by_a_bound_far_below() -> None:
    points = [point(1, 20e3), point(2, 15e3), point(3, 13e3, mark="served")]
    lines = [TimeLine(style="bound", label="lowest bound", us=4.0)]
    near, whole = panels(search_chart(points, lines, trials=3, name="Times"))
    low, high = map(float, re.findall(r'data-y="(\S+) (\S+) \S+ linear"', near)[0])
    assert 12e3 < low < 13e3 < high < 27e3
    assert "↓ lowest bound" in near
    assert 'class="bound"' not in near
    assert 'class="bound"' in whole
    assert 'class="focus"' in whole
    for panel in (near, whole):
        assert panel.count('class="served"') == 1
        assert panel.count("<tspan") == 2 * 2


@given(TIMES, TIMES)
def test_near_panel_always_shows_what_lookup_returns(fastest_us: float, served_us: float) -> None:
    near, _ = panels(
        search_chart([point(1, fastest_us), point(2, served_us, mark="served")], (), trials=2, name="")
    )
    assert near.count('class="served"') == 1
    assert "↑ served" not in near


def test_slower_trials_are_marked_at_the_edge_and_aborted_ones_are_no_best() -> None:
    points = [point(1, 1.0, "aborted"), *(point(trial, 10.0) for trial in range(2, 9)), point(9, 1e4)]
    near, whole = panels(search_chart(points, (), trials=9, name="Times"))
    assert "1 trials are slower" in near
    assert near.count('class="measured"') == 7
    assert (whole.count('class="measured"'), whole.count('class="aborted"')) == (8, 1)
    assert "best so far: 10 us" in near


def test_of_many_lines_the_whole_range_labels_those_outside_of_the_near_panel() -> None:
    lines = [
        TimeLine(style="library", label=name, us=us)
        for name, us in zip("abcdef", range(10, 70, 10), strict=True)
    ]
    near, whole = panels(search_chart([point(1, 10.0, mark="served")], lines, trials=1, name="Times"))
    labels = re.findall(r"<tspan x=\S+>(\w+)</tspan>", whole)
    assert labels == ["f", "e", "d", "c", "served"]
    assert "<title>f: 60 us</title>" in whole
    assert "↑ f" in near
    few = panels(search_chart([point(1, 10.0)], lines[:4], trials=1, name="Times"))[1]
    assert re.findall(r"<tspan x=\S+>(\w+)</tspan>", few) == ["d", "c", "b", "a"]


@pytest.mark.parametrize("lines", [(), (TimeLine(style="bound", label="bound", us=5.0),)])
def test_one_trial_has_a_chart_without_or_with_a_bound(lines: tuple[TimeLine, ...]) -> None:
    chart = search_chart([point(1, 5.0)], lines, trials=1, name="<b>")
    outline = Outline()
    outline.feed(chart)
    assert outline.open == []
    assert "<b>" not in chart
    assert search_chart([point(1, 0.0)], lines, trials=4, name="none") == ""
    assert search_chart([], lines, trials=4, name="none") == ""


def test_convergence_of_two_searches_is_labelled() -> None:
    curves = [
        Curve(style="curve0", label="A", steps=((1, 9.0), (5, 4.0))),
        Curve(style="curve1", label="B", steps=((2, 5.0),)),
    ]
    for panel in panels(convergence_chart(curves, trials=9, name="Convergence")):
        assert re.findall(r"<tspan x=\S+>(\w)</tspan>", panel) == ["B", "A"]  # the slower one is above
    assert convergence_chart([replace(curve, steps=()) for curve in curves], trials=9, name="") == ""


def history_with(tmp_path: Path, times: dict[int, float]) -> SearchHistory:
    with open_store(database(tmp_path / "a.db", times), read_only=True) as store:
        (history,) = search_histories(store)
    return history


def test_report_marks_what_lookup_returns(tmp_path: Path) -> None:
    history = history_with(tmp_path, {32: 8.0, 64: 2.0})
    text = history_page([history], database="a.db")
    assert "configuration that lookup returns" in text
    assert ">served</tspan>" in text
    default = replace(history.records[1], verdict=Verdict(versus_default="itself"))
    itself = replace(history, records=(default,))
    assert ">served, default</tspan>" in history_page([itself], database="a.db")
    recorded = replace(history, workload="recorded:kernel=x")
    assert ">served</tspan>" not in history_page([recorded], database="a.db")


@pytest.mark.parametrize(
    "outcome",
    [
        Pruned(bound_us=3.0, incumbent_us=2.0),
        CompileFailed(reason="no"),
        Aborted(samples_us=(9.0,), above_us=1.0),
        Predicted(predicted_us=12.0, verification=Verification(how="not verified", detail="none")),
        measured(3.0),
    ],
)
def test_a_report_of_any_one_outcome_is_well_formed(tmp_path: Path, outcome: object) -> None:
    history = history_with(tmp_path, {32: 8.0})
    result = Result(outcome=outcome)  # type: ignore[arg-type]
    only = replace(history, records=(replace(history.records[0], result=result),))
    outline = Outline()
    outline.feed(history_page([only], database="a.db"))
    assert outline.open == []
