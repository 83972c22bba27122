"""Forks of a server: a child of this process with its own folder, environment, streams and exit status."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer

pytestmark = pytest.mark.needs("fork-server")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = ForkServer.start(["json"])
    yield started
    started.close()


def describe(status: int) -> int:
    """Print where this process runs, and return its exit status."""
    sys.stdout.write(f"{Path.cwd()} {os.environ['COLOUR']} {os.getppid()}")
    sys.stderr.write("complaint\n")
    return status


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


def fail() -> None:
    raise ValueError("as asked")


def test_fork_is_a_child_with_its_own_folder_environment_and_streams(
    server: ForkServer, tmp_path: Path
) -> None:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        fork = server.launch(
            f"{__name__}:describe",
            7,
            folder=tmp_path,
            environment={**os.environ, "COLOUR": "blue"},
            streams=[0, output.fileno(), errors.fileno()],
        )
        assert fork.wait(60) == 7
        output.seek(0)
        errors.seek(0)
        assert output.read().decode().split() == [str(tmp_path), "blue", str(os.getpid())]
        assert errors.read() == b"complaint\n"


def test_exit_status_is_that_of_python(server: ForkServer) -> None:
    with tempfile.TemporaryFile() as errors:
        streams = [0, 1, errors.fileno()]
        assert server.launch(f"{__name__}:end_by", int(signal.SIGTERM), streams=streams).wait(60) == -15
        assert server.launch(f"{__name__}:fail", streams=streams).wait(60) == 1
        errors.seek(0)
        assert errors.read().decode().endswith("ValueError: as asked\n")


def test_extended_server_and_forks_of_forks_serve(server: ForkServer) -> None:
    extended = server.extended(["decimal"])
    assert extended.launch(f"{__name__}:is_loaded", "decimal").wait(60) == 1
    assert extended.launch(f"{__name__}:launch_one").wait(60) == 3
    extended.close()


def is_loaded(name: str) -> int:
    return int(name in sys.modules)


def launch_one() -> int:
    return ForkServer.fork().launch(f"{__name__}:three").wait(60)


def three() -> int:
    return 3
