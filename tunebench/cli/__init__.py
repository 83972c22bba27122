"""The command line: `tunebench COMMAND`. Each command is a module here, imported only when it runs.

A command's module defines `command`, a Typer function whose docstring starts with the line in `COMMANDS`; a
command with subcommands defines a Typer `app` instead. Commands parse options, call one function of the
package and print its result (see `tunebench.cli._output`).
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
from typer.main import get_command

from tunebench import __version__, _environment
from tunebench._start import is_command_line, quit_at_once
from tunebench._user_code import IMPORT_S, end_process, limit_user_code
from tunebench.cli._current_folder import distrust
from tunebench.cli._help import HelpCommand, HelpGroup, WorkloadCommand, write_section
from tunebench.errors import InputError, TunebenchError, UnknownName, describe_error, user_place

__all__ = ["COMMANDS", "EXIT_CODES", "app", "load_command", "main", "run"]

COMMANDS = {
    "tune": "Find the fastest kernel and parameters for a workload, and record them.",
    "lookup": "Look up the best known kernel and parameters for a workload.",
    "show": "Show the records of a workload: the fastest configurations, and failures by class.",
    "report": "Write an HTML page of search histories, or a comparison of two databases or devices.",
    "check": "Compare best times with those of a baseline file; exit with 1 if a workload became slower.",
    "dashboard": (
        "Browse the database in a web browser: coverage, workloads, trials, searches that run, predictions."
    ),
    "predict": "Predict the time of a workload or a model on GPUs, present or not.",
    "compare": "Compare GPUs, present or not, by predicted time, throughput and cost of the same work.",
    "extract": "Extract the workloads of a PyTorch model, and the groups of operations that share a kernel.",
    "plan": "Plan how training steps run: the memory of one device, a pipeline, or training on a cluster.",
    "time": "Time a PyTorch model on this machine: eager torch, torch.compile, and tuned kernels.",
    "explain": (
        "Explain the time of a configuration: its limiting resource, and changes that would save time."
    ),
    "export": "Export a kernel with a launch manifest and an example in C++, or a lookup table for C++.",
    "workloads": "List operators, suites of real layers, and models.",
    "kernels": "List kernel variants and their parameters.",
    "devices": "List the devices of this machine and the described ones.",
    "bound": "Compare the lower bound with the times of a recorded tuning space.",
    "replay": "Search a recorded tuning space instead of a device, to compare samplers.",
    "completion": "Print a script that completes commands, options, workloads and devices in a shell.",
    "doctor": "Check the installation and this machine, and name the remedy for what is missing.",
    "db": "Manage the database of tuning results.",
}
"""Every command with its one-line help, so that `--help` imports no command."""

EXIT_CODES = {
    0: "done",
    1: "a check failed, or any other error",
    2: "invalid command line or input",
    3: "not measured here (lookup --strict), or measured only for variants whose files are not given",
    4: "the database cannot be read or written",
    5: "the device is missing or not usable, or the cluster is lost; results so far are kept",
    6: "an optional dependency is not installed or does not work, such as a compiler",
    130: "interrupted by Ctrl-C, SIGTERM or SIGHUP; results so far are kept",
}
"""Meaning of every exit code."""

_WITHOUT_DEFAULTS = {"completion", "doctor"}
"""Commands that work with a broken file of defaults; `doctor` reports it."""

_BAD_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS}
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or write to another disk"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable, or write to another path"),
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or write to another disk",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
"""What to do after an error of the system."""
_INTERRUPTED = 130

# Typer's base class of usage errors; it has no public name.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Commands(HelpGroup):
    """The command group, which imports only the command that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder with the help line; `resolve_command` returns the real command."""
        return HelpCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes."""
        write_section("Exit codes", [(str(code), meaning) for code, meaning in EXIT_CODES.items()], formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in COMMANDS:
            raise UnknownName("command", name, COMMANDS)
        command = load_command(name)
        if name not in _WITHOUT_DEFAULTS and not {"--help", "-h"} & {*rest}:
            _use_defaults(ctx, name, command, rest)
        return name, command, rest


def _use_defaults(ctx: Any, name: str, command: Any, rest: list[str]) -> None:
    from tunebench.cli import _defaults

    defaults_file = _defaults.find()
    if defaults_file is not None:
        _defaults.apply(defaults_file, ctx, name, command, rest)


def load_command(name: str) -> Any:
    """Import a command, and return it as Click runs it.

    Args:
        name: One of `COMMANDS`.
    """
    from tunebench.cli._option_group import with_verbosity

    module = importlib.import_module(f"{__name__}.{name}")
    if hasattr(module, "app"):
        return get_command(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=WorkloadCommand)(with_verbosity(module.command))
    return get_command(single)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _tunebench(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Find, store and run the fastest kernel for a workload on a device."""


def main() -> None:
    """Run the command line of this process and exit with its exit code."""
    _open_closed_streams()
    warnings.showwarning = _warn
    distrust()
    exit_code = run(sys.argv[1:])
    if is_command_line():
        quit_at_once()
    sys.exit(exit_code)


def _open_closed_streams() -> None:
    """Write to the null device where stdout or stderr is closed, so that no other file gets its number."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 (stays open)


def run(arguments: Sequence[str]) -> int:
    """Run one command. Expected errors are printed as one line on stderr.

    Args:
        arguments: Arguments after `tunebench`; none for the help.

    Returns:
        The exit code, one of `EXIT_CODES`.
    """
    if _environment.completing():
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        command = get_command(app)
        with limit_user_code(IMPORT_S), end_process():
            exit_code = command.main(
                list(arguments) or ["--help"], prog_name="tunebench", standalone_mode=False
            )
        sys.stdout.flush()
    except (TunebenchError, OSError, typer.Abort, _UsageError) as error:
        if _environment.debug():
            raise
        line, exit_code = _explain(error)
        if line:
            _complain(line)
        return exit_code
    except (Exception, SystemExit) as error:
        if _environment.debug() or not user_place(error):
            raise
        _complain(" ".join(describe_error(error).split("\n")))
        return TunebenchError.exit_code
    if exit_code == _INTERRUPTED:
        _complain("interrupted")
    return exit_code if isinstance(exit_code, int) else 0


def _complain(line: str) -> None:
    _print_line("error:", "red", line)


def _warn(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning as one line, without its place in the code."""
    _print_line("warning:", "yellow", str(message))


def _print_line(label: str, colour: str, line: str) -> None:
    from tunebench.cli._output import printable

    typer.echo(f"{typer.style(label, fg=colour, bold=True)} {printable(line)}", err=True)


def _explain(error: Exception) -> tuple[str, int]:
    """Return the line to print for an expected error (empty for none) and the exit code."""
    match error:
        case TunebenchError():
            return " ".join(str(error).split("\n")), error.exit_code
        case BrokenPipeError():
            _forget_stdout()
            return "", 1
        case OSError():
            return _explain_system(error), InputError.exit_code if error.errno in _BAD_PATH else 1
        case typer.Abort():
            return "interrupted", _INTERRUPTED
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if context else ""
    # A command group without a subcommand has shown its help already.
    return (message + hint if message else ""), InputError.exit_code


def _explain_system(error: OSError) -> str:
    location = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return location + reason + (f"; {remedy}" if remedy else "")


def _forget_stdout() -> None:
    """Redirect stdout to the null device after a broken pipe, so that the flush at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
