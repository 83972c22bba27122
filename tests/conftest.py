"""What every test has: a database and a cache of its own, and examples that are the same in every run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tunebench import device

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

_databases = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let those who have the time run more of what the suite has a part of."""
    parser.addoption(
        "--configs",
        type=int,
        default=2,
        help="configurations of each CUDA C++ variant that are emulated and counted",
    )
    parser.addoption(
        "--every-sample",
        action="store_true",
        help="run every sample that PyTorch has of the operators in test_torch.py",
    )


@pytest.fixture(scope="session", autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tests, and the processes they and their fixtures start, away from the user's files."""
    places = tmp_path_factory.mktemp("places")
    base = tmp_path_factory.getbasetemp()  # of one process, in the folder of all that share the tests
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBENCH_DB", str(places / "fixtures.db"))
        patch.setenv("TUNEBENCH_CACHE", str(shared / "cache"))
        patch.delenv("TUNEBENCH_DEBUG", raising=False)
        patch.delenv("COLUMNS", raising=False)  # processes that share the tests have one
        yield places


@pytest.fixture(autouse=True)
def _own_database(_own_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(_own_places / f"{next(_databases)}.db"))


@pytest.fixture
def learns() -> Iterator[None]:
    """Skip where what learns is absent; it has one thread, since several wait on a busy machine."""
    for name in ("sklearn", "scipy"):
        pytest.importorskip(name, reason="the extra `train` learns; asking does not need it")
    with pytest.importorskip("threadpoolctl").threadpool_limits(limits=1):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not device.local_gpus():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
