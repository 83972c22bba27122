"""Options that are added to commands: the fields of a dataclass, and those of all commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from tunebench import _console, _start
from tunebench._signal import ending_like_ctrl_c
from tunebench.errors import InputError

__all__ = ["grouped_options", "with_verbosity"]

Command = Callable[..., None]


def grouped_options(parameter: str, group: type[Any]) -> Callable[[Command], Command]:
    """Return a decorator that replaces a parameter of a command by one option for each field of a dataclass.

    Typer reads the options of a command from its signature. The command receives one object of the dataclass.
    If the parameter has the default None, the options are optional, and it is None unless the first one is
    given.

    Args:
        parameter: Name of the parameter.
        group: The dataclass; its fields are annotated with Typer options.
    """
    fields, kinds = dataclasses.fields(group), get_type_hints(group, include_extras=True)

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        optional = signature.parameters[parameter].default is None
        parameters: list[inspect.Parameter] = []
        for command_parameter in signature.parameters.values():
            if command_parameter.name != parameter:
                parameters.append(command_parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            for index, field in enumerate(fields):
                default = None if optional and index == 0 else field.default
                if default is dataclasses.MISSING:
                    default = inspect.Parameter.empty
                parameters.append(
                    inspect.Parameter(
                        field.name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=default,
                        annotation=kinds[field.name],
                    )
                )

        @functools.wraps(command)
        def grouped(**arguments: Any) -> None:
            of_group = {field.name: arguments.pop(field.name) for field in fields}
            absent = optional and of_group[fields[0].name] is None
            command(**arguments, **{parameter: None if absent else group(**of_group)})

        grouped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return grouped

    return decorate


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Quiet: no progress and no notes, only results and errors."),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Verbose: a line for each step on stderr, also without a terminal."),
]


def with_verbosity(command: Command) -> Command:
    """Return a command with the options `-q` and `-v`, which apply while it runs, and that signals interrupt.

    Args:
        command: The command.

    Raises:
        InputError: both are given.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("quiet", Quiet), ("verbose", Verbose))
    ]

    @functools.wraps(command)
    def run(*, quiet: bool, verbose: bool, **arguments: Any) -> None:
        if quiet and verbose:
            raise InputError("-q and -v exclude each other")
        _start.stop_quitting()  # from now on there is work to end
        with ending_like_ctrl_c(), _console.verbosity(verbose - quiet):
            command(**arguments)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
