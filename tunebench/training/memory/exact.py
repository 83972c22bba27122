"""The fastest schedule of a small training step within a budget, by an integer program.

The program is Checkmate's (arXiv 1910.02653), with copies to the host. Stage t ends with the first run of
operation t. Before this run, the stage starts copies to the host, waits for copies that ended and frees their
tensors, starts copies to the device, and runs earlier operations again, each at most once, in their order.

The result is the fastest of these schedules. A schedule that repeats an operation twice in a stage, repeats
operations in another order, or starts a copy between two operations of a stage is not considered. Copies
of one stage follow the order of tensors when they leave and the reverse order when they return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebench.training.integer_program import IntegerProgram
from tunebench.training.memory.schedule import Action, Stage, schedule_of
from tunebench.training.memory.step import StepOperation, TrainingStep

__all__ = ["ExactResult", "exact_schedule", "least_budget_exact"]

_COPY_COST = 1e-7
"""What a copy adds to the objective, so that ties go to fewer copies; the time of all operations is 1."""

Slot = tuple[int, int]
"""A stage, and an operation that may run in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The solution of the integer program.

    Attributes:
        schedule: The best schedule found; none if there is none, or none was found in time.
        lower_us: Lower bound in microseconds of the time of these schedules; infinite if there is none.
        optimal: Whether the schedule is proven optimal, or proven not to exist.
    """

    schedule: tuple[Action, ...] | None
    lower_us: float
    optimal: bool


def exact_schedule(
    step: TrainingStep, budget_bytes: int, *, limit_s: float = 30.0, relaxed: bool = False
) -> ExactResult:
    """Return the fastest schedule within a budget.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
        limit_s: Time limit of the solver in seconds.
        relaxed: Whether to solve only the linear relaxation: it gives a lower bound and no schedule.

    Raises:
        MissingDependency: HiGHS is not installed.
    """
    model = _StagedModel(step, budget_bytes)
    solution = model.program.solve(limit_s, relaxed=relaxed)
    # The objective also counts ties between copies: without them the bound could exceed the least time.
    lower_us = max(step.compute_us, (solution.bound - model.tie_cost) / model.per_us)
    if solution.values is None or relaxed:
        return ExactResult(schedule=None, lower_us=lower_us, optimal=solution.optimal and not relaxed)
    schedule = schedule_of(step, model.stages_of(solution.values))
    return ExactResult(schedule=schedule, lower_us=lower_us, optimal=solution.optimal)


def least_budget_exact(step: TrainingStep, *, limit_s: float = 30.0) -> tuple[int, bool]:
    """Return the least budget in bytes at which such a schedule exists, and whether this is proven.

    Args:
        step: The training step; its link is ignored.
        limit_s: Time limit of the solver in seconds.

    Raises:
        MissingDependency: HiGHS is not installed.
    """
    model = _StagedModel(step.without_link(), None)
    solution = model.program.solve(limit_s)
    assert solution.values is not None or not solution.optimal, "running every operation once is a schedule"
    scale = model.total_bytes
    if solution.values is None:
        return scale, False
    return round(solution.values[model.budget] * scale), solution.optimal


class _StagedModel:
    """The integer program of a step, for the least time within a budget or for the least budget.

    Attributes:
        program: The program.
        budget: The variable that is the budget, as a fraction of `total_bytes`; only for the least budget.
        total_bytes: Bytes of all tensors and workspaces.
        per_us: Objective of a microsecond.
        tie_cost: Most that the costs of copies add to the objective.
    """

    def __init__(self, step: TrainingStep, budget_bytes: int | None) -> None:
        # A last operation that takes no time and reads the results: they must be on the device at the end.
        end = StepOperation(name="end of the step", time_us=0.0, inputs=step.results, outputs=())
        self._own = len(step.operations)  # without the end of the step
        self._step = step if not step.results else replace(step, operations=(*step.operations, end))
        self._operations, self._budget_bytes = self._step.operations, budget_bytes
        self._count, self._producer = len(self._operations), step.producers()
        self.program = IntegerProgram()
        workspaces = max(operation.workspace_bytes for operation in self._operations)
        self.total_bytes = sum(tensor.size_bytes for tensor in step.tensors) + workspaces or 1
        self.per_us = 1.0 / (step.compute_us or 1.0)
        self.tie_cost = 0.0
        if budget_bytes is None:
            self.budget = self.program.variable(cost=1.0)
        self._runs = self._run_variables()
        self._inputs = {slot: self._step.movable(self._operations[slot[1]].inputs) for slot in self._runs}
        self._slots = [
            [(stage, index) for index in range(stage + 1) if (stage, index) in self._runs]
            for stage in range(self._count)
        ]
        self._leaves: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], int] = {}
        self._returns: dict[tuple[int, int], int] = {}
        if step.link is not None:
            self._copy_variables()
        self._present = {
            (slot, tensor): self.program.variable()
            for tensor, producer in self._producer.items()
            for stage in range(producer + 1, self._count)
            for slot in self._slots[stage]
        }
        self._limit_presence()
        self._limit_memory()
        if step.link is not None:
            self._limit_copies()
            self._limit_times()

    def stages_of(self, values: list[float]) -> list[Stage]:
        """Return the stages of a solution."""

        def chosen(variables: dict[tuple[int, int], int], stage: int) -> tuple[int, ...]:
            """Return what is chosen in a stage, in ascending order."""
            return tuple(
                sorted(
                    key
                    for (variable_stage, key), name in variables.items()
                    if variable_stage == stage and values[name] > 0.5
                )
            )

        stages = []
        for stage in range(self._count):
            leaves, resident = chosen(self._leaves, stage), chosen(self._held, stage)
            before = chosen(self._held, stage - 1) + leaves
            stages.append(
                Stage(
                    copy_out=leaves,
                    release=tuple(tensor for tensor in before if tensor not in resident),
                    copy_in=chosen(self._returns, stage)[::-1],
                    compute=tuple(index for index in chosen(self._runs, stage) if index < self._own),
                )
            )
        return stages

    def _run_variables(self) -> dict[Slot, int]:
        """Return a variable for each operation that may run in a stage."""
        untimed = self._budget_bytes is None or self._step.link is not None
        runs = {}
        for stage in range(self._count):
            for index, operation in enumerate(self._operations[: stage + 1]):
                # Stage t ends with the first run of operation t, which is certain; all earlier runs are
                # choices.
                first = index == stage
                if first or operation.recomputable:
                    cost = 0.0 if untimed else operation.time_us * self.per_us
                    runs[stage, index] = self.program.variable(lower=float(first), cost=cost, integer=True)
        return runs

    def _copy_variables(self) -> None:
        """Add the variables of copies."""
        for tensor, producer in self._producer.items():
            for stage in range(producer + 1, self._count):
                self._leaves[stage, tensor] = self.program.variable(cost=_COPY_COST, integer=True)
                self._held[stage, tensor] = self.program.variable(integer=True)
                self._returns[stage, tensor] = self.program.variable(cost=_COPY_COST, integer=True)
                self.tie_cost += 2 * _COPY_COST

    def _after(self, stage: int, tensor: int) -> dict[int, float]:
        """Return the variable that is 1 if a tensor is on the device after a stage."""
        if self._producer[tensor] == stage:
            return {self._runs[stage, stage]: 1.0}
        return {self._present[self._slots[stage][-1], tensor]: 1.0}

    def _limit_presence(self) -> None:
        """Require that a tensor is on the device when it is read, and only after it was written or copied."""
        for tensor, producer in self._producer.items():
            for stage in range(producer + 1, self._count):
                before = self._after(stage - 1, tensor)
                if (stage, tensor) in self._returns:
                    before[self._returns[stage, tensor]] = 1.0
                for slot in self._slots[stage]:
                    now = self._present[slot, tensor]
                    self.program.at_most({now: 1.0, **dict.fromkeys(before, -1.0)}, 0.0)
                    if tensor in self._inputs[slot]:
                        self.program.at_most({self._runs[slot]: 1.0, now: -1.0}, 0.0)
                    # Within a stage, presence passes from slot to slot; running the producer also makes the
                    # tensor present.
                    before = {now: 1.0}
                    if slot[1] == producer:
                        before[self._runs[slot]] = 1.0

    def _limit_memory(self) -> None:
        """Require that the tensors on the device, outputs and workspace of each operation fit the budget."""
        most_bytes = self.total_bytes if self._budget_bytes is None else self._budget_bytes
        for slots in self._slots:
            for slot in slots:
                operation = self._operations[slot[1]]
                row = {
                    self._present[slot, tensor]: self._step.tensors[tensor].size_bytes / most_bytes
                    for tensor in self._producer
                    if (slot, tensor) in self._present
                }
                run_bytes = self._step.bytes_of(operation.outputs) + operation.workspace_bytes
                row[self._runs[slot]] = run_bytes / most_bytes
                limit = 1.0
                if self._budget_bytes is None:
                    row[self.budget], limit = -1.0, 0.0
                self.program.at_most(row, limit - self._step.resident_bytes / most_bytes)

    def _limit_copies(self) -> None:
        """Require that a tensor leaves once, stays until its release, and returns only when it is absent."""
        for tensor, producer in self._producer.items():
            # Copies to the host so far: at most one in the whole step, which serves all later copies back.
            departures: dict[int, float] = {}
            for stage in range(producer + 1, self._count):
                leaves, stays = self._leaves[stage, tensor], self._held[stage, tensor]
                returns = self._returns[stage, tensor]
                self.program.at_most(
                    {leaves: 1.0, **dict.fromkeys(self._after(stage - 1, tensor), -1.0)}, 0.0
                )
                self.program.at_most({returns: 1.0, **dict.fromkeys(departures, -1.0)}, 0.0)
                self.program.at_most({returns: 1.0, stays: 1.0}, 1.0)
                earlier = self._held.get((stage - 1, tensor))
                self.program.at_most(
                    {stays: 1.0, leaves: -1.0} | ({} if earlier is None else {earlier: -1.0}), 0.0
                )
                for slot in self._slots[stage]:
                    self.program.at_most({stays: 1.0, self._present[slot, tensor]: -1.0}, 0.0)
                    if slot[1] == producer:
                        self.program.at_most({stays: 1.0, self._runs[slot]: 1.0}, 1.0)
                departures[leaves] = 1.0
            self.program.at_most(departures, 1.0)

    def _limit_times(self) -> None:
        """Order operations and copies in time, in units of the time of all operations."""
        link = self._step.link
        assert link is not None
        sizes = [tensor.size_bytes for tensor in self._step.tensors]
        out = {tensor: link.to_host_us(sizes[tensor]) * self.per_us for tensor in self._producer}
        back = {tensor: link.to_device_us(sizes[tensor]) * self.per_us for tensor in self._producer}
        clock = _Clock(self.program, self._longest(out, back))
        on_host = {tensor: self.program.variable(upper=clock.horizon) for tensor in self._producer}
        # Three clocks: the end of the last copy out, of the last copy back, and of the compute stream.
        out_end = back_end = now = self.program.variable(upper=0.0)
        returned: list[tuple[int, int, int]] = []
        for stage in range(self._count):
            for tensor in sorted(tensor for tensor in self._producer if (stage, tensor) in self._leaves):
                leaves = self._leaves[stage, tensor]
                out_end = clock.after((out_end, now), {leaves: out[tensor]})
                clock.wait(on_host[tensor], out_end, {leaves: 1.0}, 1.0)
            released = clock.after((now,), {})
            for tensor in self._producer:
                if (stage, tensor) in self._leaves:
                    leaving = {self._leaves[stage, tensor]: 1.0, self._held[stage, tensor]: -1.0}
                    if (stage - 1, tensor) in self._held:
                        leaving[self._held[stage - 1, tensor]] = 1.0
                    clock.wait(released, on_host[tensor], leaving, 1.0)
            now = released
            for tensor in sorted(self._producer, reverse=True):
                if (stage, tensor) in self._returns:
                    returns = self._returns[stage, tensor]
                    back_end = clock.after((back_end, now), {returns: back[tensor]})
                    returned.append((tensor, returns, back_end))
            for slot in self._slots[stage]:
                start = clock.after((now,), {})
                for tensor, returns, end in returned:
                    if tensor in self._inputs[slot]:
                        clock.wait(start, end, {self._runs[slot]: 1.0, returns: 1.0}, 2.0)
                duration = self._operations[slot[1]].time_us * self.per_us
                now = clock.after((start,), {self._runs[slot]: duration})
        self.program.at_most({now: 1.0, clock.finish: -1.0}, 0.0)

    def _longest(self, out: dict[int, float], back: dict[int, float]) -> float:
        """Return a time within which the fastest schedule ends, in units of the time of all operations."""
        # Copying every tensor out when it is written, and in for each operation that reads it, is a schedule.
        copies_time = sum(out.values())
        for operation in self._operations:
            copies_time += sum(back[tensor] for tensor in self._step.movable(operation.inputs))
        return 1.0 + copies_time


class _Clock:
    """Times of events in a program.

    Attributes:
        horizon: Latest time of any event.
        finish: The end of the step, which is the objective.
    """

    def __init__(self, program: IntegerProgram, horizon: float) -> None:
        self._program = program
        self.horizon = horizon
        self.finish = program.variable(upper=horizon, cost=1.0)

    def after(self, earlier: tuple[int, ...], durations: dict[int, float]) -> int:
        """Return an event after others, later by the durations of variables that are 1."""
        event = self._program.variable(upper=self.horizon)
        for earlier_event in earlier:
            self._program.at_most({earlier_event: 1.0, **durations, event: -1.0}, 0.0)
        return event

    def wait(self, event: int, earlier_event: int, conditions: dict[int, float], fulfilled: float) -> None:
        """Require that an event is not before another if the conditions add up to a number."""
        # With all conditions met the row is earlier_event <= event. Each one that is not met adds the horizon
        # of slack (big M).
        row = {name: self.horizon * weight for name, weight in conditions.items()}
        self._program.at_most({earlier_event: 1.0, event: -1.0, **row}, fulfilled * self.horizon)
