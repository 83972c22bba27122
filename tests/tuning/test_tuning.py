"""Tuning on the CPU from search to lookup: every outcome is stored, and known trials are not repeated."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.docs.example_process import COMMAND_MODULES
from tests.fork_server import Fork, ForkServer
from tests.support import missing
from tunebench import kernels, lookup, tune
from tunebench._signal import ending_like_ctrl_c
from tunebench.db.store import open_store
from tunebench.errors import DatabaseError, InputError, LookupMiss, UnknownName
from tunebench.measure.timing import Protocol
from tunebench.tuning import Plan, Progress, Report, known_outcome

FAULTY = str(Path(__file__).parents[1] / "data" / "faulty_variant.py")
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"
QUICK = Protocol(min_samples=3, max_samples=5, max_s=0.05, abort_factor=1e6)


def plan(**changes: object) -> Plan:
    options = {"trials": 50, "protocol": QUICK, "baselines": False, "finalists": 1, "workers": 2, **changes}
    return Plan(**options)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuning") / "records.db"


@pytest.fixture(scope="module")
def seen() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def report(database: Path, seen: list[Progress], tmp_path_factory: pytest.TempPathFactory) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        faulty = plan(variant_files=(FAULTY,), timeout_s=5.0)
        return tune(WORKLOAD, device="cpu", db=database, plan=faulty, watcher=seen.append)


def test_every_failure_is_of_its_class_and_the_search_ends(report: Report) -> None:
    assert report.trials == {
        "measured": 2,
        "crashed": 2,
        "timed_out": 1,
        "wrong_result": 4,
        "compile_failed": 6,
    }
    assert report.config is not None
    assert report.config["fault"] == "none"
    assert report.gap is not None
    assert report.gap > 1


def test_the_time_of_the_finals_is_a_part_of_the_wall_time(report: Report) -> None:
    assert 0 < report.finals_s < report.seconds["wall_s"]
    assert report.to_json()["finals_s"] == report.finals_s


def test_every_failure_is_stored_with_its_reason(report: Report, database: Path) -> None:
    with open_store(database) as store:
        entries = store.history(WORKLOAD)
    reasons = {e.result.outcome.kind: getattr(e.result.outcome, "reason", "") for e in entries}
    assert "SIGSEGV" in reasons["crashed"]
    assert "within 5 s" in reasons["timed_out"]
    wrong = [e.result.outcome.reason for e in entries if e.result.outcome.kind == "wrong_result"]
    assert any("y[0,0]" in reason for reason in wrong)
    assert any("replaced time.perf_counter_ns" in reason for reason in wrong)
    assert any("no_such_method" in getattr(e.result.outcome, "reason", "") for e in entries)
    measured = next(e for e in entries if e.result.outcome.kind == "measured")
    assert measured.result.outcome.samples_us
    assert measured.result.conditions["numba"]
    assert measured.result.effort.compile_s > 0


def test_failures_are_reported_by_reason_with_their_first_configuration(report: Report) -> None:
    reasons = {failure.config["fault"]: str(failure) for failure in report.failures}
    assert sum(failure.count for failure in report.failures) == 13
    assert reasons["refuse"].startswith("2 compile_failed: ")
    assert "no_such_method" in reasons["refuse"]
    assert "kernel raised SystemExit: 0 (" in reasons["exit"]
    assert reasons["interrupt"].startswith("1 compile_failed: KeyboardInterrupt (")
    assert r"half a character \ud800, and NUL \x00" in reasons["text"]
    assert reasons["leave"] == "1 compile_failed: the compiler: worker exited with code 0"


def test_lookup_without_the_file_of_the_best_variant_names_it(report: Report, database: Path) -> None:
    assert report.variant == "softmax/faulty"
    with (
        kernels.variant_file_scope(empty=True),
        pytest.raises(LookupMiss, match=f"softmax/faulty took .* its file is not loaded.*{FAULTY}"),
    ):
        lookup("softmax", rows=33, cols=65, dtype="f32", device="cpu", db=database)


def test_kernels_that_replay_a_result_or_replace_the_clock_are_wrong(report: Report, database: Path) -> None:
    with open_store(database) as store:
        reasons = {
            e.key.config["fault"]: getattr(e.result.outcome, "reason", "") for e in store.history(WORKLOAD)
        }
    assert reasons["replay"].startswith("in a timed launch: ")
    assert reasons["clock"].startswith("the variant replaced time.perf_counter_ns in the process")


def test_progress_counts_up_to_the_end(report: Report, seen: list[Progress]) -> None:
    search = [p for p in seen if p.phase == "search"]
    assert [p.done for p in search] == sorted(p.done for p in search)
    assert sum(search[-1].outcomes.values()) == 15


def test_known_configurations_cost_no_trials_and_are_looked_up(
    report: Report, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_outcome, "BUSY_ELSEWHERE", 1.0)  # under load, the hang would be tried again
    second = tune(WORKLOAD, device="cpu", db=database, plan=plan(variant_files=(FAULTY,), timeout_s=5.0))
    assert second.trials == {}
    assert second.cached == 15
    answer = lookup("softmax", rows=33, cols=65, dtype="f32", device="cpu", db=database)
    assert answer.variant == "softmax/faulty"
    assert answer.how == "measured here"


def test_built_in_variant_is_tuned_and_looked_up(tmp_path: Path) -> None:
    report = tune(WORKLOAD, device="cpu", db=tmp_path / "a.db", plan=plan(trials=3, sampler="random"))
    assert sum(report.trials.values()) == 3
    answer = lookup("softmax", rows=33, cols=65, dtype="f32", device="cpu", db=tmp_path / "a.db")
    assert answer.config == report.config


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"trials": 0}, InputError),
        ({"sampler": "grid"}, UnknownName),
        ({"variants": ("no_such",)}, UnknownName),
        ({"variant_files": ("/no/such/file.py",)}, InputError),
        ({"variants": ("cuda_block",)}, InputError),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(
    changes: dict[str, object], error: type, tmp_path: Path
) -> None:
    with pytest.raises(error):
        tune(WORKLOAD, device="cpu", db=tmp_path / "a.db", plan=plan(**changes))
    assert not (tmp_path / "a.db").exists()


COMMAND = (
    *("tune", "--workload", WORKLOAD, "--device", "cpu"),
    *("--variant-file", FAULTY.replace("faulty", "forty"), "--trials", "16", "--finalists", "1"),
    *("--no-baselines", "--json", "--workers", "2", "--db"),
)


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkServer | None]:
    """Return a server whose forks are commands; None where there is none."""
    server = None
    if missing("fork-server") is None:
        server = ForkServer.start(COMMAND_MODULES, "tests.docs.example_process:import_commands")
    yield server
    if server is not None:
        server.close()


def trials(database: Path) -> Counter[str]:
    """Return how often each configuration was measured by a search."""
    try:
        store = open_store(database, read_only=True)
    except DatabaseError:  # the database does not exist yet
        return Counter()
    with store:
        return Counter(str(e.key.config) for e in store.history(WORKLOAD) if e.purpose == "search")


def start(
    commands: ForkServer | None, database: Path, output: IO[bytes], errors: IO[bytes], **environment: str
) -> Fork | subprocess.Popen[bytes]:
    """Start a run in a process of its own."""
    variables = {**os.environ, **environment}
    arguments = [*COMMAND, str(database)]
    if commands is None:
        command = [sys.executable, "-m", "tunebench", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=errors, env=variables)
    with open(os.devnull, "rb") as nothing:
        return commands.launch(
            "tests.docs.example_process:run_command",
            *arguments,
            environment=variables,
            streams=[stream.fileno() for stream in (nothing, output, errors)],
        )


def run(
    commands: ForkServer | None,
    database: Path,
    interruption: tuple[int, int] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or send it a signal once a number of trials is stored.

    Args:
        commands: Server of commands, if any.
        database: Database of the run.
        interruption: Number of trials, and the signal.
        environment: Further variables of the environment.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(commands, database, output, errors, **environment)
        if interruption is not None:
            after, number = interruption
            end = time.monotonic() + 120
            while (
                process.poll() is None and time.monotonic() < end and sum(trials(database).values()) < after
            ):
                time.sleep(0.05)
            os.kill(process.pid, number)
        returncode = process.wait(120)
        for stream in (output, errors):
            stream.seek(0)
        out, err = output.read().decode(), errors.read().decode()
    return subprocess.CompletedProcess(COMMAND, returncode, out, err)


def test_killed_twice_interrupted_once_and_nothing_is_lost_or_measured_twice(
    tmp_path: Path, commands: ForkServer | None
) -> None:
    database = tmp_path / "killed.db"
    before: Counter[str] = Counter()
    for after, number in ((2, signal.SIGKILL), (5, signal.SIGKILL), (8, signal.SIGINT)):
        ended = run(commands, database, (after, number))
        assert ended.returncode == (130 if number == signal.SIGINT else -number), ended.stderr
        recorded = trials(database)
        assert recorded >= before
        assert sum(recorded.values()) >= after
        before = recorded
    last = run(commands, database)
    assert last.returncode == 0, last.stderr
    assert trials(database) >= before
    assert set(trials(database).values()) == {1}
    assert sum(trials(database).values()) == 16


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_end_a_run_like_ctrl_c(
    tmp_path: Path, number: signal.Signals, commands: ForkServer | None
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, tests and tuners ignore SIGHUP
    try:
        ended = run(commands, tmp_path / "a.db", (3, number), TMPDIR=str(scratch))
    finally:
        signal.signal(number, before)
    assert ended.returncode == 130, ended.stderr
    assert json.loads(ended.stdout)["interrupted"]
    assert "Traceback" not in ended.stderr
    assert list(scratch.iterdir()) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM trial WHERE state = 'claimed'").fetchone() == (0,)


def test_handlers_of_the_program_and_ignored_signals_are_kept() -> None:
    handler = lambda number, frame: None  # noqa: E731
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ending_like_ctrl_c():
            assert signal.getsignal(signal.SIGTERM) is handler
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), ending_like_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, earlier_handler in before.items():
            signal.signal(number, earlier_handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_a_destructor_ends_a_run(number: signal.Signals) -> None:
    """Python drops the exception that its handler raises there."""

    class Released:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def run() -> None:
        Released()
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt), ending_like_ctrl_c():
        run()
