"""Every command that takes a workload or reads records takes `--variant-file`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs_nvrtc, needs_torch
from tunebench import _environment, cli, kernels

OWN = str(Path(__file__).parents[1] / "data" / "own_operator.py")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
WORKLOAD = "twice:n=1024"

WITHOUT = {
    "completion": "prints a script",
    "devices": "lists devices",
    "doctor": "checks the installation",
    "plan memory": "plans models of PyTorch operations",
    "plan pipeline": "plans bundled models, whose layers are library kernels",
    "plan cluster": "plans bundled models, whose layers are library kernels",
    "db upgrade": "changes tables",
    "db downgrade": "changes tables",
    "db export-bundled": "writes records of the package's own kernels only",
    "db ship": "old name of db export-bundled",
}
"""Commands without the option, and why: they take no workload, and read no record of a user's variant."""

LINES = """
lookup {w} --device cpu
lookup {w} --device cpu --strict
lookup {w} --json
show {w}
show {w} --device cpu --json
show {w} --sass --config step=2 --device cpu
explain {w} --device cpu
explain {w} --device cpu --variant own --config step=2 --json
report --out {out}/all.html
report {w} --out {out}/one.html --device cpu
report --suite {out}/own.toml --out {out}/suite.html
report --compare {out}/own.jsonl {out}/own.jsonl --out {out}/compare.html
check --baseline {out}/own.jsonl
check --baseline {out}/new.json --update {w}
check --baseline {out}/own.jsonl --tune --trials 1 --tolerance 1000 {w}
db export --out {out}/space.json
db export --workload {w} --out {out}/again.jsonl --format jsonl
db export --workload {w} --variant twice/own --out {out}/kt.json --format kernel-tuner
db stats
db runs --workload {w}
db forget {w} --variant own
db verify
db merge {db} --into {out}/merged.db
db import {out}/own.jsonl --db {out}/imported.db
db export-optuna --storage sqlite:///{out}/studies.db
db export-optuna --storage sqlite:///{out}/studies2.db -w {w} --device cpu
bound {out}/own.json
bound {out}/own.json --json
replay {out}/own.json --trials 2
replay {out}/own.json --trials 2 --report {out}/replay.html
predict {w} --device h100-sxm
predict {w} {w} --device "RTX 4090" --json
predict --workloads {out}/own.csv --device h100-sxm --out {out}/predicted.csv
predict --model {out}/list.toml --device h100-sxm
compare {w} --device h100-sxm,l4
compare --model {out}/list.toml --device "H100 SXM"
kernels
kernels twice
kernels twice/own --json
workloads
workloads twice
workloads {w}
dashboard --port 0
tune {w} --device cpu --trials 2 --no-baselines --finalists 1 --workers 1
"""

TORCH_LINES = """
extract {out}/model.py:make --input 8x16 --device cpu
time {out}/model.py:make --input 8x16 --device cpu --rounds 1 --no-torch-compile
"""

CUDA_LINES = """
export softmax:rows=64,cols=64,dtype=f32 --arch sm_90 --out {out}/export
"""

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
"""


def _parse(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if line]


def _commands() -> Iterator[tuple[str, Any]]:
    for name in cli.COMMANDS:
        command = cli.load_command(name)
        for sub, entry in getattr(command, "commands", {"": command}).items():
            yield f"{name} {sub}".rstrip(), entry


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database of a user's variant, which was measured, and files made of it."""
    folder = tmp_path_factory.mktemp("own")
    options = (
        "--device",
        "cpu",
        "--trials",
        "2",
        "--no-baselines",
        "--finalists",
        "1",
        "--workers",
        "1",
        "-q",
    )
    db = ("--db", str(folder / "own.db"), "--variant-file", OWN)
    assert cli.run(("tune", WORKLOAD, "-q", *options, *db)) == 0
    assert cli.run(("db", "export", "--format", "jsonl", "--out", str(folder / "own.jsonl"), *db)) == 0
    assert cli.run(("db", "export", "--out", str(folder / "own.json"), *db)) == 0
    (folder / "own.toml").write_text(f'[layer.first]\nworkload = "{WORKLOAD}"\ncount = 2\n')
    (folder / "list.toml").write_text(f'[[operation]]\nworkload = "{WORKLOAD}"\n')
    (folder / "own.csv").write_text(f'workload\n"{WORKLOAD}"\n')
    (folder / "model.py").write_text(MODEL)
    return folder


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dashboard end once it is ready."""
    from tunebench.report import dashboard

    monkeypatch.setattr(dashboard, "serve", lambda page, on_ready: on_ready("http://127.0.0.1:1"))


def test_every_command_with_workloads_or_records_takes_variant_files() -> None:
    options: dict[str, Any] = {}
    for name, command in _commands():
        for param in command.params:
            if "--variant-file" in param.opts:
                options[name] = param
    names = {name for name, _ in _commands()}
    assert names - set(options) == set(WITHOUT)
    like = options["lookup"]
    for name, option in options.items():
        assert (option.help, option.metavar, option.multiple) == (like.help, like.metavar, True), name
    for name, command in _commands():
        if name in WITHOUT:
            assert not {"--workload", "--variant"} & {opt for param in command.params for opt in param.opts}


def test_lines_cover_every_command_that_takes_variant_files() -> None:
    lines = [shlex.split(line) for line in _parse(LINES + TORCH_LINES + CUDA_LINES)]
    assert len(lines) >= 40
    for name, _ in _commands():
        if name not in WITHOUT:
            assert any(line[: len(name.split())] == name.split() for line in lines), name


def _run(line: str, recorded: Path, file: str = OWN) -> int:
    words = [word.format(w=WORKLOAD, out=recorded, db=recorded / "own.db") for word in shlex.split(line)]
    # No file is loaded, so that a command works only if it loads the file itself.
    with _environment.default_database(str(recorded / "own.db")), kernels.variant_file_scope(empty=True):
        return cli.run([*words, "--variant-file", file])


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("line", _parse(LINES))
def test_command_works_with_a_users_operator(
    line: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(recorded / "own.db"))
    assert _run(line, recorded) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    if "--json" in line:
        json.loads(out)
    assert out.strip()


@needs_torch
@pytest.mark.parametrize("line", _parse(TORCH_LINES))
def test_command_of_a_model_works_with_a_users_file(
    line: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(recorded / "own.db"))
    assert _run(line, recorded) == 0, capsys.readouterr()


@needs_nvrtc
@pytest.mark.parametrize("line", _parse(CUDA_LINES))
def test_command_of_a_gpu_works_with_a_users_file(line: str, recorded: Path) -> None:
    assert _run(line, recorded, str(EXAMPLES / "my_cuda_kernel.py")) == 0
    assert "softmax_row" in (recorded / "export" / "manifest.json").read_text()


def test_bound_of_an_exported_space_is_that_of_its_variant(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert _run("bound {out}/own.json --json", recorded) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["rows"], figures["described"], figures["violations"]) == (2, 2, 0)
    assert 0 < figures["bound_over_best"] < 1
    with kernels.variant_file_scope(empty=True):
        assert cli.run(["bound", str(recorded / "own.json")]) == 0
    assert "needs its file: --variant-file" in " ".join(capsys.readouterr().out.split())


def test_unknown_variant_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with kernels.variant_file_scope(empty=True):
        assert cli.run(["kernels", "twice/own"]) == 2
    assert "A variant of your own needs its file: --variant-file" in capsys.readouterr().err
