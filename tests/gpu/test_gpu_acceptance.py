"""The parts of the GPU acceptance run that work without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import (
    acceptance,
    acceptance_run,
    acceptance_workloads,
    interleaved,
    speedups,
)
from tests.gpu.acceptance_report import AcceptanceReport
from tests.gpu.interleaved import TimedCall
from tests.support import measured, needs_no_gpu, until
from tunebench import device, kernels
from tunebench.executor import WorkerExecutor
from tunebench.outcome import LaunchFailed, Measured, Resources, Result
from tunebench.task import Task
from tunebench.tuning import Progress
from tunebench.workloads import parse

H100 = device.find("h100-sxm")
SOFTMAX = "softmax:rows=64,cols=100,dtype=f32"

# -- command line ------------------------------------------------------------------------------------


@needs_no_gpu
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--arch", "sm_90"), "acceptance needs a GPU of sm_90; this machine has no NVIDIA GPU\n"),
        ((), "acceptance needs a GPU; this machine has no NVIDIA GPU\n"),
    ],
)
def test_missing_gpu_is_one_line_of_error(tmp_path: Path, arguments: Sequence[str], line: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.acceptance", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (5, "", line)
    assert not list(tmp_path.iterdir())


def test_a_gpu_of_another_architecture_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(acceptance, "local_gpus", lambda: (H100,))
    assert acceptance.find_device("sm_90") is H100
    with pytest.raises(SystemExit, match="5"):
        acceptance.find_device("sm_80")
    assert "has h100-sxm (sm_90)" in capsys.readouterr().err


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        acceptance.parsed(["--only", "verify,veryfi"])
    assert "unknown step veryfi; known: conformance, facts, verify" in capsys.readouterr().err


def test_steps_come_in_their_order_and_share_the_time() -> None:
    options = acceptance.parsed(["--only", "record,verify", "--minutes", "10"])
    assert options.steps == ["verify", "record"]
    limits = acceptance.ends(options.steps, options.minutes)
    assert limits["record"] == pytest.approx(600)
    assert limits["verify"] == pytest.approx(600 * 0.20 / 0.30)
    assert sum(acceptance.STEPS.values()) == pytest.approx(1)


def test_failing_step_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(session: Any) -> None:
        raise RuntimeError("of no use")

    monkeypatch.setattr(acceptance, "local_gpus", lambda: (H100,))
    monkeypatch.setitem(acceptance.STEP_FUNCTIONS, "verify", breaks)
    monkeypatch.setitem(acceptance.STEP_FUNCTIONS, "record", lambda s: s.report.put("record", complete=True))
    assert acceptance.main(["--out", str(tmp_path), "--only", "verify,record"]) == 1
    steps = json.loads((tmp_path / "report.json").read_text())
    assert steps["verify"]["problems"] == ["RuntimeError: of no use"]
    assert "breaks" in steps["verify"]["traceback"]
    assert steps["record"]["complete"]
    assert acceptance.main(["--out", str(tmp_path), "--only", "record"]) == 0


# -- lists of workloads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *acceptance_workloads.VERIFIED,
        *acceptance_workloads.measured(),
        *(text for text, *_ in acceptance_workloads.RECORDED),
    ],
)
def test_every_listed_workload_parses_and_has_a_variant(text: str) -> None:
    parse(text)
    found, reason = acceptance_run.gpu_candidates(text, H100)
    assert found, reason


def test_recorded_variants_exist() -> None:
    for _, key, _ in acceptance_workloads.RECORDED:
        assert kernels.variant(key).key == key


def test_defaults_are_verified_first_and_nothing_twice() -> None:
    workloads = [SOFTMAX, "layernorm:rows=64,cols=100,dtype=f16"]
    items, problems = acceptance_run.items_to_verify(workloads, 4, H100)
    assert not problems
    candidates = len({(item.text, item.candidate.variant.key) for item in items})
    for item in items[:candidates]:
        variant = item.candidate.variant
        assert item.candidate.table.config(item.row) == variant.default(parse(item.text), H100)
    assert len(items) == 4 * candidates
    assert len(set(map(str, items))) == len(items)
    again, _ = acceptance_run.items_to_verify(workloads, 4, H100)
    assert list(map(str, items)) == list(map(str, again))


def test_workload_without_variant_is_reported() -> None:
    items, problems = acceptance_run.items_to_verify([SOFTMAX], 1, device.find("cpu"))
    assert items == []
    assert "no GPU variant supports softmax" in problems[0]


def test_spaces_are_measured_in_turns() -> None:
    candidate = acceptance_run.gpu_candidates(SOFTMAX, H100)[0][0]
    a, b = (
        [acceptance_run.AcceptanceItem(text, candidate, row) for row in range(n)]
        for text, n in (("a", 5), ("b", 2))
    )
    order = [(item.text, item.row) for item in acceptance_run.in_turns([a, b], 2)]
    assert order == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3), ("a", 4)]


# -- configurations and outcomes ---------------------------------------------------------------------


def item(row: int = 0) -> acceptance_run.AcceptanceItem:
    return acceptance_run.AcceptanceItem(SOFTMAX, acceptance_run.gpu_candidates(SOFTMAX, H100)[0][0], row)


def result(us: float) -> Result:
    return Result(outcome=measured(us, us), resources=Resources(registers=32, static_smem_bytes=0))


class Instant(WorkerExecutor[Task]):
    """Executor that answers at once; its third task raises an exception."""

    capacity = 2
    busy_s = 0.0

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def submit(self, task: Task) -> Future[Result]:
        self.tasks.append(task)
        future: Future[Result] = Future()
        if len(self.tasks) == 3:
            future.set_exception(RuntimeError("a fault"))
        else:
            future.set_result(result(1000.0))
        return future

    def close(self) -> None: ...


def test_all_items_run_when_one_raises() -> None:
    on = Instant()
    ran = list(acceptance_run.run_items([item(row) for row in range(5)], on, H100, float("inf")))
    assert len(ran) == len(on.tasks) == 5
    assert [type(result) for _, result in ran].count(RuntimeError) == 1
    assert on.tasks[1].config == item().candidate.table.config(1)


def test_no_item_starts_after_the_time_limit() -> None:
    on = Instant()
    assert list(acceptance_run.run_items([item()], on, H100, 0.0)) == []
    assert on.tasks == []


def test_a_time_below_its_bound_is_a_problem() -> None:
    assert item().bound_us > 0
    assert acceptance_run.fault_of(item(), result(item().bound_us * 1.01)) is None
    found = acceptance_run.fault_of(item(), result(item().bound_us * 0.99))
    assert found is not None
    assert "is below its bound of" in found


def test_unmeasured_outcome_is_a_problem() -> None:
    found = acceptance_run.fault_of(item(), Result(outcome=LaunchFailed(reason="for no reason")))
    assert found is not None
    assert found.endswith("launch_failed: for no reason")


def session(folder: Path, lines_said: list[str] | None = None) -> acceptance_run.AcceptanceRun:
    report = AcceptanceReport(folder, say=(lines_said if lines_said is not None else []).append)
    return acceptance_run.AcceptanceRun(H100, report, folder, until=float("inf"))


def test_a_tally_counts_and_keeps_lines_and_problems(tmp_path: Path) -> None:
    lines_said: list[str] = []
    here = session(tmp_path, lines_said)
    tally = acceptance_run.OutcomeTally(here, "verify", 4, ["a problem"])
    tally.add(item(0), result(1000.0))
    tally.add(item(1), Result(outcome=LaunchFailed(reason="no")))
    tally.add(item(2), RuntimeError("a fault"))
    tally.end(more=1)
    entry = json.loads((tmp_path / "report.json").read_text())["verify"]
    assert entry["outcomes"] == {"measured": 1, "launch_failed": 1, "fault": 1}
    assert (entry["done"], entry["total"], entry["complete"], entry["more"]) == (3, 4, False, 1)
    assert len(entry["problems"]) == entry["problem_count"] == 3
    lines = [json.loads(line) for line in (tmp_path / "verify.jsonl").read_text().splitlines()]
    assert [line["outcome"]["kind"] for line in lines] == ["measured", "launch_failed"]
    assert lines[0]["config"] == dict(item(0).candidate.table.config(0))
    assert sum("WRONG" in text for text in lines_said) == 2


def test_failed_process_is_a_problem_with_its_last_lines() -> None:
    answer = acceptance_run.run_gpu_process(
        ["contest", "softmax:rows=1,cols=1,dtype=f64", "x", "y"], timeout_s=60.0
    )
    assert answer["problem"].startswith("exit status 1: ")


def test_slow_process_is_a_problem() -> None:
    answer = acceptance_run.run_gpu_process(["ceilings"], timeout_s=0.01)
    assert answer == {"problem": "no answer within 0 s", "timed_out": True}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('{\"rows\": 1}')", {"rows": 1}),
        ("print('noise'); print('{\"rows\": 1}'); print('{\"rows\": 2}'); print('noise')", {"rows": 2}),
        ("pass", {"problem": "the process printed no answer"}),
        ("print('{\"rows\": 1}'); raise SystemExit(3)", {"rows": 1, "problem": 'exit status 3: {"rows": 1}'}),
    ],
)
def test_last_answer_of_a_process_is_kept(script: str, expected: dict[str, Any]) -> None:
    instead = [sys.executable, "-c", script]
    assert acceptance_run.run_gpu_process([], before=instead, timeout_s=120.0) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('{\"rows\": 1}', flush=True)", {"rows": 1}),
        ("import subprocess; subprocess.Popen(['sleep', '600'])", {}),  # a child keeps the pipe open
    ],
)
def test_process_group_is_killed_at_its_time_limit(
    script: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    real = subprocess.Popen.communicate

    def communicate(process: Any, timeout: float | None = None) -> Any:
        if timeout is None:
            return real(process)
        until(ready.exists, "the process has printed its answer")
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    script += f"; import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    instead = [sys.executable, "-c", script]
    timed_out = {"problem": "no answer within 3 s", "timed_out": True}
    assert acceptance_run.run_gpu_process([], before=instead, timeout_s=3.0) == expected | timed_out


def test_search_stops_at_its_time_limit() -> None:
    def progress(phase: str, done: int) -> Progress:
        rest: dict[str, Any] = {"total": 9, "outcomes": {}, "masked": 0, "cached": 0}
        return Progress(phase=phase, done=done, best_us=None, bound_us=0.0, seconds_left=None, **rest)

    watch = acceptance._stop_after(-1.0)
    watch(progress("search", 0))
    watch(progress("finalists", 3))
    with pytest.raises(KeyboardInterrupt):
        watch(progress("search", 1))
    acceptance._stop_after(100.0)(progress("search", 1))


# -- report ------------------------------------------------------------------------------------------


def test_report_is_complete_after_every_fact(tmp_path: Path) -> None:
    report = AcceptanceReport(tmp_path / "new", say=lambda text: None)
    report.begin("verify")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == {"verify": {"complete": False}}
    report.put("verify", done=1)
    report.put("verify", done=2, complete=True)
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written == {"verify": {"complete": True, "done": 2}}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_report_is_continued_and_a_repeated_step_replaced(tmp_path: Path) -> None:
    first = AcceptanceReport(tmp_path, say=lambda text: None)
    first.begin("verify")
    first.put("verify", problems=["one"])
    first.line("verify", {"a": 1})
    second = AcceptanceReport(tmp_path, say=lambda text: None)
    second.begin("record")
    assert second.problems(["verify", "record"]) == ["verify: one"]
    second.begin("verify")
    assert second.problems(["verify", "record"]) == []
    assert not (tmp_path / "verify.jsonl").exists()


def test_progress_shows_seconds_since_start(tmp_path: Path) -> None:
    lines_said: list[str] = []
    clock = iter([100.0, 112.34])
    AcceptanceReport(tmp_path, say=lines_said.append, now=lambda: next(clock)).say("half way")
    assert lines_said == ["[  12.3 s] half way"]


# -- comparison --------------------------------------------------------------------------------------


def call(name: str, rounds: Sequence[Sequence[float] | Exception], log: list[str]) -> TimedCall:
    left = list(rounds)

    def take() -> Sequence[float]:
        log.append(name)
        now = left.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    def prepare() -> Callable[[], Sequence[float]]:
        return take

    return TimedCall(name, prepare)


def test_programs_run_in_turn_and_are_ranked() -> None:
    log: list[str] = []
    ours = call("ours", [[10.0] * 5, [12.0] * 5, [12.0] * 5], log)
    library = call("library", [[9.0] * 5, [9.0] * 5, [30.0] * 5], log)
    rows = interleaved.compare([ours, library], rounds=3, ours="ours")
    assert log == ["ours", "library"] * 3
    assert [row["name"] for row in rows] == ["library", "ours"]
    assert [row["median_us"] for row in rows] == [9.0, 12.0]
    assert [row["speedup"] for row in rows] == [0.75, 1.0]
    assert rows[0]["samples"] == 15


def test_failing_program_is_dropped() -> None:
    def refuses() -> Callable[[], Sequence[float]]:
        raise RuntimeError("not for this workload")

    log: list[str] = []
    late = call("late", [[5.0], ValueError("lost"), [5.0]], log)
    ours = call("ours", [[7.0]] * 3, log)
    rows = interleaved.compare([TimedCall("never", refuses), late, ours], rounds=3, ours="ours")
    assert rows[0]["name"] == "ours"
    assert rows[1:] == [
        {"name": "never", "problem": "RuntimeError: not for this workload"},
        {"name": "late", "problem": "ValueError: lost"},
    ]
    assert log == ["late", "ours", "late", "ours", "ours"]


def entry(variant: str, us: float, config: int, kind: type = Measured) -> Any:
    key = SimpleNamespace(variant=variant, config=f"bm={config}")
    outcome = measured(us) if kind is Measured else LaunchFailed(reason="no")
    return SimpleNamespace(key=key, result=Result(outcome=outcome), bound_us=1.0)


def test_only_variants_near_the_best_are_compared() -> None:
    entries = [
        entry("gemm/slow", 50.0, 1),
        entry("gemm/mma", 11.0, 2),
        entry("gemm/mma", 10.0, 3),
        entry("gemm/simt", 30.0, 4),
        entry("gemm/broken", 1.0, 5, LaunchFailed),
    ]
    best = speedups.best_of_each(entries)
    assert list(best) == ["gemm/mma", "gemm/simt", "gemm/slow"]
    assert best["gemm/mma"] == {"config": "bm=3", "median_us": 10.0, "bound_us": 1.0}
    assert speedups.worth_comparing(best) == ["gemm/mma", "bm=3", "gemm/simt", "bm=4"]
    assert speedups.worth_comparing({}) == []


def times(**us: float) -> list[dict[str, Any]]:
    return [{"name": name, "median_us": value} for name, value in us.items()] + [
        {"name": "x", "problem": "no"}
    ]


def test_ratios_by_workload_and_path_with_geometric_means() -> None:
    rows = [
        {
            "workload": "one",
            "paths": ["mma", "simt"],
            "rows": times(mma=10.0, simt=20.0, torch=20.0, triton=5.0),
        },
        {"workload": "two", "paths": ["simt"], "rows": times(simt=4.0, torch=2.0)},
        {"workload": "not timed", "paths": ["mma"], "problem": "not done"},
        {"workload": "alone", "paths": ["mma"], "rows": times(mma=1.0)},
    ]
    found = speedups.ratios(rows)
    assert set(found["by_workload"]) == {"one", "two"}
    assert found["by_workload"]["one"]["mma"] == {"torch": 2.0, "triton": 0.5, "fastest": 0.5}
    assert found["by_workload"]["one"]["simt"]["torch"] == 1.0
    means = found["geometric_means"]
    assert means["mma"]["torch"] == {"ratio": pytest.approx(2.0), "workloads": 1}
    assert means["simt"]["torch"] == {"ratio": pytest.approx(0.5**0.5), "workloads": 2}
    assert means["best of all"]["torch"] == {"ratio": pytest.approx(1.0), "workloads": 2}
    assert means["best of all"]["fastest"] == {"ratio": pytest.approx(0.5), "workloads": 2}


FUSED = "softmax:rows=64,cols=100,dtype=f32,prologue=scale"


def test_fusion_gain_needs_all_parts_measured() -> None:
    parts = [str(part) for part in parse(FUSED).unfused()]
    assert len(parts) == 2
    rows = [
        {"workload": text, "median_us": us} for text, us in zip([FUSED, *parts], (4.0, 3.0, 5.0), strict=True)
    ]
    assert speedups.fusion_gains(rows) == {FUSED: {"whole_us": 4.0, "parts_us": 8.0, "gain": 2.0}}
    assert speedups.fusion_gains(rows[:2]) == {}
    assert speedups.fusion_gains([*rows[:2], {"workload": parts[1], "median_us": None}]) == {}


def test_bandwidth_share_of_memory_bound_workloads() -> None:
    rows = [
        {"workload": SOFTMAX, "median_us": 2.0},
        {"workload": "gemm:m=8,n=8,k=8,dtype=f16", "median_us": 1.0},
    ]
    moved = 2 * 64 * 100 * 4
    assert speedups.bandwidth_shares(rows, 100.0) == {SOFTMAX: pytest.approx(moved / 2e-6 / 1e9 / 100.0)}
    assert speedups.bandwidth_shares(rows, None) == {}


def test_fused_workloads_are_listed_with_their_parts() -> None:
    listed = acceptance_workloads.measured()
    assert len(listed) > len(acceptance_workloads.MEASURED)
    for text in acceptance_workloads.MEASURED:
        assert {str(part) for part in parse(text).unfused()} <= set(listed)


def test_repeated_step_keeps_rows_of_other_workloads(tmp_path: Path) -> None:
    report = AcceptanceReport(tmp_path)
    report.begin("measure")
    report.put("measure", rows=[{"workload": "one"}, {"workload": "two"}])
    again = AcceptanceReport(tmp_path)
    again.begin("measure")
    assert again.steps["measure"] == {"complete": False}
    assert again.rows_of_others("measure", ["two", "three"]) == [{"workload": "one"}]


def test_comparison_continues_after_a_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = {"softmax/cuda_block": {"config": "a=1", "median_us": 2.0}}
    late = {"rows": times(**{"softmax/cuda_block": 2.0, "torch": 3.0}), "problem": "late", "timed_out": True}
    answers = iter([late, {"problem": "exit status 1"}])
    asked: list[list[str]] = []

    def run_gpu_process(arguments: list[str], *, timeout_s: float) -> dict[str, Any]:
        asked.append(arguments)
        return next(answers)

    monkeypatch.setattr(acceptance, "run_gpu_process", run_gpu_process)
    here = session(tmp_path)
    rows = [{"workload": w, "variant": "v", "bound_us": 1.0, "paths": paths} for w in ("one", "two")]
    here.report.put("measure", rows=rows)
    acceptance.compare(here)
    assert asked == [["contest", w, "softmax/cuda_block", "a=1"] for w in ("one", "two")]
    step = here.report.steps["compare"]
    assert (step["undone"], step["problems"]) == (["one: late"], ["two: exit status 1"])
    mean = step["ratios"]["geometric_means"]["softmax/cuda_block"]["torch"]
    assert mean == {"ratio": pytest.approx(1.5), "workloads": 1}


def test_no_speedup_without_own_time() -> None:
    rows = interleaved.compare([call("library", [[3.0]], [])], rounds=1, ours="ours")
    assert rows == [{"name": "library", "median_us": 3.0, "ci_us": (3.0, 3.0), "samples": 1}]
