"""How often the loops of a Triton kernel run, from the text of the kernel and the values of its arguments."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tunebench.variant import ceil_div

__all__ = ["loop_trips"]


def loop_trips(
    source: str, entry: str, values: Mapping[str, Any], grid: tuple[int, int, int]
) -> tuple[float, ...]:
    """Return how often each loop over a range runs in the middle of the grid, in the order of the source.

    A loop whose range depends on more than the values is left out, and so are loops that Triton unrolls and
    those in functions that the kernel calls.

    Args:
        source: The module that defines the kernel.
        entry: Name of the kernel.
        values: Whole-number arguments by name; compile-time constants, too.
        grid: Programs in x, y, z.
    """
    language = SimpleNamespace(
        cdiv=ceil_div,
        minimum=min,
        maximum=max,
        program_id=lambda axis=0: grid[axis] // 2,
        num_programs=lambda axis=0: grid[axis],
        constexpr=int,
    )
    triton = SimpleNamespace(cdiv=ceil_div, language=language)
    environment: dict[str, Any] = {"tl": language, "triton": triton, "min": min, "max": max, **values}
    trips: list[float] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            _walk(node.body, environment, trips)
    return tuple(trips)


def _walk(body: list[ast.stmt], environment: dict[str, Any], trips: list[float]) -> None:
    for node in body:
        if isinstance(node, ast.Assign):
            _assign(node, environment)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            _forget(node.target, environment)
        elif isinstance(node, ast.For):
            bounds = _range(node.iter, environment)
            if bounds is not None:
                trips.append(max(1.0, math.ceil((bounds[1] - bounds[0]) / bounds[2])))
            _forget(node.target, environment)
            _walk(node.body, environment, trips)
        elif isinstance(node, ast.If | ast.While | ast.With):
            _walk(node.body, environment, trips)


def _assign(node: ast.Assign, environment: dict[str, Any]) -> None:
    """Note the values of assigned names; names whose value is unknown are forgotten."""
    (target, *more) = node.targets
    pairs = [(target, node.value)]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = list(zip(target.elts, node.value.elts, strict=False))
    for place, value in pairs:
        number = None if more else _number(value, environment)
        if number is not None and isinstance(place, ast.Name):
            environment[place.id] = number
        else:
            _forget(place, environment)


def _forget(target: ast.expr, environment: dict[str, Any]) -> None:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            environment.pop(node.id, None)


def _number(expression: ast.expr, environment: Mapping[str, Any]) -> int | None:
    """Return the value of an expression; None if it is no whole number, or not known."""
    code = compile(ast.Expression(expression), "loop", "eval")
    try:
        value = eval(code, {"__builtins__": {}}, dict(environment))  # noqa: S307 - the kernel's own text
    except Exception:  # the expression needs a tensor, or anything else
        return None
    return int(value) if isinstance(value, int) else None


def _range(expression: ast.expr, environment: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return start, stop and step of a range; None if they are not known, or the loop is unrolled."""
    if not isinstance(expression, ast.Call) or not 1 <= len(expression.args) <= 3:
        return None
    name = ast.unparse(expression.func).rpartition(".")[2]
    numbers = [_number(argument, environment) for argument in expression.args]
    if name != "range" or None in numbers:
        return None
    whole = [number for number in numbers if number is not None]
    start, stop, step = (0, whole[0], 1) if len(whole) == 1 else (*whole, 1)[:3]
    return (start, stop, step) if step > 0 else None
