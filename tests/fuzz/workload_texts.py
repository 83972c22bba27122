"""Fuzzing of workload texts: a text that is nearly valid is refused with a reason, or means what it says.

    python -m tests.fuzz.workload_texts [--texts 100000] [--seed 0] [--first 0]

Texts are drawn from the grammar of each operator and of suites, then changed up to three times: dimensions
that are missing, repeated or renamed, values of another kind or at a limit, other separators, characters that
a terminal or a database obeys, expressions with other functions or deeper parentheses. For each text:

- parsing ends within the time limit, with a workload or an `InputError` of a printable message;
- every dimension of an accepted text has the value that the text states, an expression the same values;
- the canonical text of the workload parses to the same workload;
- one text in 50 is predicted and searched for variants, with finite times or an `InputError`.

Text N of a seed is always the same. The exit status is 1 if any text failed.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz import command
from tunebench import device as devices
from tunebench import expression, predict
from tunebench.activation import DEFINITIONS
from tunebench.dimension import Kind, items_of
from tunebench.errors import InputError, quoted
from tunebench.tuning.tunable import find_variants
from tunebench.workload import Workload
from tunebench.workloads import all_operators, parse, suite, suites

__all__ = ["check", "fuzz", "near_valid_text"]

TIME_LIMIT_S = 20.0
"""Time limit of one text, on a busy machine."""

SEARCHED = 50
"""One text in this many is predicted and searched for variants, if it is accepted."""

LONGEST_MESSAGE = 3000
"""Longest message of an error, in characters."""

_CANONICAL = {
    "strided_elementwise": ("shape", "operands"),
    "strided_reduction": ("shape", "operands", "axes"),
}
"""Dimensions that an operator rewrites: adjacent axes of operands are merged."""

_SIZES = ("1", "2", "7", "64", "100", "1024", "4096")
_LIMITS: tuple[str, ...] = (
    "0",
    "-1",
    "2147483647",
    "2147483648",
    "9223372036854775808",
    "9" * 40,
    "1e3",
    "1_000",
    "0x10",
)
_LIMITS += ("+5", "05", " 5", "5 ", "1.5", "١٢", "1", "", "nan", "inf", "-0", "1..8", "None", "true", "\0")
_CHARACTERS: tuple[str, ...] = (
    "\0",
    "\ud800",
    "\x1b[2J",
    "\u202e",
    "\u200b",
    "\n",
    "\t",
    " ",
    "'",
    '"',
    "\\",
    "%s",
    "{0}",
)
_CHARACTERS += ("é", "😀", "\uff1d", "^", "[", "lambda:", "#", *"=,:/+()*-._")
_FLOATS = ("1e-5", "0.5", "1", "1e38", "1e39", "1e-50", "-1", "nan", "1e", ".5")


# -- texts -------------------------------------------------------------------------------------------------


def near_valid_text(chance: random.Random) -> str:
    """Return a text that is valid up to three changes."""
    text = _layer(chance) if chance.random() < 0.05 else _workload(chance)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        text = chance.choice(_CHANGES)(chance, text)
    return text


def _layer(chance: random.Random) -> str:
    name = chance.choice(suites())
    return f"{name}/{chance.choice(suite(name)).name}{chance.choice(('', ',n=2', ',m=3', ',dtype=f32'))}"


def _workload(chance: random.Random) -> str:
    name = chance.choice(tuple(all_operators()))
    cls = all_operators()[name]
    tree = _expression(chance, 3)
    items = []
    for field in cls._fields():
        if field.name == "momentum" or ("[" + field.name in cls.usage() and chance.random() < 0.6):
            continue
        items.append(f"{field.name}={_value(chance, cls.dimension_kinds()[field.name], tree)}")
    return f"{name}:{','.join(items)}"


def _value(chance: random.Random, kind: Kind, tree: str) -> str:
    if kind.values:
        return str(chance.choice(kind.values))
    if kind.base is bool:
        return chance.choice(("true", "false"))
    if kind.base is int:
        return chance.choice(_SIZES)
    if kind.base is float:
        return chance.choice(_FLOATS)
    match kind.note:
        case "expression":
            return tree
        case "names":
            return chance.choice(("", "y", "bias", "bias+y"))
        case "shape":
            return chance.choice(("8x16", "8", "2x3x4", "4x4x4x4"))
        case "operands":
            return "+".join(
                f"{name}.{chance.choice(('f32', 'f16'))}.{chance.choice(('16_1', '1', '0_1'))}"
                for name in ("bias", "x", "y")
                if name in tree
            )
    return "name"


def _expression(chance: random.Random, depth: int) -> str:
    if not depth or chance.random() < 0.3:
        return chance.choice(("x", "x", "y", "bias", "0.5", "2", "1e-3"))
    below = functools.partial(_expression, chance, depth - 1)
    name, count = chance.choice((*expression.FUNCTIONS.items(), *expression.SHORTHANDS.items()))
    return chance.choice(
        (
            f"{name}({','.join(below() for _ in range(count))})",
            f"{below()}{chance.choice('+-*/')}{below()}",
            f"-{below()}",
            f"({below()})",
        )
    )


# -- changes -----------------------------------------------------------------------------------------------


def _change_items(change: Callable[[random.Random, list[str]], None]) -> Callable[[random.Random, str], str]:
    def changed(chance: random.Random, text: str) -> str:
        head, colon, rest = text.partition(":")
        items = items_of(rest)
        change(chance, items)
        return head + colon + ",".join(items)

    return changed


def _drop(chance: random.Random, items: list[str]) -> None:
    items.pop(chance.randrange(len(items)))


def _repeat(chance: random.Random, items: list[str]) -> None:
    items.insert(chance.randrange(len(items) + 1), chance.choice(items))


def _shuffle(chance: random.Random, items: list[str]) -> None:
    chance.shuffle(items)


def _exchange_values(chance: random.Random, items: list[str]) -> None:
    target, source = chance.randrange(len(items)), chance.choice(items)
    items[target] = items[target].partition("=")[0] + "=" + source.partition("=")[2]


def _limit(chance: random.Random, items: list[str]) -> None:
    index = chance.randrange(len(items))
    items[index] = items[index].partition("=")[0] + "=" + chance.choice(_LIMITS)


def _rename(chance: random.Random, items: list[str]) -> None:
    index = chance.randrange(len(items))
    name, equals, value = items[index].partition("=")
    items[index] = chance.choice((name.upper(), name[:-1], name + "s", "k", "__class__", "")) + equals + value


def _nest(chance: random.Random, items: list[str]) -> None:
    index, deep = chance.randrange(len(items)), chance.choice((1, 2, 50, 3000))
    name, equals, value = items[index].partition("=")
    wrap = chance.choice(("(", "-", "exp(", "max(x,"))
    items[index] = name + equals + wrap * deep + value + ")" * (deep if "(" in wrap else 0)


def _insert(chance: random.Random, text: str) -> str:
    position = chance.randrange(len(text) + 1)
    return text[:position] + chance.choice(_CHARACTERS) + text[position:]


def _delete(chance: random.Random, text: str) -> str:
    position = chance.randrange(len(text) + 1)
    return text[:position] + text[position + chance.choice((1, 1, 5, 1000)) :]


def _separate(chance: random.Random, text: str) -> str:
    old = chance.choice((",", "=", ":"))
    return text.replace(old, chance.choice((", ", ";", "==", " = ", ",,", ":", "=")), chance.choice((1, -1)))


_CHANGES: tuple[Callable[[random.Random, str], str], ...] = (
    *map(_change_items, (_drop, _repeat, _shuffle, _exchange_values, _limit, _limit, _rename, _nest)),
    *(_insert, _delete, _separate),
)


# -- checks ------------------------------------------------------------------------------------------------


def check(text: str, *, search: bool) -> str:
    """Parse a text and check the result.

    Args:
        text: Text of a workload.
        search: Whether to predict an accepted workload and to search for variants.

    Returns:
        ``"accepted"`` or ``"refused"``.

    Raises:
        AssertionError: if the workload is not what the text states, or a message is unusable.
    """
    workload, message = _parsed(text)
    if workload is None:
        assert message, "an error without a message"
        assert len(message) <= LONGEST_MESSAGE, f"a message of {len(message)} characters"
        return "refused"
    reparsed = parse(str(workload))
    assert (reparsed, str(reparsed)) == (workload, str(workload)), f"{workload} parses to {reparsed}"
    str(workload).encode()
    if ":" in text:
        _check_stated(workload, text)
    if search:
        _check_search(workload)
    return "accepted"


def _parsed(text: str) -> tuple[Workload | None, str]:
    """Return the workload of a text, or None and the message of the error."""
    try:
        return parse(text), ""
    except InputError as error:
        return None, str(error)


def _check_stated(workload: Workload, text: str) -> None:
    """Check that each dimension has the stated value."""
    stated = workload.split_dimensions(text.strip().partition(":")[2])
    for name, value in stated.items():
        if name in _CANONICAL.get(workload.operator, ()) or (
            name == "vector_dtype" and not stated.get("vectors")
        ):
            continue
        kind, got = workload.dimension_kinds()[name], getattr(workload, name)
        match got:
            case bool():
                same = value.lower() in (("true", "1") if got else ("false", "0"))
            case int():
                same = int(value) == got
            case float():
                same = float(value) == got
            case _ if kind.note == "expression":
                same = _values(value) == _values(got)
            case _ if kind.note == "names":
                same = sorted(filter(None, value.split("+"))) == sorted(filter(None, got.split("+")))
            case _:
                same = value == str(got)
        assert same, f"{name}={value!r} is taken as {got!r}"


def _values(text: str) -> str:
    """Return the value of an accepted expression, computed by Python."""
    names = sorted(expression.names(expression.parse(text)))
    values = {name: np.float64(1.25 + 0.5 * index) for index, name in enumerate(names)}
    scope = {"__builtins__": {}, **_functions(), **values}
    with np.errstate(all="ignore"):
        try:
            return f"{eval(text.strip(), scope):.6g}"
        except ZeroDivisionError:
            return "division by zero"


def _functions() -> dict[str, Callable[..., Any]]:
    meanings: dict[str, Callable[..., Any]] = {
        "eq": lambda a, b: float(a == b),
        "ne": lambda a, b: float(a != b),
        "lt": lambda a, b: float(a < b),
        "le": lambda a, b: float(a <= b),
        "where": lambda c, a, b: a if c else b,
        "gt": lambda a, b: float(a > b),
        "ge": lambda a, b: float(a >= b),
        "clamp": lambda a, low, high: np.minimum(np.maximum(a, low), high),
        "pow": lambda a, b: np.float64(a) ** b,
        "max": np.maximum,
        "min": np.minimum,
        "square": lambda a: a * a,
        "sqrt": np.sqrt,
        "round": np.rint,
        "rsqrt": lambda a: 1 / np.sqrt(a),
        "exp": np.exp,
        "log": np.log,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "abs": abs,
        "step": lambda a: float(a > 0),
        "relu": lambda a: np.maximum(a, 0),
    }
    unknown = set(expression.FUNCTIONS) - set(meanings)  # any function that differs for different arguments
    functions = meanings | {
        name: (lambda *a, n=name: sum(math.pi * len(n) * np.tanh(v) for v in a)) for name in unknown
    }

    def written_out(definition: str) -> Callable[..., Any]:
        return lambda x: eval(definition, {"__builtins__": {}, **functions, "x": x})

    return functions | {name: written_out(definition) for name, definition in DEFINITIONS.items()}


def _check_search(workload: Workload) -> None:
    device = devices.find("h100-sxm")
    try:
        predicted = predict(workload, device=device)
        find_variants(workload, device, compilable=False)
    except InputError:
        return
    times = (predicted.bound_us, predicted.low_us, predicted.time_us, predicted.high_us)
    assert list(times) == sorted(times), f"predicted {times} us"
    assert 0 < times[2] < math.inf, f"predicted {times} us"


def fuzz(seed: int, numbers: range) -> Counter[str]:
    """Check texts and count their outcomes; failures are printed.

    Args:
        seed: Seed of the texts.
        numbers: Numbers of the texts.

    Returns:
        Number of texts by outcome: accepted, refused, failed.
    """

    def text_of(number: int) -> str:
        return near_valid_text(random.Random(f"{seed}:{number}"))

    return command.count_outcomes(
        numbers,
        lambda number: [check(text_of(number), search=number % SEARCHED == 0)],
        lambda number: f"text {number} of seed {seed}, {quoted(text_of(number))},",
        limit_s=TIME_LIMIT_S,
    )


if __name__ == "__main__":
    sys.exit(
        command.main(__doc__, "texts", 100_000, lambda _, arguments: fuzz(arguments.seed, arguments.numbers))
    )
