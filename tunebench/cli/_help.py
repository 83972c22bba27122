"""Help texts: the options of a command by group, in lines that fit a narrow terminal.

Typer's tables have a column for each of name, short name, negation and type, and cut off what does not fit.
Here a long name takes a line of its own, and no line breaks inside the name of an option.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["HelpCommand", "HelpGroup", "WorkloadCommand", "write_section"]

_COMMON = "Options"
_NAME_WIDTH = 26
_TYPES = {"str": "TEXT", "path": "PATH", "int": "INT", "float": "FLOAT"}


class _Help:
    """Help that lists each group of options under its title, for a command or a group of commands."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{**keywords, "rich_markup_mode": None})

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the paragraphs about the command."""
        _write_paragraphs(ctx.command.help or "", formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group of options, then the options of no group."""
        _write_options(self, ctx, formatter)


class HelpCommand(_Help, TyperCommand):
    """A command with this help."""


class WorkloadCommand(HelpCommand):
    """A command that takes workloads with or without `--workload` in front of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option = self._workload_option()
        if option is not None:
            args = list(self._with_option(args, repeatable=option.multiple))
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        option = self._workload_option()
        completions = super().shell_complete(ctx, incomplete)
        if option is not None and not incomplete.startswith("-"):
            completions = [*completions, *option.shell_complete(ctx, incomplete)]
        return completions

    def _workload_option(self) -> Any:
        """Return the option `--workload`; None without it, or if other arguments need no option."""
        if any(param.param_type_name == "argument" for param in self.params):
            return None
        return next((param for param in self.params if "--workload" in param.opts), None)

    def _with_option(self, args: list[str], *, repeatable: bool) -> Iterator[str]:
        """Yield the arguments with `--workload` before those that are no option and no value of one."""
        values_of_option = {
            name: param.nargs
            for param in self.params
            if not getattr(param, "is_flag", False)
            for name in param.opts
        }
        expected = 0  # values that the option before still takes
        has_workload = False
        for arg in args:
            if not expected and not arg.startswith("-") and (repeatable or not has_workload):
                yield "--workload"
                has_workload = True
            yield arg
            expected = expected - 1 if expected else values_of_option.get(arg, 0)


class HelpGroup(_Help, TyperGroup):
    """A command with subcommands and this help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and then the commands with the first line of their help."""
        super().format_options(ctx, formatter)
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, (command.help or "").partition("\n")[0])
            for name, command in commands
            if command is not None and not command.hidden
        ]
        write_section("Commands", rows, formatter)


def write_section(title: str, rows: Sequence[tuple[str, str]], formatter: Any) -> None:
    """Write a table of two columns under a title; a name that is too long takes a line of its own.

    Args:
        title: Title of the table.
        rows: Name and meaning of each row.
        formatter: Receives the lines.
    """
    width = min(max(len(name) for name, _ in rows), _NAME_WIDTH)
    with formatter.section(typer.style(title, bold=True)):
        indent = " " * formatter.current_indent
        for name, meaning in rows:
            lines = _wrapped(meaning, formatter.width - len(indent) - width - 2) or [""]
            if len(name) > width:
                formatter.write(f"{indent}{name}\n")
                name = ""
            for line in lines:
                formatter.write(f"{indent}{name:{width}}  {line}".rstrip() + "\n")
                name = ""


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            name, meaning = record
            if param.param_type_name == "argument":
                sections["Arguments"].append((name.partition(" <")[0], meaning))
            else:
                sections.setdefault(param.rich_help_panel or _COMMON, []).append((_typed(name), meaning))
    common = sections.pop(_COMMON, [])
    for title, rows in [*sections.items(), (_COMMON, common)]:
        if rows:
            write_section(title, rows, formatter)


def _typed(name: str) -> str:
    """Return the name of an option with the type of its value as a metavariable, such as INT."""
    return re.sub(r"<(\w+)(?: range)?>", lambda match: _TYPES.get(match[1], match[1].upper()), name)


def _write_paragraphs(text: str, formatter: Any) -> None:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        formatter.write("\n")
        for line in _wrapped(paragraph, formatter.width - 2):
            formatter.write(f"  {line}\n")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), max(width, 20), break_on_hyphens=False, break_long_words=False
    )
