"""A lower bound of the time of any schedule, by a linear program over moments of the step.

The moments are first runs of operations, and divide the step into stages. Take any schedule that `simulate`
accepts, whatever its order of actions, without copies to the device of tensors that are not read there:
leaving them out makes no schedule slower. The following numbers then satisfy the rows of the program, so
that its optimum is at most the time of the schedule:

- kept: 1 if a tensor is on the device at a moment.
- again: 1 if an operation that first ran in an earlier stage runs in a stage.
- back: 1 if a tensor that is neither kept at the start of a stage nor written in it is copied in in it.
- left: 1 if the copy of a tensor to the host ended before a moment.

The tensors at a moment fit the budget. A tensor that is read in a stage, or kept after it, was kept before
it, is written again in it, or comes back; one that comes back has left. A tensor that is read later was
kept, had left, or is written again before. An operation that runs again reads its inputs. The time of a
stage is at least that of its operations. Copies that ended before a moment, and those that start after one,
take their time before and after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunebench.training.integer_program import IntegerProgram
from tunebench.training.memory.step import TrainingStep

__all__ = ["RelaxedChoice", "relaxed_bound_us", "relaxed_choice"]


def relaxed_bound_us(
    step: TrainingStep, budget_bytes: int, *, stages: int | Sequence[int] = 24, limit_s: float = 10.0
) -> float:
    """Return a lower bound in microseconds of the time of any schedule within a budget; 0 if not in time.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
        stages: Most stages, or the first operation of each stage after the first one.
        limit_s: Time limit of the solver in seconds.

    Raises:
        MissingDependency: HiGHS is not installed.
    """
    return _Relaxation(step, budget_bytes, stages).solve(limit_s).lower_us


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedChoice:
    """Choices of the linear program at one moment.

    Attributes:
        lower_us: Lower bound in microseconds of the time of any schedule; 0 if not in time.
        kept: Tensors that it keeps on the device.
        swapped: Tensors that it keeps on the host.
    """

    lower_us: float
    kept: frozenset[int] = frozenset()
    swapped: frozenset[int] = frozenset()


def relaxed_choice(
    step: TrainingStep, budget_bytes: int, moment: int, *, limit_s: float = 10.0
) -> RelaxedChoice:
    """Return which tensors to keep and to swap at an operation, from the linear program of two stages.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
        moment: The operation.
        limit_s: Time limit of the solver in seconds.

    Raises:
        MissingDependency: HiGHS is not installed.
    """
    return _Relaxation(step, budget_bytes, (moment,)).solve(limit_s)


class _Relaxation:
    """The linear program of a step, in units of the time of all operations and of the budget."""

    def __init__(self, step: TrainingStep, budget_bytes: int, stages: int | Sequence[int]) -> None:
        self._step, self._budget_bytes = step, budget_bytes
        self._operations, self._producer = step.operations, step.producers()
        self._per_us = 1.0 / (step.compute_us or 1.0)
        self.program = IntegerProgram()
        count = len(step.operations)
        if isinstance(stages, int):
            stages = [part * count // min(stages, count) for part in range(min(stages, count))]
        self._moments = sorted({0, count, *stages})
        self._kept: dict[tuple[int, int], int] = {}
        self._again: dict[tuple[int, int], int] = {}
        self._back: dict[tuple[int, int], int] = {}
        self._left: dict[tuple[int, int], int] = {}
        last = {
            tensor: index for index, operation in enumerate(self._operations) for tensor in operation.inputs
        }
        last.update(dict.fromkeys(step.results, count))
        needed = self._needed()
        for stage, moment in enumerate(self._moments[:-1]):
            for tensor, producer in self._producer.items():
                if producer < moment and tensor in needed[stage]:
                    self._add(stage, tensor, producer)
        self._connect()
        if step.link is not None:
            self._limit_absence()
        self._limit_memory()
        self._limit_times()

    def solve(self, limit_s: float) -> RelaxedChoice:
        """Return the solution, with the tensors at the start of the last stage."""
        solution = self.program.solve(limit_s, relaxed=True)
        # The solver's tolerance must not lift the bound above the time of a schedule.
        lower_us = solution.bound * self._step.compute_us * (1 - 1e-6)
        values, last = solution.values or [], len(self._moments) - 2

        def most(variables: dict[tuple[int, int], int]) -> frozenset[int]:
            """Return the tensors whose variable exceeds one half."""
            at_last = (
                tensor for (stage, tensor), key in variables.items() if stage == last and values[key] > 0.5
            )
            return frozenset(at_last) if values else frozenset()

        return RelaxedChoice(lower_us=lower_us, kept=most(self._kept), swapped=most(self._left))

    def _needed(self) -> list[set[int]]:
        """Return for each stage the tensors that can help to run its operations, or later ones."""
        needed_by_stage = []
        for moment in self._moments[:-1]:
            needed = {tensor for operation in self._operations[moment:] for tensor in operation.inputs}
            needed.update(self._step.results)
            # Backwards: an operation can help if something it writes is needed, and then so is what it reads.
            for operation in reversed(self._operations[:moment]):
                if operation.recomputable and needed.intersection(operation.outputs):
                    needed.update(operation.inputs)
            needed_by_stage.append(needed)
        return needed_by_stage

    def _add(self, stage: int, tensor: int, producer: int) -> None:
        """Add the variables of a tensor in a stage."""
        self._kept[stage, tensor] = self.program.variable()
        if self._operations[producer].recomputable and (stage, producer) not in self._again:
            self._again[stage, producer] = self.program.variable()
        if self._step.link is not None:
            self._back[stage, tensor] = self.program.variable()
            self._left[stage, tensor] = self.program.variable()
            self.program.at_most({self._back[stage, tensor]: 1.0, self._left[stage, tensor]: -1.0}, 0.0)
            if (stage - 1, tensor) in self._left:
                earlier = self._left[stage - 1, tensor]
                self.program.at_most({earlier: 1.0, self._left[stage, tensor]: -1.0}, 0.0)

    def _sources(self, stage: int, tensor: int) -> dict[int, float]:
        """Return the variables that add up to at least 1 if a tensor is on the device during a stage."""
        keys = (
            self._kept.get((stage, tensor)),
            self._again.get((stage, self._producer[tensor])),
            self._back.get((stage, tensor)),
        )
        return {key: -1.0 for key in keys if key is not None}

    def _connect(self) -> None:
        """Require that a tensor that is read or kept was kept before, is written again, or is copied back."""
        for (stage, tensor), keeps in self._kept.items():
            if stage and self._producer[tensor] < self._moments[stage - 1]:
                self.program.at_most({keeps: 1.0, **self._sources(stage - 1, tensor)}, 0.0)
        for (stage, index), repeats in self._again.items():
            for tensor in self._step.movable(self._operations[index].inputs):
                self.program.at_most({repeats: 1.0, **self._sources(stage, tensor)}, 0.0)
        for stage, moment in enumerate(self._moments[:-1]):
            end = self._moments[stage + 1]
            read = {tensor for operation in self._operations[moment:end] for tensor in operation.inputs}
            if end == len(self._operations):
                read.update(self._step.results)
            now = self._operations[moment].inputs
            for tensor in sorted(read):
                if self._producer.get(tensor, moment) < moment:
                    # The operation at the moment itself runs at once: what it reads must be there already.
                    row = {self._kept[stage, tensor]: -1.0} if tensor in now else self._sources(stage, tensor)
                    self.program.at_most(row, -1.0)

    def _limit_absence(self) -> None:
        """Require that a tensor that is read later is kept, on the host, or written again in between."""
        stages = len(self._moments) - 1
        read: dict[int, int] = {}
        for stage in reversed(range(stages)):
            moment, end = self._moments[stage : stage + 2]
            if end == len(self._operations):
                read.update(dict.fromkeys(self._step.results, stage))
            for operation in self._operations[moment:end]:
                read.update(dict.fromkeys(operation.inputs, stage))
            for tensor, last in read.items():
                if (stage, tensor) in self._kept:
                    repeats = (
                        self._again.get((later_stage, self._producer[tensor]))
                        for later_stage in range(stage, last + 1)
                    )
                    row = {key: -1.0 for key in repeats if key is not None}
                    row[self._kept[stage, tensor]] = row[self._left[stage, tensor]] = -1.0
                    self.program.at_most(row, -1.0)

    def _limit_memory(self) -> None:
        """Require that the tensors at each moment fit the budget."""
        for stage, moment in enumerate(self._moments[:-1]):
            operation = self._operations[moment]
            # These are on the device in any case, and counted in `working_bytes`.
            operation_tensors = {*operation.inputs, *operation.outputs}
            row = {
                keeps: self._step.tensors[tensor].size_bytes / self._budget_bytes
                for (variable_stage, tensor), keeps in self._kept.items()
                if variable_stage == stage and tensor not in operation_tensors
            }
            self.program.at_most(row, 1.0 - self._step.working_bytes(operation) / self._budget_bytes)

    def _limit_times(self) -> None:
        """Require that stages and copies take their time."""
        link, sizes = self._step.link, [tensor.size_bytes for tensor in self._step.tensors]
        stages = len(self._moments) - 1
        starts = [
            self.program.variable(upper=math.inf, cost=float(stage == stages)) for stage in range(stages + 1)
        ]
        for stage in range(stages):
            moment, end = self._moments[stage : stage + 2]
            row = {starts[stage]: 1.0, starts[stage + 1]: -1.0}
            for (variable_stage, index), repeats in self._again.items():
                if variable_stage == stage:
                    row[repeats] = self._operations[index].time_us * self._per_us
            spent = sum(operation.time_us for operation in self._operations[moment:end]) * self._per_us
            self.program.at_most(row, -spent)
            if link is None:
                continue
            out = {
                leaves: link.to_host_us(sizes[tensor]) * self._per_us
                for (variable_stage, tensor), leaves in self._left.items()
                if variable_stage == stage
            }
            self.program.at_most({**out, starts[stage]: -1.0}, 0.0)
            back = {
                back: link.to_device_us(sizes[tensor]) * self._per_us
                for (variable_stage, tensor), back in self._back.items()
                if variable_stage >= stage
            }
            self.program.at_most({**back, starts[stage]: 1.0, starts[stages]: -1.0}, 0.0)
