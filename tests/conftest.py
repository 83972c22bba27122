"""What every test has: a database and a cache of its own, and examples that are the same in every run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tunebench import device

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

_databases = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let those who have the time hold more configurations against what they execute."""
    parser.addoption(
        "--configs",
        type=int,
        default=3,
        help="configurations of each CUDA C++ variant that test_costs.py counts",
    )


@pytest.fixture(scope="session")
def _places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("places")


@pytest.fixture(autouse=True)
def _own_places(_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests, and the processes they start, away from the user's own database and cache."""
    monkeypatch.setenv("TUNEBENCH_DB", str(_places / f"{next(_databases)}.db"))
    monkeypatch.setenv("TUNEBENCH_CACHE", str(_places / "cache"))
    monkeypatch.delenv("TUNEBENCH_DEBUG", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # processes that share the tests have one


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
