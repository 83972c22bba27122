"""Fixtures that keep tests from generating code, which takes seconds, unless the code is what they test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant
from tunebench.workload import Workload


@pytest.fixture(autouse=True)
def _no_generated_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run what kernels do not run operation by operation, except in tests marked `inductor`."""
    if "compile" not in request.node.path.stem or request.node.get_closest_marker("inductor"):
        yield
        return
    inductor = pytest.importorskip("tunebench.torch.compiler.inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "missing_compiler", lambda device: "not in tests")
        yield


@pytest.fixture(scope="module", autouse=True)
def _own_stand_ins() -> Iterator[None]:
    """Fail if tests leave stand-ins of compiled kernels to other files, which would test references."""
    from tunebench.dispatch import choice

    before = choice.bind, choice.Dispatcher.bound_choice
    yield
    assert (choice.bind, choice.Dispatcher.bound_choice) == before


@pytest.fixture
def compiled_kernels() -> None:
    """Compile the kernels that the test runs, where those of the other tests run by their references."""


@pytest.fixture(scope="session")
def _serial_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[Any, Any]]:
    """Binaries, loaded code and dispatchers of `serial_kernels`."""
    return tmp_path_factory.mktemp("serial"), {}, {}


@pytest.fixture
def serial_kernels(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    _serial_cache: tuple[Path, dict[str, Any], dict[Any, Any]],
) -> None:
    """Compile kernels without their parallel loop, which takes half the time.

    They have a cache of their own, because the key of a binary is that of the parallel kernel.
    """
    if request.config.getoption("--every-sample"):
        return
    import numba

    from tunebench.compile import numba_cpu
    from tunebench.dispatch import choice, cpu

    def dispatcher(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> Any:
        return numba.njit(fastmath=set(variant.fastmath))(variant.kernel(workload, config))

    folder, entries, dispatchers = _serial_cache
    monkeypatch.setenv("TUNEBENCH_CACHE", str(folder))
    monkeypatch.setattr(numba_cpu, "_dispatcher", dispatcher)
    monkeypatch.setattr(cpu, "_entries", entries)
    monkeypatch.setattr(choice, "_dispatchers", dispatchers)
