"""The parts of the GPU acceptance run that work without a GPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import acceptance, acceptance_run, acceptance_workloads, carried, gpu_process, headline
from tests.gpu.acceptance_report import ARCHIVE, AcceptanceReport
from tests.support import measured, needs_no_gpu, needs_nvrtc, until
from tunebench import device, kernels, variant
from tunebench.db import open_store
from tunebench.executor import TaskRefused, WorkerExecutor
from tunebench.kernels.common import library, library_gpu
from tunebench.outcome import LaunchFailed, Resources, Result, TimedOut
from tunebench.task import Task
from tunebench.variant import GpuVariant, Variant
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


def test_the_former_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        acceptance.parsed(["--run", "1"])
    assert "choose from" in capsys.readouterr().err


def test_runs_fit_into_fifteen_minutes_and_share_their_time() -> None:
    assert acceptance.parsed(["--run", "B"]).runs == ["B"]
    assert acceptance.parsed([]).runs == ["A", "B"]
    start_s, between_s = 120.0, 30.0  # of the machine, and until the second command
    assert start_s + between_s + 60.0 * sum(acceptance.MINUTES.values()) < 15 * 60
    seconds = acceptance.step_seconds("A", acceptance.MINUTES["A"])
    assert list(seconds) == ["facts", "wgmma", "headline", "tune"]
    assert sum(seconds.values()) == pytest.approx(60 * 7 - acceptance.RESERVE_S)
    assert seconds["headline"] / seconds["tune"] == pytest.approx(195 / 115)


def test_age_of_the_process_counts() -> None:
    script = "import time; time.sleep(0.3); import tests.gpu.acceptance as a; print(a.process_age_s())"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    begun = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True)
    assert 0.3 <= float(ran.stdout) <= time.monotonic() - begun + 0.1


def test_run_that_waits_for_ever_ends_itself(tmp_path: Path) -> None:
    limited = "with a._ended_after(0.1, lambda: 'the table'): time.sleep(600)"
    script = f"import tests.gpu.acceptance as a, time\n{limited}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=False)
    assert ran.returncode == 3
    assert ran.stdout.decode().endswith("its results\nthe table\n")
    threads = threading.active_count()
    with acceptance._ended_after(0.1):
        assert threading.active_count() == threads + 1
    time.sleep(0.2)  # this process goes on


def test_a_missing_tar_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        acceptance.parsed(["--run", "B", "--previous", "nowhere.tar.gz"])
    assert "there is no file nowhere.tar.gz" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        acceptance.parsed(["--prepare", "--wheels", str(Path(__file__).parent)])
    assert "there is no wheel in" in capsys.readouterr().err


def steps_in(archive: Path, folder: Path) -> dict[str, Any]:
    AcceptanceReport.unpack(archive, folder)
    steps: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return steps


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let every step measure one thing at once."""

    def done(session: acceptance_run.AcceptanceRun, step: str) -> None:
        session.measured += 1
        session.report.put(step, complete=True)

    monkeypatch.setattr(acceptance, "local_gpus", lambda: (H100,))
    monkeypatch.setattr(acceptance, "process_age_s", lambda: 1.0)  # that of these tests exceeds the limit
    for step in acceptance.STEP_FUNCTIONS:
        monkeypatch.setitem(acceptance.STEP_FUNCTIONS, step, functools.partial(done, step=step))
    return monkeypatch


def test_failing_step_does_not_stop_the_others_and_runs_add_up(
    instant: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks(session: Any) -> None:
        raise RuntimeError("of no use")

    instant.setitem(acceptance.STEP_FUNCTIONS, "wgmma", breaks)
    copies = ["--copy", str(tmp_path / "copies")]
    assert acceptance.main(["--out", str(tmp_path / "out"), *copies, "--run", "A"]) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [ARCHIVE]
    steps = steps_in(tmp_path / "copies" / ARCHIVE, tmp_path / "first")
    assert steps["wgmma"]["problems"] == ["RuntimeError: of no use"]
    assert "breaks" in steps["wgmma"]["traceback"]
    assert steps["headline"]["complete"]
    previous = ["--previous", "nowhere.tar.gz", str(tmp_path / "copies" / ARCHIVE)]
    assert acceptance.main(["--out", str(tmp_path / "other"), "--run", "B", *previous]) == 0
    steps = steps_in(tmp_path / "other" / ARCHIVE, tmp_path / "second")
    assert set(steps) == set(acceptance.STEP_FUNCTIONS)


def test_run_that_measured_nothing_has_its_own_exit_status(
    instant: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for step in acceptance.STEP_FUNCTIONS:
        instant.setitem(acceptance.STEP_FUNCTIONS, step, lambda session: None)
    assert acceptance.main(["--out", str(tmp_path), "--run", "A"]) == acceptance.NOTHING_MEASURED


def test_a_run_reads_what_was_prepared_and_does_not_write_it_back(
    instant: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[str | None] = []
    instant.setitem(
        acceptance.STEP_FUNCTIONS,
        "facts",
        lambda session: folders.append(os.environ.get("TUNEBENCH_CARRIED")),
    )
    instant.setenv("TUNEBENCH_CARRIED", "to be restored")
    prepared = AcceptanceReport(tmp_path / "in", archives=[tmp_path / "in.tar.gz"], say=lambda text: None)
    for name in (*acceptance.INPUTS, "kept.txt"):
        (prepared.folder / name).mkdir() if "." not in name else prepared.text(name, "")
        if "." not in name:
            prepared.text(f"{name}/file", "")
    prepared.pack()
    acceptance.main(["--out", str(tmp_path), "--run", "A", "--previous", str(tmp_path / "in.tar.gz")])
    assert folders[0] is not None
    assert folders[0].endswith("/carried")
    AcceptanceReport.unpack(tmp_path / ARCHIVE, tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        "report.json",
        "headline.md",
        "kept.txt",
    }


def test_printed_table_fits_into_what_is_kept_of_the_output() -> None:
    libraries = [{"name": "torch", "median_us": 1e5, "speedup": 0.5}]
    rows = [
        {"workload": text, "variant": "attention/cuda_wgmma_backward", "config": "", "rows": libraries}
        for text in acceptance_workloads.HEADLINE
    ]
    text = headline.headline_text({"headline": {"rows": rows}, "tune": {"rows": rows}})
    assert len(text) + acceptance.PROBLEMS_SHOWN * 230 < 12_000
    assert text.splitlines()[0].startswith("headline figures: 22 of 22. Times with cold caches")
    assert "its time, cold caches" in headline.headline_table({"headline": {"rows": rows}})


# -- what is carried -----------------------------------------------------------------------------------------


def test_defaults_of_every_step_of_run_a_are_carried() -> None:
    keys = {(kernel.variant.key, str(kernel.workload)) for kernel in carried.kernels_to_carry(H100)}
    for text in acceptance_workloads.HEADLINE:
        workload = str(parse(text))
        for key in headline.ranked(session(Path("unused"), report=False), text):
            assert (key, workload) in keys
    assert {key for key, _ in keys} >= {
        *acceptance_workloads.SANITIZED_FIRST,
        *(variant.key for variant in kernels.variants() if "wgmma" in variant.key),
    }


@needs_nvrtc
def test_carried_kernels_are_found_and_missing_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    listed = [kernel for kernel in carried.kernels_to_carry(H100) if "case" in kernel.variant.key][:3]
    monkeypatch.setattr(carried, "kernels_to_carry", lambda device: iter(listed[:2]))
    lines: list[str] = []
    assert carried.write_carried(tmp_path / "carried", [H100], lines.append, workers=1) == []
    assert lines == ["compiled 2 of 2 kernels to carry"]
    assert [carried.is_carried(tmp_path / "carried", kernel) for kernel in listed] == [True, True, False]
    monkeypatch.setattr(carried, "kernels_to_carry", lambda device: iter(listed))
    monkeypatch.setenv("TUNEBENCH_CARRIED", str(tmp_path / "carried"))
    (answer,) = gpu_process.carried("sm_90")
    assert (answer["kernels"], len(answer["missing"])) == (3, 1)


@needs_nvrtc
def test_smoke_compiles_without_carried_binaries_and_names_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {"softmax/cuda_block": SOFTMAX, "softmax/no_such_variant": SOFTMAX}
    monkeypatch.setattr(gpu_process, "smoke_workloads", lambda device: texts)
    monkeypatch.setenv("TUNEBENCH_CARRIED", "/nowhere")
    answers = {
        answer["compiled"]: answer["reason"] for answer in gpu_process.answers(["smoke", "sm_90", "2"])
    }
    assert answers["softmax/cuda_block"] is None
    assert "no_such_variant" in str(answers["softmax/no_such_variant"])
    assert "TUNEBENCH_CARRIED" not in os.environ


def test_every_gpu_variant_has_a_workload_to_compile() -> None:
    on_gpus = {variant.key for variant in kernels.variants() if isinstance(variant, GpuVariant)}
    assert set(acceptance_workloads.smoke_workloads(H100)) == on_gpus


def test_imports_are_timed_and_failures_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_process, "MODULES", ("json", "no_such_module"))
    (answer,) = gpu_process.answers(["imports"])
    assert list(answer["seconds"]) == ["json", "no_such_module"]
    assert answer["failed"] == {"no_such_module": "ModuleNotFoundError: No module named 'no_such_module'"}


# -- lists of workloads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *acceptance_workloads.VERIFIED,
        *acceptance_workloads.measured(),
        *acceptance_workloads.HEADLINE,
        *(text for text, _ in acceptance_workloads.RECORDED),
    ],
)
def test_every_listed_workload_parses_and_has_a_variant(text: str) -> None:
    parse(text)
    candidates, reason = acceptance_run.gpu_candidates(text, H100)
    assert candidates, reason


def test_recorded_spaces_are_small_enough_to_be_measured_whole() -> None:
    sizes = []
    for text, key in acceptance_workloads.RECORDED:
        candidates = acceptance_run.gpu_candidates(text, H100)[0]
        sizes += [len(candidate.table) for candidate in candidates if candidate.variant.key == key]
    assert len(sizes) == len(acceptance_workloads.RECORDED) == 3
    assert sum(sizes) * 0.15 < acceptance.RUNS["B"]["record"]  # seconds each, see `rehearsal.COST_S`


def unsupported(variants: Iterable[Variant[Any]], texts: Iterable[str]) -> set[str]:
    """Return the variants that support none of the workloads."""
    workloads = [parse(text) for text in texts]
    return {v.key for v in variants if all(v.refuses(workload, H100) for workload in workloads)}


def test_every_variant_is_verified_and_sanitized() -> None:
    on_gpus = [variant for variant in kernels.variants() if isinstance(variant, GpuVariant)]
    assert unsupported(on_gpus, acceptance_workloads.VERIFIED) == set()
    assert unsupported(on_gpus, acceptance_workloads.SANITIZED) == set()


def test_every_variant_that_uses_wgmma_has_a_medium_workload() -> None:
    on_hopper = [variant for variant in kernels.variants() if "wgmma" in variant.key]
    assert unsupported(on_hopper, acceptance_workloads.WGMMA) == set()


def test_fused_workloads_are_listed_with_their_parts() -> None:
    listed = acceptance_workloads.measured()
    assert len(listed) > len(acceptance_workloads.MEASURED)
    for text in acceptance_workloads.MEASURED:
        assert {str(part) for part in parse(text).unfused()} <= set(listed)


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
    repeated, _ = acceptance_run.items_to_verify(workloads, 4, H100)
    assert list(map(str, items)) == list(map(str, repeated))


def test_each_program_of_a_library_is_verified_once_after_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def install(version: str, *others: str) -> None:
        versions = {"torch": version, **dict.fromkeys(others, "99")}
        for module in (library, library_gpu, variant):
            monkeypatch.setattr(module, "installed_version", versions.get)

    install("9.9.9+cpu")
    assert acceptance_run.library_items(acceptance_workloads.VERIFIED, H100) == []
    install("9.9.9+cu130")
    programs = {
        f"{item.candidate.variant.key} {item.candidate.table.config(item.row)}": item.text
        for item in acceptance_run.library_items(acceptance_workloads.VERIFIED, H100)
    }
    for program in ("torch_mm", "torch_addmm", "torch_activation", "torch_scaled_mm"):
        assert f"gemm/library_gpu program={program}" in programs
    for program in ("flash", "cudnn", "efficient", "flash_backward"):
        assert f"attention/library_gpu program={program}" in programs
    assert "conv2d/library_gpu program=torch_benchmark" in programs
    assert not any(program.endswith("program=torch") for program in programs)
    items, _ = acceptance_run.items_to_verify([SOFTMAX], 2, H100)
    keys = [item.candidate.variant.key for item in items]
    assert keys.count("softmax/library_gpu") == 1
    assert keys.index("softmax/library_gpu") == len(set(keys)) - 1
    install("9.9.9+cu130", "nvmath-python", "nvidia-cublas", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13")
    ranked = acceptance_run.library_items(acceptance_workloads.VERIFIED, H100)
    keys = [item.candidate.variant.key for item in ranked]
    for key in ("gemm/library_cublaslt", "conv2d/library_cudnn", "attention/library_cudnn"):
        assert keys.count(key) == 2


def test_configurations_to_verify_are_listed_in_time_only() -> None:
    answers = iter([True, False])
    items, _ = acceptance_run.items_to_verify(
        [SOFTMAX, "layernorm:rows=64,cols=100,dtype=f16"], 1, H100, lambda: next(answers)
    )
    assert {item.text for item in items} == {SOFTMAX}


def test_step_without_time_is_left_out(tmp_path: Path) -> None:
    lines_said: list[str] = []
    run = session(tmp_path, lines_said)
    run.clock = lambda: 10.0
    status = acceptance.run_steps(run, {"verify": 1.0}, 10.0)
    assert run.report.steps["verify"] == {"complete": False, "undone": ["no time left"]}
    assert status == acceptance.NOTHING_MEASURED


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


def run(on: WorkerExecutor[Task], items: Sequence[Any], folder: Path, until: float = float("inf")) -> Any:
    current = session(folder)
    current.until, current.start_executor = until, lambda *_: on
    return list(acceptance_run.run_items(current, items, acceptance_run.Protocol()))


def test_all_items_run_when_one_raises(tmp_path: Path) -> None:
    on = Instant()
    ran = run(on, [item(row) for row in range(5)], tmp_path)
    assert len(ran) == len(on.tasks) == 5
    assert [type(result) for _, result in ran].count(RuntimeError) == 1
    assert on.tasks[1].config == item().candidate.table.config(1)


def test_no_item_starts_after_the_time_limit(tmp_path: Path) -> None:
    on = Instant()
    assert run(on, [item()], tmp_path, until=0.0) == []
    assert on.tasks == []


def test_three_hangs_of_a_variant_end_the_variant_and_not_the_step(tmp_path: Path) -> None:
    current = session(tmp_path)
    current.start_executor = lambda device, protocol, refuse: Hanging(refuse)
    items, _ = acceptance_run.items_to_verify([SOFTMAX], 6, H100)
    tally = acceptance_run.OutcomeTally(current, "verify", len(items))
    for verified, answer in acceptance_run.run_items(current, items, acceptance_run.Protocol()):
        tally.add(verified, answer)
    tally.end()
    hanging = sum(verified.candidate.variant.key == "softmax/cuda_block" for verified in items)
    assert hanging > 4
    assert tally.outcomes == {
        "timed_out": 3,
        "left out": hanging - 3,
        "measured": len(items) - hanging,
    }
    entry = current.report.steps["verify"]
    assert entry["stopped"] == ["softmax/cuda_block"]
    assert not entry["complete"]


class Hanging(Instant):
    """Executor in which every task of `softmax/cuda_block` hangs."""

    def __init__(self, refuse: Callable[[Task], str | None]) -> None:
        super().__init__()
        self._refuse = refuse

    def submit(self, task: Task) -> Future[Result]:
        future: Future[Result] = Future()
        if (reason := self._refuse(task)) is not None:
            future.set_exception(TaskRefused(reason))
        elif task.variant.key == "softmax/cuda_block":
            future.set_result(Result(outcome=TimedOut(reason="no answer")))
        else:
            future.set_result(result(1000.0))
        return future


def test_a_time_below_its_bound_is_a_problem() -> None:
    assert item().bound_us > 0
    assert acceptance_run.fault_of(item(), result(item().bound_us * 1.01)) is None
    fault = acceptance_run.fault_of(item(), result(item().bound_us * 0.99))
    assert fault is not None
    assert "is below its bound of" in fault


def test_unmeasured_outcome_is_a_problem() -> None:
    fault = acceptance_run.fault_of(item(), Result(outcome=LaunchFailed(reason="for no reason")))
    assert fault is not None
    assert fault.endswith("launch_failed: for no reason")


def session(
    folder: Path, lines_said: list[str] | None = None, *, report: bool = True
) -> acceptance_run.AcceptanceRun:
    if not report:
        nothing: Any = None
        return acceptance_run.AcceptanceRun(H100, nothing)
    written = AcceptanceReport(folder, say=(lines_said if lines_said is not None else []).append)
    return acceptance_run.AcceptanceRun(H100, written, until=float("inf"))


def test_a_tally_counts_and_keeps_lines_and_problems(tmp_path: Path) -> None:
    lines_said: list[str] = []
    current = session(tmp_path, lines_said)
    tally = acceptance_run.OutcomeTally(current, "verify", 4, ["a problem"])
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


# -- report ------------------------------------------------------------------------------------------


def test_report_is_complete_after_every_fact(tmp_path: Path) -> None:
    report = AcceptanceReport(tmp_path / "new", say=lambda text: None)
    report.begin("verify")
    report.put("verify", done=1)
    report.put("verify", done=2, complete=True)
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written == {"verify": {"complete": True, "done": 2}}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_tar_file_has_the_folder_and_a_copy_of_the_database(tmp_path: Path) -> None:
    archive = tmp_path / "out" / ARCHIVE
    report = AcceptanceReport(tmp_path / "work", archives=[archive], say=lambda text: None)
    with open_store(report.folder / "acceptance.db") as store:  # still open while it is copied
        report.put("verify", done=1)
        assert store.best(SOFTMAX, H100.key) == []
    report.line("verify", {"a": 1})
    report.pack()
    AcceptanceReport.unpack(archive, tmp_path / "again")
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"report.json", "verify.jsonl", "acceptance.db"}
    with open_store(tmp_path / "again" / "acceptance.db", read_only=True) as store:
        assert store.best(SOFTMAX, H100.key) == []
    assert [path.name for path in archive.parent.iterdir()] == [ARCHIVE]


def test_tar_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    script = f"""
import itertools
from pathlib import Path
from tests.gpu.acceptance_report import AcceptanceReport
seconds = itertools.count(0, 1000)
report = AcceptanceReport(
    Path({str(tmp_path / "work")!r}),
    archives=[Path({str(archive)!r})],
    say=print,
    now=lambda: float(next(seconds)),
)
report.text("large.txt", "".join(map(str, range(300_000))))
while True:
    report.put("verify", rows=list(range(1000)))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as process:
        until(archive.is_file, "the process wrote a tar file")
        for _ in range(20):  # a reader sees a whole file at any time
            time.sleep(0.01)
            AcceptanceReport.unpack(archive, tmp_path / "read")
        process.kill()
    assert steps_in(archive, tmp_path / "again")["verify"]["rows"] == list(range(1000))


def test_killed_step_keeps_the_entry_of_an_earlier_run(tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    first = AcceptanceReport(tmp_path / "first", archives=[archive], say=lambda text: None)
    first.begin("headline")
    first.put("headline", rows=[1])
    first.pack()
    second = AcceptanceReport(tmp_path / "first", archives=[archive], say=lambda text: None)
    second.begin("headline")  # and then the process is killed
    assert steps_in(archive, tmp_path / "again")["headline"]["rows"] == [1]


def test_tar_file_is_rewritten_every_few_seconds(tmp_path: Path) -> None:
    now = [0.0]
    archive = tmp_path / ARCHIVE
    report = AcceptanceReport(tmp_path / "w", archives=[archive], say=lambda text: None, now=lambda: now[0])
    for second, expected in ((0.0, 0), (1.0, 0), (2.5, 2), (3.0, 2), (600.0, 4)):
        now[0] = second
        report.put("verify", done=[0.0, 1.0, 2.5, 3.0, 600.0].index(second))
        folder = tmp_path / f"at {second}"
        assert steps_in(archive, folder)["verify"]["done"] == expected


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
