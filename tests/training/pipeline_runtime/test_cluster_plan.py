"""Plans of a cluster run by processes: losses, memory against the verdict, and clean-up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import Fork, Programs

pytest.importorskip("torch")

COMMAND = ["-m", "tests.training.pipeline_runtime.cluster_plan_ranks"]


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}


@pytest.fixture(scope="module")
def programs(programs: Programs) -> Iterator[Programs]:
    """Return what runs programs in processes that have imported what plans run with."""
    with programs.importing(["benchmarks.plan_cluster_gpt"]) as extended:
        yield extended


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plans")
    done = programs.run([*COMMAND, "results"], environment=environment(folder))
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("tunebench-*"))
    written: dict[str, Any] = json.loads(done.stdout)
    return written


@pytest.mark.parametrize("plan", ["stages", "shards"])
def test_losses_of_four_processes_are_those_of_one(results: dict[str, Any], plan: str) -> None:
    losses = results[plan]["losses"]
    assert losses == pytest.approx(results[plan]["one process"], rel=1e-6)
    assert len(set(losses)) == 3


@pytest.mark.parametrize("plan", ["stages", "shards"])
def test_memory_is_that_of_the_verdict(results: dict[str, Any], plan: str) -> None:
    peaks = [rank["peak_bytes"] for rank in results[plan]["ranks"]]
    assert results[plan]["predicted"] == pytest.approx(peaks, rel=0.05)
    for storage in ("host", "nvme"):
        stored = [rank[f"{storage}_bytes"] for rank in results[plan]["ranks"]]
        assert results[plan][f"predicted {storage}"] == pytest.approx(stored, abs=16)


def children(process: int) -> set[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {int(pid) for pid in listed}


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "waited for 60 s"
        time.sleep(0.05)


@pytest.fixture
def running(tmp_path: Path, programs: Programs) -> Iterator[Fork | subprocess.Popen[bytes]]:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    with open(os.devnull, "wb") as nothing:
        process = programs.start(
            [*COMMAND, "endless"], output=nothing, errors=nothing, environment=environment(tmp_path)
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(
    running: Fork | subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    wait_until(lambda: len(children(running.pid)) == 4)
    started = children(running.pid)
    os.kill(running.pid, number)
    running.wait(60)
    wait_until(lambda: not any(map(alive, started)))
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("tunebench-*"))


SIGNAL_IN_CALLBACK = """
import os, signal, time
from benchmarks.rank_processes import run_ranks
sent = []
def send():
    if not sent:
        sent.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(after_in_parent=send)
run_ranks(1, lambda folder: time.sleep(600))
"""


def test_signal_within_a_callback_of_fork_ends_the_run(tmp_path: Path) -> None:
    """Python drops an exception that the handler raises there."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_IN_CALLBACK],
        env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert not list(tmp_path.glob("tunebench-*"))


def test_a_process_that_ends_ends_the_run(running: Fork | subprocess.Popen[bytes], tmp_path: Path) -> None:
    wait_until(lambda: len(children(running.pid)) == 4)
    started = children(running.pid)
    os.kill(max(started), signal.SIGKILL)
    assert running.wait(60) == 1
    assert not any(map(alive, started))
    assert not list(tmp_path.glob("tunebench-*"))
