"""elementwise by NumPy and by torch: one operation after the other, as a program without fusion does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.expression import Apply, Number, steps
from tunebench.measure.libraries import Call, single, torch_type
from tunebench.workloads.operators.elementwise import Elementwise

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]

Tensors = Mapping[str, Any]
Operations = Mapping[str, Callable[..., Any]]

ARITHMETIC: Operations = {
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
}


def numpy_call(workload: Elementwise, inputs: Mapping[str, Array]) -> Call | None:
    """Compute by NumPy, which has no erf and so no gelu."""
    numpy_has: Operations = {
        **ARITHMETIC,
        "abs": np.abs,
        "exp": np.exp,
        "log": np.log,
        "max": np.maximum,
        "min": np.minimum,
        "relu": lambda x: np.maximum(x, np.float32(0)),
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "sqrt": np.sqrt,
        "square": np.square,
        "tanh": np.tanh,
    }
    if any(step.operation not in numpy_has for step in steps(workload.tree)):
        return None
    return _program(workload, single(inputs), numpy_has, np.float32)


def torch_calls(workload: Elementwise, t: Tensors) -> dict[str, Call]:
    """Return the same by torch, which rounds each step to the type of the inputs."""
    import torch
    from torch.nn import functional

    device = t[workload.whole_names[0]].device

    @functools.cache  # made in the first call: later ones copy nothing to the device
    def number(value: float) -> Any:
        return torch.tensor(value, device=device)

    def with_tensor(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*(x if torch.is_tensor(x) else number(x) for x in given))

    torch_has: Operations = {
        **ARITHMETIC,
        "gelu": with_tensor(functional.gelu),
        "max": with_tensor(torch.maximum),
        "min": with_tensor(torch.minimum),
        "relu": with_tensor(torch.relu),
        "silu": with_tensor(functional.silu),
        **{
            name: with_tensor(getattr(torch, name))
            for name in ("abs", "exp", "log", "rsqrt", "sigmoid", "sqrt", "square", "tanh")
        },
    }
    out = torch_type(workload.out)
    call = _program(workload, t, torch_has, float)
    if workload.out == workload.dtype:
        return {"torch": call}
    return {"torch": lambda: call().to(out)}


def _program(
    workload: Elementwise, tensors: Tensors, operations: Operations, number: Callable[[float], Any]
) -> Call:
    """Return a program that does each different operation once, of which a plain copy has none.

    Which operation takes what is found beforehand: small problems would show it.
    """
    ordered = steps(workload.tree)
    if not ordered:
        (name,) = workload.whole_names
        return lambda: tensors[name] + number(0)
    leaves = dict.fromkeys(x for step in ordered for x in step.arguments if not isinstance(x, Apply))
    given = [number(x.value) if isinstance(x, Number) else tensors[x.name] for x in leaves]
    places = {node: place for place, node in enumerate((*leaves, *ordered))}
    calls = [(operations[step.operation], [places[x] for x in step.arguments]) for step in ordered]

    def run() -> Any:
        values = list(given)
        for operation, arguments in calls:
            values.append(operation(*(values[place] for place in arguments)))
        return values[-1]

    return run
