"""The judge: a process that loads no kernel, and that verifies and times those of a measuring process.

It owns the memory of inputs and outputs, draws the inputs, computes references and tolerances, and reads its
own clock around batches of launches. The measuring process runs user code: it may replace whatever it
contains, but it only launches what it is asked to launch, and is stopped while the judge prepares inputs and
reads outputs. Its precise samples are the result if they agree with the judge's clock.

Four tests apply to every configuration (docs/decisions/0097-finalists-are-judged-from-outside.md):

* The outputs of launches that were chosen at random before they ran are within the tolerance.
* The samples are, on average, not much shorter than the launches took by the judge's clock.
* Their median is not much shorter either; else work moves between launches, and the judge's times are the
  result.
* Launches on inputs that are new throughout take no longer than others, at random between them, in which a
  small part differs from the launch before. The samples of new inputs are the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import is_integer
from tunebench.executor._judged_process import Ended, JudgedProcess, Late, Wrong
from tunebench.executor._prepared_launches import LaunchMemory, PreparedLaunches, launch_request, samples_of
from tunebench.kernels import file_of_operator, import_file
from tunebench.measure import runner
from tunebench.measure.arena import slot_bytes
from tunebench.measure.comparison import randomization_probability
from tunebench.measure.cuda import gpu_references
from tunebench.measure.fresh_inputs import FreshInputs
from tunebench.measure.judged import take_channel
from tunebench.measure.machine import keep_freed_memory
from tunebench.measure.sampled import check_of
from tunebench.measure.timing import Protocol, Samples
from tunebench.measure.verify import POISON, Errors, InputSet, OutputCheck, draw_stress
from tunebench.outcome import Effort, Outcome, Verification, WrongResult
from tunebench.task import Task
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["JudgeSetup", "JudgedCase", "Verdict", "examine", "start"]

CHANGED_SHARE = 0.25
"""Share of timed launches whose inputs differ little from those of the launch before."""
LEAST_CHANGED = 8
"""Minimum number of these launches; with 30 others, 5e7 ways to choose them are equally likely."""
CHANCE = 1e-6
"""Probability below which the two kinds of launches differ not by chance: the rate of false alarms."""
SAVING = 1.25
"""Least ratio of the times of both kinds that is a finding: branches of known data are predicted better."""

MARGIN = 1.5
"""Largest ratio of the time by the judge's clock and by the samples."""
REPEATED, REPEATED_US = 4 / 3, 15.0
"""A repetition, which also poisons outputs, may take this many times as long as a launch, plus some time."""
COLD = 3.0
"""Largest ratio of the times of a launch with the caches that the judge leaves and with warm ones."""
HANDOVER_US = 60.0
"""Time of a batch that is not that of its launches, in microseconds: messages, and the start of threads."""
LOOP_US = 2.0
"""Time that the loop around a launch may take, in microseconds: the samples leave it out."""
LONGEST_HANDOVER_US = 200.0
"""Largest time of an empty batch that is left out of that of a launch alone: a kernel may delay it."""
READING_US = 100.0
"""Time that reading the clocks may take per timed launch, in microseconds."""
SHORT_US = 1000.0
"""Time of a launch below which reading the clocks takes a notable part: it is also run without that."""
UNTIMED_US = 3000.0
"""Duration of a batch of untimed launches."""
UNTIMED_BATCHES = 4
REPETITIONS = 3
"""Repetitions of the comparison of both clocks before a finding."""

VERIFY_S = 0.05
"""Time after which no further launch is verified; one always is."""
MOST_KEPT_BYTES = 256 << 20
MOST_KEPT = 16
"""Launches kept to be verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSetup:
    """Configuration of a judge.

    Attributes:
        device: The device that the measuring process uses.
        protocol: How samples are taken.
        limit_s: Time limit of all launches of a configuration, in seconds.
    """

    device: Device
    protocol: Protocol
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCase:
    """What a measuring process runs for a judge, without its kernel.

    Attributes:
        workload: The pickled workload.
        operator_file: The user's file that defines its operator, which is loaded then; None for others.
        guard: Process id of the measuring process's guard (see `tunebench.executor._supervisor`).
        name: Variant and configuration: extreme inputs are tried once for each.
    """

    workload: bytes
    operator_file: str | None
    guard: int
    name: str

    @classmethod
    def of(cls, workload: Workload, name: str, guard: int) -> JudgedCase:
        """Return the case of a workload.

        Args:
            workload: The workload.
            name: What the process runs.
            guard: Process id of its guard.
        """
        return cls(
            workload=pickle.dumps(workload),
            operator_file=file_of_operator(workload),
            guard=guard,
            name=name,
        )

    @classmethod
    def of_task(cls, task: Task, guard: int) -> JudgedCase:
        """Return the case of a task that a measuring process runs."""
        return cls.of(task.workload, f"{task.variant.key} {task.config}", guard)

    def load(self) -> Workload:
        """Return the workload."""
        if self.operator_file is not None:
            import_file(self.operator_file)
        workload: Workload = pickle.loads(self.workload)  # noqa: S301 - from our own parent
        return workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of an examination.

    Attributes:
        outcome: The outcome; None if the measuring process ended before there was one.
        effort: Time that verifying and timing took.
    """

    outcome: Outcome | None
    effort: Effort


_setup: JudgeSetup | None = None
_rng: Any = None
_inputs: _WorkloadInputs | None = None


class _WorkloadInputs:
    """Inputs of a workload: new ones, and extreme ones with their check.

    Args:
        workload: The workload.
        setup: Protocol, and the device, which computes references of large workloads if it is a GPU.
    """

    def __init__(self, workload: Workload, setup: JudgeSetup) -> None:
        self._device = setup.device
        self.fresh = FreshInputs(workload, _rng)
        self.memory = LaunchMemory(self.fresh, setup.device, setup.protocol)
        self.extreme_errors: dict[str, float] = {}

    @functools.cached_property
    def extreme(self) -> tuple[InputSet, OutputCheck] | None:
        """Extreme inputs and the check of their outputs; None if the operator states none."""
        inputs = draw_stress(self.input_set(self.fresh.first))
        return None if inputs is None else (inputs, check_of(inputs))

    def input_set(self, inputs: Mapping[str, Array]) -> InputSet:
        """Return inputs of the workload with their reference."""
        workload = self.fresh.workload
        on = gpu_references(self._device, workload) if self._device.kind == "gpu" else None
        return InputSet(workload=workload, seed=int(_rng.integers(1 << 62)), inputs=inputs, on=on)


def start(setup: JudgeSetup) -> None:
    """Prepare this process: draw the secret from which all inputs and choices follow."""
    global _setup, _rng
    keep_freed_memory()
    _setup, _rng = setup, np.random.default_rng(secrets.randbits(128))


def examine(case: JudgedCase) -> Verdict:
    """Verify and time the configuration that a measuring process has loaded."""
    global _inputs
    channel = take_channel()
    if _setup is None or channel is None:
        raise RuntimeError("examine needs start(setup) and a connection to the measuring process")
    with contextlib.closing(Connection(channel)) as connection:
        workload = case.load()
        if _inputs is None or _inputs.fresh.workload != workload:
            _inputs = None  # releases its memory first
            _inputs = _WorkloadInputs(workload, _setup)
        began = time.perf_counter()
        process = JudgedProcess(connection, case.guard, _setup.limit_s)
        examination = _Examination(case.name, _inputs, process, _setup, _rng)
        try:
            outcome: Outcome | None = examination.outcome()
        except Ended:
            outcome = None
        except Wrong as wrong:
            outcome = WrongResult(reason=str(wrong))
        except Late as late:
            outcome = late.outcome
            process.kill()
        finally:
            process.resume()
    spent_s, measure_s = time.perf_counter() - began, process.spent_us / 1e6
    return Verdict(
        outcome=outcome, effort=Effort(verify_s=max(0.0, spent_s - measure_s), measure_s=measure_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptLaunch:
    """A launch to verify."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


@dataclass(slots=True)
class _TimedLaunches:
    """Samples on new and on little changed inputs, and the time per launch of each batch."""

    new_us: list[float] = field(default_factory=list)
    changed_us: list[float] = field(default_factory=list)
    launch_us: list[float] = field(default_factory=list)


class _Examination:
    """Examination of one configuration.

    Args:
        name: Variant and configuration.
        inputs: Inputs of its workload.
        process: The measuring process.
        setup: Device and protocol.
        rng: All choices; secret.
    """

    def __init__(
        self, name: str, inputs: _WorkloadInputs, process: JudgedProcess, setup: JudgeSetup, rng: Any
    ) -> None:
        self._name = name
        self._inputs, self._fresh = inputs, inputs.fresh
        self._process, self._rng = process, rng
        self._workload, self._device = self._fresh.workload, setup.device
        self._protocol = dataclasses.replace(setup.protocol, **runner.THOROUGH)
        self._prepared = PreparedLaunches(inputs.memory, process, rng)
        self._arena = self._prepared.arena
        self._kept: list[_KeptLaunch] = []
        self._launches = self._batches = 0
        self._timed = _TimedLaunches()

    def outcome(self) -> Outcome:
        """Return the outcome."""
        self._prepared.open()
        worst_extreme = self._inputs.extreme_errors.get(self._name)
        if worst_extreme is None and (worst_extreme := self._verify_extreme()) is not None:
            self._inputs.extreme_errors[self._name] = worst_extreme
        self._run(2)  # compiles and loads what the kernel leaves until its first launch
        timed = self._timed
        self._prepared.sample(
            self._protocol,
            timed.new_us,
            self._time_batch,
            lambda: len(timed.changed_us) >= LEAST_CHANGED,
        )
        together_us, alone_us = self._together_us(), self._alone_us()
        for _ in range(REPETITIONS):
            if max(self._ratios(together_us, alone_us)) > MARGIN:  # other programs may have been in the way
                for _ in range(UNTIMED_BATCHES):
                    self._time_batch()
                together_us = min(together_us, self._together_us(), key=min)
                alone_us = min(alone_us, self._alone_us(), key=functools.partial(min, default=0.0))
        ratio, ratio_of_median = self._ratios(together_us, alone_us)
        reply, _ = self._process.ask({"do": "finish"})
        if isinstance(reply.get("wrong"), str):
            raise Wrong(reply["wrong"])
        self._refute_saving()
        errors, verified, detail = self._verify()
        if worst_extreme is not None:
            errors = errors.joined(Errors(share=worst_extreme))
            detail = f"{detail}, also for extreme inputs"
        self._refute_samples(ratio)
        which = f"; {verified} of {self._launches} launches, chosen at random"
        alike = ratio_of_median <= MARGIN
        unlike_conditions = {} if alike else {"outside_ratio_of_median": round(ratio_of_median, 3)}
        return runner.judge(
            Samples(tuple(self._timed.new_us if alike else max(together_us, alone_us, key=min))),
            cache=self._protocol.cache,
            verification=Verification(
                how=self._workload.verified_by, detail=detail + which, **errors.fields()
            ),
            abort_above_us=None,
            conditions=_conditions(reply) | {"outside_ratio": round(ratio, 3)} | unlike_conditions,
        )

    # -- launches --------------------------------------------------------------------------------------------

    def _time_batch(self) -> None:
        """Time a batch of launches, some of them on little changed inputs."""
        count = self._prepared.batch
        changed = self._rng.random(count) < CHANGED_SHARE
        reply, outside_us = self._run(count, changed, do="time")
        samples_us = samples_of(reply, count)
        for us, is_changed in zip(samples_us, changed, strict=True):
            (self._timed.changed_us if is_changed else self._timed.new_us).append(us)
        self._timed.launch_us.append(outside_us / count - HANDOVER_US / count - READING_US)

    def _ratios(self, together_us: Sequence[float], alone_us: Sequence[float]) -> tuple[float, float]:
        """Return the times of launches by this process's clock over the mean and the median of the samples.

        A batch does the work of all its launches, whichever of them does it: their mean is not shorter.
        Launches of a batch could share processors that one of them cannot use; one alone cannot.
        """
        new_us, together = self._timed.new_us, min(together_us)
        mean_us = statistics.fmean([*new_us, *self._timed.changed_us])
        longer_us = max(together, min(alone_us, default=0.0))
        return together / max(1e-3, mean_us), longer_us / max(1e-3, statistics.median(new_us))

    def _together_us(self) -> list[float]:
        """Return times per launch of batches by this process's clock."""
        median_us = statistics.median(self._timed.new_us)  # a mean would be that of a rare long launch
        count = min(self._arena.slots, max(2, int(UNTIMED_US / max(median_us, 1.0))))
        if self._prepared.flushes:
            return self._timed.launch_us if median_us > SHORT_US else self._batches_us(count)
        # Batches contain copies, or fill caches; repetitions of launches make them longer by launches only.
        once_us, repeats = self._batches_us(count), 2 + int(UNTIMED_US / max(median_us, 1.0) / count)
        longer_us = [max(0.0, us - min(once_us)) for us in self._batches_us(count, repeats)]
        repeated_us = [us / (repeats - 1) for us in longer_us]
        if self._device.kind != "cpu":
            return repeated_us
        return max(
            [(us - REPEATED_US) / REPEATED for us in repeated_us], [us / COLD for us in once_us], key=min
        )

    def _alone_us(self) -> list[float]:
        """Return times of single launches by this process's clock, without the exchange of messages.

        Code and inputs are in the caches, as in a batch or nearer. Empty on a GPU, where batches contain
        copies.
        """
        if self._device.kind != "cpu":
            return []
        empty_us = [self._process.ask(launch_request([]))[1] for _ in range(UNTIMED_BATCHES)]
        batches_us = [self._run(1, flush=False)[1] for _ in range(UNTIMED_BATCHES)]
        handover_us = min(LONGEST_HANDOVER_US, max(HANDOVER_US, statistics.median(empty_us)))
        share = 1.0 if self._prepared.flushes else 1 / COLD
        return [share * max(0.0, us - handover_us) for us in batches_us]

    def _batches_us(self, count: int, repeats: int = 1) -> list[float]:
        """Return the times per launch of some batches that this process alone times."""
        batches_us = [self._run(count, repeats=repeats)[1] for _ in range(UNTIMED_BATCHES)]
        return [max(0.0, (us - HANDOVER_US) / count - LOOP_US) for us in batches_us]

    def _run(
        self,
        count: int,
        changed: Sequence[bool] | None = None,
        *,
        do: str = "launch",
        repeats: int = 1,
        flush: bool = True,
    ) -> tuple[dict[str, Any], float]:
        """Run a batch of launches, each on a slot of its own, and keep one of them to verify.

        Returns:
            The reply, and the time by the judge's clock, in microseconds.
        """
        slots = self._prepared.prepare(count, changed)
        position = self._position()  # chosen before the launches: their inputs are compared, too
        chosen = self._choose(slots, changed)
        inputs = {} if position is None else _copies(self._arena.inputs(chosen))
        reply, us = self._prepared.run(slots, do, repeats=repeats, flush=flush)
        self._launches += count
        self._refute_misuse(slots)
        if position is not None:
            self._refute_changes(self._arena.inputs(chosen), inputs)
            outputs = _copies(self._arena.outputs(chosen))
            self._kept[position : position + 1] = [_KeptLaunch(inputs=inputs, outputs=outputs)]
        return reply, us

    def _choose(self, slots: Sequence[int], changed: Sequence[bool] | None) -> int:
        """Return the slot of a batch to keep: in half of the batches one with little changed inputs."""
        flags = [False] * len(slots) if changed is None else changed
        similar = [slot for slot, is_changed in zip(slots, flags, strict=True) if is_changed]
        choices = similar if similar and self._rng.random() < 0.5 else slots
        return int(choices[int(self._rng.integers(len(choices)))])

    def _position(self) -> int | None:
        """Return where to keep a launch of the next batch, or None; each batch is as likely to stay."""
        self._batches += 1
        most = max(1, min(MOST_KEPT, MOST_KEPT_BYTES // slot_bytes(self._workload)))
        if len(self._kept) < most:
            return len(self._kept)
        position = int(self._rng.integers(self._batches))
        return position if position < most else None

    def _verify_extreme(self) -> float | None:
        """Verify a launch on extreme inputs; return its error, or None if the operator states none."""
        if (checked := self._inputs.extreme) is None:
            return None
        inputs, check = checked
        for name, array in self._arena.inputs(0).items():
            array[...] = inputs.inputs[name]
        self._arena.poison(0)
        self._process.ask(launch_request([0]))
        self._refute_misuse([0])
        error = check.worst(self._arena.outputs(0))
        if not error <= 1:
            raise Wrong(f"on extreme inputs: {check.describe(self._arena.outputs(0), error)}")
        return error

    # -- tests -----------------------------------------------------------------------------------------------

    def _refute_misuse(self, slots: Sequence[int]) -> None:
        """Raise `Wrong` if a launch wrote outside of its outputs, or left elements of them unwritten."""
        for slot in slots:
            if (name := self._arena.overrun(slot)) is not None:
                raise Wrong(f"the kernel wrote past the end of {name}")
            if (element := self._unwritten(slot)) is not None:
                raise Wrong(f"in a launch on new inputs: {element} was not written")

    def _refute_changes(self, after: Mapping[str, Array], before: Mapping[str, Array]) -> None:
        """Raise `Wrong` if a launch changed its inputs."""
        for name, array in after.items():
            if not np.array_equal(_bits(array), _bits(before[name])):
                raise Wrong(f"the kernel wrote to its input {name}")

    def _unwritten(self, slot: int) -> str | None:
        """Return an element of a floating-point output that is still poisoned, or None."""
        for tensor in self._workload.outputs():
            if is_integer(tensor.dtype) or tensor.dtype == "bool":
                continue
            array = self._arena.outputs(slot)[tensor.name]
            bits = _bits(array)
            poison = int.from_bytes(bytes([POISON]) * array.itemsize)
            if bits.max(initial=0) == poison:
                at = np.unravel_index(int(bits.argmax()), array.shape)
                return f"{tensor.name}[{','.join(str(int(i)) for i in at)}]"
        return None

    def _refute_saving(self) -> None:
        """Raise `Wrong` if launches on little changed inputs are faster: it keeps earlier results."""
        new_us, changed_us = self._timed.new_us, self._timed.changed_us
        new, changed = statistics.median(new_us), statistics.median(changed_us) if changed_us else 0.0
        if not changed_us or new <= SAVING * changed:
            return
        chance = randomization_probability(changed_us, new_us)
        if chance < CHANCE:
            raise Wrong(
                f"the kernel saves work between launches: a launch takes {significant(new, 3)} us on new "
                f"inputs, but {significant(changed, 3)} us if a part of them differs from the launch before "
                f"(probability of chance {significant(chance, 2)})"
            )

    def _refute_samples(self, ratio: float) -> None:
        """Raise `Wrong` if launches take much longer by the judge's clock than by the samples."""
        mean_us = statistics.fmean([*self._timed.new_us, *self._timed.changed_us])
        if ratio > MARGIN:
            raise Wrong(
                f"the samples are not the times of the launches: their mean is {significant(mean_us, 3)} "
                f"us, but by another process's clock a launch takes {significant(ratio, 3)} times as long"
            )

    def _verify(self) -> tuple[Errors, int, str]:
        """Verify kept launches.

        Returns:
            The largest errors, the number of verified launches, and what a check covers.
        """
        worst, verified, detail, began = Errors(), 0, "", time.perf_counter()
        for launch in self._kept:
            inputs = self._inputs.input_set(launch.inputs)
            check = check_of(inputs)
            errors = check.errors(launch.outputs)
            worst, verified, detail = worst.joined(errors), verified + 1, check.detail
            if not errors.share <= 1:
                raise Wrong(f"in a launch on new inputs: {check.describe(launch.outputs, errors.share)}")
            if time.perf_counter() - began > VERIFY_S:
                break
        return worst, verified, detail


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def _bits(array: Array) -> Array:
    """Return the bits of all elements as integers, so that NaN equals NaN."""
    return array.reshape(-1).view(f"u{array.itemsize}")


def _conditions(reply: Mapping[str, Any]) -> dict[str, Any]:
    conditions = reply.get("conditions")
    return dict(conditions) if isinstance(conditions, dict) else {}
