"""Pages of the dashboard: contents, order, filters, pages of lists, hostile texts and requests."""

from __future__ import annotations

import html
import re
import shlex
import sqlite3
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.cli.conftest import Run, run_refused  # noqa: F401 (a fixture)
from tests.db.support import load_golden
from tests.report.dashboard.conftest import Get
from tests.report.dashboard.support import GEMM, GPU, HOSTILE, OTHER, WORKLOADS, fill, request, workload_path
from tests.support import measured
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.db.browse import DeviceEntry, WorkloadEntry, open_browser
from tunebench.errors import DatabaseError
from tunebench.outcome import Result
from tunebench.report.dashboard.app import create_app
from tunebench.report.dashboard.catalogue import Catalogue, Line
from tunebench.report.dashboard.compared import Side, option_rows
from tunebench.report.dashboard.page import Pages
from tunebench.report.dashboard.prediction import prepare
from tunebench.report.dashboard.render import template_environment
from tunebench.space import Config

VOID = {"meta", "link", "br", "wbr", "path", "rect", "circle", "input"}
PATHS = ("/", "/workloads", "/searches", "/stale", "/predictions", "/plans", "/compare", workload_path())


class Table(HTMLParser):
    """Texts of the cells of the last table, and tags that were opened, which must match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.urls: set[str] = set()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        self.urls |= {value or "" for name, value in attrs if name in ("src", "href", "action")}
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tbody":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag == "td" and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            while self.open.pop() != tag:
                assert self.open, f"</{tag}> without its start"

    def handle_data(self, data: str) -> None:
        if "td" in self.open and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def rows(page: str) -> list[list[str]]:
    table = Table()
    table.feed(page)
    return [[" ".join(cell.split()) for cell in row] for row in table.rows]


def link(page: str, rel: str) -> str:
    match = re.search(rf'<a href="([^"]*)" rel="{rel}">', page)
    return html.unescape(match[1]) if match else ""


@pytest.mark.parametrize("path", PATHS)
def test_pages_are_well_formed_and_load_nothing_from_elsewhere(get: Get, path: str) -> None:
    answer = get(path)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    table = Table()
    table.feed(answer.text)
    assert table.open == []
    assert not {name for name in table.attributes if name.startswith("on") or name == "style"}
    assert not {url for url in table.urls if not url.startswith(("/", "#"))}


def test_overview_counts_and_covers(get: Get) -> None:
    page = get("/").text
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts["workloads"] == str(WORKLOADS + 2)
    assert (facts["devices"], facts["stale trials"], facts["searches now"]) == ("2", "1", "1")
    assert f"gemm on {GPU.name}: 1 of 1 measured" in page
    assert f"softmax on {GPU.name}: {WORKLOADS} of {WORKLOADS} measured" in page
    assert f"softmax on {OTHER.name}: none" in page
    assert f"recorded on {OTHER.name}: 0 of 1 measured, 1 imported" in page
    imported = page[page.index("Imported tuning spaces") : page.index("Newest searches")]
    assert "7.000" in imported
    assert "Best time, µs" in imported


def test_workloads_are_ordered_and_divided_into_pages(get: Get) -> None:
    def times(page: str) -> list[float]:
        return [float(row[2]) for row in rows(page)]

    first = get("/workloads?sort=time&operator=softmax").text
    second = get(link(first, "next")).text
    assert times(first) + times(second) == sorted(times(first) + times(second))
    assert len(times(first)) == 50
    assert len(times(second)) == WORKLOADS - 50
    assert link(second, "next") == ""
    assert times(get(link(second, "prev")).text) == times(first)
    down = get("/workloads?sort=time&order=desc&operator=softmax").text
    assert times(down) == sorted(times(down), reverse=True)
    assert f"50 of {WORKLOADS} rows" in down


def test_workload_has_best_bound_and_ratios(get: Get) -> None:
    (row,) = rows(get(f"/workloads?text=gemm&device={GPU.key}").text)
    assert row[:2] == [GEMM, f"{GPU.name} {GPU.architecture}"]
    assert row[2:9] == ["10.20", "measured", "0.500", "20.40x", "1.50x", "0.80x", "6"]
    assert [row[1] for row in rows(get("/workloads?text=gemm&how=measured").text)] == [
        f"{OTHER.name} {OTHER.architecture}",
        f"{GPU.name} {GPU.architecture}",
    ]
    assert rows(get("/workloads?how=predicted").text) == [["No workload with these filters."]]


def test_trials_are_ordered_filtered_and_lead_to_samples(get: Get) -> None:
    path = workload_path()
    page = get(path).text
    shown = rows(page)
    assert [row[0] for row in shown] == ["10.20", "19.00", "20.50", "30.50", "-", "-"]
    assert [row[1] for row in shown[:3]] == ["measured finalist", "measured", "measured stale"]
    assert [row[0] for row in rows(get(f"{path}&kind=aborted").text)] == ["-"]
    assert [row[0] for row in rows(get(f"{path}&source=stale").text)] == ["20.50"]
    assert [row[0] for row in rows(get(f"{path}&config=BLOCK%3D2").text)] == ["10.20"]
    assert [row[0] for row in rows(get(f"{path}&config=%25").text)] == ["No trial with these filters."]
    by_config = [row[2] for row in rows(get(f"{path}&sort=config&order=desc").text)]
    assert by_config == sorted(by_config, reverse=True)
    next_page = get(f"{path}&after=[20.5,{2**40}]").text
    assert [row[0] for row in rows(next_page)][:1] == ["30.50"]
    trial = re.search(r'href="(/trials/\d+)">10.20<', page)
    assert trial is not None
    trial_page = get(trial[1]).text
    assert trial_page.count('class="measured"') == 3 + 4  # samples of the finalist and of the search
    assert "faster than the default" in trial_page
    assert "ratio 0.8, low 0.7, high 0.9" in trial_page


def test_searches_show_progress(get: Get) -> None:
    page = get("/searches").text
    assert '<progress max="10" value="3"' in page
    assert "3 of 10 trials" in page
    assert "1 in work" in page
    assert "13 µs" in page
    assert next(row[2] for row in rows(page)) == "running"
    assert len(rows(page)) == 25
    older = get(link(page, "next")).text
    assert len(rows(older)) == 25
    assert rows(older) != rows(page)
    search = re.search(r'href="(/searches/\w+)"', page)
    assert search is not None
    assert "Newest measurements" in get(search[1]).text
    assert {row[2] for row in rows(get("/searches?state=finished").text)} == {"finished"}
    (failed,) = rows(get("/searches?state=failed").text)
    assert failed[2].startswith("failed <script>")
    assert failed[4] == "-"
    assert rows(get("/searches?state=interrupted").text) == [["None."]]


def test_stale_trials_and_predictions(get: Get) -> None:
    (stale,) = rows(get("/stale").text)
    assert 'aria-sort="descending"' in get("/stale").text
    assert 'aria-sort="ascending"' in get("/stale?sort=workload").text
    assert stale[:4] == ["1 of 6", GEMM, f"{GPU.name} {GPU.architecture}", "gemm/a"]
    tune = f"tunebench tune --workload {GEMM} --variant gemm/a --device {GPU.name} --db "
    assert stale[5].startswith(tune)
    page = get("/predictions").text
    by_method = {row[2]: row for row in rows(page)}
    assert by_method["library"][4:6] == ["8.16", "cublas"]
    assert by_method["offline"][3:5] == ["12.000", "13.00"]
    assert page.count('<circle class="measured"') == 1
    assert len(rows(get("/predictions?method=offline").text)) == 1


def side(path: str, name: str) -> str:
    """Return the value of the box that selects a row for a comparison."""
    return quote(html.unescape(re.findall(rf'value="([^"]*)" aria-label="Compare {name}', path)[0]))


def test_two_devices_are_compared(get: Get) -> None:
    sides = re.findall(r'value="(workload [^"]*)"', get("/workloads?text=gemm").text)
    assert len(sides) == 2
    path = "/compare?" + "&".join(f"side={quote(html.unescape(text))}" for text in sides)
    page = get(path).text
    facts = dict(re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', page))
    values = {name: re.findall(r">([^<>]+)<", text) for name, text in facts.items()}
    assert [value for value in values["best time, µs"] if value.strip()] == ["13.00", "10.20"]
    assert values["speedup over the other (higher is better)"] == ["0.78x", "1.27x"]
    assert values["best / lowest bound"] == ["26.00x", "20.40x"]
    assert values["measurements to within 5 % of the fastest of both"] == ["never", "2"]
    assert values["block"] == ["7", "2"]
    assert values["stages"] == ["3", "3"]
    assert "1 of 3 differ" in page
    assert len(re.findall(r'<path class="curve[01]"', page)) == 4  # two curves in two panels
    outcomes = dict(re.findall(r'<span class="kind (\w+)">[^<]*</span></th><td>(\d+)</td>', page))
    assert outcomes == {"aborted": "0", "compile_failed": "0", "measured": "3", "predicted": "1"}


def test_two_searches_are_compared_and_hostile_texts_are_escaped(get: Get) -> None:
    failed = side(get("/searches?state=failed").text, "softmax")
    hostile = quote(f"workload {OTHER.key} recorded:kernel={HOSTILE}")
    page = get(f"/compare?side={failed}&side={hostile}").text
    assert "The workloads differ" in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;" in page
    compared = get(f"/compare?side={failed}&side={failed}").text
    assert "no configuration has a time" in compared
    assert "No measurement with a time" in compared


def test_options_in_which_searches_differ_are_shown() -> None:
    side = Side(
        kind="search",
        href="/searches/1",
        workload=GEMM,
        device=None,
        state="finished",
        best_us=None,
        ci_us=None,
        bound_us=None,
        bound_ratio=None,
        failed=0,
        points=(),
        options={"cache": "cold", "seed": 1, "variants": ["a", "b"], "warm_start": True},
    )
    changed_side = replace(side, options={"cache": "warm", "seed": 2, "variants": [], "warm_start": True})
    assert option_rows(side, changed_side) == [("cache", "cold", "warm"), ("variants", "a, b", "-")]
    assert option_rows(side, replace(side, options=None)) == []  # of an earlier version


def test_plans_of_a_folder(get: Get) -> None:
    page = get("/plans").text
    assert page.index("damaged.toml") < page.index("cannot be read") < page.index("good.toml")
    assert "other.toml" not in page
    assert "gpt&lt;b&gt;" in page
    assert "--tensor-model-parallel-size=2" in page
    assert "1.500" in page
    assert ">Step, s</a>" in page


def test_texts_of_the_database_are_escaped(get: Get) -> None:
    hostile = workload_path(f"recorded:kernel={HOSTILE}", OTHER)
    trial = re.findall(r'href="(/trials/\d+)"', get(f"{workload_path()}&kind=compile_failed").text)[-1]
    for path in (*PATHS, hostile, trial):
        text = get(path).text
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "\u202e" not in text  # would reverse the text after it
    assert "&lt;script&gt;" in get(hostile).text
    assert "&lt;script&gt;" in get(trial).text


def test_commands_to_copy_are_quoted_for_a_shell() -> None:
    device = DeviceEntry(
        id=1, key="k", kind="cuda", architecture="sm_90", product="h100-sxm", sm_count=132, descriptor={}
    )
    workload = f"$(x);{HOSTILE}\n'"
    line = Line(device=device, entry=WorkloadEntry(device_id=1, workload=workload), read=True)
    shown = template_environment().from_string("{{ text }}").render(text=line.tune_command("a b.db"))
    assert "<" not in shown
    words = shlex.split(html.unescape(shown))
    assert words[:2] == ["tunebench", "tune"]
    assert "a b.db" in words
    assert any("$(x);<script>" in word for word in words)


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/nowhere", 404, "no page"),
        ("/trials/123456", 404, "no trial"),
        ("/trials/99999999999999999999", 404, "no trial"),
        ("/trials/x", 404, "no trial"),
        ("/searches/x", 404, "no search"),
        ("/workload?device=x&workload=y", 404, "no device"),
        ("/workloads?sort=x", 400, "sort must be one of"),
        ("/workloads?how=x", 400, "how must be one of"),
        ("/workloads?after=x", 400, "JSON list"),
        ("/workloads?after=[[1]]", 400, "JSON list"),
        ("/workloads?after=[1]", 400, "another order"),
        ("/workloads?sort=time&after=[0,null]", 400, "JSON list"),
        (f"/workloads?text={'x' * 501}", 400, "at most 500"),
        (f"{workload_path()}&after=[1]", 400, "another list"),
        (f'{workload_path()}&after=["x",1]', 400, "another order"),
        ("/searches?after=[1]", 400, "another list"),
        ("/compare?side=x&side=y", 400, "side must be"),
        ("/compare?side=search+x&side=search+y", 404, "no search 'x'"),
        (f"/compare?side=workload+x+y&side=search+{'y' * 2000}", 404, "no device 'x'"),
        ("/compare?side=x", 200, "1 are selected. Select two"),
    ],
)
def test_wrong_paths_are_explained(get: Get, path: str, status: int, reason: str) -> None:
    answer = get(path)
    assert answer.status == status
    assert reason in html.unescape(answer.text)


def test_other_sites_and_methods_are_refused(get: Get) -> None:
    for host in ("127.0.0.1", "localhost:1", "[::1]:8642", "192.0.2.7:8642", "Tuner.example:80"):
        assert get("/", host=host).status == 200
    for host in ("evil.example", "127.0.0.1.evil.example:8642", "", "localhost.evil"):
        assert get("/", host=host).status == 421
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get("/", method=method).status == 405
    assert get("/", method="HEAD").status == 200


def test_headers_forbid_scripts_and_frames_of_others(get: Get) -> None:
    for path in ("/", "/nowhere", "/dashboard.js", "/page.css"):
        headers = get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_unchanged_pages_are_not_sent_again(get: Get) -> None:
    tag = get("/page.css").headers["etag"]
    second = get("/page.css", headers={"if-none-match": tag})
    assert (second.status, second.text) == (304, "")


@pytest.mark.slow
def test_catalogue_follows_the_database(tmp_path: Path) -> None:
    db = str(tmp_path / "changing.db")
    fill(db)
    with open_browser(db) as browser, open_store(db) as store:
        catalogue = Catalogue(browser)
        catalogue.read_changes()
        assert not catalogue.snapshot(wait_s=0).unread
        before = catalogue.snapshot(wait_s=0).lines
        catalogue.read_changes()
        assert catalogue.snapshot(wait_s=0).lines == before
        run = store.begin_run(
            RunStart(device=OTHER, workload="softmax:rows=9,cols=9", sampler="bound", seed=0)
        )
        config = Config({"block": 1, "stages": 3})
        key = TrialKey(
            device=OTHER.key,
            workload="softmax:rows=9,cols=9",
            variant="softmax/a",
            revision="r1",
            config=config,
        )
        store.record(key, Result(outcome=measured(3.0)), run_id=run)
        catalogue.read_changes()
        (new,) = (line for line in catalogue.snapshot(wait_s=0).lines if line not in before)
        assert new.best is not None
        assert new.best.time_us == 3.0
        store.recheck(OTHER.key, key.workload, key.variant, lambda config: "r2")
        catalogue.read_changes()
        line = catalogue.snapshot(wait_s=0).line((new.device.id, key.workload))
        assert line is not None
        assert line.best is not None
        assert line.best.stale


def test_replaced_file_is_read_anew(tmp_path: Path) -> None:
    db, replacement = tmp_path / "a.db", tmp_path / "b.db"
    fill(str(db))
    with open_store(replacement) as store:
        store.begin_run(RunStart(device=OTHER, workload=GEMM, sampler="bound", seed=0))
    with open_browser(str(db)) as browser:
        catalogue = Catalogue(browser)
        catalogue.read_changes()
        assert catalogue.snapshot(wait_s=0).workloads == WORKLOADS + 2
        for suffix in ("-wal", "-shm"):
            db.with_name(f"a.db{suffix}").unlink(missing_ok=True)
        replacement.rename(db)
        catalogue.read_changes()
        assert catalogue.snapshot(wait_s=0).workloads == 0
        db.unlink()
        with pytest.raises(DatabaseError, match="cannot be opened"):
            catalogue.read_changes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "path", "status"),
    [
        ("UPDATE run SET versions = '[1]'", "/searches", 200),
        ("UPDATE measurement SET comparison = '{\"libraries\": [3]}'", "/workloads", 200),
        ("UPDATE measurement SET median_us = 'x', samples_us = '{}'", "/workloads?sort=time", 503),
        ("UPDATE trial SET device_id = 77 WHERE id = 1", "/trials/1", 404),
        ("UPDATE measurement SET recorded_at = 'never'", "/", 503),
        ("UPDATE device SET descriptor = '[]'", "/predictions", 200),
    ],
)
def test_damaged_records_end_no_page(tmp_path: Path, damage: str, path: str, status: int) -> None:
    db = tmp_path / "damaged.db"
    fill(str(db))
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(damage)
        connection.commit()
    with open_browser(str(db)) as browser:
        catalogue = Catalogue(browser, prepare)
        catalogue.start()
        catalogue.wait()
        app = create_app(Pages(browser, catalogue))
        assert request(app, path).status == status
        assert request(app, "/plans").status == 200
        catalogue.close()


def test_claimed_trial_has_its_configuration(get: Get) -> None:
    page = get(f"{workload_path(on=OTHER)}&kind=claimed").text
    (row,) = rows(page)
    assert row[:3] == ["-", "claimed", "block=8,stages=3"]
    trial = re.findall(r'href="(/trials/\d+)"', page)[-1]
    assert "has claimed this trial" in get(trial).text


def test_database_is_only_read(database: str) -> None:
    with open_browser(database) as browser, pytest.raises(DatabaseError), browser.writing() as connection:
        connection.exec_driver_sql("DELETE FROM measurement")


def test_command_refuses_what_it_cannot_show(tmp_path: Path, run_refused: Run) -> None:  # noqa: F811
    old, empty = tmp_path / "old.db", tmp_path / "empty.db"
    load_golden("0005", old)
    before = old.read_bytes()
    assert "tunebench db upgrade" in run_refused("dashboard", "--db", str(old), exit_code=4)
    assert old.read_bytes() == before
    sqlite3.connect(empty).close()
    assert "does not exist" in run_refused("dashboard", "--db", str(tmp_path / "none.db"), exit_code=4)
    fill(str(tmp_path / "a.db"))
    command = ("dashboard", "--db", str(tmp_path / "a.db"))
    assert "must be a folder" in run_refused(*command, "--plans", str(tmp_path / "nothing"))
    assert "cannot listen on 192.0.2.1" in run_refused(*command, "--host", "192.0.2.1")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, run_refused: Run) -> None:  # noqa: F811
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    assert "uvicorn is not installed; run: " in run_refused("dashboard", exit_code=6)
