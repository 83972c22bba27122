"""Every command in a folder of a stranger: nothing of it runs, and results are those of an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli import hostile_folder
from tests.cli.test_cli_run import commands
from tests.emulate.kernel_text import SIGNATURE, X
from tests.support import needs_compiler, needs_nvrtc, needs_ray, needs_torch
from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench import _child, cli
from tunebench.binary.compiled import CompileError
from tunebench.compile.nvrtc import compile_source
from tunebench.emulate import host_compiler
from tunebench.emulate.emulator import NotEmulated, emulate
from tunebench.emulate.host_compiler import build_executable

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = "softmax:rows=8,cols=64,dtype=f32"
QUICK = "--trials 1 --workers 1 --finalists 1 --no-baselines --quiet"
COMMANDS = """
lookup -w {w} --device cpu
show -w {w} --device cpu
report --out {out}/report.html
check --baseline {out}/base.json --update
predict -w {w} --device h100-sxm
compare -w {w} --device h100-sxm --device a100-sxm-80
plan cluster --model gpt2 --cluster "4 x h100-sxm, 4 a node, nvlink4" --batch 8
plan pipeline --model gpt2 --stages 2 --microbatches 4 --device h100-sxm
explain -w {w} --device sm_90
explain -w {w} --device cpu
workloads
kernels
devices
db export -w {w} --device cpu --out {out}/cache.json
bound {out}/cache.json
replay {out}/cache.json --trials 2
completion bash
db upgrade
db downgrade --to 0006 --force --db {out}/old.db
db stats
db runs
db verify
db export --format jsonl --out {out}/all.jsonl
db merge {db} --into {out}/merged.db
db export-optuna --storage sqlite:///{out}/optuna.db
db export-bundled --out {out}/bundle
db import {out}/all.jsonl
db forget -w {w} --device cpu --yes
"""
CUDA_COMMANDS = """
export -w {w} --arch sm_90 --out {out}/export
tune -w {w} --arch sm_90 --variant cuda_block --db {out}/cuda.db {quick}
tune -w {w} --arch sm_90 --variant numba_cuda --db {out}/numba.db {quick}
"""
TORCH_COMMANDS = """
extract {out}/model.py:make --input 8x16
plan memory {out}/model.py:make --input 8x16 --device h100-sxm --plot {out}/memory.svg
"""
MEASURING_COMMANDS = """
doctor
tune -w {w} --device cpu --db {out}/cpu.db {quick}
time {out}/model.py:make --input 8x16 --rounds 1
"""
"""Commands whose output contains times."""

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
"""


def test_list_has_every_command() -> None:
    listed = [
        shlex.split(line)
        for line in (COMMANDS + CUDA_COMMANDS + TORCH_COMMANDS + MEASURING_COMMANDS).splitlines()
    ]
    missing = [
        command for command in commands() if not any(words[: len(command)] == command for words in listed)
    ]
    assert missing == [["dashboard"]]  # it does not end; see below


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one configuration that was measured."""
    db = tmp_path_factory.mktemp("measured") / "measured.db"
    assert cli.run(["tune", "-w", WORKLOAD, "--device", "cpu", "--db", str(db), *QUICK.split()]) == 0
    return db


class Visit:
    """Runs commands in one new interpreter whose working folder is given, and keeps what they print.

    Args:
        folder: The working folder.
        out: A folder for files that the commands write.
        database: The database to copy there.
    """

    def __init__(self, folder: Path, out: Path, database: Path) -> None:
        self.folder, self.out = folder, out
        out.mkdir()
        self.database = out / "results.db"
        for target in (self.database, out / "old.db"):
            shutil.copyfile(database, target)
        (out / "model.py").write_text(MODEL, encoding="utf-8")

    def run(self, lines: str) -> dict[str, str]:
        """Return exit code and output of each command, without what differs between folders and times."""
        texts = {"w": WORKLOAD, "db": str(self.database), "quick": QUICK, "out": str(self.out)}
        words = [shlex.split(line.format(**texts)) for line in lines.splitlines() if line]
        done = subprocess.run(
            [sys.executable, "-P", hostile_folder.__file__, json.dumps(words)],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed = dict(zip(filter(None, lines.splitlines()), json.loads(done.stdout), strict=True))
        failed = {line: text for line, text in printed.items() if not text.startswith("0\n")}
        assert not failed, done.stderr[-3000:]
        return {line: self.neutral(text) for line, text in printed.items()}

    def environment(self) -> dict[str, str]:
        """Return the environment: a cache and an import path of its own."""
        paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
        own = {
            "TUNEBENCH_CACHE": str(self.out / "cache"),
            "TUNEBENCH_DB": str(self.database),
            "PYTHONPATH": paths,
        }
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.out / "inductor")
        return {**os.environ, **own}

    def neutral(self, text: str) -> str:
        """Return output without what differs between folders and times."""
        text = re.sub(r"\d+(\.\d+)? (m?s|seconds)\b", "TIME", text.replace(str(self.out), "OUT"))
        return "\n".join(
            " ".join(line.split()) for line in text.splitlines() if not line.startswith("  seconds")
        )

    def trials(self) -> dict[str, list[tuple[object, ...]]]:
        """Return configurations and outcomes of each database that was written."""
        rows = {}
        for path in sorted(self.out.glob("*.db")):
            with sqlite3.connect(path) as connection:
                query = "SELECT variant, config, state FROM trial ORDER BY 1, 2"
                rows[path.name] = connection.execute(query).fetchall() if path.name != "optuna.db" else []
        return rows


@pytest.fixture
def visits(tmp_path: Path, database: Path) -> Iterator[tuple[Visit, Visit]]:
    """A visit of an empty folder and one of a hostile folder; nothing of the latter may run."""
    folders = [tmp_path / name for name in ("empty", "hostile", "marks")]
    for folder in folders:
        folder.mkdir()
    empty, hostile, marks = folders
    hostile_folder.build(hostile, marks)
    yield Visit(empty, tmp_path / "out-empty", database), Visit(hostile, tmp_path / "out-hostile", database)
    assert hostile_folder.marks(marks) == []


@pytest.mark.slow
def test_commands_give_the_results_of_an_empty_folder(visits: tuple[Visit, Visit]) -> None:
    empty, hostile = visits
    assert hostile.run(COMMANDS) == empty.run(COMMANDS)


@pytest.mark.slow
def test_dashboard_runs_nothing_of_the_folder(visits: tuple[Visit, Visit]) -> None:
    pages = []
    for visit in visits:
        command = [sys.executable, "-P", "-c", "from tunebench.__main__ import main; main()", "dashboard"]
        with subprocess.Popen(
            [*command, "--port", "0"],
            cwd=visit.folder,
            env=visit.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            address = re.findall(r"http://\S+", process.stdout.readline())[0]
            with urllib.request.urlopen(address, timeout=60) as reply:
                pages.append(visit.neutral(reply.read().decode()))
            process.terminate()
    assert pages[0] == pages[1].replace("out-hostile", "out-empty")


@needs_ray
@pytest.mark.exhaustive
def test_cluster_runs_nothing_of_the_folder(visits: tuple[Visit, Visit]) -> None:
    empty, hostile = visits
    command = "tune -w {w} --cluster local --db {out}/cluster.db {quick}"
    assert hostile.run(command).keys() == empty.run(command).keys()
    assert hostile.trials() == empty.trials()


@needs_compiler
def test_emulator_reads_no_header_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile_folder.build(tmp_path, tmp_path)
    monkeypatch.chdir(tmp_path)
    variant = ToyVariant(f"{SIGNATURE} y[t] = x[t] * factor;\n}}")
    inputs: dict[str, Any] = {"x": X, "factor": np.float32(2)}
    outputs = emulate(variant, Toy(n=64), CONFIG, inputs)
    np.testing.assert_array_equal(outputs["y"], 2 * X)
    assert hostile_folder.marks(tmp_path) == []


@needs_compiler
@pytest.mark.parametrize(
    "line", ['#include "cuda.h"', "  # include <cuda.h>", "%:include_next <a>", "#inc\\\nlude MACRO"]
)
def test_source_that_reads_a_file_is_refused(line: str) -> None:
    source = f"{line}\n{SIGNATURE}}}"
    with pytest.raises(NotEmulated, match="reads another file"):
        build_executable(source, ("toy",))
    with pytest.raises(CompileError, match="reads another file"):
        compile_source(source, ("toy",), "sm_90")


@needs_compiler
def test_key_of_an_executable_depends_on_every_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = host_compiler.find_compiler()
    assert compiler is not None
    before = host_compiler.key_parts(compiler, "plain")
    (tmp_path / "algorithm").write_text("#include_next <algorithm>\nint another_header;\n")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    host_compiler.key_parts.cache_clear()
    assert host_compiler.key_parts(compiler, "plain") != before
    monkeypatch.undo()
    host_compiler.key_parts.cache_clear()
    assert host_compiler.key_parts(compiler, "plain") == before


def test_children_find_their_files_where_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "lib", "/absolute"])
    monkeypatch.setenv("TUNEBENCH_CACHE", "cache")
    monkeypatch.setenv("TUNEBENCH_CARRIED", "~/carried")
    monkeypatch.setenv("CXX", "g++")
    assert _child.import_path() == [str(tmp_path), str(tmp_path / "lib"), "/absolute"]
    environment = _child.absolute_environment(CXX="c++")
    assert environment["TUNEBENCH_CACHE"] == str(tmp_path / "cache")
    assert (environment["TUNEBENCH_CARRIED"], environment["CXX"]) == ("~/carried", "c++")
    monkeypatch.setenv("CXX", "./g++")
    assert _child.absolute_environment()["CXX"] == str(tmp_path / "g++")


def test_programs_of_the_folder_are_not_found_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    for path in (tmp_path / "g++", program):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f".::bin:{tmp_path}/nothing")
    assert _child.find_program("g++") is None
    monkeypatch.setenv("PATH", f".:{program.parent}")
    assert _child.find_program("g++") == str(program)
    assert _child.find_program("./g++") == str(tmp_path / "g++")


@needs_nvrtc
@pytest.mark.exhaustive
def test_compiling_commands_give_the_results_of_an_empty_folder(visits: tuple[Visit, Visit]) -> None:
    empty, hostile = visits
    assert hostile.run(CUDA_COMMANDS) == empty.run(CUDA_COMMANDS)
    assert hostile.trials() == empty.trials()


@needs_torch
@pytest.mark.exhaustive
def test_commands_of_models_give_the_results_of_an_empty_folder(visits: tuple[Visit, Visit]) -> None:
    empty, hostile = visits
    assert hostile.run(TORCH_COMMANDS) == empty.run(TORCH_COMMANDS)


@needs_torch
@pytest.mark.exhaustive
def test_measuring_commands_run_nothing_of_the_folder(visits: tuple[Visit, Visit]) -> None:
    empty, hostile = visits
    assert hostile.run(MEASURING_COMMANDS).keys() == empty.run(MEASURING_COMMANDS).keys()
    assert hostile.trials() == empty.trials()
