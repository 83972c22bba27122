"""Tests of a real Ray cluster of two workers with kills: lost trials are retried, and recorded once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import InstantExecutor, measured, until
from tunebench import tune
from tunebench.db.store import open_store
from tunebench.device import find
from tunebench.errors import ClusterLost
from tunebench.executor import WorkerLost
from tunebench.executor.ray import Cluster, RayExecutor, WorkerRequest, worker_setup
from tunebench.measure.timing import Protocol
from tunebench.outcome import Crashed, Measured, Outcome
from tunebench.task import Task
from tunebench.testing import executor_stages as stages
from tunebench.testing.executor_contract import ExecutorContract, outcome, task
from tunebench.tuning import Plan, Progress

pytest.importorskip("ray", reason="the extra `cluster` is not installed")

HERE = Path(__file__).parent
FORTY = str(HERE.parent / "data" / "forty_variant.py")
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"
TIMEOUT_S = 10.0
"""Time limit of measuring one task, in seconds; a new process may take seconds of it for imports."""
MARK = f"TUNEBENCH_TEST_MARK={secrets.token_hex(8)}"
"""In the environment of every process that these tests start, so that none is left behind."""


def left() -> dict[int, str]:
    """Return the command line of each living process of these tests, by its process id."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (folder / "environ").read_bytes():
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().decode().strip("\0 ")
    return commands


@dataclasses.dataclass
class TestCluster:
    __test__ = False

    process: subprocess.Popen[str]
    address: str
    head: int
    other: int

    def add(self) -> None:
        self.process.stdin.write("add\n")
        self.process.stdin.flush()
        self.other = json.loads(self.process.stdout.readline())["other"]


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        name, _, value = MARK.partition("=")
        patch.setenv(name, value)
        patch.setenv("RAY_AUTH_MODE", "token")  # nothing is to be left in the home
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_health_check_period_ms", "1000")  # a node is lost after five
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        patch.setenv("RAY_worker_niceness", "0")  # the other tests of a run starve what is nice
        for quiet in ("USAGE_STATS_ENABLED", "enable_metrics_collection", "enable_worker_prestart"):
            patch.setenv(f"RAY_{quiet}", "0")
        yield patch
        for pid, command in left().items():  # of nodes that were killed: they would notice in a minute
            if command.endswith("Agent"):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(AssertionError):
            until(lambda: not left(), "", 30)
        assert left() == {}, "processes are left behind"


@pytest.fixture(scope="module")
def cluster(environment: pytest.MonkeyPatch) -> Iterator[TestCluster]:
    folder = tempfile.mkdtemp(prefix="tb-test-", dir="/tmp")  # sockets need a short path
    process = subprocess.Popen(
        [sys.executable, str(HERE / "ray_cluster.py")],
        # What is installed on the workers: `stages` too.
        env={
            **os.environ,
            "TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)]),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield TestCluster(process, **json.loads(process.stdout.readline()))
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def workers(cluster: TestCluster) -> Iterator[RayExecutor]:
    with Cluster(WorkerRequest(address=cluster.address, kind="cpu", patience_s=30.0)) as connected:
        device = find("cpu").key
        assert [connected_device.key for connected_device in connected.devices] == [device]
        start = functools.partial(stages.start_executor, timeout_s=TIMEOUT_S)
        executor = connected.executors({device: worker_setup(start, {})})[device]
        until(lambda: executor.pool.workers == 2 or executor.pool.refused, "two workers")
        assert not executor.pool.refused
        yield executor


class Waiting:
    """A trial that measures until `end` is called; `pids` returns the processes that began it."""

    def __init__(self, workers: RayExecutor, folder: Path, us: int = 1) -> None:
        self.folder = folder / str(us)
        self.folder.mkdir()
        self.us = us
        self.future = workers.submit(task(run="wait", us=us, folder=str(self.folder)))

    def pids(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.pid")]

    def actor(self) -> int:
        return stages.actor_of(until(self.pids, "a process that measures")[0])

    def begun_again(self) -> None:
        until(lambda: len(self.pids()) == 2, "the trial is begun again")

    def end(self) -> None:
        (self.folder / "go").touch()
        assert outcome(self.future).median_us == self.us


def test_trial_of_a_killed_worker_is_retried(workers: RayExecutor, tmp_path: Path) -> None:
    before = workers.pool
    trial = Waiting(workers, tmp_path)
    os.kill(trial.actor(), signal.SIGKILL)
    trial.begun_again()
    trial.end()
    until(lambda: workers.pool.workers == 2, "a worker in place of the killed one")
    assert workers.pool.retried == before.retried + 1
    assert len(workers.pool.lost) == len(before.lost) + 1


def test_trial_of_a_lost_node_is_retried_and_a_new_node_gets_a_worker(
    workers: RayExecutor, cluster: TestCluster, tmp_path: Path
) -> None:
    before = workers.pool
    trials = [Waiting(workers, tmp_path, us) for us in (1, 2)]
    benches = [trial.actor() for trial in trials]
    nodes = [stages.parent_of(bench) for bench in benches]
    assert set(nodes) == {cluster.head, cluster.other}
    os.kill(cluster.other, signal.SIGKILL)
    os.kill(benches[nodes.index(cluster.other)], signal.SIGKILL)
    trials[nodes.index(cluster.head)].end()
    lost = trials[nodes.index(cluster.other)]
    lost.begun_again()
    assert (workers.pool.workers, workers.pool.retried) == (1, before.retried + 1)
    lost.end()
    cluster.add()
    until(lambda: workers.pool.workers == 2, "the new node's worker")


def test_trial_that_kills_every_worker_is_a_crash_and_other_trials_are_measured(workers: RayExecutor) -> None:
    before = workers.pool
    killer = workers.submit(task(run="kill"))
    companions = [workers.submit(task(us=us)) for us in range(1, 9)]
    killed = outcome(killer)
    assert isinstance(killed, Crashed)
    assert killed.reason.startswith("3 workers died with it")
    assert [outcome(future).median_us for future in companions] == [*range(1, 9)]
    assert len(workers.pool.lost) == len(before.lost) + 3
    until(lambda: workers.pool.workers == 2, "both places have a worker again")


def test_trials_on_the_same_worker_raise_worker_lost_when_it_dies(
    workers: RayExecutor, tmp_path: Path
) -> None:
    with workers.same_worker():
        first = Waiting(workers, tmp_path, 1)
        actor = first.actor()  # two compile at a time there: of two trials either might measure first
        second = Waiting(workers, tmp_path, 2)
        time.sleep(0.3)
        assert not second.pids(), "one place, one after the other"
        os.kill(actor, signal.SIGKILL)
        for trial in (first, second):
            with pytest.raises(WorkerLost):
                trial.future.result(timeout=60)
    with workers.same_worker():
        assert isinstance(outcome(workers.submit(task())), Measured)


class TestRay(ExecutorContract):
    """The contract; its last test closes the executor, so the tests that kill workers come before it."""

    timeout_s = TIMEOUT_S


def actors_of(cluster: TestCluster) -> list[int]:
    """Return the actors that compile and measure on the cluster."""
    nodes = {cluster.head, cluster.other}
    return [
        pid
        for pid, command in left().items()
        if command.startswith("ray::WorkerActor") and stages.parent_of(pid) in nodes
    ]


def plan(cluster: TestCluster, trials: int) -> Plan:
    return Plan(
        trials=trials,
        cluster=cluster.address,
        variant_files=(FORTY,),
        protocol=Protocol(min_samples=3, max_samples=5, max_s=0.05),
        baselines=False,
        finalists=1,
        workers=1,
    )


def recorded(database: Path) -> Counter[str]:
    """Return how often each configuration was recorded by a search."""
    with open_store(database, read_only=True) as store:
        return Counter(str(e.key.config) for e in store.history(WORKLOAD) if e.purpose == "search")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray") / "records.db"


def test_a_run_outlives_a_killed_worker_and_records_every_trial_once(
    cluster: TestCluster, database: Path
) -> None:
    killed: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.phase == "search" and progress.done >= 2 and not killed:
            killed.append(actors_of(cluster)[0])
            os.kill(killed[0], signal.SIGKILL)

    report = tune(WORKLOAD, device="cpu", db=database, plan=plan(cluster, 10), watcher=watch)
    assert killed
    assert (report.interrupted, report.stopped) == (False, None)
    assert sum(report.trials.values()) == 10
    assert set(recorded(database).values()) == {1}
    assert sum(recorded(database).values()) == 10
    assert len(report.pool.lost) == 1
    assert report.pool.retried >= 1
    assert report.config is not None


def test_a_lost_cluster_is_an_error_in_a_bounded_time(cluster: TestCluster) -> None:
    device = find("cpu").key
    with Cluster(WorkerRequest(address=cluster.address, kind="cpu", patience_s=5.0)) as connected:
        start = functools.partial(stages.start_executor, timeout_s=60.0)
        executor = connected.executors({device: worker_setup(start, {})})[device]
        assert isinstance(outcome(executor.submit(task())), Measured)
        future = executor.submit(task(run="hang"))
        (gcs,) = [pid for pid, command in left().items() if "gcs_server" in command]
        os.kill(gcs, signal.SIGKILL)
        with pytest.raises(ClusterLost, match="cluster"):
            future.result(timeout=50)
        with pytest.raises(ClusterLost):
            executor.submit(task())


def losing() -> InstantExecutor[Task]:
    """Return an executor that measures twice, then loses its cluster."""

    def answer(_task: Task) -> Outcome:
        if len(executor.tasks) == 2:
            raise ClusterLost("somewhere: there has been no worker for 60 s")
        return measured(5.0)

    executor = InstantExecutor(answer)
    return executor


def test_a_run_that_loses_its_cluster_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tunebench.tuning.start_workers", lambda *_: losing())
    database = tmp_path / "lost.db"
    local_plan = Plan(trials=9, variant_files=(FORTY,))
    report = tune(WORKLOAD, device="cpu", db=database, plan=local_plan)
    assert report.interrupted
    assert report.stopped == "somewhere: there has been no worker for 60 s"
    assert report.median_us == 5.0
    assert list(recorded(database).values()) == [1, 1]
    monkeypatch.setattr("tunebench.tuning.start_workers", lambda *_: losing())
    resumed = tune(WORKLOAD, device="cpu", db=database, plan=local_plan)
    assert resumed.cached == 2
    assert list(recorded(database).values()) == [1] * 4, "claims of what was not measured are free"


def test_a_driver_that_is_killed_leaves_neither_processes_nor_files(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = left()
    folder = Path(tempfile.mkdtemp(prefix="tb-test-", dir="/tmp"))  # short enough for Ray to use it
    command = (
        *(sys.executable, "-m", "tunebench", "tune", "--cluster", "local", "--workload", WORKLOAD),
        *("--device", "cpu", "--no-baselines", "--workers", "1", "--db", str(tmp_path / "killed.db")),
    )
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}) as driver:
        until(
            lambda: any(
                process_command.startswith("ray::WorkerActor") for process_command in left().values()
            ),
            "a worker is started",
        )
        driver.kill()
    until(lambda: left().keys() <= before.keys(), "processes are left behind", 30)
    assert list(folder.iterdir()) == []
    folder.rmdir()
