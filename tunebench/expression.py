"""Elementwise expressions: the grammar of `gelu(x+bias)*y`, and the tree that every lowering starts from.

    expression = name | number | - expression | expression (+ - * /) expression | ( expression )
               | function(expression) | function(expression, expression)
               | where(expression, expression, expression)

Python's own parser reads the text. The result is checked against this grammar and converted to a tree of
three kinds of nodes. Python never evaluates the text, so it cannot execute code. The meaning of a function is
defined where it is lowered: `tunebench.workloads.common.expression_value` has the float64 reference.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunebench.activation import DEFINITIONS
from tunebench.errors import InputError, UnknownName, quoted

__all__ = [
    "FUNCTIONS",
    "LARGEST",
    "SHORTHANDS",
    "SMALLEST",
    "Apply",
    "Name",
    "Node",
    "Number",
    "canonical",
    "names",
    "parse",
    "steps",
    "write",
]

FUNCTIONS: Mapping[str, int] = {
    "abs": 1,
    "cos": 1,
    "eq": 2,
    "erf": 1,
    "exp": 1,
    "gelu": 1,
    "le": 2,
    "log": 1,
    "lt": 2,
    "max": 2,
    "min": 2,
    "ne": 2,
    "relu": 1,
    "round": 1,
    "rsqrt": 1,
    "sigmoid": 1,
    "silu": 1,
    "sin": 1,
    "sqrt": 1,
    "square": 1,
    "step": 1,
    "tanh": 1,
    "where": 3,
}
"""Functions by name, each with its number of arguments.

Comparisons (`eq`, `le`, `lt`, `ne`) are 1 where they hold, else 0. ``round(x)`` is the nearest whole number,
the even one of two. ``where(c, x, y)`` is x where c is not 0, else y.
"""

SHORTHANDS: Mapping[str, int] = {"clamp": 3, "ge": 2, "gt": 2, "pow": 2, **dict.fromkeys(DEFINITIONS, 1)}
"""Functions that the canonical form writes with others, each with its number of arguments.

An activation of `tunebench.activation` that is no key of `FUNCTIONS` is written as its definition.

``clamp(x, low, high)`` is ``min(max(x, low), high)``; ``gt(x, y)`` and ``ge(x, y)`` exchange `lt` and `le`.
``pow(x, n)`` is a product for a whole number up to 16 in magnitude, a root for 0.5 and -0.5, and otherwise
``exp(n * log(x))``, which has a value for positive x only.
"""

LARGEST_PRODUCT = 16
"""Largest exponent of `pow` that becomes a product."""

MAX_LENGTH = 240
"""Maximum characters of an expression: enough for any chain, too few to exhaust a parser's stack."""

_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_TOKEN = re.compile(r"[A-Za-z]\w*|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])|[-+*/(), ]", re.ASCII)
LARGEST, SMALLEST = 3.4028234e38, 1.1754944e-38
"""Range of positive normal f32 numbers."""


@dataclass(frozen=True, slots=True)
class Name:
    """An input of an expression."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A constant of an expression, as f32."""

    value: float


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation on arguments: `add`, `sub`, `mul`, `div`, `neg`, or a key of `FUNCTIONS`."""

    operation: str
    arguments: tuple[Node, ...]


Node = Name | Number | Apply
"""A node of an expression; equal subexpressions are equal nodes."""


@functools.cache
def parse(text: str) -> Node:
    """Parse an expression.

    Args:
        text: Expression such as ``gelu(x+bias)*y``, of at most `MAX_LENGTH` characters.

    Returns:
        The root of the expression tree.

    Raises:
        InputError: The text does not match the grammar; the message names the position (from 1).
        UnknownName: The expression calls an unknown function.
    """
    return _node(_python_tree(text).body, text.strip())


@functools.cache
def canonical(text: str) -> str:
    """Return the canonical text: no spaces, no needless parentheses, one spelling per number.

    Args:
        text: Expression such as ``gelu(x + bias) * y``.

    Raises:
        InputError: As for `parse`.
        UnknownName: As for `parse`.
    """
    parsed, tree = parse(text), _python_tree(text)
    if any(isinstance(node, ast.Name) and node.id in SHORTHANDS for node in ast.walk(tree)):
        tree = _python_tree(ast.unparse(ast.parse(_written(parsed), mode="eval")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            value = float(node.value)  # type: ignore[arg-type]  # parse has seen that it is a number
            node.value = int(value) if value.is_integer() and value < 1e16 else value
    return ast.unparse(tree).replace(" ", "")


def write(node: Node) -> str:
    """Return the canonical text of a node.

    Args:
        node: Root of an expression tree.

    Raises:
        InputError: The text is longer than `MAX_LENGTH` characters.
    """
    return canonical(_written(node))


def _written(node: Node) -> str:
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Number):
        return repr(node.value)
    arguments = [_written(argument) for argument in node.arguments]
    if node.operation in FUNCTIONS:
        return f"{node.operation}({','.join(arguments)})"
    if node.operation == "neg":
        return f"(-{arguments[0]})"
    return f"({arguments[0]}{_INFIX[node.operation]}{arguments[1]})"


def names(node: Node) -> tuple[str, ...]:
    """Return the names of the inputs, each once, in the order of their first use."""
    return tuple(dict.fromkeys(leaf.name for leaf in _walk(node) if isinstance(leaf, Name)))


def steps(node: Node) -> tuple[Apply, ...]:
    """Return the distinct operations in evaluation order: arguments first."""
    return tuple(dict.fromkeys(step for step in _walk(node) if isinstance(step, Apply)))


def _walk(node: Node) -> Iterator[Node]:
    """Yield all nodes, arguments before the operations on them."""
    if isinstance(node, Apply):
        for argument in node.arguments:
            yield from _walk(argument)
    yield node


def _python_tree(text: str) -> ast.Expression:
    text = text.strip()
    if not 0 < len(text) <= MAX_LENGTH:
        raise InputError(f"an expression must have 1 to {MAX_LENGTH} characters, got {len(text)}")
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise InputError(
                f"{quoted(text)}, position {at + 1}: unexpected {text[at]!r}; an expression has names, "
                f"numbers, + - * /, parentheses, and functions: {', '.join([*FUNCTIONS, *SHORTHANDS])}"
            )
        at = token.end()
    try:
        return ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise InputError(f"{quoted(text)}, position {error.offset or len(text) + 1}: {error.msg}") from None


def _node(syntax: ast.expr, text: str) -> Node:
    """Convert a node of Python's syntax tree to an expression node, if the grammar allows it."""
    match syntax:
        case ast.Name(id=name):
            if name in FUNCTIONS or name in SHORTHANDS:
                raise _refusal(syntax, text, f"{name} is a function, write {name}(x)")
            return Name(name)
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if value and not SMALLEST <= value <= LARGEST:
                raise _refusal(syntax, text, f"a number must be 0 or from {SMALLEST} to {LARGEST} (f32)")
            return Number(float(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Apply("neg", (_node(operand, text),))
        case ast.BinOp(op=operation) if type(operation) in _BINARY:
            return Apply(_BINARY[type(operation)], (_node(syntax.left, text), _node(syntax.right, text)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _call(name, arguments, syntax, text)
    raise _refusal(syntax, text, "expected names, numbers, + - * /, -x, parentheses and functions of names")


def _call(name: str, arguments: list[ast.expr], syntax: ast.expr, text: str) -> Node:
    arities = {**FUNCTIONS, **SHORTHANDS}
    if name not in arities:
        raise UnknownName("function of an expression", name, arities)
    if len(arguments) != arities[name]:
        raise _refusal(syntax, text, f"{name} takes {arities[name]} argument(s), got {len(arguments)}")
    nodes = tuple(_node(argument, text) for argument in arguments)
    match name:
        case "clamp":
            return Apply("min", (Apply("max", nodes[:2]), nodes[2]))
        case "ge" | "gt":
            return Apply("le" if name == "ge" else "lt", nodes[::-1])
        case "pow":
            return _power(*nodes)
        case _ if name in DEFINITIONS:
            return _with_argument(parse(DEFINITIONS[name]), *nodes)
    return Apply(name, nodes)


def _with_argument(node: Node, argument: Node) -> Node:
    """Return an expression in x with another argument in its place."""
    if isinstance(node, Name):
        return argument
    if isinstance(node, Number):
        return node
    return Apply(node.operation, tuple(_with_argument(inner, argument) for inner in node.arguments))


def _power(base: Node, exponent: Node) -> Node:
    """Return a power as products, a root, or an exponential (see `SHORTHANDS`)."""
    match exponent:
        case Apply(operation="neg", arguments=(Number(value=0.5),)):
            return Apply("rsqrt", (base,))
        case Apply(operation="neg", arguments=(Number() as positive,)):
            return Apply("div", (Number(1.0), _power(base, positive)))
        case Number(value=0.5):
            return Apply("sqrt", (base,))
        case Number(value=value) if value.is_integer() and 1 <= value <= LARGEST_PRODUCT:
            return _product(base, int(value))
    return Apply("exp", (Apply("mul", (exponent, Apply("log", (base,)))),))


def _product(base: Node, count: int) -> Node:
    """Return the product of `count` equal factors, by squaring."""
    if count == 1:
        return base
    squared = Apply("square", (_product(base, count // 2),))
    return Apply("mul", (squared, base)) if count % 2 else squared


def _refusal(syntax: ast.expr, text: str, reason: str) -> InputError:
    part = ast.get_source_segment(text, syntax)
    return InputError(f"{quoted(text)}, position {syntax.col_offset + 1}: {quoted(part)}: {reason}")
