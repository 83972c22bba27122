"""Inputs and checks of timed launches: none can reuse an earlier result, and random ones are verified.

A kernel that is correct when it is verified may skip work when it is timed: it returns what is still in its
output, replays a result, or leaves the work to a thread. Therefore, before each timed launch, its
outputs are poisoned, and a random run of elements of each input is exchanged. The cost of an honest kernel is
the same for every input. After timing, outputs of random launches are compared with the reference of their
own inputs. They are chosen after each launch, so that no kernel can foresee the choice.

Where a reference is expensive, the search compares launches on unchanged inputs with the reference it has, in
random elements. Every finalist is compared with a new reference in every element.

Source: the cheating kernels of KernelBench ("Eval unit tests for adversarial eval testing") and of GPU MODE
(reference-kernels, "reward hacks fabricating benchmark time"; pygpubench, "exploit test suite").
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tunebench._lazy import np
from tunebench.measure.sampled import check_of
from tunebench.measure.task_limit import outside_limit
from tunebench.measure.verify import Errors, InputSet, OutputCheck

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Workload

__all__ = ["LaunchMemory", "TimedLaunches", "changing_inputs", "spare_inputs"]

AFFORDABLE_WORK = 4_000_000
"""FLOPs plus bytes up to which every trial of a search gets a new reference: it takes a few milliseconds."""

VERIFIED_LAUNCHES = 2
"""Timed launches verified per task; one if its reference is expensive."""

LONGEST_RUN_BYTES = 1 << 20
"""Limit on the bytes of an input that change between launches, since they are copied to the device."""


class LaunchMemory(Protocol):
    """Memory of a kernel's tensors, on the host or on a device."""

    def write(self, name: str, start: int, values: Array) -> None:
        """Overwrite elements of an input, from the flat index `start`."""

    def outputs(self) -> dict[str, Array]:
        """Return copies of the outputs."""


def spare_inputs(workload: Workload) -> Mapping[str, Array]:
    """Return spare inputs from which timed launches exchange parts; kernels do not know their seed."""
    with outside_limit():
        drawn = workload.draw(np.random.default_rng(secrets.randbits(128)))
    return {name: np.ascontiguousarray(array) for name, array in drawn.items()}


_INDEX_TYPES = ("i32", "i64")
"""Types of indices and offsets, which may depend on one another and stay as they are."""


def changing_inputs(workload: Workload) -> tuple[str, ...]:
    """Return the names of the inputs that differ between launches: all but numbers, indices and offsets."""
    return tuple(t.name for t in workload.inputs() if t.size > 1 and t.dtype not in _INDEX_TYPES)


Changes = Mapping[str, slice]
"""The flat range of each input that is exchanged."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A timed launch to verify: the changes of its inputs, and its outputs."""

    changes: Changes
    outputs: Mapping[str, Array]


class TimedLaunches:
    """Preparation of each timed launch, and verification of some.

    Args:
        memory: The tensors; its inputs are `inputs`.
        inputs: The verified inputs.
        check: Check of outputs computed from `inputs`.
        spare: Inputs to exchange parts with.
        thorough: Whether to compute references whatever they cost.
        rng: Random choices; the default cannot be predicted by a kernel.
    """

    def __init__(
        self,
        memory: LaunchMemory,
        inputs: InputSet,
        check: OutputCheck,
        spare: Mapping[str, Array],
        *,
        thorough: bool,
        rng: numpy.random.Generator | None = None,
    ) -> None:
        workload = inputs.workload
        work = workload.flops() + workload.traffic().total_bytes
        self._memory, self._inputs, self._check, self._spare = memory, inputs, check, spare
        self._rng = rng or np.random.default_rng(secrets.randbits(128))
        self._own_reference = thorough or work <= AFFORDABLE_WORK
        self._most = VERIFIED_LAUNCHES if work <= AFFORDABLE_WORK or not thorough else 1
        self._changing = changing_inputs(workload)
        self._changes: Changes = {}
        self._kept: list[_Kept] = []
        self._launches = self._eligible = 0

    def wrap(self, sample_us: Callable[[], float]) -> Callable[[], float]:
        """Return a function that changes the inputs, takes a sample, and may keep the outputs.

        Args:
            sample_us: Poisons the outputs, launches the kernel and returns its time in microseconds.
        """

        def sample() -> float:
            self._prepare()
            us = sample_us()
            self._keep()
            return us

        return sample

    def _prepare(self) -> None:
        """Exchange new parts of the inputs."""
        self.restore()
        self._changes = {} if self._unchanged() else {name: self._run(name) for name in self._changing}
        for name, run in self._changes.items():
            self._memory.write(name, run.start, _flat(self._spare, name)[run])

    def restore(self) -> None:
        """Write the verified inputs again where the latest launch had others."""
        for name, run in self._changes.items():
            self._memory.write(name, run.start, _flat(self._inputs.inputs, name)[run])
        self._changes = {}

    def _unchanged(self) -> bool:
        """Return whether the next launch reads the verified inputs, whose reference is known."""
        if self._own_reference:
            return False
        return (not self._eligible and self._launches > 1) or bool(self._rng.random() < 0.5)

    def _run(self, name: str) -> slice:
        """Return a random range of an input, from a 256th to half of it."""
        values = _flat(self._spare, name)
        longest = min(values.size // 2, LONGEST_RUN_BYTES // values.itemsize)
        length = max(1, int(longest * 2.0 ** -self._rng.uniform(0, 7)))
        start = int(self._rng.integers(values.size - length + 1))
        return slice(start, start + length)

    def _keep(self) -> None:
        """Keep the outputs of this launch with equal probability for all launches, as reservoir sampling."""
        self._launches += 1
        if self._changes and not self._own_reference:
            return
        self._eligible += 1
        full = len(self._kept) == self._most
        slot = int(self._rng.integers(self._eligible)) if full else len(self._kept)
        if slot < self._most:
            self._kept[slot:] = [_Kept(self._changes, self._memory.outputs()), *self._kept[slot + 1 :]]

    def verify(self) -> tuple[Errors, str | None]:
        """Verify the kept launches.

        Returns:
            The largest errors, and why a result is wrong, or None.
        """
        worst = Errors()
        for launch in self._kept:
            if self._own_reference:
                check = check_of(self.inputs_of(launch.changes))
                errors = check.errors(launch.outputs)
            else:
                check = self._check
                errors = check.spot(launch.outputs, self._rng)
            worst = worst.joined(errors)
            if not errors.share <= 1:
                return worst, f"in a timed launch: {check.describe(launch.outputs, errors.share)}"
        return worst, None

    @property
    def detail(self) -> str:
        """What was verified, for `Verification.detail`."""
        which = "" if self._own_reference else "random elements of "
        return f"; before timing, and {which}{len(self._kept)} of {self._launches} timed launches"

    def inputs_of(self, changes: Changes | None = None) -> InputSet:
        """Return the inputs of a launch; of the latest without an argument."""
        chosen = self._changes if changes is None else changes
        if not chosen:
            return self._inputs
        changed = dict(self._inputs.inputs)
        for name, run in chosen.items():
            changed[name] = changed[name].copy()
            _flat(changed, name)[run] = _flat(self._spare, name)[run]
        return dataclasses.replace(self._inputs, inputs=changed)


def _flat(arrays: Mapping[str, Array], name: str) -> Array:
    return arrays[name].reshape(-1)
