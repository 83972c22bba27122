"""Functions of a program are written as text that means the same in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tunebench.errors import InputError, UnknownName
from tunebench.own_kernel._portable import portable
from tunebench.variant import ceil_div

FACTOR = 3
HALVES = (0.5, float("inf"))


def doubled(value: int) -> int:
    """Return twice a value."""
    return 2 * value


def nested(value: int) -> int:
    return doubled(value) + FACTOR


def rebuilt(function: Callable[..., Any] | str, names: tuple[str, ...] = ("block", "n"), **sizes: int) -> Any:
    text = portable(function, "grid", names, sizes).written("made")
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["made"]()


def test_lambda_is_found_among_several_on_a_line() -> None:
    first, second = (lambda block: block + 1, lambda block: block + 2)
    assert (rebuilt(first)(block=1), rebuilt(second)(block=1)) == (2, 3)


def test_values_modules_and_functions_of_the_program_are_carried() -> None:
    weights = np.array([1, 2], dtype=np.int32)
    function = lambda block: (nested(block) + int(np.sum(weights)) + ceil_div(block, 2), HALVES)  # noqa: E731
    assert rebuilt(function)(block=5) == function(5)  # type: ignore[no-untyped-call]


def test_size_is_taken_from_the_workload() -> None:
    n = 10
    assert rebuilt(lambda block: ceil_div(n, block), n=10)(block=3, n=100) == 34


def test_expression_takes_the_names_that_it_uses() -> None:
    found = portable("ceil_div(n, block) if block in (1, 2) else max(n, 3)", "grid", ("block", "n", "m"), {})
    assert found.arguments == ("n", "block") or set(found.arguments) == {"n", "block"}
    assert rebuilt("[x * block for x in range(n)]")(block=2, n=3) == [0, 2, 4]


def test_constants_leave_the_signature() -> None:
    def kernel(x: Any, block: int = 4, *, n: int = 2) -> Any:
        return x + block * n

    written = portable(kernel, "kernel", ("x", "block", "n"), {}, ("block", "n"))
    assert written.arguments == ("x",)
    assert "def kernel(x):" in written.body


def test_contradicting_size_is_refused() -> None:
    n = 10
    with pytest.raises(InputError, match="n, which is 10 in your program and 11 as an argument"):
        portable(lambda block: n // block, "grid", ("block", "n"), {"n": 11})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"argument of grid 'blok'\. Did you mean 'block'"):
        portable(lambda blok: 1, "grid", ("block",), {})
    with pytest.raises(UnknownName, match="name in grid 'm'"):
        portable("m + 1", "grid", ("block",), {})
    with pytest.raises(InputError, match="not a Python expression"):
        portable("block >", "grid", ("block",), {})


def test_value_without_text_is_refused() -> None:
    handle = object()
    with pytest.raises(InputError, match="uses handle, a object"):
        portable(lambda block: (handle, block), "grid", ("block",), {})


def test_function_without_a_file_is_refused() -> None:
    scope: dict[str, Any] = {}
    exec("f = lambda block: block", scope)
    with pytest.raises(InputError, match="write it as a string"):
        portable(scope["f"], "grid", ("block",), {})
