"""Schedules: the actions of a step, in the order in which the host issues them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunebench.training.memory.step import TrainingStep

__all__ = [
    "Action",
    "Compute",
    "CopyIn",
    "CopyOut",
    "Free",
    "Stage",
    "schedule_of",
    "unplanned",
    "with_frees",
]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operation. The compute stream first waits for copies of its inputs to the device."""

    operation: int


@dataclass(frozen=True, slots=True)
class Free:
    """Free a tensor on the device. The compute stream first waits for copies of the tensor."""

    tensor: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Start a copy of a tensor to the host."""

    tensor: int


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Allocate a tensor on the device and start its copy from the host."""

    tensor: int


Action = Compute | Free | CopyOut | CopyIn


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The actions up to the first run of an operation.

    Attributes:
        copy_out: Tensors whose copy to the host starts, in order.
        release: Tensors to free once their copies to the host end.
        copy_in: Tensors whose copy to the device starts, in order.
        compute: Operations in order; the last one runs for the first time.
    """

    copy_out: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    copy_in: tuple[int, ...] = ()
    compute: tuple[int, ...] = ()


def unplanned(step: TrainingStep) -> tuple[Action, ...]:
    """Return the schedule that runs every operation once and frees each tensor after its last use.

    Args:
        step: The training step.
    """
    return with_frees(step, [Compute(index) for index in range(len(step.operations))])


def schedule_of(step: TrainingStep, stages: Sequence[Stage]) -> tuple[Action, ...]:
    """Return the actions of stages, and free each tensor as soon as nothing needs it.

    Args:
        step: The training step.
        stages: One stage for each operation.
    """
    actions: list[Action] = []
    for stage in stages:
        actions.extend(CopyOut(tensor) for tensor in stage.copy_out)
        actions.extend(Free(tensor) for tensor in stage.release)
        actions.extend(CopyIn(tensor) for tensor in stage.copy_in)
        actions.extend(Compute(operation) for operation in stage.compute)
    return with_frees(step, actions)


def with_frees(step: TrainingStep, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return actions with each tensor freed after its last use before it is written or copied in again.

    A `Free` of the input means that the tensor must not be freed earlier.

    Args:
        step: The training step.
        actions: Actions in order.
    """
    reverse: list[Action] = []
    live = set(step.movable(step.results))
    # Backwards, `live` has the tensors that a later action needs: one that is not live dies here, behind its
    # last use.
    for action in reversed(list(actions)):
        if isinstance(action, Free | CopyOut):
            if action.tensor not in live:
                reverse.append(Free(action.tensor))
                live.add(action.tensor)
            if isinstance(action, CopyOut):
                reverse.append(action)
        elif isinstance(action, CopyIn):
            # A copy back that nothing reads is left out.
            if action.tensor in live:
                live.remove(action.tensor)
                reverse.append(action)
        else:
            operation = step.operations[action.operation]
            inputs, outputs = step.movable(operation.inputs), step.movable(operation.outputs)
            dead = [tensor for tensor in (*inputs, *outputs) if tensor not in live]
            reverse.extend(Free(tensor) for tensor in reversed(dead))
            reverse.append(action)
            live.difference_update(outputs)
            live.update(inputs)
    return tuple(reversed(reverse))
