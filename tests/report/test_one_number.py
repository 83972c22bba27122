"""One search, one number: every command, page and file names the same best, times, speedups and gap."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import VERIFIED, InstantExecutor, measured, needs_nvrtc, record_outcome
from tests.tuning.test_replay import recording
from tunebench import cli, lookup, tune, tuning
from tunebench import device as devices
from tunebench._figure import duration, ratio
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.executor.judged_call import JudgedCaller
from tunebench.kernels import load_file
from tunebench.kernels import variant as find_variant
from tunebench.measure import processor
from tunebench.measure.baseline import Baseline
from tunebench.measure.processor import ProcessorRates
from tunebench.measure.timing import Protocol
from tunebench.outcome import CacheState, Outcome, Predicted
from tunebench.report import history_page, replay_history, search_history, with_best_kernels
from tunebench.space import Config, Parameter, Space
from tunebench.task import Task
from tunebench.tuning import Plan, Report
from tunebench.tuning.choice import choose_config
from tunebench.tuning.replay import Space as RecordedReplay
from tunebench.tuning.replay import replay
from tunebench.workloads import parse

BOUNDED = str(Path(__file__).parents[1] / "data" / "bounded_variant.py")
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"
OFFLINE = "softmax:rows=512,cols=1024,dtype=f32"
ABSENT = "h100-sxm"
OTHER = devices.described()["a100-80-sxm"]
DRIFT = (1.0, 1.31, 0.97, 1.12)
"""Factors of the rounds on a busy machine: no median of one round is that of another."""

XGEMM: dict[str, tuple[int, ...]] = {
    "MWG": (64, 128),
    "NWG": (64, 128),
    "KWG": (32,),
    "MDIMC": (16,),
    "NDIMC": (16,),
    "MDIMA": (16,),
    "NDIMB": (16,),
    "KWI": (2,),
    "VWM": (2,),
    "VWN": (1, 2),
    "SA": (1,),
    "SB": (1,),
}
"""Parameters of a recorded kernel with a cost model."""

Tune = Callable[..., Report]


class Machine(InstantExecutor[Task]):
    """Executor with made-up times, which drift from round to round.

    Args:
        load: Factor of all times.
        stops_at: Number of the task at which the user presses Ctrl-C; None for never.
    """

    def __init__(self, load: float = 1.0, stops_at: int | None = None) -> None:
        super().__init__(self._answer)
        self._load, self._stops_at = load, stops_at
        self._asked = 0

    def _answer(self, task: Task) -> Outcome:
        self._asked += 1
        if self._asked == self._stops_at:
            raise KeyboardInterrupt
        if task.predicted_us is not None and task.device.kind == "gpu":
            low_us, high_us = task.interval_us or (None, None)
            return Predicted(
                predicted_us=task.predicted_us, verification=VERIFIED, low_us=low_us, high_us=high_us
            )
        turn = sum(earlier.thorough and earlier.config == task.config for earlier in self.tasks)
        us = 130.0 + 1.5 * abs(int(task.config["copy"]) - 17)  # the bounds are 10 to 49 us
        us *= self._load * (DRIFT[turn % len(DRIFT)] if task.thorough else 0.91)
        return measured(us, us * 1.003, us * 1.009, cache=CACHE[0])


CACHE: list[CacheState] = ["cold"]
"""Cache state of the made-up times."""


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "a.db")


@pytest.fixture
def tunes(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Tune with made-up times, with the machine and the changes of the plan that are given."""
    load_file(BOUNDED)
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(processor, "busy_elsewhere", lambda: 0.0)
    rates = ProcessorRates(gb_s=40.0, gflop_s=200.0, busy=False)
    monkeypatch.setattr(processor, "measure_rates", lambda device: rates)  # without them there is no gap
    rounds = iter(range(10_000))

    def time_baselines(*_: object) -> list[Baseline]:
        drift = DRIFT[::-1][next(rounds) % len(DRIFT)]
        times = {"numpy": 90.0, "torch": 55.0}
        return [Baseline.of(name, [us * drift, us * drift * 1.01]) for name, us in times.items()]

    monkeypatch.setattr(JudgedCaller, "call", time_baselines)
    monkeypatch.setattr("tunebench.tuning.tunable.unavailable", lambda language: None)

    def run(machine: Machine | None = None, *, on: str = "cpu", **changes: object) -> Report:
        monkeypatch.setattr(tuning, "start_workers", lambda *start: machine or Machine())
        workload = OFFLINE if on != "cpu" else WORKLOAD
        variants = () if on != "cpu" else ("bounded",)
        plan = Plan(**{"variants": variants, "trials": 12, "finalists": 2, "sampler": "random", **changes})
        return tune(workload, device=on, db=database, plan=plan)

    return run


@dataclass(frozen=True)
class Commands:
    """Runs commands that must succeed."""

    capsys: pytest.CaptureFixture[str]

    def text(self, *arguments: str) -> str:
        """Return what a command prints."""
        self.capsys.readouterr()
        assert cli.run(arguments) == 0, self.capsys.readouterr().err
        return self.capsys.readouterr().out

    def json(self, *arguments: str) -> Any:
        """Return the value of a command."""
        return json.loads(self.text(*arguments, "--json"))


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


# -- what each command says ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Said:
    """Figures of a best configuration, at full precision, from the report of `tune`."""

    report: Report

    @property
    def words(self) -> dict[str, str]:
        """The figures as commands and pages print them, by name."""
        report = self.report
        assert report.median_us is not None
        words = {"time": duration(report.median_us), "bound": ratio(report.median_us / report.bound_us)}
        if report.gap is not None:
            words["gap"] = ratio(report.gap)
        if report.is_default:
            words["default"] = "1.00x"
        elif report.versus.get("default"):
            words["default"] = f"{ratio(report.versus['default'].ratio)}x"
        elif report.default_us is not None:  # without common rounds
            words["default"] = f"{ratio(report.default_us / report.median_us)}x"
        for baseline in report.baselines:
            speedup = report.versus_baselines[baseline.name].ratio
            words[baseline.name] = f"{duration(baseline.median_us)} {ratio(speedup)}x"
        return words


def text_of(page: str) -> str:
    """Return the text of a page without scripts, style sheets and charts, with single spaces."""
    page = re.sub(r"<(style|script|svg|pre).*?</\1>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).replace(" us", " µs").split())


def contains(text: str, *words: str) -> None:
    spaced = " ".join(text.replace(" us", " µs").split())
    for word in words:
        assert word.replace(" us", " µs") in spaced, (word, spaced)


def dashboard_pages(db: str, workload: str, key: str) -> Iterator[str]:
    """Yield the texts of the pages of the dashboard that name figures of a workload."""
    pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
    from tunebench.db.browse import open_browser
    from tunebench.report.dashboard.catalogue import Catalogue
    from tunebench.report.dashboard.page import Pages

    with open_browser(db) as browser:
        catalogue = Catalogue(browser)
        catalogue.start()
        catalogue.wait()
        pages = Pages(browser, catalogue)
        yield text_of(pages.workload({"device": key, "workload": workload}))
        yield text_of(pages.workloads({"device": key, "text": workload}))
        catalogue.close()


def check_all(
    report: Report,
    db: str,
    commands: Commands,
    *,
    on: Device | None = None,
) -> None:
    """Require the figures of a report of `tune` from every other command, page and file."""
    assert report.config is not None
    assert report.median_us is not None
    numbers, workload = Said(report=report), report.workload
    words = numbers.words
    device = on or devices.find("cpu")
    where = ("--device", device.name if device.kind == "gpu" else "cpu", "--db", db)
    contains(str(report), str(report.config), words["time"])
    plain = json.loads(json.dumps(report.to_json()))
    assert (plain["median_us"], plain["config"]) == (report.median_us, dict(report.config))
    if report.how == "measured" and report.gap is not None:
        contains(str(report), f"gap {words['gap']}" if not report.optimality_proof.proved else "optimal")  # type: ignore[union-attr]

    answer = commands.json("lookup", workload, *where)
    assert (answer["variant"], answer["config"]) == (report.variant, dict(report.config))
    assert (answer["expected_us"], answer["bound_us"]) == (report.median_us, report.bound_us)
    assert (answer["ties"] or 0) == report.tie_count
    stored = {name: (versus["time_us"], versus["ratio"]) for name, versus in answer["baselines"].items()}
    timed = {
        baseline.name: (baseline.median_us, report.versus_baselines[baseline.name].ratio)
        for baseline in report.baselines
    }
    assert stored == timed
    text = commands.text("lookup", workload, *where)
    contains(text, str(report.config), words["time"])
    for name, (us, speedup) in timed.items():
        contains(str(report), f"{name} {duration(us)} {ratio(speedup)}x")
        contains(text, f"speedup over {name}: {ratio(speedup)}x")
    if report.tie_count:
        contains(text, f"ties {report.tie_count} other configuration")

    shown = [row for row in commands.json("show", workload, *where)["best"] if row["served"]]
    assert [(row["variant"], row["config"], row["time_us"]) for row in shown] == [
        (report.variant, str(report.config), report.median_us)
    ]
    contains(commands.text("show", workload, *where), str(report.config), "returned by lookup")

    choice = choose_config(parse(workload), device, db=db)  # what export and explain take
    assert (choice.variant.key, choice.config) == (report.variant, report.config)
    assert choice.expected_us == report.median_us

    (history,) = with_best_kernels([search_history(workload, device=device, db=db)])
    assert history.best is not None
    assert (history.best.key.variant, history.best.key.config) == (report.variant, report.config)
    page = text_of(history_page([history], database="a.db"))
    contains(page, f"best time, {report.how} {words['time']}")
    if "default" in words:
        contains(page, f"speedup over default {words['default']}")
    for baseline in report.baselines:  # the header of a column has the unit of its times
        contains(page, f"{baseline.name} {words[baseline.name].replace(' us', '')}")
    if report.how == "measured":
        assert history.kernel is not None
        assert history.kernel.gaps[-1] == report.gap
    else:
        contains(page, f"best / lowest bound {words['bound']}")

    for page in dashboard_pages(db, workload, device.key):
        contains(page, words["time"].removesuffix(" us"), f"{words['bound']}x")
        if report.is_default or report.versus.get("default"):
            contains(page, words["default"])
        for baseline in report.baselines[:1]:
            contains(page, f"{ratio(report.versus_baselines[baseline.name].ratio)}x")


# -- searches ------------------------------------------------------------------------------------------


def once(tunes: Tune) -> Report:
    return tunes()


def resumed(tunes: Tune) -> Report:
    stopped = tunes(Machine(stops_at=5))
    assert stopped.interrupted
    return tunes()


def interrupted(tunes: Tune) -> Report:
    return tunes(Machine(stops_at=8))


def interrupted_in_the_finals(tunes: Tune) -> Report:
    return tunes(Machine(stops_at=15))


def interrupted_after_a_finished_one(tunes: Tune) -> Report:
    tunes()
    return tunes(Machine(load=0.9, stops_at=4))


def repeated_on_a_busy_machine(tunes: Tune) -> Report:
    tunes()
    return tunes(Machine(load=1.6))


def repeated_with_other_options(tunes: Tune) -> Report:
    tunes()
    return tunes(Machine(load=0.8), sampler="bound", seed=7, trials=20, finalists=4, audit=0.5)


def without_baselines_after_one_with(tunes: Tune) -> Report:
    tunes()
    return tunes(baselines=False)


def complete(tunes: Tune) -> Report:
    return tunes(trials=100)


@pytest.mark.parametrize(
    "search",
    [
        once,
        resumed,
        interrupted,
        interrupted_in_the_finals,
        interrupted_after_a_finished_one,
        repeated_on_a_busy_machine,
        repeated_with_other_options,
        without_baselines_after_one_with,
        complete,
    ],
    ids=lambda search: search.__name__,
)
def test_every_command_says_what_tune_says(
    search: Callable[[Tune], Report],
    tunes: Tune,
    database: str,
    commands: Commands,
) -> None:
    report = search(tunes)
    assert report.served is None
    assert report.gap is not None
    check_all(report, database, commands)


def test_figures_are_those_of_the_common_rounds(tunes: Tune) -> None:
    """Times are medians of the samples of all rounds, speedups mean ratios of the medians of each round."""
    report = tunes()
    assert report.config is not None
    us = 130.0 + 1.5 * abs(int(report.config["copy"]) - 17)
    rounds = [[us * drift * noise for noise in (1.0, 1.003, 1.009)] for drift in DRIFT]
    assert report.median_us == pytest.approx(statistics.median(itertools.chain(*rounds)))
    for baseline, of_round in zip(report.baselines, (55.0, 90.0), strict=True):  # the fastest first
        samples = [[of_round * drift, of_round * drift * 1.01] for drift in DRIFT[::-1]]
        assert baseline.median_us == pytest.approx(statistics.median(itertools.chain(*samples)))
        logs = [
            math.log(statistics.median(theirs) / statistics.median(ours))
            for theirs, ours in zip(samples, rounds, strict=True)
        ]
        ratio_of_means = math.exp(statistics.fmean(logs))
        assert report.versus_baselines[baseline.name].ratio == pytest.approx(ratio_of_means)


def test_the_page_of_a_search_names_its_best(tunes: Tune, database: str) -> None:
    pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
    from tunebench.db.browse import open_browser
    from tunebench.report.dashboard.catalogue import Catalogue
    from tunebench.report.dashboard.page import Pages

    tunes()
    report = tunes(Machine(load=1.6))
    words = Said(report=report).words
    with open_browser(database) as browser:
        (run, _) = browser.runs()
        page = text_of(Pages(browser, Catalogue(browser)).search(run.id))
    contains(page, f"best time {words['time']}", f"best / lowest bound {words['bound']}x")


def test_figures_survive_a_merge_and_an_import(
    tunes: Tune,
    database: str,
    tmp_path: Path,
    commands: Commands,
) -> None:
    report = tunes()
    merged, imported, lines = (str(tmp_path / name) for name in ("b.db", "c.db", "a.jsonl"))
    commands.json("db", "merge", database, "--into", merged)
    check_all(report, merged, commands)
    commands.json("db", "export", "--format", "jsonl", "--out", lines, "--db", database)
    commands.json("db", "import", lines, "--db", imported)
    check_all(report, imported, commands)


def test_figures_of_two_devices_stay_apart(
    tunes: Tune,
    database: str,
    commands: Commands,
) -> None:
    gpu = find_variant("softmax/cuda_block")
    config = gpu.default(parse(WORKLOAD), OTHER)
    record_outcome(database, WORKLOAD, OTHER, gpu.key, config, measured(1.5, 1.6, 1.7))
    report = tunes()
    check_all(report, database, commands)
    assert lookup(WORKLOAD, device=OTHER, db=database).expected_us == 1.6


def test_a_better_result_of_another_variant_is_said(tunes: Tune, database: str) -> None:
    cpu, better_variant = devices.find("cpu"), find_variant("softmax/numba_cpu")
    config = better_variant.default(parse(WORKLOAD), cpu)
    record_outcome(database, WORKLOAD, cpu, better_variant.key, config, measured(5.0, 5.1, 5.2))
    with open_store(database) as store:
        (record,) = store.history(WORKLOAD)
        store.record(record.key, record.result, purpose="finalist", bound_us=0.25)
    report = tunes()
    assert (report.variant, report.served and report.served.variant) == (
        "softmax/bounded",
        better_variant.key,
    )
    answer = lookup(WORKLOAD, device="cpu", db=database)
    assert report.served is not None
    assert (answer.config, answer.expected_us) == (report.served.config, report.served.time_us)
    contains(str(report), f"lookup returns {better_variant.key} {config}: 5.1 us (measured, cold caches)")
    assert report.to_json()["served"]["config"] == dict(config)


def test_a_search_with_warm_caches_says_that_lookup_returns_the_cold_one(
    tunes: Tune, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = tunes()
    monkeypatch.setattr("tests.report.test_one_number.CACHE", ["warm"])
    warm = tunes(Machine(load=0.5), protocol=Protocol(cache="warm"))
    assert warm.median_us != cold.median_us
    assert warm.served is not None
    assert (warm.served.time_us, warm.served.cache) == (cold.median_us, "cold")
    assert lookup(WORKLOAD, device="cpu", db=database).expected_us == cold.median_us


def test_the_answer_is_timed_again_with_new_finalists(tunes: Tune, database: str) -> None:
    """A machine that was idle once does not decide for ever."""
    first = tunes(trials=40, finalists=4)  # several are faster than the default
    second = tunes(Machine(load=3.0), seed=5, trials=20, finalists=1)
    assert not second.is_earlier
    assert second.median_us is not None
    assert first.median_us is not None
    assert second.median_us > 2 * first.median_us


# -- predictions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_predictions_are_one_number_everywhere(
    again: bool,
    tunes: Tune,
    database: str,
    commands: Commands,
) -> None:
    absent = devices.find(ABSENT)
    with open_store(database) as store:
        assert store.best(OFFLINE) == []
    report = tunes(on=ABSENT, trials=60)
    if again:
        before = len(_records(database))
        report = tunes(on=ABSENT, trials=60)
        assert report.is_earlier or len(_records(database)) > before
    check_all(report, database, commands, on=absent)


def test_a_default_that_finishes_late_still_wins_a_tie(
    tunes: Tune,
    database: str,
    commands: Commands,
) -> None:
    """Compilers work at the same time, so that the default may be recorded after others."""
    absent, block = devices.find(ABSENT), find_variant("softmax/cuda_block")
    workload = parse(OFFLINE)
    default = block.default(workload, absent)
    rival = next(config for config in _configs(block, workload, absent) if config != default)
    us = {config: Predicted(predicted_us=3.0, verification=VERIFIED) for config in (rival, default)}
    for config, outcome in us.items():
        record_outcome(database, OFFLINE, absent, block.key, config, outcome)
    report = tunes(on=ABSENT, trials=2, variants=("cuda_block",))
    assert (report.config, report.tie_count) == (default, 1)
    contains(str(report), "same prediction: ")
    check_all(report, database, commands, on=absent)


@needs_nvrtc
def test_the_exported_manifest_names_the_same(
    tunes: Tune,
    database: str,
    tmp_path: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = tunes(on=ABSENT, trials=20, variants=("cuda_block",))
    out = tmp_path / "out"
    commands.json("export", OFFLINE, "--device", ABSENT, "--db", database, "--out", str(out))
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["variant"], manifest["expected_us"]) == (report.variant, report.median_us)
    assert manifest["config"] == dict(report.config or {})


# -- recorded tuning spaces ----------------------------------------------------------------------------


def test_the_page_of_a_replayed_search_has_the_gap_of_its_proof() -> None:
    table = Space(
        tuple(Parameter(name, values, "") for name, values in XGEMM.items()),
    ).enumerate()
    times_us = np.linspace(9e3, 3e4, len(table))
    space = RecordedReplay.of(
        recording(
            kernel="Xgemm",
            device="NVIDIA GeForce RTX 3090",
            problem=(4096, 4096),
            table=table,
            times_us=times_us,
            fastest_us=times_us,
            failures={},
        )
    )
    assert space.bounds is not None
    replayed = replay(space, trials=3, seed=0, sampler="random")
    history = replay_history(space, replayed)
    assert history.best is not None
    assert history.best.result.outcome == min(
        (trial.outcome for trial in replayed.trials),
        key=lambda outcome: getattr(outcome, "median_us", np.inf),
    )
    assert history.kernel is not None
    assert replayed.optimality_proof.gap is not None
    assert history.kernel.gaps[-1] == replayed.optimality_proof.gap
    contains(
        text_of(history_page([history], database="mine.json")),
        "optimality gap "
        + ("1, proved" if replayed.optimality_proof.proved else ratio(history.kernel.gaps[-1])),
    )


def _records(database: str) -> list[object]:
    with open_store(database, read_only=True) as store:
        return list(store.history(OFFLINE))


def _configs(variant: object, workload: object, device: Device) -> Iterator[Config]:
    table = variant.configs(workload, device)  # type: ignore[attr-defined]
    return (table.config(row) for row in range(len(table)))
