"""`tune_suite` and `tune --suite`: one budget for many workloads, on an executor that measures nothing."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import VERIFIED, InstantExecutor, measured, needs_nvrtc
from tunebench import cli, tune_suite, tuning
from tunebench.db.store import open_store
from tunebench.device import described, local_cpu
from tunebench.errors import DatabaseError, InputError, UnknownName
from tunebench.executor import WorkerExecutor
from tunebench.measure.baseline import Baseline
from tunebench.measure.timing import Protocol
from tunebench.outcome import Crashed, Outcome, Predicted, Result
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning import Plan, Progress, TuningSummary, scheduler, tunable
from tunebench.tuning.budget_scheduler import FIRST
from tunebench.tuning.run_context import RunContext
from tunebench.workloads import parse

SOFTMAX = "softmax:rows=64,cols=64,dtype=f32"
NORM = "layernorm:rows=64,cols=64,dtype=f32"
GEMM = "gemm:m=64,n=64,k=64,dtype=f32"
ALIEN = "gemm:m=16,n=16,k=16,dtype=e4m3"
THREE = {SOFTMAX: 1, NORM: 20, GEMM: 3}
FORTY = str(Path(__file__).parents[1] / "data" / "forty_variant.py")

Answer = Callable[[Task], Outcome]


def slow(task: Task) -> Outcome:
    """Return a time of one to two milliseconds that depends on the configuration."""
    return measured(time_us_of(task.config))


def time_us_of(config: Config) -> float:
    """Return the time of a configuration for `slow`, in microseconds."""
    return 1000.0 + sum(str(config).encode()) * 7919 % 1000


class Fake(InstantExecutor[Task]):
    """Executor that answers at once; it raises KeyboardInterrupt before a given task."""

    def __init__(self, answer: Answer, interrupt_at: int | None = None) -> None:
        super().__init__(answer)
        self.interrupt_at = interrupt_at

    def submit(self, task: Task) -> Future[Result]:
        if len(self.tasks) == self.interrupt_at:
            raise KeyboardInterrupt
        return super().submit(task)

    @property
    def searched(self) -> Counter[str]:
        return Counter(str(task.workload) for task in self.tasks if not task.thorough)


Use = Callable[..., Fake]
"""Makes tuning use a fake executor, and returns it."""


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that makes tuning use a fake executor and returns that executor."""

    def use(answer: Answer = slow, interrupt_at: int | None = None) -> Fake:
        fake = Fake(answer, interrupt_at)
        monkeypatch.setattr(tuning, "start_workers", lambda target, plan: fake)
        return fake

    return use


def run(suite: Any, trials: int | None, db: Path, **changes: Any) -> TuningSummary:
    watcher = changes.pop("watcher", None)
    device = changes.pop("device", "cpu")
    plan = Plan(
        trials=trials, **{"sampler": "random", "audit": 0, "baselines": False, "finalists": 1} | changes
    )
    return tune_suite(suite, device=device, db=db, plan=plan, watcher=watcher)


def trials(report: TuningSummary) -> dict[str, int]:
    return {part.workload: part.trials for part in report.results}


def states(report: TuningSummary) -> dict[str, str]:
    return {part.workload: part.state for part in report.results}


# -- division of the budget --------------------------------------------------------------------------


def test_budget_is_kept_and_follows_time_in_the_model(tmp_path: Path, use: Use) -> None:
    fake, seen = use(), list[Progress]()
    report = run(THREE, 60, tmp_path / "a.db", watcher=seen.append)
    assert fake.searched.total() == report.trials == 60
    assert trials(report) == fake.searched
    assert (
        fake.searched[NORM] > fake.searched[GEMM] >= fake.searched[SOFTMAX] >= 10
    )  # every workload gets a first round
    assert [part.workload for part in report.results] == [NORM, GEMM, SOFTMAX]
    assert sum(part.share or 0 for part in report.results) == pytest.approx(1)
    assert report.after_us == sum(part.count * (part.after_us or 0) for part in report.results)
    assert report.after_us < report.before_us

    search = [now for now in seen if now.phase == "search"]
    assert [now.trials_done for now in search] == sorted(now.trials_done for now in search)
    assert (search[0].predicted, search[-1].predicted, search[-1].trials_done) == (3, 0, 60)
    measured_only = [now.model_us for now in search if now.predicted == 0]
    assert measured_only == sorted(measured_only, reverse=True)
    assert {now.phase for now in seen} == {"search", "finalists"}


def test_a_plan_without_trials_has_the_default_of_each_workload(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    monkeypatch.setattr(tuning, "TRIALS", 4)
    assert run(THREE, None, tmp_path / "a.db", minutes=60.0).trials == 12
    assert Plan().trial_budget == 50


def test_time_before_tuning_is_that_of_the_default_or_the_earlier_answer(tmp_path: Path, use: Use) -> None:
    fake = use()
    [part] = run({SOFTMAX: 2}, 8, tmp_path / "a.db").results
    first = fake.tasks[0]
    assert first.config == first.variant.default(first.workload, local_cpu())
    assert part.before_us == slow(first).median_us  # type: ignore[union-attr]
    assert part.after_us == min(slow(task).median_us for task in fake.tasks)  # type: ignore[union-attr]
    assert part.after_us < part.before_us
    [second] = run({SOFTMAX: 2}, 1, tmp_path / "a.db", seed=1).results
    assert second.before_us == part.after_us


@pytest.mark.parametrize("total", [1, 2])
def test_largest_workloads_come_first_with_few_trials(total: int, tmp_path: Path, use: Use) -> None:
    use()
    report = run({SOFTMAX: 1, NORM: 10**6, GEMM: 1000}, total, tmp_path / "a.db")
    assert report.trials == total
    assert states(report) == {NORM: "tuned", GEMM: "tuned" if total == 2 else "left", SOFTMAX: "left"}


def test_exhausted_workload_leaves_its_trials_to_others(tmp_path: Path, use: Use) -> None:
    fake = use()
    report = run({SOFTMAX: 10**6, NORM: 1}, 100, tmp_path / "a.db", variant_files=(FORTY,))
    assert fake.searched == {SOFTMAX: 40, NORM: 60}
    assert {part.report.variant for part in report.results if part.report} == {
        "softmax/forty",
        "layernorm/numba_cpu",
    }


@needs_nvrtc
def test_best_prediction_ends_a_workload_with_predicted_times(tmp_path: Path, use: Use) -> None:
    def predicted(task: Task) -> Outcome:
        assert task.predicted_us is not None
        return Predicted(predicted_us=task.predicted_us, verification=VERIFIED)

    fake, device = use(predicted), described()["h100-sxm"]
    [tunable_variant], _ = tunable.find_variants(parse(SOFTMAX), device, ("cuda_block",))
    report = run({SOFTMAX: 1}, 10**6, tmp_path / "a.db", device=device, variants=("cuda_block",))
    assert report.how == "predicted"
    assert report.after_us == tunable_variant.predicted_us(tunable_variant.fastest())
    assert report.trials == len(fake.tasks) < len(tunable_variant.table)


# -- errors and interruptions ------------------------------------------------------------------------


def test_workload_without_a_variant_does_not_stop_the_others(tmp_path: Path, use: Use) -> None:
    fake = use()
    report = run({ALIEN: 100, SOFTMAX: 1}, 20, tmp_path / "a.db")
    assert states(report) == {SOFTMAX: "tuned", ALIEN: "unsuited"}
    assert "no variant can do" in report.results[1].reason
    assert fake.searched == {SOFTMAX: 20}
    assert [part.workload for part in report.without] == [ALIEN]


def test_workload_that_always_fails_is_abandoned(tmp_path: Path, use: Use) -> None:
    def answer(task: Task) -> Outcome:
        return Crashed(reason="SIGSEGV") if task.workload.operator == "gemm" else slow(task)

    fake = use(answer)
    report = run({GEMM: 10**6, SOFTMAX: 1}, 100, tmp_path / "a.db")
    assert states(report) == {SOFTMAX: "tuned", GEMM: "failed"}
    assert fake.searched == {GEMM: 24, SOFTMAX: 76}


def test_error_ends_one_workload_and_a_lost_database_ends_all(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, error = scheduler.run.search, InputError("this one cannot be")

    def fail(context: RunContext, executor: WorkerExecutor[Task]) -> None:
        if context.workload.operator == "gemm":
            raise error
        search(context, executor)

    monkeypatch.setattr(scheduler.run, "search", fail)
    use()
    report = run({GEMM: 100, SOFTMAX: 1}, 20, tmp_path / "a.db")
    assert states(report) == {SOFTMAX: "tuned", GEMM: "failed"}
    assert {part.reason for part in report.results} == {"", "this one cannot be"}
    assert trials(report) == {SOFTMAX: 20, GEMM: 0}

    error = DatabaseError("gone")
    with pytest.raises(DatabaseError, match="gone"):
        run({GEMM: 100, SOFTMAX: 1}, 20, tmp_path / "b.db")


# -- continued runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [7, 41])
def test_interrupted_run_keeps_its_trials_and_the_same_call_continues(
    stop: int, tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebench.db.reader.is_dead", lambda owner: True)
    first = use(interrupt_at=stop)
    report = run(THREE, 40, tmp_path / "a.db")  # finalists are timed after the fortieth trial
    assert report.interrupted
    assert report.trials == min(stop, 40)
    second = use()
    report = run(THREE, 40, tmp_path / "a.db")
    assert not report.interrupted
    assert report.trials == 40
    assert (first.searched + second.searched).total() == 40
    tried = Counter(
        (task.variant.key, task.workload, task.config)
        for task in first.tasks + second.tasks
        if not task.thorough
    )
    assert set(tried.values()) == {1}
    assert {str(task.workload) for task in second.tasks if task.thorough} == set(
        THREE
    )  # finalists of every workload

    third = use()
    report = run(THREE, 40, tmp_path / "a.db")  # the run before was complete, so this one searches further
    assert third.searched.total() == 40
    assert {str(task.workload) for task in third.tasks if task.thorough} == set(third.searched)


def test_time_limit_ends_the_search_and_the_same_call_continues(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebench.db.reader.is_dead", lambda owner: True)
    now = time.monotonic()
    moments = iter([now, *[now + 30] * 4, *[now + 61] * 100])
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    first = use()
    report = run(THREE, 40, tmp_path / "a.db", minutes=1.0)
    assert report.cut_short
    assert not report.interrupted
    assert report.trials == first.searched.total() < 40
    assert any(task.thorough for task in first.tasks)  # finalists are timed although the search was stopped
    monkeypatch.undo()
    monkeypatch.setattr("tunebench.db.reader.is_dead", lambda owner: True)
    second = use()
    assert run(THREE, 40, tmp_path / "a.db").trials == 40
    assert (first.searched + second.searched).total() == 40


def test_all_workloads_get_a_trial_where_time_is_short(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, began = use(), time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: began + 2 * len(fake.tasks))  # two seconds for a trial
    monkeypatch.setattr(scheduler, "time", clock)
    run(THREE, 1_000_000, tmp_path / "a.db", minutes=0.2)
    assert len(fake.searched) == 3
    assert fake.searched.total() < FIRST


def test_a_workload_begins_with_what_is_fastest_for_the_nearest(tmp_path: Path, use: Use) -> None:
    larger = SOFTMAX.replace("rows=64", "rows=128")
    for sampler, begins in (("surrogate", True), ("random", False)):
        fake = use()
        database = tmp_path / f"{sampler}.db"
        run({SOFTMAX: 99, larger: 1}, 20, database, sampler=sampler, variants=("numba_cpu",))
        tried = [
            [task.config for task in fake.tasks if str(task.workload) == workload and not task.thorough]
            for workload in (SOFTMAX, larger)
        ]
        best = min(tried[0][:5], key=time_us_of)
        assert tried[0][0] == tried[1][0] != best  # the default
        assert (tried[1][1] == best) == begins


def test_known_finalists_are_neither_searched_nor_timed_again(tmp_path: Path, use: Use) -> None:
    use()
    earlier = run({SOFTMAX: 1}, 40, tmp_path / "a.db")
    use(interrupt_at=20)
    run({GEMM: 1}, 40, tmp_path / "a.db", seed=1)  # measured, but without a finalist comparison
    fake = use()
    report = run({SOFTMAX: 1, GEMM: 1, NORM: 10**6}, 8, tmp_path / "a.db")
    assert states(report) == {NORM: "tuned", SOFTMAX: "known", GEMM: "known"}
    assert {(str(task.workload), task.thorough) for task in fake.tasks} == {
        (NORM, False),
        (NORM, True),
        (GEMM, True),
    }
    [softmax] = [part for part in report.results if part.workload == SOFTMAX]
    assert softmax.before_us == softmax.after_us == earlier.results[0].after_us


# -- checks of arguments -----------------------------------------------------------------------------


class Baselines:
    """Caller that times one baseline of every workload at once."""

    def __init__(self) -> None:
        self.workloads: list[str] = []
        self.entered = self.left = 0

    def call(self, workload: Any, *_: Any) -> list[Baseline]:
        assert self.entered > self.left
        self.workloads.append(str(workload))
        return [Baseline.of("numpy", [3000.0, 3100.0, 3200.0])]

    def __enter__(self) -> Baselines:
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1


def test_baselines_of_all_workloads_are_timed_by_one_caller(tmp_path: Path, use: Use) -> None:
    fake, baselines = use(), Baselines()
    fake.caller = lambda stage: baselines  # type: ignore[method-assign, assignment, return-value]
    run(THREE, 6, tmp_path / "a.db", baselines=True)
    assert set(baselines.workloads) == set(THREE)
    assert (baselines.entered, baselines.left) == (1, 1)


def test_workload_of_several_layers_is_tuned_once(tmp_path: Path, use: Use) -> None:
    fake, path = use(), tmp_path / "net.toml"
    entries = {"first": 2, "second": 3}
    path.write_text(
        "".join(
            f'[layer.{name}]\nworkload = "{SOFTMAX}"\ncount = {count}\nscales = "rows"\n'
            for name, count in entries.items()
        )
    )
    report = tune_suite(
        path, batch=2, device="cpu", db=tmp_path / "a.db", plan=Plan(trials=2, baselines=False)
    )
    [part] = report.results
    assert (part.layers, part.count) == (("first", "second"), 5)
    assert part.workload == SOFTMAX.replace("rows=64", "rows=128")
    assert fake.searched.total() == 2


@pytest.mark.parametrize(
    ("suite", "changes", "error", "said"),
    [
        ({}, {}, InputError, "at least one"),
        ({SOFTMAX: 0}, {}, InputError, "count must be 1 or more"),
        ({ALIEN: 1}, {}, InputError, "nothing of 1 workloads can be tuned: no variant can do"),
        ({SOFTMAX: 1}, {"variants": ("no_such",)}, UnknownName, "no_such"),
        ("nope", {}, UnknownName, "unknown suite"),
        ({SOFTMAX: 1}, {"device": described()["h100-sxm"], "stop_at_gap": 1.1}, InputError, "stop_at_gap"),
    ],
)
def test_untunable_arguments_are_refused_before_the_first_trial(
    suite: Any, changes: dict[str, Any], error: type, said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        run(suite, 5, tmp_path / "a.db", **changes)
    assert not (tmp_path / "a.db").exists()


# -- command line ------------------------------------------------------------------------------------


def command(path: Path, *words: str) -> tuple[str, ...]:
    quick = ("--device", "cpu", "--no-baselines", "--sampler", "random", "--db", str(path.with_suffix(".db")))
    return ("tune", "--suite", str(path), *quick, *words)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.toml"
    problems = {"soft": SOFTMAX, "norm": NORM, "eight": ALIEN}
    path.write_text("".join(f'[layer.{name}]\nworkload = "{text}"\n' for name, text in problems.items()))
    return path


def test_command_reports_each_workload(file: Path, use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use()
    assert cli.run(command(file, "--trials", "12")) == 0
    out, err = capsys.readouterr()
    assert "trials   12 of 12" in out
    assert f"unsuited {ALIEN}: no variant can do" in out
    assert f"search {NORM} 0/12: model" in err
    assert f"search {SOFTMAX} " in err

    assert cli.run(command(file, "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["total"], data["trials"], data["how"]) == (150, 150, "measured")
    assert {part["workload"]: part["state"] for part in data["parts"]}[ALIEN] == "unsuited"
    assert data["after_us"] == sum(part["count"] * (part["after_us"] or 0) for part in data["parts"])


def test_ctrl_c_explains_how_to_continue(file: Path, use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(interrupt_at=5)
    assert cli.run(command(file, "--trials", "12")) == 130
    assert (
        "5 of 12; interrupted: all results are kept, the same command resumes here" in capsys.readouterr().out
    )


def test_a_suite_is_really_tuned(tmp_path: Path) -> None:
    """Tune two workloads on this CPU, with one trial each and their finalists."""
    suite = {SOFTMAX: 1, SOFTMAX.replace("64", "32"): 1}
    protocol = Protocol(min_samples=3, max_samples=5, max_s=0.05)
    plan = Plan(trials=2, workers=1, baselines=False, variant_files=(FORTY,), protocol=protocol)
    report = tune_suite(suite, device="cpu", db=tmp_path / "a.db", plan=plan)
    assert states(report) == dict.fromkeys(suite, "tuned")
    with open_store(tmp_path / "a.db") as store:
        assert store.finished(local_cpu().key) == set(suite)
        assert {store.best(text)[0].purpose for text in suite} == {"finalist"}
    seconds = [part.report.seconds for part in report.results if part.report is not None]
    assert (
        sum(times["wall_s"] for times in seconds) <= report.wall_s
    )  # each workload counts only the time of its own turns
    assert all(times["wall_s"] > times["compile_s"] > 0 for times in seconds)
    assert dataclasses.replace(report, results=()).after_us == 0
