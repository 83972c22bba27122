"""The kernels of the page for users of Kernel Tuner compute their references."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunebench
from tests.docs.test_examples import ROOT, blocks
from tests.support import needs_compiler
from tunebench.device import find
from tunebench.emulate.emulator import emulate
from tunebench.kernels import variant_file_scope
from tunebench.measure.verify import worst_error
from tunebench.own_kernel import KernelDescription

PAGE = ROOT / "docs" / "guide" / "kernel-tuner.md"
PROGRAMS = {
    block.body.split("\n", 1)[0].removeprefix("# file: "): block.body
    for block in blocks(PAGE)
    if "import tunebench" in block.body
}


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


def test_page_shows_every_kernel_both_ways() -> None:
    others = {block.body.split("\n", 1)[0] for block in blocks(PAGE) if "import kernel_tuner" in block.body}
    assert others == {f"# file: {name.removesuffix('.py')}_kernel_tuner.py" for name in PROGRAMS}
    assert len(PROGRAMS) == 5


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernel_computes_its_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described: dict[str, Any] = {}
    monkeypatch.setattr(
        tunebench, "tune_kernel", lambda source, **given: described.update(given, source=source)
    )
    file = tmp_path / name
    file.write_text(PROGRAMS[name])
    spec = importlib.util.spec_from_file_location(f"page_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

    workload: Any
    variant: Any
    workload, variant = KernelDescription(**described).load()
    config = variant.configs(workload, find("sm_90")).config(-1)  # the last one: every parameter is in use
    small = variant.emulation_workload(workload, config)
    inputs = small.draw(np.random.default_rng(0))
    outputs = emulate(variant, small, config, inputs)
    exact = {key: np.asarray(value, dtype=np.float64) for key, value in inputs.items()}
    assert worst_error(small, outputs, small.reference(exact)) <= 1
