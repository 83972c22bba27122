"""Runner of the variants of this machine's processor."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._host import cores
from tunebench._lazy import np
from tunebench.binary.compiled import Binary
from tunebench.compile.numba_cpu import load_numba_cpu
from tunebench.device import Device
from tunebench.dtype import bits_of
from tunebench.measure.arena import SlotArena
from tunebench.measure.judged import JudgedLaunches
from tunebench.measure.machine import MachineState, RunTimes, ThreadClocks, keep_freed_memory
from tunebench.measure.observer import ObservedSamples
from tunebench.measure.runner import Runner, coverage, first_errors, judge, versions
from tunebench.measure.timed_launches import TimedLaunches
from tunebench.measure.timing import Protocol, collect
from tunebench.measure.verify import Errors, GuardedArray, InputSet, OutputCheck
from tunebench.outcome import Effort, Outcome, Verification, WrongResult
from tunebench.task import Task
from tunebench.variant import LibraryCpuVariant, NumbaCpuVariant, Scalar

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["CpuRunner", "CpuTimer", "kernel_argument"]


_now_ns = time.perf_counter_ns
"""The clock, bound before any kernel could replace it."""

_THREADS_LEFT = "the kernel left threads running, which would work after it was timed"


class CpuTimer:
    """Timing of calls on the processor, with caches flushed before each call if the protocol requires it.

    Args:
        device: The processor, for the size of its last-level cache.
        protocol: Whether to flush.
    """

    def __init__(self, device: Device, protocol: Protocol) -> None:
        cold = protocol.cache == "cold"
        self._flush = np.zeros(2 * device.l2_bytes // 8 if cold else 0)
        self._threads = ThreadClocks(device.sm_count)
        self._runs: list[RunTimes] = []

    def begin(self) -> None:
        """Start to record the times of runs for `conditions`."""
        self._runs.clear()

    def time_us(self, call: Callable[[], object], *, flush: bool = True) -> float:
        """Run `call` once and return its time in microseconds, without waiting for a busy processor.

        Args:
            call: Runs the kernel.
            flush: Whether to flush as the protocol requires; False if another process did.
        """
        if flush:
            self._flush += 1.0
        times = self._threads.times(call, _now_ns)  # the call must not change the clock that ends the sample
        self._runs.append(times)
        return times.run_us

    def conditions(self) -> Mapping[str, Any]:
        """Return the processor time of the runs since `begin`, and how the load of the machine affected them.

        Returns:
            `processor_us`, the median processor time of a run, all threads together; if runs were
            interrupted, `interrupted`, their share, `wall_us`, the median wall time of a run, and
            `processor_share`, the share of the wall time for which the busiest thread had a processor.
        """
        runs = self._runs
        conditions = {"processor_us": round(statistics.median(run.processor_us for run in runs), 3)}
        interrupted = sum(run.interrupted for run in runs)
        if interrupted:
            wall_us = sum(run.wall_us for run in runs)
            conditions["interrupted"] = round(interrupted / len(runs), 3)
            conditions["wall_us"] = round(statistics.median(run.wall_us for run in runs), 3)
            conditions["processor_share"] = round(min(1.0, sum(run.run_us for run in runs) / wall_us), 3)
        return conditions


class _HostMemory:
    """The tensors of one configuration on the host: copies of the inputs, guarded outputs and scratch.

    Args:
        task: The configuration.
        inputs: Values of the inputs.
    """

    def __init__(self, task: Task, inputs: InputSet) -> None:
        workload, variant = task.workload, task.variant
        self._outputs = tuple(tensor.name for tensor in workload.outputs())
        self._inputs = {name: np.array(array, order="C") for name, array in inputs.inputs.items()}
        written = (*workload.outputs(), *variant.scratch(workload, task.config))
        self._written = {tensor.name: GuardedArray(tensor) for tensor in written}
        self.arrays = {**self._inputs, **{name: guarded.array for name, guarded in self._written.items()}}

    def load(self, inputs: InputSet) -> None:
        """Overwrite all inputs."""
        for name, array in self._inputs.items():
            array[...] = inputs.inputs[name]

    def poison(self) -> None:
        """Overwrite everything that the kernel writes."""
        for guarded in self._written.values():
            guarded.poison()

    def write(self, name: str, start: int, values: Array) -> None:
        """Overwrite elements of an input, from the flat index `start`."""
        self._inputs[name].reshape(-1)[start : start + values.size] = values

    def outputs(self) -> dict[str, Array]:
        """Return copies of the outputs."""
        return {name: self.arrays[name].copy() for name in self._outputs}

    def misuse(self, expected: InputSet) -> str | None:
        """Return which memory the kernel wrote that it must not, or None.

        Args:
            expected: The inputs that it was given.
        """
        for guarded in self._written.values():
            if guarded.overrun is not None:
                return f"the kernel wrote past the end of {guarded.overrun}"
        for name, array in self._inputs.items():
            if not np.array_equal(_bits_of(array), _bits_of(expected.inputs[name])):
                return f"the kernel wrote to its input {name}"
        return None


Binder = Callable[[Mapping[str, "Array"]], Callable[[], object]]
"""Returns the launch of a configuration on arrays by name: inputs, outputs and scratch."""


def _binder(task: Task, binary: Binary) -> Binder:
    """Load a configuration."""
    workload, variant, config = task.workload, task.variant, task.config
    if isinstance(variant, LibraryCpuVariant):
        return functools.partial(variant.call, workload, config)
    assert isinstance(variant, NumbaCpuVariant), variant
    kernel, names = load_numba_cpu(binary, variant, workload, config), variant.arguments(workload, config)
    return lambda arrays: functools.partial(kernel, *(kernel_argument(name, arrays) for name in names))


class CpuRunner(Runner):
    """Verification on the full workload, then timing with a monotonic clock, of verified launches.

    Args:
        protocol: How samples are taken.
        device: This machine's processor.
    """

    def __init__(self, protocol: Protocol, device: Device) -> None:
        super().__init__(protocol)
        self._stopwatch = CpuTimer(device, protocol)
        self._machine = MachineState(self._stopwatch.time_us)
        keep_freed_memory()
        self._conditions = _conditions()  # imports Numba now, not in the time of the first configuration

    def run(self, task: Task, binary: Binary, abort_above_us: float | None) -> tuple[Outcome, Effort]:
        """Verify and time one configuration."""
        start = time.perf_counter()
        bind = _binder(task, binary)
        inputs = self.input_set(task.workload, task.seed)
        first = self.first_inputs(inputs)
        check, memory = self.check(first), _HostMemory(task, first)
        launch = bind(memory.arrays)
        with np.errstate(all="ignore"):  # extreme inputs lead to infinities and NaN
            launch()
        errors, wrong = _verify(memory, first, check)
        threads = threading.active_count()  # the kernel may keep those that it started at its first launch
        if wrong is not None:
            return WrongResult(reason=wrong), Effort(verify_s=time.perf_counter() - start)
        memory.load(inputs)
        verified = time.perf_counter()
        launches = TimedLaunches(
            memory, inputs, self.check(inputs), self.spare(inputs), thorough=task.thorough
        )

        def sample_us() -> float:
            memory.poison()
            return self._stopwatch.time_us(launch)

        observed = ObservedSamples(self.observers)
        self._machine.begin()
        observed.before()
        self._stopwatch.begin()
        samples = collect(
            launches.wrap(sample_us),
            self.protocol_for(task),
            abort_above_us=None if task.thorough else abort_above_us,
            seconds=time.thread_time,
        )
        measured = time.perf_counter()
        observed.after()
        conditions = self._stopwatch.conditions()
        conditions = {**conditions, **self._machine.conditions(reference=task.thorough)}
        errors_timed, wrong = (errors, None) if samples.hopeless else launches.verify()
        wrong = wrong or memory.misuse(launches.inputs_of())
        if threading.active_count() > threads + cores():
            wrong = wrong or _THREADS_LEFT
        effort = Effort(
            verify_s=verified - start + time.perf_counter() - measured, measure_s=measured - verified
        )
        if wrong is not None:
            return WrongResult(reason=wrong), effort
        verification = Verification(
            how=task.workload.verified_by,
            detail=coverage(check, first, inputs) + launches.detail,
            **first_errors(errors, first, inputs).joined(errors_timed).fields(),
        )
        outcome = judge(
            samples,
            cache=self.protocol.cache,
            verification=verification,
            abort_above_us=abort_above_us,
            conditions=conditions,
        )
        return observed.added_to(outcome), effort

    def judged(self, task: Task, binary: Binary) -> JudgedLaunches:
        """Return the launches of one configuration for a judge, in memory of the judge."""
        warm = self.protocol.cache == "warm"
        return _HostLaunches(task, _binder(task, binary), self._stopwatch, self._machine, warm=warm)

    def conditions(self) -> Mapping[str, Any]:
        """Return the versions of the compilers and libraries in use."""
        return self._conditions


class _HostLaunches:
    """Launches for a judge, on its memory; scratch belongs to this process."""

    def __init__(
        self,
        task: Task,
        bind: Binder,
        stopwatch: CpuTimer,
        machine: MachineState,
        *,
        warm: bool,
    ) -> None:
        self._bind, self._warm = bind, warm
        self._stopwatch, self._machine = stopwatch, machine
        scratch = task.variant.scratch(task.workload, task.config)
        self._scratch = {tensor.name: GuardedArray(tensor) for tensor in scratch}
        self._threads: int | None = None

    def attach(self, arena: SlotArena) -> None:
        """Prepare the arguments of a launch on each slot."""
        self._arena = arena
        scratch = {name: guarded.array for name, guarded in self._scratch.items()}
        self._launches = [
            self._bind({**arena.inputs(slot), **arena.outputs(slot), **scratch})
            for slot in range(arena.slots)
        ]
        self._machine.begin()
        self._stopwatch.begin()

    def launch(self, slot: int, repeats: int) -> None:
        """Call the kernel; further calls find poisoned outputs, too."""
        for repeat in range(repeats):
            if repeat:
                self._arena.poison(slot)
            with np.errstate(all="ignore"):  # extreme inputs lead to infinities and NaN
                self._launches[slot]()

    def time_us(self, slot: int) -> float:
        """Call the kernel and return its time; the judge flushed the caches, or this process fills them."""
        if self._threads is None:  # the kernel may keep those that it started before
            self._threads = threading.active_count()
        for guarded in self._scratch.values():
            guarded.poison()
        if self._warm:
            self._arena.warm(slot)
        return self._stopwatch.time_us(self._launches[slot], flush=False)

    def finish(self) -> tuple[str | None, Mapping[str, Any]]:
        """Return whether the kernel misused scratch or left threads, and the state of the machine."""
        wrong = next(
            (f"the kernel wrote past the end of {s.overrun}" for s in self._scratch.values() if s.overrun),
            None,
        )
        if threading.active_count() > (self._threads or 0) + cores():
            wrong = wrong or _THREADS_LEFT
        return wrong, {**self._stopwatch.conditions(), **self._machine.conditions(reference=True)}


def _bits_of(array: Array) -> Array:
    """Return the bits of the elements as integers, so that NaN equals NaN."""
    return array.view(f"u{array.dtype.itemsize}")


def _verify(memory: _HostMemory, inputs: InputSet, check: OutputCheck) -> tuple[Errors, str | None]:
    """Return the largest errors of the first launch, and why it is wrong, or None."""
    outputs = memory.outputs()
    errors = check.errors(outputs)
    wrong = None if errors.share <= 1 else check.describe(outputs, errors.share)
    return errors, memory.misuse(inputs) or wrong


def _conditions() -> Mapping[str, Any]:
    import llvmlite
    import numba

    return {
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        **versions("torch"),
        "threads": numba.get_num_threads(),
    }


def kernel_argument(argument: str | Scalar, arrays: Mapping[str, Array]) -> Any:
    """Return a kernel's argument: arrays as `bits_of` returns them, tensors of shape `()` as numbers."""
    if isinstance(argument, Scalar):
        return argument.number()
    array = arrays[argument]
    if not array.shape:
        return np.float32(array)
    return bits_of(array)
