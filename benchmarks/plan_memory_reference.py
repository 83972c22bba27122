"""Training steps with known structure, and an exhaustive search of their schedules, to check memory plans."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tunebench.training.memory import HostLink, StepOperation, StepTensor, TrainingStep

__all__ = ["TooManyStates", "chain_operations", "chain_step", "fastest_us", "random_step"]

UNIT_BYTES = 1000
"""Size of the smallest tensor of a random step; a link of 1 GB/s copies it in 1 us."""


def chain_step(count: int, *, size_bytes: int = 1, link: HostLink | None = None) -> TrainingStep:
    """Return a chain: backward operation i reads activations i and i - 1 and the gradient of activation i.

    Every operation takes 1 us. The input of the chain occupies no memory, and the last activation is its own
    gradient.

    Args:
        count: Forward operations, and backward operations.
        size_bytes: Bytes of each activation and gradient.
        link: The link to host memory.
    """
    tensors = [StepTensor(name="x", size_bytes=0, resident=True)]
    tensors += [StepTensor(name=f"a{i}", size_bytes=size_bytes) for i in range(1, count + 1)]
    tensors += [StepTensor(name=f"g{i}", size_bytes=size_bytes) for i in reversed(range(count))]
    operations = [
        StepOperation(name=f"forward{i}", time_us=1.0, inputs=(i - 1,), outputs=(i,))
        for i in range(1, count + 1)
    ]
    for position, i in enumerate(reversed(range(1, count + 1))):
        gradient = (count + position,) if position else ()
        inputs = (i - 1, i, *gradient)
        operations.append(
            StepOperation(name=f"backward{i}", time_us=1.0, inputs=inputs, outputs=(count + position + 1,))
        )
    return TrainingStep(tensors=tuple(tensors), operations=tuple(operations), link=link)


def chain_operations(count: int, budget: int) -> float:
    """Return the least number of operations of a chain of equal operations; infinite if none is enough.

    The recurrence is that of Griewank and Walther (Algorithm 799: revolve, 2000) for the memory of
    `chain_step`. While backward operation i runs, activation i and the gradients i and i - 1 are on the
    device, which leaves the budget less 3 for other activations. Activation n is its own gradient, so
    backward operation n leaves one more, for activation n - 1.

    Args:
        count: Forward operations, and backward operations.
        budget: Tensors that the device has memory for.
    """
    if count == 1:
        return 2.0 if budget >= 2 else math.inf
    if budget < 4:
        return 2.0 * count if count + 1 <= budget else math.inf
    return _forward_runs(count - 1, budget - 3, first=True) + 1 + count


@functools.cache
def _forward_runs(length: int, free: int, *, first: bool = False) -> float:
    """Return the least forward runs for the backward operations of a part of a chain.

    The activations before and at the end of the part are on the device; the last one is not if the part runs
    for the first time. The runs up to some activation restore it; the part after it comes first.

    Args:
        length: Number of operations of the part.
        free: Other activations that fit on the device.
        first: Whether the part runs for the first time.
    """
    if length == 1:
        return float(first)
    if not free:
        return math.inf
    return min(
        first_part
        + _forward_runs(length - first_part, free - 1, first=first)
        + _forward_runs(first_part, free)
        for first_part in range(1, length)
    )


def random_step(seed: int, *, most: int = 12) -> TrainingStep:
    """Return a random training step whose times and copies take whole microseconds.

    Args:
        seed: Seed of the random numbers.
        most: Most operations.
    """
    draw = random.Random(seed)
    count = draw.randint(2, most // 2)
    tensors = [StepTensor(name="x", size_bytes=UNIT_BYTES * draw.randint(0, 2), resident=True)]
    operations: list[StepOperation] = []

    def add(name: str, inputs: set[int]) -> int:
        """Add an operation with one output and return the output."""
        tensors.append(StepTensor(name=name, size_bytes=UNIT_BYTES * draw.randint(1, 4)))
        operations.append(
            StepOperation(
                name=name,
                time_us=float(draw.randint(1, 6)),
                inputs=tuple(sorted(inputs)),
                outputs=(len(tensors) - 1,),
                workspace_bytes=UNIT_BYTES * draw.choice([0, 0, 1, 2]),
                recomputable=draw.random() < 0.9,
            )
        )
        return len(tensors) - 1

    read = []
    for index in range(count):
        inputs = {index}
        if draw.random() < 0.4:
            inputs.add(draw.randrange(index + 1))
        read.append(inputs)
        add(f"forward{index + 1}", inputs)
    gradient = count
    for index in reversed(range(count)):
        saved = read[index] | ({index + 1} if draw.random() < 0.5 else set())
        gradient = add(f"backward{index + 1}", saved | {gradient})
    results = [gradient]
    if draw.random() < 0.5:
        results.append(draw.randint(count + 1, len(tensors) - 1))
    link = HostLink(
        to_host_gb_s=draw.choice([0.5, 1.0]),
        to_device_gb_s=draw.choice([0.5, 1.0]),
        latency_us=draw.choice([0.0, 1.0]),
    )
    return TrainingStep(
        tensors=tuple(tensors), operations=tuple(operations), results=tuple(set(results)), link=link
    )


@dataclass(frozen=True, slots=True)
class _State:
    """What is on the device and the host at the start of a stage; times count from now.

    Attributes:
        device: Tensors on the device.
        left: Tensors on the host, or on their way.
        held: Tensors that stay until their copies to the host end, with these times.
        arriving: Tensors on their way to the device, with these times.
        out_us: Until when copies to the host take.
        back_us: Until when copies to the device take.
    """

    device: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    held: frozenset[tuple[int, float]] = frozenset()
    arriving: frozenset[tuple[int, float]] = frozenset()
    out_us: float = 0.0
    back_us: float = 0.0

    def moves_no_later(self, state: _State, earlier_us: float) -> bool:
        """Return whether each copy under way is also under way in another state, and ends there no earlier.

        Args:
            state: A state at the same stage and slot.
            earlier_us: Time from this state to the other, at least 0.
        """
        return (
            self.out_us <= state.out_us + earlier_us
            and self.back_us <= state.back_us + earlier_us
            and _end_no_later(self.held, state.held, earlier_us)
            and _end_no_later(self.arriving, state.arriving, earlier_us)
        )

    def later(self, passed_us: float) -> _State:
        """Return the state after some time."""
        return replace(
            self,
            held=frozenset((tensor, max(0.0, end - passed_us)) for tensor, end in self.held),
            arriving=frozenset((tensor, end - passed_us) for tensor, end in self.arriving if end > passed_us),
            out_us=max(0.0, self.out_us - passed_us),
            back_us=max(0.0, self.back_us - passed_us),
        )


def _end_no_later(
    transfers: frozenset[tuple[int, float]], other_transfers: frozenset[tuple[int, float]], earlier_us: float
) -> bool:
    """Return whether each copy is among the others and ends no later than there."""
    other_us = dict(other_transfers)
    return all(end <= other_us.get(tensor, -math.inf) + earlier_us for tensor, end in transfers)


class TooManyStates(Exception):
    """The search has more states than allowed."""


def fastest_us(
    step: TrainingStep,
    budget_bytes: int,
    below_us: float,
    *,
    most_states: int = 10**7,
    skip_dominated: bool = True,
) -> float | None:
    """Return the time of the fastest staged schedule if it is below a time, by exhaustive search.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
        below_us: Schedules of this time or more are not searched.
        most_states: States to visit before the search stops.
        skip_dominated: Whether to skip states that another one dominates, rather than only equal states.

    Raises:
        TooManyStates: The search stopped.
    """
    search = _Search(step, budget_bytes)
    start = _State()
    heap: list[tuple[float, int, int, int, _State]] = [(search.least_us(0, start), 0, 0, 0, start)]
    visited: defaultdict[tuple[int, int], _Visited] = defaultdict(_Visited)
    rule = _Visited.dominates if skip_dominated else _Visited.contains
    count = 0
    ticket = itertools.count(1)
    while heap:
        total_us, _, stage, slot, state = heapq.heappop(heap)
        if stage == len(search.operations):
            return total_us
        now_us = total_us - search.least_us(stage, state)
        states = visited[stage, slot]
        if rule(states, now_us, state, search.useful[stage]):
            continue
        states.add(now_us, state, search.useful[stage])
        count += 1
        if count > most_states:
            raise TooManyStates
        for passed_us, next_stage, next_slot, following in search.successors(stage, slot, state):
            least_us = now_us + passed_us + search.least_us(next_stage, following)
            if least_us < below_us:
                # Of equally fast states the latest one goes first.
                heapq.heappush(heap, (least_us, -next(ticket), next_stage, next_slot, following))
    return None


class _Visited:
    """The states visited at one stage and slot, by the useful tensors that they have.

    A state dominates another if it is reached no later, has at least the useful tensors on the device and on
    the host that the other has, and every copy under way is also under way in the other and ends there no
    earlier. Then it has a schedule that ends no later than any schedule of the other. Follow the other's
    schedule, but leave out each action that writes or copies a tensor that is there already, and free the
    surplus tensors when memory is short. By induction on the actions, the conditions hold after each:

    - A surplus tensor can be freed: no copy of it is under way, because it would be under way in the other.
    - A tensor that is only on the host here, and not held by a copy, is complete there.
    - Copies of one direction are a part of the other's, in the same order, from a queue that is free no
      later. So each ends no later, and neither does a wait for it.
    - A repeated operation runs with the same memory, because the surplus is freed first.

    Tensors that are not useful cannot help: no operation that is left, or that restores an input of one,
    reads them.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[frozenset[int], frozenset[int]], list[tuple[float, _State]]] = {}

    def add(self, now_us: float, state: _State, useful: frozenset[int]) -> None:
        """Add a state."""
        self._states.setdefault((state.device & useful, state.left & useful), []).append((now_us, state))

    def contains(self, now_us: float, state: _State, useful: frozenset[int]) -> bool:
        """Return whether the state was reached before."""
        states = self._states.get((state.device & useful, state.left & useful), ())
        return any(at_us <= now_us and visited == state for at_us, visited in states)

    def dominates(self, now_us: float, state: _State, useful: frozenset[int]) -> bool:
        """Return whether a visited state dominates the state."""
        device, useful_left = state.device & useful, state.left & useful
        for (more, more_left), states in self._states.items():
            if device <= more and useful_left <= more_left:
                for at_us, visited in states:
                    if at_us <= now_us and visited.moves_no_later(state, now_us - at_us):
                        return True
        return False


class _Search:
    """The schedules of a step within a budget, one decision at a time."""

    def __init__(self, step: TrainingStep, budget_bytes: int) -> None:
        end = StepOperation(name="end", time_us=0.0, inputs=step.results, outputs=())
        self.operations = (*step.operations, end)
        self._step, self._budget_bytes = step, budget_bytes - step.resident_bytes
        self._size = [tensor.size_bytes for tensor in step.tensors]
        self.useful = [self._needed(stage) for stage in range(len(self.operations))]
        self._producer = step.producers()
        self._read = [
            {tensor for operation in self.operations[stage:] for tensor in operation.inputs}
            for stage in range(len(self.operations) + 1)
        ]
        times = [operation.time_us for operation in self.operations]
        self._remaining_us = [sum(times[stage:]) for stage in range(len(times) + 1)]

    def _needed(self, stage: int) -> frozenset[int]:
        """Return the tensors that can help to run the operations from a stage on."""
        needed = {tensor for operation in self.operations[stage:] for tensor in operation.inputs}
        for operation in reversed(self.operations[:stage]):
            if operation.recomputable and needed.intersection(operation.outputs):
                needed.update(operation.inputs)
        return frozenset(needed)

    def least_us(self, stage: int, state: _State) -> float:
        """Return a lower bound of the remaining time: what is absent and not on the host is recomputed."""
        repeated = {
            self._producer[tensor]
            for tensor in self._read[stage] - state.device - state.left
            if self._producer.get(tensor, stage) < stage
        }
        return self._remaining_us[stage] + sum(self.operations[index].time_us for index in repeated)

    def successors(self, stage: int, slot: int, state: _State) -> Iterator[tuple[float, int, int, _State]]:
        """Yield time passed, stage, slot and state of each next decision. Slot 0 is the start of a stage."""
        useful = self.useful[stage]
        if slot == 0:
            for passed_us, following in self._boundary(state, useful):
                yield passed_us, stage, 1, following
            return
        index = slot - 1
        operation = self.operations[index]
        if index < stage:
            yield 0.0, stage, slot + 1, state
            if not operation.recomputable or not useful.intersection(operation.outputs):
                return
        for passed_us, following in self._run(operation, state):
            if index < stage:
                yield passed_us, stage, slot + 1, following
            else:
                yield passed_us, stage + 1, 0, self._without_useless(stage + 1, following)

    def _without_useless(self, stage: int, state: _State) -> _State:
        """Return the state without tensors that no further operation needs, unless they are held."""
        if stage == len(self.operations):
            return state
        still_useful = self.useful[stage].union(tensor for tensor, _ in state.held)
        return replace(state, device=state.device & still_useful, left=state.left & still_useful)

    def _run(self, operation: StepOperation, state: _State) -> Iterator[tuple[float, _State]]:
        inputs = set(self._step.movable(operation.inputs))
        outputs = set(operation.outputs)
        in_transfer = {tensor for tensor, _ in state.held}
        if not inputs <= state.device or outputs & in_transfer:
            return
        arriving = dict(state.arriving)
        if outputs & arriving.keys():
            return
        waited_us = max((arriving.get(tensor, 0.0) for tensor in inputs), default=0.0)
        device = state.device - outputs
        need = sum(self._size[tensor] for tensor in outputs) + operation.workspace_bytes
        for retained in self._evictions(device, inputs | in_transfer | arriving.keys(), need):
            following = replace(state, device=retained | outputs).later(waited_us + operation.time_us)
            yield waited_us + operation.time_us, following

    def _evictions(self, device: frozenset[int], pinned: set[int], need: int) -> Iterator[frozenset[int]]:
        """Yield what stays on the device if just enough is freed for some bytes."""
        excess = sum(self._size[tensor] for tensor in device) + need - self._budget_bytes
        free = sorted(device - pinned)
        for count in range(len(free) + 1):
            for freed in itertools.combinations(free, count):
                gain = sum(self._size[tensor] for tensor in freed)
                if gain >= excess and all(gain - self._size[tensor] < excess for tensor in freed):
                    yield device.difference(freed)

    def _boundary(self, state: _State, useful: frozenset[int]) -> Iterator[tuple[float, _State]]:
        """Yield time passed and state for each choice of copies and releases."""
        assert self._step.link is not None
        arriving = {tensor for tensor, _ in state.arriving}
        for leaving in _subsets(sorted((state.device & useful) - state.left - arriving)):
            end_us, out_us = dict(state.held), state.out_us
            for tensor in leaving:
                out_us += self._step.link.to_host_us(self._size[tensor])
                end_us[tensor] = out_us
            for wait_us in (0.0, *sorted(end for end in end_us.values() if end > 0)):
                released = {tensor for tensor, end in end_us.items() if end <= wait_us}
                following = replace(
                    state,
                    left=state.left.union(leaving),
                    held=frozenset((tensor, end) for tensor, end in end_us.items() if tensor not in released),
                    out_us=out_us,
                ).later(wait_us)
                for back in self._returns(following):
                    yield wait_us, back

    def _returns(self, state: _State) -> Iterator[_State]:
        """Yield the state for each choice of copies to the device."""
        assert self._step.link is not None
        in_transfer = {tensor for tensor, _ in state.held}
        arriving = {tensor for tensor, _ in state.arriving}
        for returning in _subsets(sorted(state.left - state.device, reverse=True)):
            back_us, arrival_us = state.back_us, dict(state.arriving)
            for tensor in returning:
                back_us += self._step.link.to_device_us(self._size[tensor])
                arrival_us[tensor] = back_us
            need = sum(self._size[tensor] for tensor in returning)
            for retained in self._evictions(state.device, in_transfer | arriving, need):
                yield replace(
                    state,
                    device=retained.union(returning),
                    arriving=frozenset(arrival_us.items()),
                    back_us=back_us,
                )


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(
        itertools.combinations(items, count) for count in range(len(items) + 1)
    )
