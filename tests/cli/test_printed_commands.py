"""Commands that messages print: each works as it is printed."""

from __future__ import annotations

import ast
import re
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run
from tests.support import needs_torch
from tunebench import _command, cli, device, kernels
from tunebench.errors import DeviceError
from tunebench.forecast.library import predict_all
from tunebench.workloads import parse, suites
from tunebench.workloads.networks import networks

ROOT = Path(__file__).parents[2]
OWN = ROOT / "tests" / "data" / "own_operator.py"
WORKLOAD = "twice:n=64"
QUICK = ("--trials", "1", "--no-baselines", "--finalists", "1", "--workers", "1", "-q")
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
"""

PACKAGES = ("tunebench", "db", "kernels", "workloads")
COMPLETE = ("devices", "doctor", "workloads", "kernels")
"""Commands that need no argument."""

NO_INSTRUCTION = re.compile(
    r"# Written by|that `tunebench [a-z ]+` wrote|output of `tunebench db export|"
    r"first `tunebench tune` creates|^tunebench predict: time|^Run of `tunebench db runs`|"
    r"^tunebench dashboard$|^tunebench db (ship|export-bundled)$"
)
"""Texts that name a command and do not tell to run it."""


def commands_of(message: str) -> list[str]:
    """Return the command lines in a message: between backquotes, or up to the end."""
    pattern = r"`(tunebench [^`]+)`|(?:run|is): (tunebench .+?)(?:; |$)"
    return ["".join(pair) for pair in re.findall(pattern, message, re.MULTILINE)]


def run_printed(message: str, *more: str) -> str:
    """Run the only command of a message, which must succeed, and return it."""
    (line,) = commands_of(message.strip())
    program, *words = shlex.split(line)
    assert program == "tunebench"
    assert cli.run([*words, *more]) == 0, line
    return line


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module that are no docstrings."""
    expressions = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in expressions:
            yield node.value


def test_no_message_contains_a_command_that_lacks_its_options() -> None:
    names = "|".join(name for name in cli.COMMANDS if name not in COMPLETE)
    pattern = re.compile(rf"tunebench ({names})\b")
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    sources = {file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in files}
    incomplete = [
        f"{file}: {text}"
        for file, source in sources.items()
        if pattern.search(source)
        for text in _texts(ast.parse(source))
        if pattern.search(text) and not NO_INSTRUCTION.search(text)
    ]
    pages = (ROOT / "tunebench" / "report").rglob("*.html")
    incomplete += [str(page.relative_to(ROOT)) for page in pages if pattern.search(page.read_text())]
    assert not incomplete, "\n".join(incomplete)  # use tunebench._command.command_line


def test_command_line_is_read_back_by_a_shell() -> None:
    files = ["/own file.py", "b.py"]
    line = _command.command_line(
        "db export", "a b", workload="x:f=a;b", variant_file=files, force=True, db=None, top=3
    )
    assert shlex.split(line) == [
        *("tunebench", "db", "export", "a b", "--workload", "x:f=a;b", "--variant-file", "/own file.py"),
        *("--variant-file", "b.py", "--force", "--top", "3"),
    ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a workload of a user's operator."""
    db = tmp_path_factory.mktemp("own") / "own results.db"
    options = ("--variant-file", str(OWN), "--db", str(db))
    assert cli.run(["tune", WORKLOAD, "--device", "cpu", *QUICK, *options]) == 0
    return db


def test_miss_prints_how_to_tune_with_file_and_database(tuned: Path, run_refused: Run) -> None:
    options = ("--variant-file", str(OWN), "--db", str(tuned))
    message = run_refused("lookup", "twice:n=65", "--device", "cpu", "--strict", *options, exit_code=3)
    line = run_printed(message, *QUICK)
    assert shlex.split(line) == ["tunebench", "tune", "--workload", "twice:n=65", "--device", "cpu", *options]
    assert cli.run(["lookup", "twice:n=65", "--device", "cpu", "--strict", *options]) == 0


def test_miss_prints_the_file_of_a_measured_variant(tmp_path: Path, run_refused: Run) -> None:
    file = tmp_path / "my softmax.py"
    text = (ROOT / "tests" / "data" / "forty_variant.py").read_text()
    file.write_text(text.replace("time.sleep(0.2)", "pass").replace('"forty"', '"mine"'))
    workload = "softmax:rows=1,cols=1,dtype=f32"
    with kernels.variant_file_scope():
        assert cli.run(["tune", workload, "--device", "cpu", *QUICK, "--variant-file", str(file)]) == 0
    message = run_refused("lookup", workload, "--device", "cpu", "--strict", exit_code=3)
    (option,) = re.findall(r"use (--variant-file .+), or tunebench.kernels", message)
    assert cli.run(["lookup", workload, "--device", "cpu", "--strict", *shlex.split(option)]) == 0


@pytest.mark.parametrize("model", sorted({*networks()} - {*suites()}))
def test_model_in_place_of_a_suite_prints_its_prediction(model: str, run_refused: Run) -> None:
    run_printed(run_refused("workloads", model))


def test_device_that_is_too_old_prints_its_prediction(run_refused: Run) -> None:
    message = run_refused("tune", "softmax:rows=8,cols=8,dtype=f32", "--device", "Tesla P4")
    assert "--device p4" in run_printed(message)


def test_prediction_on_a_processor_prints_how_to_measure() -> None:
    with pytest.raises(DeviceError) as caught:
        predict_all([parse("softmax:rows=8,cols=8,dtype=f32")], device.local_cpu())
    (line,) = commands_of(str(caught.value))
    assert line == "tunebench tune --workload softmax:rows=8,cols=8,dtype=f32 --device cpu"


def test_old_and_new_schemas_print_the_migration(tmp_path: Path, run_refused: Run, run_text: Run) -> None:
    path = tmp_path / "old results.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((ROOT / "tests" / "golden" / "schema_0002.sql").read_text())
    message = run_refused("db", "stats", "--db", str(path), exit_code=4)
    assert shlex.quote(str(path)) in run_printed(message)
    out = run_text("db", "downgrade", "--to", "0005", "--db", str(path))
    (line,) = re.findall(r"tunebench db upgrade[^;\n]*(?= reverts)", out)
    assert cli.run(shlex.split(line)[1:]) == 0


def test_large_database_prints_the_dashboard(
    tuned: Path, tmp_path: Path, run_refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebench.cli import report
    from tunebench.report import dashboard

    monkeypatch.setattr(report, "MOST_TRIALS", 0)
    monkeypatch.setattr(dashboard, "serve", lambda page, on_ready: on_ready("http://127.0.0.1:1"))
    run_printed(run_refused("report", "--out", str(tmp_path / "page.html"), "--db", str(tuned)))


def test_report_with_many_failures_prints_how_to_list_them(tuned: Path) -> None:
    from tunebench.tuning import report_text

    failure = SimpleNamespace(variant="twice/own", config="step=1", reason="no reason")
    report = SimpleNamespace(
        workload=WORKLOAD, device=device.local_cpu().key, database=str(tuned), failures=[failure] * 5
    )
    *_, last = report_text.failure_lines(report)  # type: ignore[arg-type]
    assert "2 more reasons" in last
    kernels.load_file(OWN)
    assert cli.run(shlex.split(last.partition("reasons: ")[2])[1:]) == 0


@needs_torch
def test_time_prints_how_to_predict_and_to_tune(
    tmp_path: Path, run_refused: Run, run_text: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    model = ("time", "model.py:make", "--input", "8x16", "--no-torch-compile", "--rounds", "1")
    run_printed(run_refused(*model, "--device", "h100-sxm"))
    out = run_text(*model, "--device", "cpu")
    extract, tune = re.findall(r"^  (tunebench .+)$", out, re.MULTILINE)
    assert cli.run(shlex.split(extract)[1:]) == 0
    words = shlex.split(tune)
    assert "workload" in Path(words[words.index("--suite") + 1]).read_text()
