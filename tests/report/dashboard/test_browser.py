"""The dashboard in a real browser: headless Chromium, driven by Playwright, on the running command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.report.dashboard.support import (
    GEMM,
    GPU,
    HOSTILE,
    OTHER,
    WORKLOADS,
    fill,
    record_running,
    workload_path,
)
from tests.support import needs_browser

pytestmark = needs_browser

PAGES = (
    "/",
    "/workloads",
    workload_path(),
    "/searches",
    "/stale",
    "/predictions",
    "/plans",
    "/trials/62",
    "/compare",
)
ANSWER_MS = 30_000
only_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)  # clicks need no second database


@contextmanager
def serving(db: str, *arguments: str) -> Iterator[str]:
    """Run the command on a free port, and yield its URL; it must end without an error at Ctrl-C."""
    command = [sys.executable, "-m", "tunebench", "dashboard", "--db", db, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        try:
            assert address is not None, process.communicate()[1]
            yield address[0]
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.fixture(scope="module")
def url(database: str, plans: Path) -> Iterator[str]:
    with serving(database, "--plans", str(plans)) as address:
        yield address


@contextmanager
def opened(chromium: Any, url: str, **context: Any) -> Iterator[Any]:
    """Open a page in a new window; a message on its console, a dialog or a foreign request is an error."""
    with chromium.new_context(viewport={"width": 1200, "height": 800}, base_url=url, **context) as window:
        window.set_default_timeout(ANSWER_MS)
        faults: list[str] = []
        page = window.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(url) or faults.append(request.url))
        page.goto("/workloads")
        page.locator("text=Reading the database").wait_for(state="hidden")
        yield page
        assert faults == []


def first_cells(page: Any, column: int = 1) -> list[str]:
    cells = page.locator(f"table.rows tbody tr td:nth-child({column})").all_inner_texts()
    return [" ".join(cell.split()) for cell in cells]


@only_sqlite
def test_pages_fit_light_dark_and_narrow(chromium: Any, url: str) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        with opened(chromium, url, color_scheme=scheme) as page:
            for path in PAGES:
                page.set_viewport_size({"width": 1200, "height": 800})
                assert page.goto(path).status == 200, path
                assert page.locator("h1").count() == 1
                page.set_viewport_size({"width": 400, "height": 800})
                root = "document.documentElement"
                assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), path
            style = page.evaluate(
                "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
            )
            colours[scheme] = [sum(map(int, re.findall(r"\d+", text)[:3])) for text in style]
    assert colours["light"][0] > 700 > 200 > colours["light"][1]  # background and text
    assert colours["dark"][0] < 200 < 500 < colours["dark"][1]


def test_headers_sort_and_the_url_keeps_the_order(chromium: Any, url: str) -> None:
    with opened(chromium, url) as page:
        page.click("[data-sort=time]")
        page.wait_for_url("**/workloads?sort=time")
        assert first_cells(page, 3)[0] == "1.50"
        assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Best time")
        page.click("[data-sort=time]")
        page.wait_for_url("**order=desc")
        shown = first_cells(page)
        assert shown[0] == f"softmax:rows={WORKLOADS},cols=64,dtype=f32"
        page.click("a[rel=next]")
        page.wait_for_url("**after=**")
        assert len(first_cells(page)) == WORKLOADS + 3 - 50
        page.reload()
        assert not set(first_cells(page, 3)) & set(shown)
        page.click("a[rel=prev]")
        page.wait_for_url("**before=**")
        assert first_cells(page) == shown


def test_filters_and_drill_down_to_samples(chromium: Any, url: str) -> None:
    with opened(chromium, url) as page:
        page.click("nav >> text=Overview")
        page.click(f"[aria-label='gemm on {GPU.name}: 1 of 1 measured']")
        assert page.locator("select[name=device]").input_value() == GPU.key
        assert first_cells(page) == [GEMM]
        page.click(f"text={GEMM}")
        page.wait_for_url("**/workload?**")
        assert page.locator("figure").nth(1).locator("a").count() == 6
        page.select_option("select[name=kind]", "measured")
        page.fill("input[name=config]", "block=2")
        page.click("form button")
        page.wait_for_url("**kind=measured**")
        rows = page.locator("[data-part=trials] tbody tr")
        assert rows.count() == 1
        rows.locator("a").click()
        page.wait_for_url("**/trials/*")
        assert page.locator("figure").first.locator("circle").count() == 3
        assert page.locator("code.copy").inner_text() == "block=2,stages=3"
        page.click("text=its search >> nth=0")
        page.wait_for_url("**/searches/*")
        page.locator("figure a").first.click()  # a point of the chart
        page.wait_for_url("**/trials/*")


@only_sqlite
def test_keys_reach_everything(chromium: Any, url: str) -> None:
    with opened(chromium, url) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.locator(".skip").bounding_box()["x"] >= 0
        page.keyboard.press("/")
        page.keyboard.type("rows=3")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=rows%3D3**")
        names = first_cells(page)
        assert len(names) == 11  # 3, and 30 to 39
        for key in ("j", "j", "k", "j"):
            page.keyboard.press(key)
        assert page.locator("tr.at td:first-child").inner_text() == names[1]
        page.keyboard.press("Enter")
        page.wait_for_url("**/workload?**")
        assert page.locator("h1").inner_text() == names[1]
        page.goto("/workloads")
        page.keyboard.press("n")
        page.wait_for_url("**after=**")
        page.keyboard.press("p")
        page.wait_for_url("**before=**")
        page.focus("[data-sort=time]")
        page.keyboard.press("Enter")
        page.wait_for_url("**sort=time**")


@only_sqlite
def test_texts_of_the_database_are_only_text(chromium: Any, url: str) -> None:
    with opened(chromium, url) as page:
        page.goto(workload_path(f"recorded:kernel={HOSTILE}", OTHER))
        assert "<script>alert('x')</script>" in page.locator("h1").inner_text()
        page.goto(workload_path())
        page.click("[data-part=trials] a >> text=30.5")
        page.wait_for_url("**/trials/*")
        assert page.locator("img, main script").count() == 0


def test_running_search_is_updated_in_place(chromium: Any, tmp_path: Path) -> None:
    db = str(tmp_path / "live.db")
    fill(db)
    with serving(db) as url, opened(chromium, url) as page:
        page.goto("/searches")
        page.evaluate("window.loaded = 'once'")
        page.locator("[data-part=list] input").nth(1).check()
        page.focus("article a")
        record_running(db, block=9, median_us=2.5)
        page.locator("article b", has_text="2.5 µs").wait_for()
        assert page.locator("article progress").get_attribute("value") == "4"
        assert page.evaluate("window.loaded") == "once"
        assert page.evaluate("document.activeElement.matches('article a')")  # the focus stays
        assert page.locator("input:checked").count() == 1
        page.click("article a")
        panel = page.locator("svg.panel").first
        panel.focus()
        page.keyboard.press("+")
        record_running(db, block=10, median_us=2.4)
        page.locator("dd", has_text="2.4 µs").wait_for()
        assert page.locator("svg.panel.zoomed").count() == 2
        assert page.evaluate("document.activeElement.matches('svg.panel')")


@only_sqlite
def test_two_rows_are_selected_and_compared_by_keys(chromium: Any, url: str) -> None:
    with opened(chromium, url) as page:
        page.goto("/workloads?text=gemm")
        for key in ("j", "x", "j", "x"):
            page.keyboard.press(key)
        page.focus("text=Compare selected")
        page.keyboard.press("Enter")
        page.wait_for_url("**/compare?side=*side=*")
        assert page.locator("svg.panel").count() == 2
        assert page.locator(".plot path.curve1").count() == 2
        assert page.locator("tr.differs th").all_inner_texts() == ["block"]
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 400


@pytest.mark.slow
def test_tune_is_watched_until_it_is_killed(chromium: Any, tmp_path: Path) -> None:
    db = str(tmp_path / "tuned.db")
    fill(db)
    tune = [sys.executable, "-m", "tunebench", "tune", "softmax:rows=16,cols=16,dtype=f32"]
    tune += ["--device", "cpu", "--trials", "50", "--db", db]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with serving(db) as url, opened(chromium, url) as page, subprocess.Popen(tune, **quiet) as process:
        page.set_default_timeout(120_000)  # the tuner compiles
        page.goto("/searches")
        page.locator("article", has_text="softmax:rows=16,cols=16").locator("a").click()
        page.wait_for_url("**/searches/*")
        page.locator("figure circle").first.wait_for()
        assert page.locator(".kind.running").count() == 1
        process.kill()
        process.wait()
        page.locator(".kind.interrupted").wait_for()
