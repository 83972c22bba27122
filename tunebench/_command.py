"""Command lines of tunebench in messages: text that a shell reads back and that works as printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

__all__ = ["command_line"]


def command_line(command: str, *arguments: object, **options: object) -> str:
    """Return a command line of tunebench that works as it is printed.

    Args:
        command: Name of the command, such as ``"db verify"``.
        arguments: Its arguments.
        options: Value of each option, by name with underscores. None and False leave an option out, True is a
            flag, and an iterable repeats the option.
    """
    words = ["tunebench", *command.split(), *map(str, arguments)]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            words += [word for element in value for word in (option, str(element))]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return shlex.join(words)
