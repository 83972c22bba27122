"""Runner of CUDA C++, Numba-CUDA and Triton variants, and of libraries, on a GPU of this machine."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.binary.compiled import Binary
from tunebench.compile.numba_cuda import array_parameters
from tunebench.device import Device, local_gpus
from tunebench.fault import DeviceLost
from tunebench.measure._cache_flush import FLUSHED_CACHES, Flush
from tunebench.measure._clock import Clock
from tunebench.measure._device_arrays import ReferenceDevice, reference_device
from tunebench.measure._device_memory import DeviceMemory
from tunebench.measure._gpu import AnyPrepared, Gpu, open_gpu
from tunebench.measure._library_gpu import library_launch, release_libraries
from tunebench.measure._sampler import Sampler
from tunebench.measure.arena import SlotArena
from tunebench.measure.direct_launch import MappedTensor
from tunebench.measure.gpu_settings import GpuSettings, settings_of
from tunebench.measure.judged import JudgedLaunches
from tunebench.measure.loader import CudaError, require_cuda_core
from tunebench.measure.observer import NVML, NvmlObserver, ObservedSamples
from tunebench.measure.runner import Runner, coverage, first_errors, judge, versions
from tunebench.measure.task_limit import outside_limit
from tunebench.measure.timed_launches import TimedLaunches
from tunebench.measure.timing import Protocol, collect
from tunebench.measure.verify import Errors, InputSet, OutputCheck
from tunebench.outcome import Effort, Outcome, Verification, WrongResult
from tunebench.task import Task
from tunebench.variant import (
    NVIDIA_LIBRARIES,
    Argument,
    GpuVariant,
    LibraryGpuVariant,
    NumbaCudaVariant,
    Scalar,
    TensorMap,
)
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["CudaRunner", "gpu_references", "kernel_arguments", "require_cuda_core"]


@dataclass(frozen=True, slots=True)
class _Opened:
    """The GPU as opened by this process."""

    gpu: Gpu
    memory: DeviceMemory
    clock: Clock
    flush: Flush | None
    settings: GpuSettings


class CudaRunner(Runner):
    """Verification on the full workload, then timing between events.

    The device is opened at the first task: a worker that fails at its start cannot report why.

    References of large workloads are computed on the device if torch is installed.

    Args:
        protocol: How samples are taken.
        device: A GPU of this machine.
        trusted: Whether no user's code runs in this process. Otherwise references are computed on the host,
            by functions of NumPy that `tunebench.measure.originals` watches.

    Raises:
        MissingDependency: cuda-core is not installed.
    """

    def __init__(self, protocol: Protocol, device: Device, *, trusted: bool = True) -> None:
        super().__init__(protocol)
        require_cuda_core()
        self._device, self._trusted = device, trusted
        self._opened: _Opened | None = None

    def run(self, task: Task, binary: Binary, abort_above_us: float | None) -> tuple[Outcome, Effort]:
        """Verify and time one configuration.

        Raises:
            CudaError: A CUDA call failed; the next task may run.
            DeviceLost: A fault made the device unusable for this process.
            DeviceError: The device is not on this machine.
        """
        on = self._open()
        with _watched(on, task), on.settings.applied(task.config):
            return self._run(on, task, binary, abort_above_us)

    def serve(self, task: Task, binary: Binary, channel: int) -> tuple[Outcome, Effort]:
        """Run the launches that a judge asks for.

        Raises:
            CudaError, DeviceLost, DeviceError: as `run`.
        """
        on = self._open()
        with _watched(on, task), on.settings.applied(task.config):
            return super().serve(task, binary, channel)

    def judged(self, task: Task, binary: Binary) -> JudgedLaunches:
        """Return the launches of one configuration for a judge; inputs and outputs are copied."""
        return _DeviceLaunches(self._open(), task, binary, self._clock_mhz(task))

    def _clock_mhz(self, task: Task) -> float:
        """Return the highest clock of a task: that of the device, or the one that its configuration locks."""
        return min(self._device.max_clock_mhz, settings_of(task.config).get("sm_clock_mhz", math.inf))

    def reference_device(self, workload: Workload) -> ReferenceDevice | None:
        """Return the GPU for a large workload if torch can use it, else None."""
        return gpu_references(self._device, workload) if self._trusted else None

    def _open(self) -> _Opened:
        if self._opened is None:
            gpu = open_gpu(self._device)
            flush = None
            if self.protocol.cache == "cold":
                nbytes = FLUSHED_CACHES * self._device.l2_bytes
                flush = Flush(gpu.allocate(nbytes), nbytes)
            self._opened = _Opened(
                gpu, DeviceMemory(gpu), Clock(gpu.pci_bus_id), flush, GpuSettings(gpu.pci_bus_id)
            )
        return self._opened

    def _run(
        self, on: _Opened, task: Task, binary: Binary, abort_above_us: float | None
    ) -> tuple[Outcome, Effort]:
        begun = time.perf_counter()
        inputs = self.input_set(task.workload, task.seed)
        first = self.first_inputs(inputs)
        check = self.check(first)
        launches = _prepare(on, task, binary, first)
        errors, wrong = _verify(on, task, check, launches)
        if wrong is not None:
            return WrongResult(reason=wrong), Effort(verify_s=time.perf_counter() - begun)
        on.memory.upload(inputs)
        verified = time.perf_counter()
        memory = _TaskMemory(on.memory, task)
        sampler = Sampler(
            on.gpu,
            on.clock,
            launches,
            flush=on.flush,
            max_clock_mhz=self._clock_mhz(task),
            poison=memory.poison,
        )
        timed = TimedLaunches(memory, inputs, self.check(inputs), self.spare(inputs), thorough=task.thorough)
        limit_us = None if task.thorough else abort_above_us
        observed = ObservedSamples(self._observers(on))
        observed.before()
        samples = collect(timed.wrap(sampler.sample_us), self.protocol_for(task), abort_above_us=limit_us)
        measured = time.perf_counter()
        observed.after()
        errors_timed, wrong = (errors, None) if samples.hopeless else timed.verify()
        wrong = wrong or sampler.skipped_work or _overrun(on, task)
        timed.restore()
        effort = Effort(
            verify_s=verified - begun + time.perf_counter() - measured, measure_s=measured - verified
        )
        if wrong is not None:
            on.memory.forget_inputs()
            return WrongResult(reason=wrong), effort
        if not samples.hopeless:
            observed.repeat(functools.partial(_repeat, on, launches), min(samples.samples_us))
        verification = Verification(
            how=task.workload.verified_by,
            detail=coverage(check, first, inputs) + timed.detail,
            **first_errors(errors, first, inputs).joined(errors_timed).fields(),
        )
        outcome = judge(
            samples,
            cache=self.protocol.cache,
            verification=verification,
            abort_above_us=limit_us,
            conditions=_compiler(binary) | sampler.conditions(samples.samples_us),
        )
        return observed.added_to(outcome), effort

    def _observers(self, on: _Opened) -> list[Any]:
        """Return the observers; that of NVML is made for the opened device."""
        return [NvmlObserver(on.clock) if observer == NVML else observer for observer in self.observers]

    def conditions(self) -> Mapping[str, Any]:
        """Return the device, its driver, and the versions of the compilers and launchers in use."""
        packages = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numba-cuda", "triton", "numpy")
        facts: dict[str, Any] = versions(*packages, "torch", *NVIDIA_LIBRARIES)
        if self._opened is not None:
            gpu, clock = self._opened.gpu, self._opened.clock
            facts |= {"gpu": gpu.name, "cuda": gpu.driver_version(), "driver": clock.driver()}
        return {name: value for name, value in facts.items() if value is not None}


def _repeat(on: _Opened, launches: tuple[AnyPrepared, ...], count: int, during: Callable[[], None]) -> None:
    """Repeat a run, and call a function while the device works on it."""
    for _ in range(count):
        on.gpu.launch(launches)
    during()
    on.gpu.synchronize()


def gpu_references(device: Device, workload: Workload) -> ReferenceDevice | None:
    """Return the GPU that computes the references of a large workload; None if torch cannot use it.

    Args:
        device: A GPU of this machine.
        workload: The workload.
    """
    return _references_on(device.key) if ReferenceDevice.is_worth(workload) else None


@functools.cache
def _references_on(key: str) -> ReferenceDevice | None:
    with outside_limit():  # torch takes seconds to import
        keys = [gpu.key for gpu in local_gpus()]
        return reference_device(f"cuda:{keys.index(key)}")


def _compiler(binary: Binary) -> dict[str, Any]:
    """Return the compiler of a binary as a condition: that of a carried binary is not on this machine."""
    return {"compiler": binary.compiler} if binary.compiler else {}


@contextlib.contextmanager
def _watched(on: _Opened, task: Task) -> Iterator[None]:
    """Raise `DeviceLost` for a fault that outlives the task, and other errors unchanged."""
    try:
        yield
    except CudaError as error:
        on.memory.forget_inputs()
        fault = on.gpu.lost()
        if fault is None:
            raise
        detail = f"{task.variant.key} with {task.config} on {task.workload}: {error}"
        raise DeviceLost(fault, detail) from error


def _prepare(on: _Opened, task: Task, binary: Binary, inputs: InputSet) -> tuple[AnyPrepared, ...]:
    """Prepare one run: memory, kernels, parameters."""
    workload, variant = task.workload, task.variant
    release_libraries()
    addresses = on.memory.hold(workload.inputs(), _written(task))
    on.memory.upload(inputs)
    tensors = variant.tensors(workload, task.config)
    if isinstance(variant, LibraryGpuVariant):
        call_of = functools.partial(variant.call, workload, task.config)
        return (library_launch(call_of, on.gpu.ordinal, tensors, addresses, inputs.inputs),)
    assert isinstance(variant, GpuVariant), variant
    planned = binary.launches(variant.launches(workload, task.config))
    kernels = on.gpu.load(binary.payload, binary.entries)
    return tuple(
        on.gpu.prepare(
            kernel, launch, kernel_arguments(variant, launch.arguments, tensors, addresses, inputs.inputs)
        )
        for kernel, launch in zip(kernels, planned, strict=True)
    )


class _TaskMemory:
    """The tensors of one configuration on the device, for `TimedLaunches`."""

    def __init__(self, memory: DeviceMemory, task: Task) -> None:
        self._memory, self._written = memory, _written(task)
        self._inputs = {tensor.name: tensor for tensor in task.workload.inputs()}
        self._outputs = task.workload.outputs()

    def poison(self) -> None:
        """Overwrite everything that the kernel writes."""
        self._memory.poison(self._written)

    def write(self, name: str, start: int, values: Array) -> None:
        """Overwrite elements of an input, from the flat index `start`."""
        self._memory.write(self._inputs[name], start, values)

    def outputs(self) -> dict[str, Array]:
        """Return copies of the outputs."""
        return {tensor.name: self._memory.download(tensor) for tensor in self._outputs}


class _DeviceLaunches:
    """Launches for a judge on copies of its inputs, whose outputs are copied to its memory."""

    def __init__(self, on: _Opened, task: Task, binary: Binary, max_clock_mhz: float) -> None:
        self._on, self._task, self._binary = on, task, binary
        self._max_clock_mhz = max_clock_mhz
        self._memory = _TaskMemory(on.memory, task)
        self._samples_us: list[float] = []

    def attach(self, arena: SlotArena) -> None:
        """Load the kernels, and prepare a launch with the numbers of the first slot."""
        self._arena, on = arena, self._on
        on.memory.forget_inputs()
        inputs = InputSet(workload=self._task.workload, seed=self._task.seed, inputs=arena.inputs(0))
        self._launches = _prepare(on, self._task, self._binary, inputs)
        on.memory.forget_inputs()
        self._sampler = Sampler(
            on.gpu,
            on.clock,
            self._launches,
            flush=on.flush,
            max_clock_mhz=self._max_clock_mhz,
            poison=self._memory.poison,
        )

    def launch(self, slot: int, repeats: int) -> None:
        """Copy inputs, launch, and copy outputs."""
        self._upload(slot)
        self._memory.poison()
        for _ in range(repeats):
            self._on.gpu.launch(self._launches)
        self._on.gpu.synchronize()
        self._download(slot)

    def time_us(self, slot: int) -> float:
        """Copy inputs, take a sample, and copy outputs."""
        self._upload(slot)
        us = self._sampler.sample_us()
        self._samples_us.append(us)
        self._download(slot)
        return us

    def finish(self) -> tuple[str | None, Mapping[str, Any]]:
        """Return whether the kernel skipped work or wrote past its outputs, and the clocks."""
        wrong = self._sampler.skipped_work or _overrun(self._on, self._task)
        return wrong, _compiler(self._binary) | self._sampler.conditions(tuple(self._samples_us))

    def _upload(self, slot: int) -> None:
        for name, array in self._arena.inputs(slot).items():
            if array.shape:
                self._memory.write(name, 0, array.reshape(-1))

    def _download(self, slot: int) -> None:
        outputs = self._arena.outputs(slot)
        for name, array in self._memory.outputs().items():
            outputs[name][...] = array


def _written(task: Task) -> tuple[Tensor, ...]:
    return (*task.workload.outputs(), *task.variant.scratch(task.workload, task.config))


def _verify(
    on: _Opened, task: Task, check: OutputCheck, launches: tuple[AnyPrepared, ...]
) -> tuple[Errors, str | None]:
    """Run once on poisoned memory; return the largest errors, and why the result is wrong, or None."""
    written = _written(task)
    on.memory.poison(written)
    on.gpu.launch(launches)
    on.gpu.synchronize()
    outputs = {tensor.name: on.memory.download(tensor) for tensor in task.workload.outputs()}
    errors = check.errors(outputs)
    wrong = [] if errors.share <= 1 else [check.describe(outputs, errors.share)]
    if (overrun := _overrun(on, task)) is not None:
        wrong.insert(0, overrun)
    if wrong:
        on.memory.forget_inputs()
    return errors, "; ".join(wrong) or None


def _overrun(on: _Opened, task: Task) -> str | None:
    name = on.memory.overrun(_written(task))
    return None if name is None else f"the kernel wrote past the end of {name}"


def kernel_arguments(
    variant: GpuVariant[Any],
    arguments: Iterable[Argument | TensorMap],
    tensors: Mapping[str, Tensor],
    addresses: Mapping[str, int],
    inputs: Mapping[str, Array],
) -> tuple[Any, ...]:
    """Return the parameters of a launch: addresses as Python integers, numbers as NumPy scalars, tensor maps.

    Args:
        variant: The variant; its language decides whether an array is an address or Numba's parameters.
        arguments: Arguments as the launch names them.
        tensors: Every tensor by name.
        addresses: Device addresses of tensors with a shape.
        inputs: Values of tensors without a shape; half types are passed as their bits.
    """
    in_numba_abi = isinstance(variant, NumbaCudaVariant)
    parameters: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Scalar):
            parameters.append(argument.number())
        elif isinstance(argument, TensorMap):
            parameters.append(MappedTensor(argument, addresses[argument.tensor]))
        elif not tensors[argument].shape:
            value = np.asarray(inputs[argument])
            parameters.append((value.view(np.uint16) if value.itemsize == 2 else value)[()])
        elif in_numba_abi:
            parameters.extend(array_parameters(tensors[argument], addresses[argument]))
        else:
            parameters.append(addresses[argument])
    return tuple(parameters)
