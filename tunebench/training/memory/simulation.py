"""Simulation of a schedule: the judge of every plan, which shares no code with the planners.

The compute stream executes operations in the order of the schedule. Copies to the host and copies to the
device execute on one side stream each, in the order in which they are issued, at the same time as
operations and as each other. The compute stream waits for a copy before it uses or frees the copied tensor.
A tensor occupies device memory from the operation that writes it, or from the issue of its copy to the
device, until it is freed; memory is therefore a function of the order of actions, not of their times.
A link with a `lost_fraction` delays the compute stream by this fraction of each copy, when it is issued.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tunebench.errors import InputError
from tunebench.training.memory.schedule import Action, Compute, CopyOut, Free
from tunebench.training.memory.step import TrainingStep

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule needs.

    Attributes:
        step_us: Time of the step in microseconds: `compute_us` and `stall_us`.
        compute_us: Time of operations, repeated ones included, in microseconds.
        stall_us: Time in which the compute stream waits for copies, or that it loses to them, in
            microseconds.
        peak_bytes: Most bytes on the device at any time, resident tensors and workspaces included.
        bytes_during: Bytes on the device during each action.
        ends_us: Time of the compute stream at the end of each action, in microseconds.
    """

    step_us: float
    compute_us: float
    stall_us: float
    peak_bytes: int
    bytes_during: tuple[int, ...]
    ends_us: tuple[float, ...]


def simulate(
    step: TrainingStep, schedule: Iterable[Action], *, budget_bytes: int | None = None
) -> Simulation:
    """Execute a schedule and return its time and memory.

    Args:
        step: The training step.
        schedule: Actions in the order in which the host issues them.
        budget_bytes: Bytes that the device has; none for no limit.

    Raises:
        InputError: The schedule uses a tensor that is not on the device, writes one that is, exceeds the
            budget, runs operations for the first time in another order, repeats one that may not be
            repeated, or lacks an operation or a result.
    """
    machine = _Machine(step, budget_bytes)
    for action in schedule:
        machine.execute(action)
    return machine.finish()


class _Machine:
    """A device with a compute stream and two copy streams."""

    def __init__(self, step: TrainingStep, budget_bytes: int | None) -> None:
        self._step, self._budget_bytes = step, budget_bytes
        self._resident = {index for index, tensor in enumerate(step.tensors) if tensor.resident}
        self._present = set(self._resident)
        self._used_bytes = step.resident_bytes
        self._bytes_during: list[int] = []
        self._ends_us: list[float] = []
        self._started = 0
        self._now_us = self._compute_us = 0.0
        self._out_free_us = self._in_free_us = 0.0
        self._on_host_us: dict[int, float] = {}
        """When each tensor is complete on the host."""
        self._arrived_us: dict[int, float] = {}
        """When each tensor that was copied to the device is complete there."""

    def execute(self, action: Action) -> None:
        """Execute one action."""
        if isinstance(action, Compute):
            self._run(action.operation)
        elif isinstance(action, Free):
            self._free(action.tensor)
        elif isinstance(action, CopyOut):
            self._copy_out(action.tensor)
        else:
            self._copy_in(action.tensor)
        self._ends_us.append(self._now_us)

    def finish(self) -> Simulation:
        """Return the result after the last action."""
        operations = len(self._step.operations)
        self._require(self._started == operations, f"{self._started} of {operations} operations ran")
        for tensor in self._step.results:
            self._use(tensor)
        peak_bytes = max(self._bytes_during, default=0)
        return Simulation(
            step_us=self._now_us,
            compute_us=self._compute_us,
            stall_us=self._now_us - self._compute_us,
            peak_bytes=peak_bytes,
            bytes_during=tuple(self._bytes_during),
            ends_us=tuple(self._ends_us),
        )

    def _run(self, index: int) -> None:
        operation = self._step.operations[index]
        first = index == self._started
        self._require(index <= self._started, f"{operation.name!r} runs before operation {self._started}")
        self._require(first or operation.recomputable, f"{operation.name!r} may run only once")
        for tensor in operation.inputs:
            self._use(tensor)
        for tensor in operation.outputs:
            self._allocate(tensor)
        self._occupy(operation.workspace_bytes)
        self._now_us += operation.time_us
        self._compute_us += operation.time_us
        self._started += first

    def _free(self, tensor: int) -> None:
        self._require(tensor not in self._resident, f"{self._name(tensor)} is resident, so it is not freed")
        self._use(tensor)
        # A copy to the host reads the tensor: it must not be freed before that copy has ended.
        self._now_us = max(self._now_us, self._on_host_us.get(tensor, 0.0))
        self._present.remove(tensor)
        self._arrived_us.pop(tensor, None)
        self._used_bytes -= self._step.tensors[tensor].size_bytes
        self._occupy()

    def _copy_out(self, tensor: int) -> None:
        self._require(self._step.link is not None, "a copy to the host needs a link")
        self._require(tensor not in self._on_host_us, f"{self._name(tensor)} is on the host already")
        self._require(tensor in self._present, f"{self._name(tensor)} is not on the device")
        assert self._step.link is not None
        duration_us = self._step.link.to_host_us(self._step.tensors[tensor].size_bytes)
        # The copy starts once the compute stream has reached it, earlier copies have ended, and the tensor
        # has arrived.
        start_us = max(self._now_us, self._out_free_us, self._arrived_us.get(tensor, 0.0))
        self._out_free_us = self._on_host_us[tensor] = start_us + duration_us
        self._now_us += self._step.link.lost_fraction * duration_us
        self._occupy()

    def _copy_in(self, tensor: int) -> None:
        self._require(tensor in self._on_host_us, f"{self._name(tensor)} is not on the host")
        assert self._step.link is not None
        self._allocate(tensor)
        duration_us = self._step.link.to_device_us(self._step.tensors[tensor].size_bytes)
        start_us = max(self._now_us, self._in_free_us, self._on_host_us[tensor])
        self._in_free_us = self._arrived_us[tensor] = start_us + duration_us
        self._now_us += self._step.link.lost_fraction * duration_us
        self._occupy()

    def _use(self, tensor: int) -> None:
        """Wait until a tensor is complete on the device."""
        self._require(tensor in self._present, f"{self._name(tensor)} is not on the device")
        self._now_us = max(self._now_us, self._arrived_us.get(tensor, 0.0))

    def _allocate(self, tensor: int) -> None:
        self._require(tensor not in self._present, f"{self._name(tensor)} is on the device already")
        self._present.add(tensor)
        self._used_bytes += self._step.tensors[tensor].size_bytes

    def _occupy(self, workspace_bytes: int = 0) -> None:
        """Record the bytes on the device during this action."""
        used_bytes = self._used_bytes + workspace_bytes
        if self._budget_bytes is not None:
            within = used_bytes <= self._budget_bytes
            self._require(within, f"{used_bytes} bytes are on the device, above {self._budget_bytes}")
        self._bytes_during.append(used_bytes)

    def _name(self, tensor: int) -> str:
        return f"tensor {self._step.tensors[tensor].name!r}"

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise InputError(f"invalid schedule at action {len(self._bytes_during)}: {message}")
