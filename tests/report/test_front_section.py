"""Reports and replays of other objectives than the time."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import measured
from tunebench.cache_file import read
from tunebench.cli import run as command
from tunebench.db import NewMeasurement, RunStart, TrialKey, open_store
from tunebench.db.browse import open_browser
from tunebench.db.goal_record import goal_records, stored_goal
from tunebench.db.record import Record, Verdict
from tunebench.device import described
from tunebench.errors import InputError, UnknownName
from tunebench.objective import Goal
from tunebench.outcome import Measured, Outcome, Result, WrongResult
from tunebench.report import history_page, search_histories
from tunebench.report.dashboard.catalogue import Catalogue
from tunebench.report.dashboard.page import Pages
from tunebench.report.front_section import front_chart
from tunebench.space import Config
from tunebench.tuning.replay import Space, replay

DEVICE = described()["h100-sxm"]
WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"
TIMES_AND_JOULES = ((1.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0))


def outcome(us: float, joules: float) -> Measured:
    made = measured(us)
    assert isinstance(made, Measured)
    return dataclasses.replace(made, metrics={"energy_j": joules})


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Return a cache file with the energy that an observer of Kernel Tuner adds."""
    entries = {
        str(b): {"b": b, "time": us, "times": [us], "nvml_energy": joules}
        for b, (us, joules) in enumerate(TIMES_AND_JOULES)
    }
    entries["9"] = {"b": 9, "time": "RuntimeFailedConfig"}
    path = tmp_path / "recorded.json"
    header = {"kernel_name": "k", "device_name": "x", "problem_size": 8, "tune_params_keys": ["b"]}
    path.write_text(json.dumps({**header, "cache": entries}))
    return path


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_a_replay_with_energy_has_a_front(sampler: str, recording: Path) -> None:
    goal = Goal.parse(objectives=["time_us", "nvml_energy"])
    done = replay(Space.of(read(recording)), trials=5, seed=0, sampler=sampler, goal=goal)
    assert [trial.config["b"] for trial in done.front] == [0, 1, 3]
    assert done.masked == 0
    limited = Goal.parse(objectives=["time_us"], require=["nvml_energy<=4"])
    best = replay(Space.of(read(recording)), trials=5, seed=0, sampler="random", goal=limited).front
    assert [trial.config["b"] for trial in best] == [1]


def test_a_replay_of_unknown_values_is_refused(recording: Path) -> None:
    goal = Goal.parse(objectives=["nvml_energi"])
    with pytest.raises(UnknownName, match="nvml_energy"):
        replay(Space.of(read(recording)), trials=5, seed=0, sampler="random", goal=goal)


def test_command_replays_and_draws_the_front(recording: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.html"
    arguments = [
        "replay",
        str(recording),
        "--trials",
        "5",
        "--metric",
        "J=nvml_energy*1",
        "--report",
        str(page),
    ]
    assert command([*arguments, "--objective", "time_us", "--objective", "J"]) == 0
    shown = capsys.readouterr().out
    assert "sampler tpe" in shown
    assert "front of seed 0: 3 of the measured configurations" in shown
    text = page.read_text()
    assert text.count('<path class="finalist"') == 3
    assert "J (less is better)" in text
    assert command([*arguments, "--objective", "J", "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert run["front"] == [{"config": "b=3", "values": {"J": 1.0}}]
    assert command([*arguments, "--objective", "J", "--stop-at-gap", "1.1"]) == 2
    assert "only objective" in capsys.readouterr().err


def key(tile: int) -> TrialKey:
    config = Config({"tile": tile})
    return TrialKey(device=DEVICE.key, workload=WORKLOAD, variant="softmax/v", revision="r", config=config)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    options = {
        "objectives": ["time_us", "energy_j"],
        "metrics": {"mJ": "energy_j*1e3", "f": "<function f 1>"},
    }
    with open_store(tmp_path / "a.db") as store:
        start = RunStart(device=DEVICE, workload=WORKLOAD, sampler="tpe", seed=0, options=options)
        run_id = store.begin_run(start)
        results = [
            NewMeasurement(key=key(n), result=Result(outcome=outcome(*v)))
            for n, v in enumerate(TIMES_AND_JOULES)
        ]
        store.record_together(results, run_id=run_id)
    return tmp_path / "a.db"


def test_reports_and_the_dashboard_show_the_front_of_the_newest_run(database: Path, tmp_path: Path) -> None:
    with open_store(database, read_only=True) as store:
        [history] = search_histories(store)
        page = history_page([history], database="a.db")
    assert [record.key.config["tile"] for record in history.front] == [0, 1, 3]
    assert "<h3>Objectives</h3><p>time_us, energy_j.</p>" in page
    assert "<th" in page
    assert ">mJ" in page or "energy_j" in page
    frame = history.to_pandas() if _has_pandas() else None
    assert frame is None or list(frame["metric.energy_j"]) == [5.0, 3.0, 4.0, 1.0]
    with open_store(database, read_only=True) as store:
        [other] = search_histories(store, goal=Goal.parse(objectives=["energy_j"]))
    assert [record.key.config["tile"] for record in other.front] == [3]


def test_the_dashboard_shows_the_front(database: Path) -> None:
    with open_browser(str(database)) as browser:
        catalogue = Catalogue(browser)
        catalogue.start()
        catalogue.wait()
        page = Pages(browser, catalogue).workload({"device": DEVICE.key, "workload": WORKLOAD})
        catalogue.close()
    assert "<h2>Objectives</h2><p>time_us, energy_j.</p>" in page
    assert page.count('<path class="finalist"') == 3


def _has_pandas() -> bool:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def test_show_prints_metrics(database: Path, capsys: Any) -> None:
    assert command(["show", WORKLOAD, "--db", str(database)]) == 0
    assert "energy_j 5" in capsys.readouterr().out
    out = database.parent / "page.html"
    arguments = ["report", "--db", str(database), "--out", str(out)]
    assert command([*arguments, "--objective", "energy_j", "--require", "time_us<=3"]) == 0
    assert "Required: time_us&lt;=3.0" in out.read_text()


def test_the_boundary_follows_the_direction_of_the_first_objective() -> None:
    outcomes: list[Outcome] = [outcome(us, joules) for us, joules in TIMES_AND_JOULES]
    less = Goal.parse(objectives=["time_us", "energy_j"])
    more = Goal.parse(objectives=["time_us:max", "energy_j"])
    paths = []
    for goal in (less, more):
        front = [outcomes[index] for index in goal.front(outcomes)]
        [path] = re.findall(r'class="best" d="([^"]*)"', front_chart(goal, outcomes, front))
        paths.append(path)
    assert re.fullmatch(r"M\S+ [\d.]+(H[\d.]+V[\d.]+){2}", paths[0])
    assert re.fullmatch(r"M\S+ [\d.]+", paths[1])  # the slowest has the least energy


def test_small_values_have_short_labels() -> None:
    goal = Goal.parse(objectives=["time_us", "energy_j"])
    outcomes: list[Outcome] = [outcome(us, 1e-8 * joules) for us, joules in TIMES_AND_JOULES]
    chart = front_chart(goal, outcomes, outcomes)
    assert "energy_j, in 1e-9 (less is better)" in chart
    assert re.findall(r'text-anchor="end">([^<]*)<', chart) == ["10", "20", "30", "40", "50"]


def record(number: int, tile: int, result: Outcome, **changes: Any) -> Record:
    fields: dict[str, Any] = {"purpose": "search", "bound_us": None, "stale": False, **changes}
    with_defaults = {"seed": None, "run_id": None, "recorded_at": None, "verdict": Verdict(), **fields}
    return Record(id=number, key=key(tile), result=Result(outcome=result), **with_defaults)


def test_only_what_lookup_may_return_is_in_the_front() -> None:
    goal = Goal.parse(objectives=["energy_j"])
    good = record(1, 0, outcome(2.0, 5.0))
    others = [
        record(2, 1, outcome(2.0, 1.0), stale=True),
        record(3, 2, outcome(2.0, 1.0), bound_us=3.0),
        record(4, 3, outcome(2.0, 1.0)),
        record(5, 3, WrongResult(reason="y[0] is 1")),
    ]
    assert goal_records([good, *others], goal) == [good]


def test_of_times_finalists_count_that_beat_an_allowed_default() -> None:
    default = record(1, 0, outcome(3.0, 1.0), purpose="finalist", verdict=Verdict(versus_default="itself"))
    tied = record(2, 1, outcome(2.9, 5.0), purpose="finalist", verdict=Verdict(versus_default="not faster"))
    search = record(3, 2, outcome(1.0, 0.5))
    records = [default, tied, search]
    assert goal_records(records, Goal.parse(require=["energy_j<=9"])) == [default]
    assert goal_records(records, Goal.parse(require=["energy_j>=2"])) == [tied]


def test_goals_of_other_versions_are_left_out() -> None:
    assert stored_goal(None) == Goal()
    assert stored_goal({"objectives": ["a b"]}) == Goal()
    with pytest.raises(InputError):
        Goal.parse(objectives=["a b"])
