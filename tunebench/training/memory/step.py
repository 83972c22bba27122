"""A training step as operations on tensors, with times and bytes: the input of a memory plan.

    step = TrainingStep(
        tensors=(StepTensor(name="x", size_bytes=4, resident=True), StepTensor(name="y", size_bytes=8), …),
        operations=(StepOperation(name="relu", time_us=2.0, inputs=(0,), outputs=(1,)), …),
        link=HostLink(to_host_gb_s=25.0, to_device_gb_s=25.0, latency_us=10.0),
    )

Operations refer to tensors by their index in `TrainingStep.tensors`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from tunebench.errors import InputError

__all__ = ["HostLink", "StepOperation", "StepTensor", "TrainingStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensor:
    """Memory that one operation writes, or that is on the device before the step.

    Attributes:
        name: A name for messages and reports.
        size_bytes: Bytes on the device.
        resident: Whether the tensor stays on the device during the whole step, such as a parameter.
        role: What a resident tensor is, in the plural, such as ``parameters``; empty if not known.
    """

    name: str
    size_bytes: int
    resident: bool = False
    role: str = ""

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise InputError(f"tensor {self.name!r}: size_bytes must be at least 0, found {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperation:
    """An operation of the step.

    Attributes:
        name: A name for messages and reports.
        time_us: Time in microseconds.
        inputs: Indices of the tensors that the operation reads.
        outputs: Indices of the tensors that it writes, into new memory.
        workspace_bytes: Further bytes on the device while it runs.
        recomputable: Whether it may run more than once. Operations with side effects may not.
        source: Line of the model that calls it, as in ``model.py:12``; empty if not known.
    """

    name: str
    time_us: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int = 0
    recomputable: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.time_us < math.inf):
            value = self.time_us
            raise InputError(f"operation {self.name!r}: time_us must be finite and at least 0, found {value}")
        if self.workspace_bytes < 0:
            value = self.workspace_bytes
            raise InputError(f"operation {self.name!r}: workspace_bytes must be at least 0, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link to host memory. Both directions work at the same time, each with one copy at a time.

    Attributes:
        to_host_gb_s: Copies from the device, in 1e9 bytes per second.
        to_device_gb_s: Copies to the device, in 1e9 bytes per second.
        latency_us: Time of a copy of zero bytes in microseconds.
        name: A name for messages and reports.
        lost_fraction: Fraction of the time of a copy that operations lose to it, 0 to 1. A GPU copies beside
            operations; on a processor, copies take cores and memory from them.
    """

    to_host_gb_s: float
    to_device_gb_s: float
    latency_us: float = 0.0
    name: str = ""
    lost_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.lost_fraction <= 1:
            raise InputError(f"a host link needs a lost_fraction from 0 to 1, found {self.lost_fraction}")
        if not (self.to_host_gb_s > 0 and self.to_device_gb_s > 0 and 0 <= self.latency_us < math.inf):
            raise InputError(f"a host link needs positive rates and a latency of at least 0, found {self}")

    def to_host_us(self, size_bytes: int) -> float:
        """Return the time of a copy from the device in microseconds."""
        return self.latency_us + size_bytes / (1e3 * self.to_host_gb_s)

    def to_device_us(self, size_bytes: int) -> float:
        """Return the time of a copy to the device in microseconds."""
        return self.latency_us + size_bytes / (1e3 * self.to_device_gb_s)


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The operations of a forward and a backward pass, in the order in which they first run.

    Attributes:
        tensors: All tensors. Each is resident, or written by exactly one operation before its first use.
        operations: The operations.
        results: Indices of the tensors that must be on the device after the step, such as gradients.
        link: The link to host memory; without one, nothing is swapped.
    """

    tensors: tuple[StepTensor, ...]
    operations: tuple[StepOperation, ...]
    results: tuple[int, ...] = ()
    link: HostLink | None = None

    def __post_init__(self) -> None:
        if not self.operations:
            raise InputError("a training step needs at least one operation, found none")
        # Single assignment: everything below relies on each tensor having one producer that runs before its
        # readers.
        written = {index for index, tensor in enumerate(self.tensors) if tensor.resident}
        for operation in self.operations:
            for index in (*operation.inputs, *operation.outputs):
                if not 0 <= index < len(self.tensors):
                    raise InputError(
                        f"operation {operation.name!r} uses tensor {index} of {len(self.tensors)}"
                    )
            self._require_written(operation.inputs, written, f"operation {operation.name!r} reads")
            for index, count in Counter(operation.outputs).items():
                if count > 1 or index in written:
                    name = self.tensors[index].name
                    raise InputError(
                        f"tensor {name!r} must be written once; {operation.name!r} writes it again"
                    )
            written.update(operation.outputs)
        self._require_written(self.results, written, "the step returns")
        self._require_written(range(len(self.tensors)), written, "the step declares")

    def _require_written(self, indices: tuple[int, ...] | range, written: set[int], use: str) -> None:
        """Raise InputError unless these tensors are resident or written by an earlier operation."""
        for index in indices:
            if index not in written:
                names = [tensor.name for tensor in self.tensors[index : index + 1]]
                raise InputError(f"{use} tensor {names or index}, which no earlier operation writes")

    @cached_property
    def compute_us(self) -> float:
        """Time of all operations, each once, in microseconds."""
        return sum(operation.time_us for operation in self.operations)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of all resident tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.resident)

    @cached_property
    def static_bytes(self) -> dict[str, int]:
        """Bytes that every plan has on the device at the end of the step, by role, largest first."""
        size_of_role: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.resident:
                role = tensor.role or "other tensors"
                size_of_role[role] = size_of_role.get(role, 0) + tensor.size_bytes
        size_of_role["gradients"] = self.bytes_of(self.results)
        return {role: size for role, size in sorted(size_of_role.items(), key=lambda item: -item[1]) if size}

    def bytes_of(self, tensors: tuple[int, ...]) -> int:
        """Return the bytes of the tensors that are not resident, each counted once."""
        return sum(
            self.tensors[index].size_bytes for index in set(tensors) if not self.tensors[index].resident
        )

    def movable(self, tensors: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensors that are not resident, without duplicates."""
        return tuple(index for index in dict.fromkeys(tensors) if not self.tensors[index].resident)

    def working_bytes(self, operation: StepOperation) -> int:
        """Return the least bytes on the device while an operation runs, resident tensors included."""
        operand_bytes = self.bytes_of(operation.inputs + operation.outputs)
        return self.resident_bytes + operand_bytes + operation.workspace_bytes

    def producers(self) -> dict[int, int]:
        """Return the index of the operation that writes each tensor."""
        return {
            tensor: index for index, operation in enumerate(self.operations) for tensor in operation.outputs
        }

    def without_link(self) -> TrainingStep:
        """Return this step without a link to host memory."""
        return replace(self, link=None)

    def without_recomputation(self) -> TrainingStep:
        """Return this step with operations that may run only once."""
        operations = (replace(operation, recomputable=False) for operation in self.operations)
        return replace(self, operations=tuple(operations))
