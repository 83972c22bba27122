"""Segments: operations that run at a call of a path, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tunebench.training.coexecution._call import Number, Operation, Variable, replaced
from tunebench.training.coexecution._path import Update
from tunebench.training.coexecution._script import Runner

__all__ = ["Piece", "Segment", "UpdatePiece", "Updated", "called", "running"]


@contextmanager
def running() -> Iterator[None]:
    """Set the modes of this thread in which operations of a path run."""
    optimize = torch._C._get_graph_executor_optimize()
    enabled = torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled("cpu")  # casts are operations of the path already
    torch._C._set_graph_executor_optimize(False)
    torch._C._set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(optimize)
        torch._C._set_grad_enabled(enabled)
        torch.set_autocast_enabled("cpu", autocast)


Updated = Callable[[Callable[..., None], tuple[Any, ...], dict[str, Any]], None]
"""What runs a function of torch that updates parameters, from the function and its arguments."""


def called(function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a function."""
    function(*args, **kwargs)


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """Operations that one function runs.

    Attributes:
        operations: The operations.
        runner: The function, from inputs and numbers to a tuple of outputs.
        inputs: Indices of the values that it reads.
        numbers: Types of the numbers that it reads, by index.
        outputs: Indices of the values that it returns.
        made: The same as a set.
        writes: First given variables of each memory that it writes.
        changes: First values of each memory that it makes or writes.
        touches: First values of each memory that it makes, writes or reads.
        beside: Whether another thread may run it concurrently with Python and with independent pieces.
        drops: Values that nothing needs after it.
        plan: How it was started last in another thread; see `_runner`.
    """

    operations: tuple[Operation, ...]
    runner: Runner
    inputs: tuple[int, ...]
    numbers: dict[int, type]
    outputs: tuple[int, ...]
    made: frozenset[int]
    writes: tuple[int, ...]
    changes: frozenset[int]
    touches: frozenset[int]
    beside: bool
    drops: tuple[int, ...]
    plan: Any = None

    def uses(self, index: int) -> bool:
        """Return whether it reads or returns a value."""
        return index in self.made or index in self.inputs

    def run(self, values: list[Any], numbers: dict[int, Any]) -> None:
        """Run it on values and numbers by index."""
        with torch._C._AutoDispatchBelowAutograd():
            results = self.runner(
                *[values[index] for index in self.inputs], *[numbers[index] for index in self.numbers]
            )
        if self.outputs:
            for index, result in zip(self.outputs, results, strict=True):
                values[index] = result


@dataclass(slots=True, kw_only=True, eq=False)
class UpdatePiece:
    """An update of parameters by a function of an optimizer, after all pieces that began before.

    Attributes:
        update: The update.
        writes: First given variables of each memory that it writes.
        drops: Values that nothing needs after it.
    """

    update: Update
    writes: tuple[int, ...]
    drops: tuple[int, ...]
    inputs: ClassVar[None] = None
    touches: ClassVar[frozenset[int]] = frozenset()
    changes: ClassVar[frozenset[int]] = frozenset()

    def run(self, values: list[Any], numbers: dict[int, Any], updated: Updated = called) -> None:
        """Run it on values and numbers by index.

        Args:
            values: The values.
            numbers: The numbers.
            updated: What runs the function of torch.
        """
        call = self.update.call
        values_of = self.update.values

        def leaf(pattern: Any) -> Any:
            if isinstance(pattern, Variable):
                return values[values_of[pattern.index]]
            return numbers[pattern.index] if isinstance(pattern, Number) else pattern.value

        kwargs = {key: replaced(value, leaf) for key, value in call.kwargs}
        updated(call.function, replaced(call.args, leaf), kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What runs at a call.

    Attributes:
        parts: What begins, in order.
        waits: Whether Python waits for results.
        reads: Values that Python waits for; None to wait for all.
        needs: First values of the memory of each.
        shares: Whether Python may write this memory afterwards.
        operations: Number of operations.
        runner: Who runs it.
        site: Where it begins, ``file:line``.
    """

    parts: tuple[Piece | UpdatePiece, ...]
    waits: bool
    reads: frozenset[int] | None
    needs: frozenset[int]
    shares: bool
    operations: int
    runner: str
    site: str

    @property
    def saved_parts(self) -> int:
        """Return how many parts at the end of the iteration can be taken back: all but the last updates.

        Updates write every weight and state in place, and only lack of memory stops them.
        """
        others = [position for position, part in enumerate(self.parts) if isinstance(part, Piece)]
        return others[-1] + 1 if others else 0

    def run(self, values: list[Any], numbers: dict[int, Any]) -> None:
        """Run it on values and numbers by index."""
        with running():
            for part in self.parts:
                part.run(values, numbers)
                for index in part.drops:
                    values[index] = None
