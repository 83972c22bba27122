"""Fixture that keeps inductor from generating code in tests of compiled models, which takes seconds."""

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
