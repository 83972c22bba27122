"""What runs in the process of an example: a `tunebench` command, or a Python program."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from tests.fork_server import WORKER_MODULES, ForkServer, fork_workers

PACKAGES = ("numpy", "ml_dtypes", "numba", "optuna", "rich.console", "sqlalchemy.dialects.sqlite", "typer")
"""Packages that most programs import."""

COMMAND_MODULES = (*PACKAGES, *WORKER_MODULES, "alembic.command", "alembic.autogenerate", "highspy")
"""Modules that commands import when they run, besides those of the commands."""

SCRIPT = Path(sys.executable).with_name("tunebench")


def import_commands() -> None:
    """Import every command, and what the commands import when they run; start no thread."""
    from tests.fork_server import prepare_workers
    from tunebench import cli

    for name in cli.COMMANDS:
        importlib.import_module(f"tunebench.cli.{name}")
    prepare_workers()


def run_command(*arguments: str) -> NoReturn:
    """Run `tunebench` with these arguments; its worker processes are forks, too."""
    from tunebench.__main__ import main

    sys.argv[:] = [str(SCRIPT), *arguments]
    if arguments[0] == "tune":
        _fork_workers()
    main()
    sys.exit()


def _fork_workers() -> None:
    """Let worker processes be forks of this process, as it is now."""
    server = ForkServer.fork()
    fork_workers(lambda: server)


def run_program(path: str) -> None:
    """Run a Python file as the main program."""
    sys.argv[:] = [path]
    sys.path[0] = str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")


def run_tuning_program(path: str) -> None:
    """Run a Python file that tunes as the main program; its worker processes are forks."""
    _fork_workers()
    run_program(path)
