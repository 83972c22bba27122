"""Pages of reports in headless Chromium, opened as files."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_report import HOSTILE, WORKLOAD, database
from tests.support import needs_browser
from tunebench._console import printable
from tunebench.db import open_store
from tunebench.report import (
    compare_databases,
    comparison_page,
    history_page,
    search_histories,
    with_best_kernels,
)

pytestmark = needs_browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    first = database(folder / "a.db", {32: 12000.0, 64: 900.0, 128: 1500.0})
    database(folder / "a.db", {32: 8.0, 64: 2.0}, workload="softmax:rows=32,cols=16,dtype=f32")
    second = database(folder / "b.db", {32: 12000.0, 64: 1900.0})
    with open_store(first, read_only=True) as a, open_store(second, read_only=True) as b:
        report = history_page(with_best_kernels(search_histories(a)), database="a.db")
        compared = comparison_page(compare_databases(a, b))
    paths = {"report": folder / "report.html", "comparison": folder / "comparison.html"}
    paths["report"].write_text(report, encoding="utf-8")
    paths["comparison"].write_text(compared, encoding="utf-8")
    return paths


def opened(chromium: Any, path: Path, faults: list[str], **context: Any) -> Any:
    page = chromium.new_context(**context).new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    page.on(
        "request", lambda request: request.url.startswith(("file:", "data:")) or faults.append(request.url)
    )
    page.goto(path.as_uri())
    return page


def test_pages_load_nothing_and_fit_light_dark_and_narrow(chromium: Any, pages: dict[str, Path]) -> None:
    faults: list[str] = []
    shades = {}
    for path in pages.values():
        for scheme in ("light", "dark"):
            page = opened(chromium, path, faults, color_scheme=scheme, viewport={"width": 400, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == 400
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            shades[scheme] = sum(map(int, re.findall(r"\d+", colour)[:3]))
    assert faults == []
    assert shades["light"] > 700 > 200 > shades["dark"]


def test_labels_of_charts_do_not_overlap_as_drawn(chromium: Any, pages: dict[str, Path]) -> None:
    faults: list[str] = []
    for width in (400, 1100):
        page = opened(chromium, pages["report"], faults, viewport={"width": width, "height": 800})
        boxes = page.locator("svg.panel").evaluate_all(
            "panels => panels.map(panel => [...panel.querySelectorAll('.label')].map(label => {"
            "const box = label.getBoundingClientRect(), whole = panel.getBoundingClientRect();"
            "return [box.top, box.bottom, whole.right - box.right]}))"
        )
        assert len(boxes[0]) == 3  # served, default and bound
        for panel in boxes:
            assert all(room >= -1 for _, _, room in panel)
            assert all(upper[1] <= lower[0] + 1 for upper, lower in pairwise(sorted(panel)))
    assert faults == []


def test_panels_zoom_by_dragging_and_by_keys(chromium: Any, pages: dict[str, Path]) -> None:
    faults: list[str] = []
    page = opened(chromium, pages["report"], faults, viewport={"width": 1100, "height": 900})
    near, whole = page.locator("svg.panel").first, page.locator("svg.panel").nth(1)
    ticks, point = near.locator(".ticks"), near.locator("circle.measured").first
    before, transform = ticks.inner_html(), point.get_attribute("transform")
    near.scroll_into_view_if_needed()
    box = near.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.2 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.8 * box["height"], steps=3)
    page.mouse.up()
    assert ticks.inner_html() != before
    assert point.get_attribute("transform") != transform
    assert whole.evaluate("panel => panel.classList.contains('zoomed')")  # shows the same trials
    assert page.locator(".selection").count() == 0
    near.dblclick()
    assert (ticks.inner_html(), point.get_attribute("transform")) == (before, transform)
    whole.focus()
    for key in ("+", "ArrowDown", "-"):
        page.keyboard.press(key)
        assert whole.evaluate("panel => panel.classList.contains('zoomed')")
    page.keyboard.press("0")
    assert page.locator(".zoomed").count() == 0
    assert faults == []


def test_headers_sort_by_value_with_the_keyboard(chromium: Any, pages: dict[str, Path]) -> None:
    faults: list[str] = []
    page = opened(chromium, pages["report"], faults)
    section = page.locator("section", has_text=WORKLOAD).locator("table", has_text="lower bound").first
    times = section.locator("tbody td:first-child")
    header = section.get_by_role("button", name="time")
    assert times.all_inner_texts() == ["0.900", "1.500", "12.000"]
    header.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Space")  # descending
    assert times.all_inner_texts() == ["12.000", "1.500", "0.900"]
    assert faults == []


def test_links_lead_to_sections_and_hostile_text_stays_text(chromium: Any, pages: dict[str, Path]) -> None:
    faults: list[str] = []
    page = opened(chromium, pages["report"], faults)
    page.get_by_role("link", name=WORKLOAD).click()
    assert page.url.endswith("#history0")
    page.locator("summary").first.click()
    assert page.locator("table", has_text=printable(HOSTILE)).count() >= 1
    page = opened(chromium, pages["comparison"], faults)
    assert page.locator("span.regression").inner_text() == "regression"
    assert faults == []
