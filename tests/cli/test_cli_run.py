"""The command line as a whole: its commands, errors, exit codes and lazy imports."""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import json
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import Run
from tunebench import _console, _start, cli, errors
from tunebench.cli import _output
from tunebench.db import open_store
from tunebench.space import Config
from tunebench.workloads import parse

Raise = Callable[[BaseException], None]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Return the words of every command that is not hidden, such as ``["db", "export-bundled"]``."""
    listed = []
    for name in cli.COMMANDS:
        if is_group(name):
            group = typer.main.get_group(importlib.import_module(f"tunebench.cli.{name}").app)
            listed += [[name, sub] for sub, command in group.commands.items() if not command.hidden]
        else:
            listed.append([name])
    return listed


def is_group(name: str) -> bool:
    return hasattr(importlib.import_module(f"tunebench.cli.{name}"), "app")


@pytest.fixture
def devices_raise(monkeypatch: pytest.MonkeyPatch) -> Raise:
    """Make the command `devices` raise an error."""
    from tunebench.cli import devices

    def replace(error: BaseException) -> None:
        def command() -> None:
            raise error

        monkeypatch.setattr(devices, "command", command)

    return replace


def test_every_command_module_is_listed() -> None:
    modules = {info.name for info in pkgutil.iter_modules(cli.__path__) if not info.name.startswith("_")}
    assert modules == set(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_listed_help_is_the_commands_own(name: str) -> None:
    module = importlib.import_module(f"tunebench.cli.{name}")
    function = module.app.registered_callback.callback if is_group(name) else module.command
    assert (inspect.getdoc(function) or "").partition("\n")[0] == cli.COMMANDS[name]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_help_and_a_place_in_the_docs(command: list[str], run_text: Run) -> None:
    assert f"tunebench {' '.join(command)}" in run_text(*command, "--help")
    assert f"`tunebench {' '.join(command)}" in PAGE


def test_every_exit_code_and_variable_is_documented() -> None:
    from tunebench import _environment

    for code, meaning in cli.EXIT_CODES.items():
        assert re.search(rf"^\| {code} +\| {re.escape(meaning)} +\|$", PAGE, re.MULTILINE), code
    for variable, meaning in _environment.VARIABLES.items():
        assert re.search(rf"^\| `{variable}` +\| {re.escape(meaning)} +\|$", PAGE, re.MULTILINE), variable


def test_every_error_of_the_tree_has_a_documented_exit_code() -> None:
    def below(cls: type[errors.TunebenchError]) -> list[type[errors.TunebenchError]]:
        return [cls, *(subclass for sub in cls.__subclasses__() for subclass in below(sub))]

    assert {cls.exit_code for cls in below(errors.TunebenchError)} <= set(cli.EXIT_CODES)


HEAVY = ["numpy", "sqlalchemy", "optuna", "numba", "torch", "scipy", "matplotlib", "ray", "tunebench.tuning"]

# Reading records needs SQLAlchemy, and of it neither the ORM nor the schema migrations.
UNUSED_BY_STORE = [
    *(
        "sqlalchemy.orm",
        "alembic",
        "tunebench.kernels.gemm",
        "tunebench.db.staleness",
        "tunebench.cache_file",
    ),
    *(name for name in HEAVY if name != "sqlalchemy"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("--help", ["tunebench.cli._option", "tunebench.cli.tune", "tunebench.workload", "pydantic", *HEAVY]),
        ("completion bash", ["tunebench.workload", *HEAVY]),
        ("tune --help", HEAVY),
        ("plan cluster --help", HEAVY),
        ("devices", HEAVY),
        ("workloads", HEAVY),
        ("lookup softmax:rows=8,cols=8,dtype=f32 --strict --device cpu --db {db}", HEAVY),
        ("workloads gemm", HEAVY),
        ("kernels", HEAVY),
        ("kernels gemm", HEAVY),
        ("show softmax:rows=8,cols=8,dtype=f32 --db {db}", UNUSED_BY_STORE),
        ("db stats --db {db}", UNUSED_BY_STORE),
    ],
)
def test_light_commands_import_little(words: str, unused: list[str], tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    if "{db}" in words:
        with open_store(db):
            pass
    code = (
        f"import sys; from tunebench import cli; cli.run({words.format(db=db).split()!r});"
        "print(*sorted(sys.modules), sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted({*unused} & {*done.stderr.splitlines()}) == []


def test_help_names_every_command(run_text: Run) -> None:
    shown = run_text("--help")
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("command", [[], *commands()], ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing_off(
    command: list[str], run_text: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run_text(*command, "--help")
    assert max(map(len, shown.splitlines())) <= 80
    loaded = _loaded(command)
    assert all(name in shown for name in loaded)


def _loaded(command: list[str]) -> list[str]:
    """Return the long names of the options of a command that its help must show."""
    typed = typer.main.get_command(cli.app)
    context = typer.Context(typed, info_name="tunebench")
    for name in command:
        _, typed, _ = typed.resolve_command(context, [name, "--help"])  # type: ignore[attr-defined]
        context = typer.Context(typed, info_name=name, parent=context)
    shown = [param for param in typed.get_params(context) if not getattr(param, "hidden", False)]
    return [name for param in shown for name in param.opts if name.startswith("--")]


def test_no_arguments_show_help(run_text: Run) -> None:
    assert "Usage: tunebench" in run_text()


def test_version(run_text: Run) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run_text("--version"))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["tuen"], "unknown command 'tuen'. Did you mean 'tune'?"),
        (["--nonsense"], "No such option: --nonsense"),
        (["devices", "--nonsense"], "see tunebench devices --help"),
        (["devices", "extra"], "unexpected extra argument"),
        (["workloads", "gem"], "Did you mean 'gemm'?"),
        (["workloads", "gemm:m=1"], "missing n, k, dtype"),
        (["workloads", "gemm:m=x,n=1,k=1,dtype=f32"], "m='x' must be a whole number"),
        (["workloads", "resnet50/none"], "unknown layer of resnet50 'none'"),
        (["workloads", "gpt2", "--batch", "0"], "--batch"),
        (["kernels", "softmax/none"], "unknown variant 'softmax/none'"),
        (["kernels", "none"], "unknown operator 'none'"),
    ],
)
def test_invalid_argument_is_one_line_of_error(typed: list[str], expected: str, run_refused: Run) -> None:
    assert expected in run_refused(*typed)


@pytest.mark.parametrize(
    ("error", "exit_code", "expected"),
    [
        (errors.TunebenchError("it\nbroke"), 1, "error: it broke\n"),
        (errors.LookupMiss("nothing known"), 3, "error: nothing known\n"),
        (errors.DatabaseError("locked"), 4, "error: locked\n"),
        (errors.DeviceError("gone"), 5, "error: gone\n"),
        (errors.MissingDependency("torch", "torch"), 6, "error: torch is not installed; run: pip install"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left", "/x.db"), 1, "error: /x.db: No space left; "),
        (OSError(errno.EFBIG, "File too large"), 1, "error: File too large; raise the limit of file sizes"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "error: Too many open files; raise the limit"),
        (OSError(errno.EROFS, "Read-only", "/x.db"), 2, "error: /x.db: Read-only; make"),
        (OSError(errno.EIO, "Input/output error"), 1, "error: Input/output error\n"),
    ],
)
def test_expected_errors_become_one_line_and_an_exit_code(
    error: BaseException,
    exit_code: int,
    expected: str,
    devices_raise: Raise,
    run_refused: Run,
) -> None:
    devices_raise(error)
    assert run_refused("devices", exit_code=exit_code).startswith(expected)
    assert exit_code in cli.EXIT_CODES


def test_debugging_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch, devices_raise: Raise) -> None:
    monkeypatch.setenv("TUNEBENCH_DEBUG", "1")
    devices_raise(errors.DeviceError("gone"))
    with pytest.raises(errors.DeviceError, match="gone"):
        cli.run(["devices"])


def test_unexpected_exception_of_the_package_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebench.device.local_gpus", len)  # a TypeError in the command itself
    with pytest.raises(TypeError):
        cli.run(["devices"])


def test_a_command_chooses_its_exit_code(devices_raise: Raise) -> None:
    devices_raise(typer.Exit(3))
    assert cli.run(["devices"]) == 3


def test_closed_pipe_is_no_error() -> None:
    script = "import sys; from tunebench import cli; sys.exit(cli.run(['workloads', '--json']))"
    # The reader closes its end of the pipe before the command writes.
    line = f'set -o pipefail; "{sys.executable}" -c "{script}" | true'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_stdout_is_no_error(closed: str) -> None:
    line = f'"{sys.executable}" -m tunebench workloads {closed}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_is_plain_and_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    data = {
        "workload": parse("softmax:rows=4,cols=8,dtype=f32"),
        "config": Config({"passes": 3}),
        "numbers": (np.float32(0.5), np.int64(7), 1.5, True, None),
        "set": {"b", "a"},
        "path": Path("x.db"),
    }
    _output.emit(True, data, lambda console: pytest.fail("nothing is drawn with --json"))
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "workload": "softmax:rows=4,cols=8,dtype=f32",
        "config": {"passes": 3},
        "numbers": [0.5, 7, 1.5, True, None],
        "set": ["a", "b"],
        "path": "x.db",
    }


def test_json_refuses_unsupported_values() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        _output.plain(object())
    with pytest.raises(ValueError, match="JSON"):
        _output.emit(True, float("nan"), lambda console: None)


def test_tables_keep_whole_names_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "x" * 120
    _output.console().print(_output.table("name", ">count", rows=[(name, 3), ("[y]", None)]))
    out = capsys.readouterr().out
    assert name in out
    assert re.search(r"\[y\] +-", out)


HOSTILE = "x\x1b[2J\x1b]0;title\x07\r\x9b1m\u202e\udcff [/red]"
ESCAPED = "x\\x1b[2J\\x1b]0;title\\x07\\r\\x9b1m\\u202e\\udcff [/red]"


def test_control_characters_of_foreign_text_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    to = _output.console()
    to.print(HOSTILE, soft_wrap=True)
    to.print(_output.table(HOSTILE, rows=[(HOSTILE,)], title=HOSTILE))
    out = capsys.readouterr().out
    assert out.count(ESCAPED) == 4
    assert all(sign.isprintable() or sign == "\n" for sign in out)


def test_control_characters_of_errors_and_warnings_are_escaped(
    devices_raise: Raise, capsys: pytest.CaptureFixture[str]
) -> None:
    devices_raise(errors.TunebenchError(HOSTILE))
    assert cli.run(["devices"]) == 1
    assert capsys.readouterr().err == f"error: {ESCAPED}\n"
    cli._warn(HOSTILE)
    assert capsys.readouterr().err == f"warning: {ESCAPED}\n"


def test_progress_of_a_file_with_any_name_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    text = io.StringIO()
    to = _console.console_class()(file=text, force_terminal=True, width=200)
    with _output.progress(to, HOSTILE) as show:
        show(1, 2, HOSTILE)
    assert ESCAPED in text.getvalue()


@pytest.mark.slow
def test_json_is_alone_on_stdout_whatever_code_prints() -> None:
    code = """
import os, sys
from tunebench import cli, device
known = device.local_cpu
def local_cpu():
    print("print")
    os.write(1, b"printf")
    return known()
device.local_cpu = local_cpu
cli.run(["doctor", "--json"])
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert json.loads(first)
    assert last == "after"
    assert "print\n" in done.stderr
    assert "printf" in done.stderr


def test_every_command_has_quiet_and_verbose(run_refused: Run) -> None:
    for command in commands():
        command_object = cli.load_command(command[0])
        command_object = command_object.commands[command[1]] if len(command) > 1 else command_object
        options = {option for param in command_object.params for option in param.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= options, command
    assert "exclude each other" in run_refused("devices", "-q", "-v")


# Writes "ready" where a console script imports its command, then runs the command.
SCRIPT = """
import os, re, signal, sys
sys.argv[:] = ["/usr/bin/tunebench", *sys.argv[1:]]
import tunebench
{hook}
os.write(1, b"ready")
from tunebench.__main__ import main
main()
"""
# Sends a signal to the process itself at an import.
HOOK = """
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Finder())
"""


def _ended(process: subprocess.Popen[str]) -> int:
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert err in ("", "error: interrupted\n")
    return process.returncode


def _started(hook: str = "") -> subprocess.Popen[str]:
    code = SCRIPT.format(hook=hook)
    line = [sys.executable, "-c", code, "predict", "softmax:rows=8,cols=8,dtype=f32", "--device", "t4"]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(
    "module", ["tunebench.__main__", "tunebench.cli", "typer", "tunebench.cli._help", "tunebench.cli.predict"]
)
def test_signal_at_an_import_of_the_command_line_ends_it_without_a_traceback(name: str, module: str) -> None:
    assert _ended(_started(HOOK.format(module=module, name=name))) == 130


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_within_the_first_moments_ends_the_command_without_a_traceback(name: str) -> None:
    for delay_ms in (0, 5, 10, 20, 50, 100, 200):
        process = _started()
        assert process.stdout is not None
        assert process.stdout.read(5) == "ready"
        time.sleep(delay_ms / 1000)
        process.send_signal(getattr(signal, name))
        assert _ended(process) in (130, 0)  # 0: it had ended


SLOW_END = """
import os, sys, time
sys.argv[:] = ["tunebench", "devices"]
import tunebench.__main__

class Slow:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(2, b"ending")
        sleep(1)

sys.modules["kept until the end"] = Slow()
tunebench.__main__.main()
"""
"""A command after which the interpreter takes a second to end."""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_while_the_interpreter_ends_keeps_the_exit_code(name: str) -> None:
    command = [sys.executable, "-c", SLOW_END]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.read(6) == b"ending"
        process.send_signal(getattr(signal, name))
        assert process.wait(60) == 0


def test_importing_the_package_keeps_the_signals_of_a_program() -> None:
    code = "import signal, tunebench; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "True\n"


def test_signals_interrupt_again_once_a_command_works(run_text: Run) -> None:
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    _start.quit_at_once()
    try:
        assert {signal.getsignal(number) for number in before} == {_start._quit}
        run_text("devices")
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
