"""The command line: `tunebench COMMAND`. Each command is a module here and is imported when it is run.

A command's module defines `command`, a Typer function whose docstring starts with the line in `COMMANDS`;
a command that has commands of its own defines a Typer `app` instead. Both stay thin: they read what was
typed, call one function of the package and show what it returns (see `tunebench.cli._output`).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from tunebench import __version__, _environment
from tunebench.errors import InputError, TunebenchError, UnknownName

__all__ = ["COMMANDS", "EXIT_CODES", "app", "main", "run"]

COMMANDS = {
    "tune": "Find the fastest kernel and parameters for a workload, and remember them.",
    "lookup": "Answer from memory which kernel and parameters to use for a workload.",
    "show": "Show what is known of a workload: the best, and the failures by class.",
    "predict": "Predict how long a workload or a model takes on GPUs that need not be here.",
    "compare": "Compare GPUs that need not be here by predicted time, speed and cost of the same work.",
    "extract": "Read a PyTorch model as problems: what its operations are, and which share a kernel.",
    "time": "Time a PyTorch model here: by eager torch, by torch.compile, and by tuned kernels.",
    "explain": "Tell what limits a configuration, and what would take less time.",
    "export": "Write a kernel with all that a program needs to launch it, and an example in C++.",
    "workloads": "List what can be computed: operators, and suites of real layers.",
    "kernels": "List how it can be done: variants and their parameters.",
    "devices": "List this machine's devices and the described ones.",
    "bound": "Tell how fast the configurations of a recorded space could be at most, and what beats that.",
    "replay": "Search a recorded space as if it were a device, to judge samplers.",
    "doctor": "Tell what is installed and found here, and what to install for the rest.",
    "db": "Look after the database.",
}
"""Every command with its one line of help, so that `--help` imports none of them."""

EXIT_CODES = {
    0: "done",
    1: "any other error",
    2: "what was typed cannot be used",
    3: "lookup --strict: nothing was timed for this workload on this device",
    4: "the database cannot be read or written",
    5: "the device is absent or refuses, or the cluster is lost; what was found is kept",
    6: "an optional dependency is not installed",
    130: "interrupted by Ctrl-C; what was found is kept",
}
"""What the exit code of every command means."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EROFS, errno.EACCES, errno.EPERM}
_INTERRUPTED = 130

# What Typer raises for a command line it cannot read; it has no public name of its own.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """Commands by name; only the one that is run is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in that knows its help line; `resolve_command` brings the real one."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in COMMANDS:
            raise UnknownName("command", name, COMMANDS)
        return name, _load(name), rest


def _load(name: str) -> Any:
    module = importlib.import_module(f"{__name__}.{name}")
    if hasattr(module, "app"):
        return get_command(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name)(module.command)
    return get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
)


@app.callback()
def _tunebench(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Find, remember and serve the fastest kernel for a workload on a device."""


def main() -> None:
    """Run the command line that was typed and end the process with its exit code."""
    warnings.showwarning = _warn
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; what is expected to go wrong becomes one line on stderr.

    Args:
        arguments: What was typed after `tunebench`; nothing at all asks for help.

    Returns:
        The exit code, one of `EXIT_CODES`.
    """
    try:
        command = get_command(app)
        exit_code = command.main(list(arguments) or ["--help"], prog_name="tunebench", standalone_mode=False)
        sys.stdout.flush()
    except (TunebenchError, OSError, typer.Abort, _UsageError) as error:
        if _environment.debug():
            raise
        line, exit_code = _explain(error)
        if line:
            _complain(line)
        return exit_code
    if exit_code == _INTERRUPTED:
        _complain("interrupted")
    return exit_code if isinstance(exit_code, int) else 0


def _complain(line: str) -> None:
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {line}", err=True)


def _warn(message: Warning | str, *where: object, **more: object) -> None:
    """Tell a warning in its own line, without the place in the code that it came from."""
    typer.echo(f"{typer.style('warning:', fg='yellow', bold=True)} {message}", err=True)


def _explain(error: Exception) -> tuple[str, int]:
    """Return the line to print for an expected error (none if empty), and the exit code."""
    match error:
        case TunebenchError():
            return " ".join(str(error).split("\n")), error.exit_code
        case BrokenPipeError():
            _forget_stdout()
            return "", 1
        case OSError():
            return _explain_system(error), 1
        case typer.Abort():
            return "interrupted", _INTERRUPTED
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if context else ""
    # A group named without a command has shown its help already.
    return (message + hint if message else ""), InputError.exit_code


def _explain_system(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        reason += "; free some space, or keep the database elsewhere by --db"
    elif error.errno in _NO_RIGHT:
        reason += "; make it writable, or keep the database elsewhere by --db"
    return place + reason


def _forget_stdout() -> None:
    """Let nothing more reach a closed pipe, not even the flush at exit: its reader has all it wanted."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
