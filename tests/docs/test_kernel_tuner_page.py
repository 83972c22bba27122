"""The kernels of the page for users of Kernel Tuner: their references, and both descriptions of each."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunebench
from tests.docs.test_examples import ROOT, blocks
from tests.support import needs_compiler
from tunebench.compat import kernel_tuner
from tunebench.device import find
from tunebench.emulate.emulator import emulate
from tunebench.kernels import variant_file_scope
from tunebench.measure.verify import worst_error
from tunebench.own_kernel import KernelDescription

PAGE = ROOT / "docs" / "guide" / "kernel-tuner.md"
FILES = {block.body.split("\n", 1)[0].removeprefix("# file: "): block.body for block in blocks(PAGE)}
PROGRAMS = {
    name: body for name, body in FILES.items() if re.search(r"^tunebench\.tune_kernel", body, re.MULTILINE)
}
LARGE = {"80_000_000": "30_000", "4096": "256", "2048": "128", "1_000_000": "1_000"}
"""Sizes that tests do not need."""


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


def run(body: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program, and return what it passes to `tunebench.tune_kernel` in place of tuning."""
    described: dict[str, Any] = {}

    def describe(source: Any = None, **given: Any) -> None:
        described.update(given, source=source)
        raise Described

    monkeypatch.setattr(tunebench, "tune_kernel", describe)
    monkeypatch.setattr(kernel_tuner, "_tune_kernel", describe)
    monkeypatch.setitem(sys.modules, "kernel_tuner", kernel_tuner)
    monkeypatch.chdir(folder)
    file = folder / name
    file.write_text(body)
    spec = importlib.util.spec_from_file_location(f"page_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(Described):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    fields = {field.name for field in dataclasses.fields(KernelDescription)}
    return {key: value for key, value in described.items() if key in fields}


class Described(Exception):
    """A program has described its kernel."""


def test_page_shows_ten_kernels_both_ways() -> None:
    others = {name for name, body in FILES.items() if "import kernel_tuner\n" in body}
    assert others == {f"{name.removesuffix('.py')}_kernel_tuner.py" for name in PROGRAMS}
    assert len(PROGRAMS) == 10


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernel_computes_its_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload: Any
    variant: Any
    workload, variant = KernelDescription(**run(PROGRAMS[name], name, tmp_path, monkeypatch)).load()
    config = variant.configs(workload, find("sm_90")).config(-1)  # the last one: every parameter is in use
    small = variant.emulation_workload(workload, config)
    inputs = small.draw(np.random.default_rng(0))
    outputs = emulate(variant, small, config, inputs)
    exact = {key: np.asarray(value, dtype=np.float64) for key, value in inputs.items()}
    assert worst_error(small, outputs, small.reference(exact)) <= 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_for_kernel_tuner_describes_the_same_launches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    bodies = (PROGRAMS[name], FILES[f"{name.removesuffix('.py')}_kernel_tuner.py"])
    for body in bodies:
        for large, small in LARGE.items():
            body = body.replace(large, small)
        given = run(body, name, tmp_path, monkeypatch)
        for file in (
            "matmul",
            "convolution",
            "sepconv",
            "reduction",
            "stencil",
            "pnpoly",
            "spmv",
            "zeromean",
            "expdist",
        ):
            (tmp_path / f"{file}.cu").write_text(str(given["source"]))
        variant: Any
        workload, variant = KernelDescription(**given).load()
        launches = []
        table = variant.configs(workload, find("sm_90"))
        for row in range(len(table)):
            *_, launch = variant.launches(workload, table.config(row))
            launches.append((table.config(row), launch.entry, launch.grid, launch.block, launch.smem_bytes))
        described.append((workload.operator, launches))
    assert described[0] == described[1]
