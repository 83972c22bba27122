"""Where heads of steps begin: at the first statement of a step, or at a later one.

A step whose first statements draw numbers of Python, set options or read values is cut before a statement.
One function runs the statements before it as they are, and calls the other one, which runs the rest, with the
variables that it reads. Both have the instructions of the step.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any

__all__ = ["Start", "cut", "starts"]

_READERS = {"locals", "vars", "dir", "eval", "exec", "super"}
"""Functions that see the variables of their caller."""

_UNBINDING = {"DELETE_FAST", "LOAD_FAST_AND_CLEAR"}
"""Instructions that unbind a variable: ``del``, and a comprehension for its variable (Python 3.12)."""

_VARIADIC = (CO_VARARGS, CO_VARKEYWORDS)


@dataclass(frozen=True, slots=True)
class Start:
    """A statement at which a head may begin.

    Attributes:
        offset: Offset of its first instruction.
        line: Its line.
        names: Local variables that it or a later statement reads.
    """

    offset: int
    line: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Reached:
    """What holds where an instruction is reached.

    Attributes:
        depth: Size of the stack.
        bound: Local variables that are bound.
        maybe_bound: Those that may be.
    """

    depth: int
    bound: frozenset[str]
    maybe_bound: frozenset[str]


def starts(code: CodeType) -> list[Start]:
    """Return the statements of a function, after the first, at which a head may begin, in order.

    Statements in loops and ``with`` or ``try`` blocks are left out, and those that may read a variable
    that is not bound.
    """
    from torch._dynamo.bytecode_transformation import cleaned_instructions

    if code.co_cellvars or not _READERS.isdisjoint(code.co_names):
        return []
    instructions = cleaned_instructions(code)
    index = {instruction: position for position, instruction in enumerate(instructions)}
    followers = [_followers(instructions, index, position) for position in range(len(instructions))]
    states = _reached(instructions, followers, code)
    read_later = _read_later(instructions, index, followers)
    loops = [
        range(index[instruction.target], position + 1)
        for position, instruction in enumerate(instructions)
        if instruction.target is not None and index[instruction.target] <= position
    ]
    deleted = {instruction.argval for instruction in instructions if instruction.opname in _UNBINDING}
    statements = []
    lines = {code.co_firstlineno, *(instruction.starts_line for instruction in instructions[:1])}
    for position, instruction in enumerate(instructions):
        line, state = instruction.starts_line, states.get(position)
        if line in lines or line is None:
            continue
        lines.add(line)
        is_split = instruction.exn_tab_entry or any(position in loop for loop in loops)
        if state is None or state.depth or is_split:
            continue
        names = read_later[position] & state.maybe_bound
        if names <= state.bound and names.isdisjoint(deleted):
            statements.append(Start(instruction.offset, line, tuple(sorted(names))))
    return statements[1:]


def _followers(instructions: list[Any], index: dict[Any, int], position: int) -> list[tuple[int, bool]]:
    """Return where instructions that may run next without an exception are, and whether by a jump."""
    from torch._dynamo.bytecode_analysis import JUMP_OPCODES, TERMINAL_OPCODES

    instruction = instructions[position]
    followers = [] if instruction.opcode in TERMINAL_OPCODES else [(position + 1, False)]
    if instruction.opcode in JUMP_OPCODES:
        followers.append((index[instruction.target], True))
    return followers


def _reached(
    instructions: list[Any], followers: list[list[tuple[int, bool]]], code: CodeType
) -> dict[int, _Reached]:
    """Return what holds at each instruction that is reached without an exception."""
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in _VARIADIC)
    arguments = frozenset(code.co_varnames[:count])
    states = {0: _Reached(0, arguments, arguments)}
    pending = [0]
    while pending:
        position = pending.pop()
        instruction, state = instructions[position], states[position]
        stored = {instruction.argval} if instruction.opname == "STORE_FAST" else set()
        # Dynamo's own instructions have no argument yet, which does not decide the effect of theirs
        argument = (instruction.arg or 0) if instruction.opcode >= dis.HAVE_ARGUMENT else None
        for target, jumps in followers[position]:
            effect = dis.stack_effect(instruction.opcode, argument, jump=jumps)
            reached = _Reached(state.depth + effect, state.bound | stored, state.maybe_bound | stored)
            before = states.get(target, reached)
            merged = _Reached(
                reached.depth, before.bound & reached.bound, before.maybe_bound | reached.maybe_bound
            )
            if merged != states.get(target):
                states[target] = merged
                pending.append(target)
    return states


def _read_later(
    instructions: list[Any], index: dict[Any, int], followers: list[list[tuple[int, bool]]]
) -> list[set[str]]:
    """Return, for each instruction, the local variables that it or a later one reads before it is bound."""
    names: list[set[str]] = [set() for _ in instructions]
    changes = True
    while changes:
        changes = False
        for position in reversed(range(len(instructions))):
            instruction = instructions[position]
            later = set[str]().union(*(names[target] for target, _ in followers[position]))
            if instruction.opname == "STORE_FAST":
                later.discard(instruction.argval)
            elif instruction.opcode in dis.haslocal:
                later.add(instruction.argval)
            if instruction.exn_tab_entry:
                later |= names[index[instruction.exn_tab_entry.target]]
            if later != names[position]:
                names[position] = later
                changes = True
    return names


def cut(
    function: Callable[..., Any], start: Start, rest: Callable[..., Any]
) -> tuple[Callable[..., Any], FunctionType]:
    """Return a function that runs the statements before a start, and one that runs those from there.

    Args:
        function: The function to cut.
        start: One of its `starts`.
        rest: What the first function calls with the variables of the start; its result is the result. It is
            a constant of code, whose cycles are not collected.
    """
    from torch._dynamo.bytecode_transformation import transform_code_object

    assert isinstance(function, FunctionType)
    first, second = (
        FunctionType(
            transform_code_object(function.__code__, transform)[0],
            function.__globals__,
            function.__name__,
            None,
            function.__closure__,
        )
        for transform in (partial(_end_at, start, rest), partial(_begin_at, start))
    )
    first.__defaults__, first.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return first, second


def _end_at(start: Start, rest: Callable[..., Any], instructions: list[Any], options: dict[str, Any]) -> None:
    """Let instructions return what a function returns, where they reach a start."""
    from torch._dynamo.bytecode_analysis import remove_dead_code
    from torch._dynamo.bytecode_transformation import (
        add_push_null,
        create_call_function,
        create_instruction,
        create_load_const,
    )

    position = _position(instructions, start)
    call = [
        *add_push_null([create_load_const(rest, checked=False)]),
        *(create_instruction("LOAD_FAST", argval=name) for name in start.names),
        *create_call_function(len(start.names), False),
        create_instruction("RETURN_VALUE"),
    ]
    for instruction in instructions[:position]:
        if instruction.target is instructions[position]:
            instruction.target = call[0]
    instructions[position:position] = call
    instructions[:] = remove_dead_code(instructions)


def _begin_at(start: Start, instructions: list[Any], options: dict[str, Any]) -> None:
    """Let instructions begin at a start, whose variables are their arguments."""
    from torch._dynamo.bytecode_analysis import remove_dead_code
    from torch._dynamo.bytecode_transformation import create_instruction, create_jump_absolute

    free = options["co_freevars"]
    options["co_argcount"] = len(start.names)
    options["co_posonlyargcount"] = options["co_kwonlyargcount"] = 0
    options["co_flags"] &= ~(CO_VARARGS | CO_VARKEYWORDS)
    unbound = (name for name in options["co_varnames"] if name not in start.names)
    options["co_varnames"] = (*start.names, *unbound)
    instructions[:0] = [
        *([create_instruction("COPY_FREE_VARS", arg=len(free))] if free else []),
        create_instruction("RESUME", arg=0),
        create_jump_absolute(instructions[_position(instructions, start)]),
    ]
    instructions[:] = remove_dead_code(instructions)


def _position(instructions: list[Any], start: Start) -> int:
    return next(
        position for position, instruction in enumerate(instructions) if instruction.offset == start.offset
    )
