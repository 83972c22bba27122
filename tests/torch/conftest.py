"""Fixtures that keep tests from generating code, which takes seconds, unless the code is what they test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_generated_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run what kernels do not run operation by operation, except in tests marked `inductor`."""
    if "compile" not in request.node.path.stem or request.node.get_closest_marker("inductor"):
        yield
        return
    inductor = pytest.importorskip("tunebench.torch.compiler._inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "missing_compiler", lambda device: "not in tests")
        yield


@pytest.fixture
def compiled_kernels() -> None:
    """Compile the kernels that the test runs, where those of the other tests run by their references."""
