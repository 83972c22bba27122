"""ATen's elementwise operators as expressions.

Source: PyTorch's native functions, and their derivatives (`derivatives.yaml`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunebench.activation import ACTIVATIONS, Activation

__all__ = ["expression_of", "is_boolean", "is_pointwise"]

Arguments = Mapping[str, Any]
"""Arguments of a call by their names in the schema: operands and numbers as text, others unchanged."""


def _binary(symbol: str) -> Callable[[Arguments], str | None]:
    def read(args: Arguments) -> str | None:
        alpha = args.get("alpha", 1)
        operand = args["other"] if alpha == 1 else f"({alpha!r}*{args['other']})"
        return f"({args['self']}{symbol}{operand})" if args.get("rounding_mode") is None else None

    return read


def _unary(function: str) -> Callable[[Arguments], str | None]:
    return lambda args: f"{function}({args['self']})"


def _written(template: str) -> Callable[[Arguments], str | None]:
    return lambda args: template.format(**args)


def _activation_reader(function: str) -> Callable[[Arguments], str | None]:
    """Return the reader of a function that computes activations, depending on its arguments."""

    def read(args: Arguments) -> str | None:
        record = _of_arguments(_BY_FUNCTION[function], args)
        return f"{record.name}({args['self']})" if record else None

    return read


def _gradient_reader(operator: str) -> Callable[[Arguments], str | None]:
    """Return the reader of an operator that computes gradients of activations."""

    def read(args: Arguments) -> str | None:
        record = _of_arguments(_BY_BACKWARD[operator], args)
        if record is None:
            return None
        argument = {"y": args["output"]} if record.reads_result else {"x": args["self"]}
        return record.gradient_of(dy=args["grad_output"], **argument)

    return read


def _of_arguments(records: Sequence[Activation], args: Arguments) -> Activation | None:
    for record in records:
        if all(args[name] == value for name, value in record.arguments.items()):
            return record
    return None


def _grouped(key: Callable[[Activation], str]) -> dict[str, list[Activation]]:
    groups: dict[str, list[Activation]] = {}
    for record in ACTIVATIONS.values():
        groups.setdefault(key(record), []).append(record)
    return groups


_BY_FUNCTION = _grouped(lambda record: record.torch.rpartition(".")[2])
_BY_BACKWARD = _grouped(lambda record: record.backward)
_BY_BACKWARD.pop("", None)


def _power(args: Arguments) -> str | None:
    x, exponent = args["self"], args["exponent"]
    forms = {
        1: "{0}",
        2: "square({0})",
        3: "({0}*{0}*{0})",
        0.5: "sqrt({0})",
        -0.5: "rsqrt({0})",
        -1: "(1/{0})",
    }
    return forms[exponent].format(x) if exponent in forms else None


def _logical(args: Arguments, template: str) -> str:
    """Return a logical operation; arguments of any type are first compared with 0."""
    truths = {name: f"ne({args[name]},0)" for name in ("self", "other") if name in args}
    return template.format(**truths)


def _elu(args: Arguments) -> str | None:
    x, inner = args["self"], args["input_scale"]
    scaled = x if inner == 1 else f"({inner!r}*{x})"
    negative = f"{args['alpha']!r}*(exp(min({scaled},0))-1)"
    return f"({args['scale']!r}*where(lt(0,{x}),{x},{negative}))"


def _clamp(args: Arguments) -> str:
    """Return the expression of a clamp by numbers or tensors; the upper limit wins."""
    x: str = args["self"]
    low, high = (args.get(name, args.get(f"{name}_val")) for name in ("min", "max"))
    for function, limit in (("max", low), ("min", high)):
        written = limit if isinstance(limit, str) else repr(limit)
        x = x if limit is None else f"{function}({x},{written})"
    return x


_READERS: Mapping[str, Callable[[Arguments], str | None]] = {
    "aten::add": _binary("+"),
    "aten::sub": _binary("-"),
    "aten::mul": _binary("*"),
    "aten::div": _binary("/"),
    "aten::maximum": _written("max({self},{other})"),
    "aten::minimum": _written("min({self},{other})"),
    **{
        f"aten::{name}": _unary(name)
        for name in ("abs", "cos", "erf", "exp", "log", "rsqrt", "sin", "sqrt", "square")
    },
    **{f"aten::{function}": _activation_reader(function) for function in _BY_FUNCTION},
    **{f"aten::{operator}": _gradient_reader(operator) for operator in _BY_BACKWARD},
    "aten::full": _written("{fill_value}"),
    "aten::scalar_tensor": _written("{s}"),
    "aten::fill": _written("{value}"),
    "aten::_to_copy": _written("{self}"),
    "aten::clone": _written("{self}"),
    "aten::neg": _written("(-{self})"),
    "aten::reciprocal": _written("(1/{self})"),
    "aten::pow": _power,
    "aten::round": lambda args: None if args.get("decimals") else f"round({args['self']})",
    "aten::clamp": _clamp,
    "aten::clamp_min": _clamp,
    "aten::hardtanh": _clamp,
    "aten::threshold_backward": _written("where(le({self},{threshold!r}),0,{grad_output})"),
    "aten::native_dropout_backward": _written("({grad_output}*{mask}*{scale!r})"),
    "aten::eq": _written("eq({self},{other})"),
    "aten::ne": _written("ne({self},{other})"),
    "aten::lt": _written("lt({self},{other})"),
    "aten::le": _written("le({self},{other})"),
    "aten::gt": _written("lt({other},{self})"),
    "aten::ge": _written("le({other},{self})"),
    **{
        f"aten::{kind}_{name}": functools.partial(_logical, template=template)
        for kind in ("bitwise", "logical")
        for name, template in {
            "and": "({self}*{other})",
            "or": "max({self},{other})",
            "xor": "ne({self},{other})",
            "not": "(1-{self})",
        }.items()
    },
    "aten::where": _written("where({condition},{self},{other})"),
    "aten::masked_fill": _written("where({mask},{value},{self})"),
    "aten::leaky_relu": _written("where(lt(0,{self}),{self},{negative_slope!r}*{self})"),
    "aten::leaky_relu_backward": _written(
        "where(lt(0,{self}),{grad_output},{negative_slope!r}*{grad_output})"
    ),
    "aten::elu": _elu,
    "aten::hardtanh_backward": _written(
        "where(le({self},{min_val!r}),0,where(le({max_val!r},{self}),0,{grad_output}))"
    ),
}
"""Writer of each operator's expression, by its name without overload; None for other arguments."""


_BOOLEAN = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "clone", "mul"})
"""Operators whose expressions are 0 or 1 for operands of type bool, or in any case."""


def is_boolean(name: str) -> bool:
    """Return whether the expression of a call with a result of type bool is 0 or 1."""
    short = name.removeprefix("aten::")
    return short in _BOOLEAN or short.startswith(("bitwise_", "logical_"))


def is_pointwise(name: str) -> bool:
    """Return whether calls of an ATen operator may be expressions."""
    return name in _READERS


def expression_of(name: str, args: Arguments) -> str | None:
    """Return the expression of a call, or None if it cannot be expressed.

    Args:
        name: Name of the operator, such as ``aten::add``.
        args: Its arguments; tensors as their names in the expression.
    """
    reader = _READERS.get(name)
    return reader(args) if reader is not None else None
