"""Pages of search histories and comparisons."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import optuna
import pytest

from tests.cli.conftest import Run, run_json, run_refused, run_text  # noqa: F401 (fixtures)
from tests.support import measured, needs_pandas
from tests.tuning.test_replay import recording
from tunebench import device, kernels
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.db.record import MeasurementBatch, NewMeasurement, RunSummary, Verdict
from tunebench.outcome import CompileFailed, Effort, Resources, Result
from tunebench.report import (
    SuiteCounts,
    best_records,
    compare_databases,
    history_page,
    replay_history,
    search_histories,
    with_best_kernels,
)
from tunebench.space import Config, Parameter, Space
from tunebench.tuning.proof import BoundedSpace, optimality_gaps
from tunebench.tuning.replay import Space as RecordedReplay
from tunebench.tuning.replay import replay
from tunebench.workloads import parse

WORKLOAD = "softmax:rows=16,cols=16,dtype=f32"
HOSTILE = "<script>alert('x')</script>\"&\u202e\x1b[2J"
VOID = {"meta", "link", "br", "wbr", "input"}


def database(path: Path, times: dict[int, float], gpu: str = "rtx-3090", workload: str = WORKLOAD) -> Path:
    """Write a database with one trial per block size, its time and a failure with a hostile reason."""
    gpu_device = device.described()[gpu]

    def new(block: int, result: Result, verdict: Verdict) -> NewMeasurement:
        config = Config({"block": block, "vector": block % 3})
        key = TrialKey(
            device=gpu_device.key, workload=workload, variant="softmax/a", revision="r", config=config
        )
        return NewMeasurement(key=key, result=result, bound_us=0.5, verdict=verdict)

    default = Verdict(versus_default="itself")
    measurements = [
        new(block, Result(outcome=measured(us)), default if block == 32 else Verdict())
        for block, us in times.items()
    ]
    measurements.append(new(999, Result(outcome=CompileFailed(reason=HOSTILE)), Verdict()))
    start = RunStart(device=gpu_device, workload=workload, sampler="random", seed=0)
    with open_store(path) as store:
        store.add([MeasurementBatch(start=start, measurements=tuple(measurements))])
    return path


class Outline(HTMLParser):
    """Open tags, which must match, and the scripts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_history_has_best_default_failures_and_effects(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", {32: 8.0, 64: 2.0, 128: 4.0})
    with open_store(path, read_only=True) as store:
        (history,) = search_histories(store)
    assert history.best is not None
    assert history.default is not None
    assert history.best.key.config["block"] == 64
    assert history.default.key.config["block"] == 32
    assert history.bound_us == 0.5
    assert [count for _, _, count in history.failures] == [1]
    first = history.effects[0]
    assert (first.name, round(first.importance, 6)) == ("block", 1.0)
    assert first.medians_us == pytest.approx({"32": 8.0, "64": 2.0, "128": 4.0})
    assert [r.key.config["block"] for r in best_records(history.records)] == [64, 128, 32]


def test_page_is_well_formed_self_contained_and_escaped(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", {32: 8.0, 64: 2.0}, workload="recorded:kernel=<img src=x>\u202e\x07")
    with open_store(path, read_only=True) as store:
        text = history_page(search_histories(store), database=str(path))
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert outline.scripts == 1  # that of the page; the reason of the failure is text
    assert "&lt;script&gt;" in text
    assert "<img" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "\\u202e" in text
    assert not re.search(r"(src|href)=\"?(https?:)?//", text)
    assert "4.00x" in text


def test_comparison_marks_regressions(tmp_path: Path) -> None:
    before = database(tmp_path / "a.db", {32: 9.0, 64: 2.0})
    after = database(tmp_path / "b.db", {32: 9.0, 64: 3.0})
    with open_store(before, read_only=True) as a, open_store(after, read_only=True) as b:
        forth, back = compare_databases(a, b), compare_databases(b, a)
        tolerant = compare_databases(a, b, tolerance=0.6)
    assert [(t.workload, t.verdict, t.speedup) for t in forth.regressions] == [
        (WORKLOAD, "regression", pytest.approx(2 / 3))
    ]
    assert [t.verdict for t in back.times] == ["improvement"]
    assert back.to_columns()["verdict"] == ["improvement"]
    assert [t.verdict for t in tolerant.times] == ["same"]


def test_comparison_of_two_devices_and_of_missing_workloads(tmp_path: Path) -> None:
    before = database(tmp_path / "a.db", {32: 2.0})
    missing_workload = "softmax:rows=32,cols=16,dtype=f32"
    after = database(tmp_path / "b.db", {32: 1.0}, gpu="a100-80-sxm")
    database(tmp_path / "b.db", {32: 1.0}, gpu="a100-80-sxm", workload=missing_workload)
    with open_store(before, read_only=True) as a, open_store(after, read_only=True) as b:
        comparison = compare_databases(a, b)
    assert [(t.before_device != t.after_device, t.speedup) for t in comparison.times] == [(True, 2.0)]
    assert (comparison.missing, comparison.new) == ((), (missing_workload,))


def test_command_writes_both_pages(tmp_path: Path, run_json: Run, run_refused: Run) -> None:  # noqa: F811
    path = str(database(tmp_path / "a.db", {32: 8.0, 64: 2.0}))
    out = tmp_path / "report.html"
    written = run_json("report", "--db", path, "--workload", WORKLOAD, "--out", str(out))
    assert written == {"file": str(out), "histories": 1, "records": 3}
    assert "Search history" in out.read_text()
    compared = run_json("report", "--compare", path, path, "--out", str(out))
    assert compared == {"file": str(out), "compared": 1, "regressions": 0}
    assert "unknown device 'sm_80'" in run_refused(
        "report", "--db", path, "--arch", "sm_80", "--out", str(out)
    )
    refused = run_refused("report", "--compare", path, path, "--arch", "sm_80", "--out", str(out))
    assert "--compare A B excludes" in refused
    assert "no record" in run_refused("report", "--db", path, "--suite", "gpt2", "--out", str(out))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunebench.cli.report.MOST_TRIALS", 2)
        assert "3 are selected" in run_refused("report", "--db", path, "--out", str(out))
    database(tmp_path / "a.db", {32: 4.0, 64: 4.0}, gpu="a100-80-sxm")
    devices = ("--compare", "rtx-3090", "a100-80-sxm", "--db", path)
    assert run_json("report", *devices, "--out", str(out))["regressions"] == 1
    assert "regression</span>" in out.read_text()
    run_json("db", "export", "--format", "jsonl", "--out", str(tmp_path / "a.jsonl"), "--db", path)
    assert (
        run_json("report", "--compare", path, str(tmp_path / "a.jsonl"), "--out", str(out))["compared"] == 2
    )


def test_overhead_is_that_of_finished_runs(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", {32: 8.0})
    start = RunStart(device=device.described()["rtx-3090"], workload=WORKLOAD, sampler="random", seed=0)
    with open_store(path) as store:
        for _ in range(2):
            run = store.begin_run(start)
            summary = RunSummary(wall_s=10.0, overhead_s=1.5, effort=Effort(compile_s=4.0))
            store.finish_run(run, summary)
        store.begin_run(start)  # not finished
        (history,) = search_histories(store)
    assert [run.wall_s for run in history.runs if run.wall_s] == [10.0, 10.0]
    assert history.overhead_s == 3.0
    assert "overhead: 3 s" in history_page([history], database="a.db")


def test_suite_page_has_the_time_of_one_pass(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", {32: 8.0, 64: 2.0})
    missing = "softmax:rows=99,cols=16,dtype=f32"
    with open_store(path, read_only=True) as store:
        histories = search_histories(store, workloads=[WORKLOAD, missing])
    suite = SuiteCounts(name="mine", counts={WORKLOAD: 10, missing: 1})
    text = history_page(histories, database="a.db", suite=suite)
    assert "Tuning report of mine" in text
    assert "1 of 2" in text
    assert "20 us" in text  # 10 calls of 2 us
    assert f"<li>{missing}</li>" in text


def test_optimality_gap_is_that_of_the_proof_after_each_record(tmp_path: Path) -> None:
    table = Space((Parameter("block", (32, 64, 128), ""),)).enumerate()
    path = database(tmp_path / "a.db", {32: 8.0, 64: 2.0, 128: 4.0})
    with open_store(path, read_only=True) as store:
        (history,) = search_histories(store)
    records = [
        replace(record, key=replace(record.key, config=Config({"block": record.key.config["block"]})))
        for record in history.records
    ]
    spaces = {"softmax/a": BoundedSpace(table=table, bounds_us=np.array([0.5, 1.0, 3.0]))}
    best = min(records[:3], key=lambda record: record.result.outcome.median_us)
    # open: 64 and 128; then 128, whose bound is above the best; then none; the failure is no configuration
    assert optimality_gaps(records, spaces, best, "cold") == (8.0, 1.0, 1.0, 1.0)
    assert optimality_gaps(records, {}, best, "cold") == ()
    # stale records and those of another cache state close nothing, and a violated bound leaves no gap
    stale = [replace(record, stale=record.key.config["block"] == 64) for record in records]
    assert optimality_gaps(stale, spaces, records[2], "cold") == (8.0, 8.0, 4.0, 4.0)
    assert optimality_gaps(records, spaces, best, "warm") == (None, None, None, 2.0 / 0.5)
    impossible = {"softmax/a": BoundedSpace(table=table, bounds_us=np.array([0.5, 1.0, 5.0]))}
    assert optimality_gaps(records[:3], impossible, best, "cold") == (8.0, 1.0, None)


def test_best_kernel_has_source_roofline_and_occupancy(tmp_path: Path) -> None:
    gpu, workload = device.described()["a100-80-sxm"], parse("softmax:rows=64,cols=1024,dtype=f32")
    block = kernels.variant("softmax/cuda_block")
    config = block.default(workload, gpu)
    key = TrialKey(device=gpu.key, workload=str(workload), variant=block.key, revision="old", config=config)
    resources = Resources(registers=40, static_smem_bytes=1024, dynamic_smem_bytes=0, spill_bytes=8)
    done = NewMeasurement(key=key, result=Result(outcome=measured(50.0), resources=resources), bound_us=0.5)
    with open_store(tmp_path / "a.db") as store:
        start = RunStart(device=gpu, workload=str(workload), sampler="random", seed=0)
        store.add([MeasurementBatch(start=start, measurements=(done,))])
        (history,) = with_best_kernels(search_histories(store))
    kernel = history.kernel
    assert kernel is not None
    assert kernel.block is not None
    assert (kernel.block.registers, kernel.block.smem_bytes) == (40, 1024)
    assert kernel.block.occupancy is not None
    assert kernel.changed
    assert "__global__" in kernel.source
    assert kernel.gaps[-1] is not None
    text = history_page([history], database="a.db")
    for part in (
        "Roofline",
        "Optimality gap",
        "registers per thread",
        "occupancy",
        "__global__",
        "has changed",
    ):
        assert part in text, part


def test_replayed_search_has_a_page() -> None:
    space = RecordedReplay.of(recording())
    history = replay_history(space, replay(space, trials=20, seed=0, sampler="random"))
    assert history.best is not None
    assert [record.id for record in history.records] == list(range(1, 21))
    assert "optimum of the recording" in history_page([history], database="mine.json")


@needs_pandas
def test_replayed_search_is_a_data_frame() -> None:
    space = RecordedReplay.of(recording())
    history = replay_history(space, replay(space, trials=20, seed=0, sampler="random"))
    assert history.to_pandas()["config.a"].between(1, 12).all()


def test_export_to_an_optuna_storage(tmp_path: Path, run_json: Run, run_refused: Run) -> None:  # noqa: F811
    path = str(database(tmp_path / "a.db", {32: 8.0, 64: 2.0}))
    command = ("db", "export-optuna", "--db", path, "--storage", f"sqlite:///{tmp_path / 'studies.db'}")
    (name,) = run_json(*command)["studies"]
    study = optuna.load_study(study_name=name, storage=command[-1])
    assert (study.best_value, study.best_params["block"]) == (2.0, 64)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert study.trials[0].user_attrs["bound_us"] == 0.5
    assert study.trials[2].user_attrs["reason"] == HOSTILE
    assert run_json(*command)["studies"] == [name]  # adds only what is new
    assert len(study.get_trials()) == 3
    assert "expected a URL" in run_refused(*command[:-1], "nonsense")
