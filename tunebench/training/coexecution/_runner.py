"""The graph runner: runs pieces of a path in a PyTorch thread, concurrently with Python."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tunebench.training.coexecution._script import Runner, forked_runner
from tunebench.training.coexecution._segment import Piece

__all__ = ["GraphRunner", "forget", "is_usable"]

_POLLS = 4_000
"""How often to ask for a result before this thread sleeps: waking it takes longer than most pieces."""


@dataclass(slots=True)
class _LaunchPlan:
    """How a piece is started after others.

    Attributes:
        after: The pieces whose results Python has not taken, in order.
        futures: Those whose futures it gets, by position in `after`.
        inputs: Indices of the values that it gets.
        launch: Function from futures, values and numbers to the future of its results.
    """

    after: tuple[Piece, ...]
    futures: tuple[int, ...]
    inputs: tuple[int, ...]
    launch: Runner


@dataclass(slots=True)
class _Flight:
    """A piece that runs, or waits for its turn.

    Attributes:
        piece: The piece.
        future: The future of its results.
        held: References to its inputs until a later piece has run. Without them and the future, the other
            thread would acquire the GIL to release its references.
        drops: Indices of values to free when a later piece has run.
    """

    piece: Piece
    future: Any
    held: Any
    drops: list[int] = field(default_factory=list)


class GraphRunner:
    """The pieces of one iteration that were started; they run one after another.

    Attributes:
        seconds: Time in which pieces ran, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._flights: list[_Flight] = []
        self._taken: list[_Flight] = []

    def start(self, piece: Piece, values: list[Any], numbers: dict[int, Any]) -> None:
        """Start a piece after those that were started before."""
        flights = self._flights
        plan: _LaunchPlan | None = piece.plan
        if plan is None or len(plan.after) != len(flights) or any(
            known is not flight.piece for known, flight in zip(plan.after, flights, strict=True)
        ):  # fmt: skip
            plan = piece.plan = _planned(piece, [flight.piece for flight in flights])
        inputs = [values[index] for index in plan.inputs]
        held = torch._C.ScriptList(inputs) if inputs else None
        futures = [flights[position].future for position in plan.futures]
        with torch._C._AutoDispatchBelowAutograd():
            future = plan.launch(*futures, *inputs, *[numbers[index] for index in piece.numbers])
        flights.append(_Flight(piece, future, held))

    def take(
        self,
        values: list[Any],
        reads: Collection[int] | None = None,
        touches: frozenset[int] = frozenset(),
        changes: frozenset[int] = frozenset(),
    ) -> None:
        """Wait for the pieces that something depends on, and store their results by index.

        Args:
            values: The values of the iteration.
            reads: Indices of the values that it reads; None to wait for all pieces.
            touches: First values of each memory that it reads or writes.
            changes: First values of each memory that it makes or writes.
        """
        flights = self._flights
        count = len(flights)
        if reads is not None:
            while count:
                piece = flights[count - 1].piece
                if touches & piece.changes or changes & piece.touches or not piece.made.isdisjoint(reads):
                    break
                count -= 1
        if not count:
            return
        taken, self._flights = flights[:count], flights[count:]
        for position, flight in enumerate(taken):
            try:
                *results, start, stop = _result(flight.future)
            except Exception:
                self._flights = taken[position:] + self._flights
                raise
            self.seconds += (stop - start) * 1e-9
            self._taken.append(flight)
            for index, result in zip(flight.piece.outputs, results, strict=True):
                values[index] = result
        for flight in self._taken[:-1]:
            for index in flight.drops:
                values[index] = None
        del self._taken[:-1]

    def drop(self, values: list[Any], indices: Collection[int]) -> None:
        """Free values that nothing reads any more; later if another thread may refer to them."""
        if self._flights:
            self._flights[-1].drops += indices
            return
        last = self._taken[-1] if self._taken else None
        for index in indices:
            if last is not None and last.piece.uses(index):
                last.drops.append(index)
            else:
                values[index] = None

    def end(self) -> None:
        """Forget the results, except the last ones, which the other thread may not have let go yet."""
        if self._taken:
            _LAST[:] = self._taken[-1:]
            self._taken = []

    def stop(self) -> None:
        """Wait until nothing runs; results and errors are lost."""
        for flight in self._flights:
            with contextlib.suppress(Exception):
                flight.future.wait()
        self._flights = []


def _result(future: Any) -> tuple[Any, ...]:
    for _ in range(_POLLS):
        if future.done():
            break
    found: tuple[Any, ...] = future.wait()
    return found


def _planned(piece: Piece, after: Sequence[Piece]) -> _LaunchPlan:
    owners = {index: position for position, other in enumerate(after) for index in other.outputs}
    positions = {owners[index] for index in piece.inputs if index in owners}
    futures = tuple(sorted(positions | ({len(after) - 1} if after else set())))
    inputs = tuple(index for index in piece.inputs if index not in owners)
    launch = forked_runner(
        piece.operations, [after[each].outputs for each in futures], inputs, piece.numbers, piece.outputs
    )
    return _LaunchPlan(tuple(after), futures, inputs, launch)


_LAST: list[_Flight] = []
"""The last piece of the last iteration."""


def forget() -> None:
    """Release the results of the last piece."""
    _LAST.clear()


_EXIT_S = 0.05
"""Time at exit for PyTorch threads to acquire the GIL, in seconds; without it the process aborts."""

_WAIT_S = 2.0
"""Time limit for all PyTorch threads to meet, in seconds; they usually need less than a millisecond."""

_MEETING: list[threading.Barrier] = []


@dataclass(slots=True)
class _Threads:
    """State of PyTorch's inter-operator threads.

    Attributes:
        count: The number of threads for operators of each; 0 if they are not used; None at first.
    """

    count: int | None = None


_THREADS = _Threads()


@atexit.register
def _let_threads_finish() -> None:
    """Release the GIL while threads drop their last references: after exit they could not acquire it."""
    forget()
    if _THREADS.count:
        time.sleep(_EXIT_S)


def _stop_using() -> None:
    """Use no threads: a forked process has none, and a new task could wait forever for their lock."""
    _THREADS.count = 0


os.register_at_fork(after_in_child=_stop_using)


def _set_threads(count: int) -> int:
    """Wait for the other inter-operator threads, so that each of them comes here once, and set its number."""
    try:
        _MEETING[0].wait(_WAIT_S)
    except threading.BrokenBarrierError:
        return 0
    torch.set_num_threads(count)
    return 1


def _set_in_thread(count: int) -> int:
    return _set_threads(count)


def _start_setting(count: int) -> torch.jit.Future[int]:
    return torch.jit.fork(_set_in_thread, count)


@functools.cache
def _setter() -> Any:
    """Return a TorchScript function from a number to a future: a thread of torch's calls `_set_threads`."""
    _set_threads.__annotations__.update({"count": int, "return": int})  # TorchScript reads no names of types
    torch.jit.ignore(_set_threads)
    return torch.jit.script(_start_setting)


def is_usable() -> bool:
    """Return whether torch's inter-operator threads give the bits of this one.

    The number of threads for operators decides the order of sums, and each inter-operator thread keeps the
    number that torch had when it ran its first operator. So each gets the number of this thread, again
    whenever this has another one. A forked process uses none.
    """
    count: int = torch.get_num_threads()
    if _THREADS.count in (0, count):
        return bool(_THREADS.count)
    _THREADS.count = count if _set_all(count) else 0
    return bool(_THREADS.count)


def _set_all(count: int) -> bool:
    threads: int = torch.get_num_interop_threads()
    _MEETING[:] = [threading.Barrier(threads)]
    futures = [_setter()(count) for _ in range(threads)]
    deadline = time.monotonic() + 2 * _WAIT_S
    while not all(future.done() for future in futures):
        if time.monotonic() > deadline:  # other tasks block them
            return False
        time.sleep(1e-4)
    came: int = sum(future.wait() for future in futures)
    return came == threads
