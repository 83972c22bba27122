"""Training programs that mix tensor operations with other Python, for tests of graph capture.

Each module of this package has a function ``make(seed)`` that returns `(step, state)`. A step is a whole
iteration: forward, loss, backward, optimizer and metrics. ``step(*state.batch(i))`` runs iteration i and
returns its loss. What a step does besides computing tensors is appended to `state.effects` or printed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Make", "State", "Step", "names", "program"]

Step = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a program reads and changes.

    Attributes:
        modules: Networks by name.
        optimizers: Optimizers by name.
        batch: Function from the number of an iteration to the arguments of the step.
        effects: Values that the steps recorded, in order.
        tensors: Other tensors that the steps read or change, by name.
        memory: Other values that the steps keep between iterations, by name.
    """

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    batch: Callable[[int], tuple[Any, ...]]
    effects: list[Any] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


Make = Callable[[int], tuple[Step, State]]


def names() -> tuple[str, ...]:
    """Return the names of all programs, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def program(name: str) -> Make:
    """Return the function that makes a program.

    Raises:
        ValueError: if there is no program of this name.
    """
    if name not in names():
        raise ValueError(f"expected the name of a program, one of {', '.join(names())}; got {name}")
    make: Make = importlib.import_module(f"{__name__}.{name}").make
    return make
