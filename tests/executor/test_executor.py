"""Local executor: results, failures as outcomes, and the overlap of compiling and measuring."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from tunebench.errors import (
    CodeTimeout,
    DeviceError,
    EnvironmentFault,
    InputError,
    TaskUnreadable,
    WorkerUnusable,
)
from tunebench.executor import (
    ExecutorClosed,
    _call_clock,
    _memory,
    _running_process,
    _supervisor,
    local,
    process,
)
from tunebench.executor._worker_main import number_of
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessCaller, ProcessStage
from tunebench.kernels import preload
from tunebench.measure.task_limit import outside_limit
from tunebench.outcome import CompileFailed, Crashed, LaunchFailed, Measured, Result, TimedOut
from tunebench.testing import executor_stages as stages
from tunebench.testing.executor_contract import ExecutorContract, outcome, task


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalExecutor]:
    with stages.start_executor(0, TestLocal.timeout_s) as workers:
        yield workers


class TestLocal(ExecutorContract):
    timeout_s = 10.0  # on a busy machine, a new process takes seconds for its imports


@pytest.mark.parametrize("overlap", [True, False])
def test_compiling_and_measuring_overlap_only_where_allowed(overlap: bool) -> None:
    with stages.start_executor(0, overlap=overlap) as workers:
        wait([workers.submit(task())])  # workers are up
        both = False
        futures = [workers.submit(task(compiling="slow", run="slow")) for _ in range(6)]
        while not all(future.done() for future in futures):
            with workers._lock:
                both = both or bool(workers._compiling and workers._measuring)
            time.sleep(0.005)
        assert all(isinstance(outcome(future), Measured) for future in futures)
    assert both is overlap


def test_each_gpu_has_a_process_and_comparisons_use_the_first() -> None:
    with stages.start_executor(0, gpus=("3", "GPU-5")) as workers:
        assert workers.capacity == 6
        gpus = [conditions(workers.submit(task(run="slow")))["gpu"] for _ in range(2)]
        futures = [workers.submit(task(run="slow")) for _ in range(6)]
        assert {conditions(future)["gpu"] for future in futures} == {"3", "GPU-5"}
        assert set(gpus) <= {"3", "GPU-5"}
        for _ in range(2):
            with workers.same_worker():
                futures = [workers.submit(task(run="slow")) for _ in range(3)]
                results = [conditions(future) for future in futures]
            assert {result["gpu"] for result in results} == {"3"}
            began = sorted(result["began"] for result in results)
            assert all(later - earlier > 0.15 for earlier, later in itertools.pairwise(began))
        stage = ProcessStage(function=os.getenv, start=stages.start)
        with workers.caller(lambda: stage) as caller:
            assert caller.call("CUDA_VISIBLE_DEVICES") == "3"


def conditions(future: Future[Result]) -> Mapping[str, Any]:
    measured = outcome(future)
    assert isinstance(measured, Measured)
    return measured.conditions


@pytest.mark.parametrize("stage", ["compiling", "run"])
def test_fault_of_the_environment_is_tried_again(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RETRY_S", (0.0, 0.0))
    with stages.start_executor(0, TestLocal.timeout_s) as workers:
        done = outcome(workers.submit(task(folder=str(tmp_path), us=5, **{stage: "fault"})))
    assert done.median_us == 5
    assert next(tmp_path.iterdir()).read_text().count("called") == 3


@pytest.mark.parametrize(("stage", "failure"), [("compiling", CompileFailed), ("run", LaunchFailed)])
def test_configuration_that_exhausts_a_resource_in_two_processes_failed(
    stage: str, failure: type, tmp_path: Path
) -> None:
    with stages.start_executor(0) as workers:
        done = outcome(workers.submit(task(folder=str(tmp_path), us=2, **{stage: "exhaust"})))
        assert isinstance(outcome(workers.submit(task())), Measured)
    assert done == failure(reason="MemoryError", refused=False, conditions={"attempts": 2})
    assert len(set(next(tmp_path.iterdir()).read_text().split())) == 2  # process ids


@pytest.mark.parametrize("stage", ["compiling", "run"])
def test_configuration_that_lacks_a_resource_once_is_measured(stage: str, tmp_path: Path) -> None:
    with stages.start_executor(0) as workers:
        done = outcome(workers.submit(task(folder=str(tmp_path), us=1, **{stage: "exhaust"})))
    assert isinstance(done, Measured)


def test_fault_of_a_machine_that_lacks_the_resource_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "file"))
    with stages.start_executor(0) as workers:
        future = workers.submit(task(run="exhaust", us=2, folder=str(tmp_path)))
        with pytest.raises(EnvironmentFault, match="this machine lacks space in "):
            future.result(timeout=600)


def test_clock_of_a_call_stops_while_the_process_waits_for_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_call_clock.CallClock, "waited_s", lambda clock: 1.5)
    with ProcessCaller(ProcessStage(function=time.sleep, start=stages.start, timeout_s=1.0)) as caller:
        begun = time.monotonic()
        assert isinstance(caller.call(600.0), TimedOut)
    assert time.monotonic() - begun >= 2.5


def fail_costs(_task: object, _resources: object) -> float:
    raise CodeTimeout("softmax/mine: costs did not return within 10 s", {"limit_s": 10.0})


def test_costs_that_fail_for_one_configuration_are_its_failure() -> None:
    stage = ProcessStage(function=stages.compile_task, start=stages.start)
    with LocalExecutor(compiling=stage, measuring=stage, overlap=True, bound=fail_costs) as workers:
        done = outcome(workers.submit(task()))
    reason = "softmax/mine: costs did not return within 10 s"
    assert done == CompileFailed(reason=reason, refused=False, conditions={"limit_s": 10.0})


def test_signals_without_a_name_have_their_number() -> None:
    assert process.death_reason(-(signal.SIGRTMIN + 1)) == f"worker killed by signal {signal.SIGRTMIN + 1}"


def test_lasting_fault_of_the_environment_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "RETRY_S", (0.0, 0.0))
    with stages.start_executor(0, TestLocal.timeout_s) as workers:
        future = workers.submit(task(run="lasting fault"))
        with pytest.raises(EnvironmentFault, match="no space left"):
            future.result(timeout=60)
    with pytest.raises(ExecutorClosed):
        workers.submit(task())


def test_process_caller_reuses_its_process_and_replaces_it_when_it_dies() -> None:
    with ProcessCaller(ProcessStage(function=stages.measure_task, start=stages.start)) as caller:
        first, second = (caller.call(task(us=us), None, None).outcome.median_us for us in (3, 4))
        assert (first, second) == (3, 4)
        assert isinstance(caller.call(task(run="crash"), None, None), Crashed)
        assert caller.call(task(us=5), None, None).outcome.median_us == 5


def test_a_caller_that_was_never_used_has_nothing_to_stop() -> None:
    before = set(multiprocessing.active_children())
    with ProcessCaller(ProcessStage(function=stages.measure_task, start=stages.start)):
        assert set(multiprocessing.active_children()) <= before


def _compute_reference(then: str) -> str:
    with outside_limit():
        time.sleep(4.0)
    if then == "hang":
        threading.Event().wait()
    return then


@pytest.mark.parametrize("then", ["return", "hang"])
def test_time_limit_does_not_count_references_and_still_ends_a_hang(then: str) -> None:
    stage = ProcessStage(function=_compute_reference, start=stages.start, timeout_s=3.0)
    with ProcessCaller(stage) as caller:
        answer = caller.call(then)
    if then == "return":
        assert answer == "return"
        return
    assert answer.reason == "no answer within 3 s"
    conditions = answer.conditions
    assert (conditions["limited"], conditions["limit_s"]) == ("call", 3.0)
    assert conditions["wall_s"] - conditions["waited_s"] >= 6.0  # the reference and the hang
    assert conditions["processor_s"] < 3.0
    assert {"load", "cores", "busy_elsewhere"} <= set(conditions)


def test_references_have_a_time_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_running_process, "OUTSIDE_S", 1.0)
    stage = ProcessStage(function=_compute_reference, start=stages.start, timeout_s=60.0)
    with ProcessCaller(stage) as caller:
        assert isinstance(caller.call("return"), TimedOut)


class _Unloadable:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (eval, ("no_such_name",))


def test_argument_that_a_worker_cannot_unpickle_raises() -> None:
    stage = ProcessStage(function=stages.compile_task, start=stages.start)
    with ProcessCaller(stage) as caller, pytest.raises(TaskUnreadable, match="NameError"):
        caller.call(_Unloadable())


def _exit(status: int) -> None:
    os._exit(status)


def _raise_system_exit() -> None:
    raise SystemExit(0)


def _close_connection() -> None:
    os.closerange(3, 100)
    time.sleep(600)


def _answer_in_part() -> None:
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.send(struct.pack("!i", 1000))
    time.sleep(600)


def _fork_and_exit() -> None:
    if os.fork():
        os._exit(4)
    time.sleep(600)  # the child inherits the connection


def _reply_with(reply: bytes) -> str:
    """Send a reply for the worker, and return another one."""
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.send(struct.pack("!i", len(reply)) + reply)
    return "right"


def _change_state() -> None:
    """Leave behind what would end, fail or slow the next call."""
    signal.setitimer(signal.ITIMER_REAL, 600.0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CPU, (600, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    sys.setrecursionlimit(999)
    builtins.open = None  # type: ignore[assignment]


def _state() -> list[object]:
    return [
        signal.getitimer(signal.ITIMER_REAL)[0],
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        signal.getsignal(signal.SIGUSR1),
        resource.getrlimit(resource.RLIMIT_CPU),
        sys.getrecursionlimit(),
        callable(builtins.open),
    ]


def _state_of(change: bool) -> tuple[int, list[object]]:
    state = _state()
    if change:
        _change_state()
    return os.getpid(), state


def _recurse(limit: int, depth: int = 10) -> int:
    sys.setrecursionlimit(limit)
    return _recurse(limit, depth - 1) if depth else 0


class _OddError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def _raise_unpicklable() -> None:
    raise _OddError("not ", "picklable")


def _pid() -> int:
    return os.getpid()


def _never_start(fault: str) -> None:
    if fault == "exit":
        os._exit(0)
    if fault == "hang":
        time.sleep(600)
    raise DeviceError("no device here")


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (_exit, (0,), "worker exited with code 0"),
        (_exit, (7,), "worker exited with code 7"),
        (_close_connection, (), "worker closed its connection"),
        (_fork_and_exit, (), "worker exited with code 4"),
    ],
)
def test_worker_that_ends_without_an_answer_crashed_at_once(
    function: Callable[..., None], arguments: tuple[object, ...], reason: str
) -> None:
    with ProcessCaller(ProcessStage(function=function, start=stages.start, timeout_s=300.0)) as caller:
        assert caller.call(*arguments) == Crashed(reason=reason)


def test_answer_that_stops_midway_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_running_process, "STALL_S", 1)
    with ProcessCaller(ProcessStage(function=_answer_in_part, start=stages.start, timeout_s=300.0)) as caller:
        assert caller.call().reason == "its connection stalled for 1 s"


@pytest.mark.parametrize(
    "reply",
    [b"", b"junk", pickle.dumps((True, "wrong")), number_of(1) + pickle.dumps((False, SystemExit(0)))],
)
def test_reply_that_no_worker_sends_is_a_crash_and_not_the_reply_to_the_next_call(reply: bytes) -> None:
    stage = ProcessStage(function=_reply_with, start=stages.start, timeout_s=300.0)
    with ProcessCaller(stage) as caller:
        crashed = caller.call(reply)
    assert isinstance(crashed, Crashed)
    assert crashed.reason.startswith("the answer of a worker process")


def test_recursion_limit_that_user_code_lowered_is_no_error_of_the_run() -> None:
    stage = ProcessStage(function=_recurse, start=stages.start)
    with ProcessCaller(stage) as caller:
        with pytest.raises(TaskUnreadable, match="RecursionError"):
            caller.call(15)
        assert caller.call(1000) == 0


def test_call_does_not_inherit_what_the_last_one_left_in_its_process() -> None:
    stage = ProcessStage(function=_state_of, start=stages.start)
    with ProcessCaller(stage) as caller:
        assert caller.call(True) == caller.call(False)


@pytest.mark.parametrize("stage", ["compiling", "run"])
def test_crash_that_does_not_happen_again_in_a_new_process_fails_no_configuration(
    stage: str, tmp_path: Path
) -> None:
    with stages.start_executor(0) as workers:
        done = outcome(workers.submit(task(folder=str(tmp_path), us=1, **{stage: "exit once"})))
    assert isinstance(done, Measured)


def test_exceptions_that_cannot_be_raised_here_become_their_text() -> None:
    for function, text in (
        (_raise_system_exit, "SystemExit: 0"),
        (_raise_unpicklable, "_OddError: not picklable"),
    ):
        stage = ProcessStage(function=function, start=stages.start)
        with ProcessCaller(stage) as caller, pytest.raises(RuntimeError, match=text):
            caller.call()


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [
        ("exit", WorkerUnusable, "end before they are ready: worker exited with code 0"),
        ("hang", WorkerUnusable, "no answer within 2 s; does the import of a variant file hang"),
        ("raise", DeviceError, "no device here"),
    ],
)
def test_process_that_does_not_start_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, how: str, error: type[Exception], reason: str
) -> None:
    monkeypatch.setattr(process, "START_S", 2.0 if how == "hang" else 60.0)
    pool = ProcessStage(function=_pid, start=_never_start, start_arguments=(how,), workers=2).pool()
    with pytest.raises(error, match=reason):
        pool.schedule().result(timeout=60)
    pool.stop()
    pool.join()


@pytest.mark.parametrize(
    ("import_of_plugin", "expected"),
    [
        ("os._exit(3)", Crashed(reason="worker exited with code 3")),
        ("time.sleep(1000)", TimedOut(reason="no answer within 3 s")),
    ],
)
def test_plugin_that_ends_or_blocks_its_worker_fails_only_its_own_calls(
    import_of_plugin: str, expected: Crashed | TimedOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    package.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    package.joinpath("entry_points.txt").write_text("[tunebench.variants]\ntheirs = theirs\n")
    tmp_path.joinpath("theirs.py").write_text(
        f"import os, time\n"
        f"if os.getpid() != {os.getpid()}:\n"
        f"    {import_of_plugin}\n"
        f"def identity(x): return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forty = str(Path(__file__).parents[1] / "data" / "forty_variant.py")
    stage = ProcessStage(function=abs, start=preload, start_arguments=((forty,),), timeout_s=3.0)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    with ProcessCaller(stage) as caller:  # imports the user's file at its start
        theirs = importlib.import_module("theirs").identity
        assert caller.call(-1) == 1
        answer = caller.call(theirs)
        assert (type(answer), answer.reason) == (type(expected), expected.reason)
        assert caller.call(-2) == 2


def test_worker_killed_while_idle_is_replaced_before_the_next_call() -> None:
    with ProcessCaller(ProcessStage(function=_pid, start=stages.start)) as caller:
        first = caller.call()
        os.kill(first, signal.SIGKILL)
        stages.wait_for(lambda: not Path(f"/proc/{first}").exists(), 30)  # its supervisor has ended, too
        assert caller.call() not in (first, None)


def test_worker_starts_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    with ProcessCaller(ProcessStage(function=_pid, start=stages.start)) as caller:
        assert caller.call() != os.getpid()


def test_worker_does_not_run_the_script_that_starts_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from tunebench.executor.process import ProcessCaller, ProcessStage\n"
        "from tunebench.testing.executor_stages import start\n"
        "print('once')\n"
        "with ProcessCaller(ProcessStage(function=os.getpid, start=start)) as caller:\n"
        "    print(caller.call() != os.getpid())\n"
    )
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "once\nTrue\n"), done.stderr


# -- what a kernel starts, prints and uses -------------------------------------------------------------------


def _start_daemons(folder: str, then: str) -> None:
    """Start processes that leave their parent and their process group, then end in one of several ways."""
    for number in range(10):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
                if os.fork():
                    os._exit(0)
            Path(folder, str(os.getpid())).touch()
            time.sleep(600)
            os._exit(0)
    stages.wait_for(lambda: _count(folder) == 10, 60)
    if then == "crash":
        os.abort()
    if then == "hang":
        time.sleep(600)


def _gone(folder: Path) -> bool:
    return not any(Path("/proc", entry.name).exists() for entry in folder.iterdir())


def _count(folder: str | Path) -> int:
    return sum(1 for _ in Path(folder).iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")
@pytest.mark.parametrize("then", ["return", "crash", "hang"])
def test_processes_that_a_kernel_starts_end_with_its_call(tmp_path: Path, then: str) -> None:
    stage = ProcessStage(function=_start_daemons, start=stages.start, timeout_s=5.0 if then == "hang" else 60)
    with ProcessCaller(stage) as caller:
        caller.call(str(tmp_path), then)
        assert _count(tmp_path) == 10
        stages.wait_for(lambda: _gone(tmp_path), 5)
        assert _gone(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")
def test_processes_that_a_kernel_starts_end_with_a_killed_tuner(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.executor.test_executor import *; "
        "from tests.executor.test_executor import _start_daemons; "
        "stage = ProcessStage(function=_start_daemons, start=stages.start); "
        "ProcessCaller(stage).call(sys.argv[1], 'hang')"
    )
    tuner = subprocess.Popen([sys.executable, "-c", code, tmp_path])
    stages.wait_for(lambda: _count(tmp_path) == 10, 60)
    tuner.kill()
    tuner.wait()
    stages.wait_for(lambda: _gone(tmp_path), 10)
    assert _count(tmp_path) == 10
    assert _gone(tmp_path)


def _start_daemons_and_kill(folder: str, above: int) -> None:
    """Start daemons, then kill this worker (0 processes above), its supervisor (1) or its guard (2)."""
    _start_daemons(folder, "return")
    guard = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill((os.getpid(), os.getppid(), guard)[above], signal.SIGKILL)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")
@pytest.mark.parametrize("above", [0, 1, 2])
def test_daemons_end_when_the_worker_its_supervisor_or_its_guard_is_killed(
    tmp_path: Path, above: int
) -> None:
    with ProcessCaller(ProcessStage(function=_start_daemons_and_kill, start=stages.start)) as caller:
        assert isinstance(caller.call(str(tmp_path), above), Crashed)
        stages.wait_for(lambda: _gone(tmp_path), 10)
        assert _gone(tmp_path)
        assert _count(tmp_path) == 10


def _hold(processes: int, megabytes: int) -> None:
    """Hold memory in this process and its children, for ever."""
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    memory = bytearray(megabytes << 20)
    memory[:: 1 << 12] = b"x" * (megabytes << 8)
    time.sleep(600)


def _reserve() -> int:
    """Reserve a terabyte of addresses, as CUDA does, and share 200 MB with four processes."""
    import mmap

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    reserved = mmap.mmap(-1, 1 << 40, flags=flags)
    used = bytearray(200 << 20)
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(1.0)  # several checks of the supervisor
    return len(used) + len(reserved)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("processes", "megabytes"), [(1, 600), (3, 250)])
def test_worker_that_holds_too_much_memory_crashed(
    monkeypatch: pytest.MonkeyPatch, processes: int, megabytes: int
) -> None:
    monkeypatch.setenv("TUNEBENCH_WORKER_MEMORY", "0.5")
    with ProcessCaller(ProcessStage(function=_hold, start=stages.start)) as caller:
        ended = caller.call(processes, megabytes)
    assert isinstance(ended, Crashed)
    assert "held too much memory: TUNEBENCH_WORKER_MEMORY in GB" in ended.reason


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_reserved_and_shared_memory_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBENCH_WORKER_MEMORY", "0.5")
    with ProcessCaller(ProcessStage(function=_reserve, start=stages.start)) as caller:
        assert caller.call() == (200 << 20) + (1 << 40)


def test_memory_limit_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBENCH_WORKER_MEMORY", "lots")
    with (
        ProcessCaller(ProcessStage(function=_pid, start=stages.start)) as caller,
        pytest.raises(InputError, match="TUNEBENCH_WORKER_MEMORY must be a positive number of GB"),
    ):
        caller.call()


def test_worker_with_much_memory_ends_when_the_machine_has_little_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, result in (("_total_bytes", 100), ("_resident_bytes", 30), ("_held_bytes", 30)):
        monkeypatch.setattr(_memory, name, lambda *_, result=result: result)
    for available, processes, ended in ((4, [1], True), (6, [1], False), (6, [1, 2, 3], True)):
        monkeypatch.setattr(_memory, "available_bytes", lambda available=available: available)
        assert _memory.exceeds(lambda processes=processes: processes, limit=75) is ended


def _print_much() -> int:
    for _ in range(100):
        os.write(1, b"x" * (1 << 16))
        os.write(2, b"y" * (1 << 16))
    sys.stdout.write("z" * 1000)
    sys.stdout.flush()
    return 7


def test_output_of_a_kernel_is_capped_and_never_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessCaller(ProcessStage(function=_print_much, start=stages.start)) as caller:
        assert caller.call() == 7
    out, err = capfd.readouterr()
    assert out == ""
    assert 0 < len(err) <= _supervisor.SHOWN_BYTES + 100
    assert "printed more, which is not shown" in err


def _limits() -> list[int]:
    import resource

    names = ("CORE", "FSIZE", "NOFILE", "NPROC")
    return [resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names]


@pytest.mark.skipif(sys.platform != "linux", reason="systems differ in their limits")
def test_worker_has_limits_of_files_and_processes() -> None:
    with ProcessCaller(ProcessStage(function=_limits, start=stages.start)) as caller:
        core, size, files, processes = caller.call()
    assert core == 0
    assert 0 < size <= _supervisor.LARGEST_FILE_BYTES
    assert 0 < files <= _supervisor.OPEN_FILES
    assert processes > 0
