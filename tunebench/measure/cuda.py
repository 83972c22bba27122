"""Runs CUDA C++ and Numba-CUDA variants on a GPU of this machine.

A sample is the time between two events around the launches of one run. Before it the last-level cache is
overwritten (cold), or the kernel runs without being timed (warm); either keeps the device busy while the host
enqueues what is timed, so that the time of the host never shows. Kernels of a few microseconds are timed in
batches where the cache may be warm: a batch cannot be flushed.

Source: the rules follow NVBench (NVIDIA, "NVBench: benchmark options"): the flush, the discarding of samples
taken at a low clock, and batches.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.compile.binary import Binary
from tunebench.compile.numba_cuda import array_parameters
from tunebench.device import Device
from tunebench.dtype import numpy_dtype
from tunebench.fault import DeviceLost
from tunebench.measure._clock import Clock
from tunebench.measure._gpu import CudaError, Gpu, Prepared, open_gpu, require_cuda_core
from tunebench.measure.runner import Runner, judge
from tunebench.measure.timing import Protocol, collect
from tunebench.measure.verify import Check, InputSet
from tunebench.outcome import Effort, Outcome, Verification, WrongResult
from tunebench.task import Task
from tunebench.variant import Argument, GpuVariant, NumbaCudaVariant, Scalar
from tunebench.workload import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["CudaRunner", "DeviceMemory", "Sampler", "kernel_arguments"]

POISON = 0xFF
"""A byte that reads as NaN in every floating-point type if repeated."""
GUARD_BYTES = 4096
"""Bytes behind each output that must stay poisoned: a kernel that writes there writes out of bounds."""
FLUSHED_CACHES = 2
"""Times the last-level cache that is overwritten before a cold sample."""
SHORT_US = 20.0
"""Runs shorter than this are near the resolution of events: batched if the cache is warm, noted if cold."""
BATCH_US = 400.0
"""How long a batch of short runs takes."""
MOST_IN_BATCH = 1000
RESOLUTION_US = 0.5
"""Source: CUDA Driver API, cuEventElapsedTime: "a resolution of approximately 0.5 microseconds"."""
LOWEST_CLOCK = 0.75
"""Samples taken below this share of the highest clock are discarded."""
RECOVERY_S = 0.05
"""Pause after a discarded sample, for the clock to recover."""
MOST_DISCARDED = 20
"""So many samples of one configuration are discarded; then the clock is taken as it is, and that is told."""
MOST_COVERS = 64
"""Most repetitions of what keeps the device busy while the host enqueues."""


class DeviceMemory:
    """Arrays on the device by name, of exactly their size; kept as long as the next run needs the same.

    Args:
        gpu: Where.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._addresses: dict[Tensor, int] = {}
        self._uploaded: InputSet | None = None

    def hold(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> dict[str, int]:
        """Have room for tensors that kernels read and write, and for no others; return their addresses."""
        sizes = {tensor: tensor.nbytes for tensor in read if tensor.shape}
        sizes |= {tensor: tensor.nbytes + GUARD_BYTES for tensor in written}
        for tensor in [held for held in self._addresses if held not in sizes]:
            self.forget_inputs()  # what was uploaded may be among them
            self._gpu.free(self._addresses.pop(tensor))
        for tensor, nbytes in sizes.items():
            if tensor not in self._addresses:
                self.forget_inputs()
                self._addresses[tensor] = self._gpu.allocate(nbytes)
        return {tensor.name: self._addresses[tensor] for tensor in sizes}

    def upload(self, inputs: InputSet) -> None:
        """Copy inputs to the device, unless they are there already."""
        if self._uploaded is inputs:
            return
        for tensor in inputs.workload.inputs():
            if tensor.shape:
                array = np.ascontiguousarray(inputs.inputs[tensor.name])
                self._gpu.upload(self._addresses[tensor], array)
        self._uploaded = inputs

    def forget_inputs(self) -> None:
        """Upload inputs again before the next run: a kernel that failed may have overwritten them."""
        self._uploaded = None

    def poison(self, written: Iterable[Tensor]) -> None:
        """Overwrite outputs and scratch memory, and what lies behind them."""
        for tensor in written:
            self._gpu.fill(self._addresses[tensor], POISON, tensor.nbytes + GUARD_BYTES)

    def download(self, tensor: Tensor) -> Array:
        """Return a copy of a tensor."""
        array = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
        self._gpu.download(self._addresses[tensor], array)
        return array

    def overrun(self, written: Iterable[Tensor]) -> str | None:
        """Return the name of a tensor that was written past its end, or None."""
        guard = np.empty(GUARD_BYTES, np.uint8)
        for tensor in written:
            self._gpu.download(self._addresses[tensor] + tensor.nbytes, guard)
            if not (guard == POISON).all():
                return tensor.name
        return None


class Sampler:
    """Takes samples of one configuration.

    Args:
        gpu: Where it runs.
        clock: Clocks of that GPU.
        launches: One run.
        flush: Address and size of memory to overwrite before each sample; None leaves caches warm.
        max_clock_mhz: Highest clock of the device.
    """

    def __init__(
        self,
        gpu: Gpu,
        clock: Clock,
        launches: tuple[Prepared, ...],
        *,
        flush: tuple[int, int] | None,
        max_clock_mhz: float,
    ) -> None:
        self._gpu, self._clock, self._launches, self._flush = gpu, clock, launches, flush
        self._lowest_mhz = LOWEST_CLOCK * max_clock_mhz
        self._clocks_mhz: list[float] = []
        self._throttled_by: set[str] = set()
        self._discarded = self._slow = 0
        first = gpu.time(self._once, self._run)
        self._batch = self._batch_for(first.device_us) if flush is None else 1
        self._graph = gpu.graph(launches, self._batch) if self._batch > 1 else None
        self._covers = self._covers_for(first.host_us, first.device_us * self._batch)

    def _batch_for(self, run_us: float) -> int:
        return 1 if run_us >= SHORT_US else min(MOST_IN_BATCH, math.ceil(BATCH_US / max(run_us, 0.1)))

    def _covers_for(self, host_us: float, run_us: float) -> int:
        """Return how often to repeat what precedes a sample so that it lasts longer than enqueuing does."""
        cover_us = run_us if self._flush is None else self._gpu.time(_nothing, self._overwrite).device_us
        return max(1, min(MOST_COVERS, math.ceil(2 * host_us / max(cover_us, 0.1))))

    def _run(self) -> None:
        if self._graph is None:
            self._gpu.launch(self._launches)
        else:
            self._gpu.replay(self._graph)

    _graph = None

    def _once(self) -> None:
        """Enqueue once what precedes a sample."""
        if self._flush is None:
            self._run()
        else:
            self._overwrite()

    def _cover(self) -> None:
        for _ in range(self._covers):
            self._once()

    def _overwrite(self) -> None:
        assert self._flush is not None
        address, nbytes = self._flush
        self._gpu.fill(address, 0, nbytes)

    def sample_us(self) -> float:
        """Return the time of one run, in microseconds, taken at a sufficient clock if the device has one."""
        while True:
            sample = self._gpu.time(self._cover, self._run).device_us / self._batch
            mhz = self._clock.sm_mhz()
            self._throttled_by |= self._clock.throttled_by()
            slow = mhz is not None and mhz < self._lowest_mhz
            if not slow or self._discarded >= MOST_DISCARDED:
                break
            self._discarded += 1
            time.sleep(RECOVERY_S)
        self._slow += slow
        self._clocks_mhz += [] if mhz is None else [mhz]
        return sample

    def conditions(self, samples_us: tuple[float, ...]) -> dict[str, Any]:
        """Return what else is to be known about the samples taken."""
        facts: dict[str, Any] = self._clock.surroundings()
        if self._clocks_mhz:
            facts["clock_mhz"] = statistics.median(self._clocks_mhz)
            facts["lowest_clock_mhz"] = min(self._clocks_mhz)
        if self._throttled_by:
            facts["throttled_by"] = sorted(self._throttled_by)
        if self._discarded:
            facts["discarded_samples"] = self._discarded
        if self._slow:
            facts["samples_at_low_clock"] = self._slow
        if self._batch > 1:
            facts["runs_in_a_sample"] = self._batch
        elif statistics.median(samples_us) < SHORT_US:
            facts["resolution_us"] = RESOLUTION_US
        return facts


def _nothing() -> None:
    """Enqueue nothing."""


def kernel_arguments(
    variant: GpuVariant[Any],
    arguments: Iterable[Argument],
    tensors: Mapping[str, Tensor],
    addresses: Mapping[str, int],
    inputs: Mapping[str, Array],
) -> tuple[Any, ...]:
    """Return the parameters of a launch: addresses as Python integers, numbers as NumPy scalars of their C type.

    Args:
        variant: Says by its language how an array is passed: as an address, or as Numba's seven and more words.
        arguments: As the launch names them.
        tensors: Every tensor by name.
        addresses: Where those with a shape are on the device.
        inputs: Where the values of those without a shape come from; half types are passed as their bits.
    """
    numba = isinstance(variant, NumbaCudaVariant)
    parameters: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Scalar):
            kinds: dict[str, Any] = {"int": np.int32, "long long": np.int64, "float": np.float32}
            parameters.append(kinds[argument.ctype](argument.value))
        elif not tensors[argument].shape:
            value = np.asarray(inputs[argument])
            parameters.append((value.view(np.uint16) if value.itemsize == 2 else value)[()])
        elif numba:
            parameters.extend(array_parameters(tensors[argument], addresses[argument]))
        else:
            parameters.append(addresses[argument])
    return tuple(parameters)


class CudaRunner(Runner):
    """Verifies on the real problem, then times between events.

    The device is opened at the first task, not before: a worker that cannot start would tell nobody why.

    Args:
        protocol: How samples are taken.
        device: A GPU of this machine.

    Raises:
        MissingDependency: if cuda-core is not installed.
    """

    def __init__(self, protocol: Protocol, device: Device) -> None:
        super().__init__(protocol)
        require_cuda_core()
        self._device = device
        self._opened: tuple[Gpu, DeviceMemory, Clock, tuple[int, int] | None] | None = None

    def run(self, task: Task, binary: Binary, abort_above_us: float | None) -> tuple[Outcome, Effort]:
        """Verify and time one configuration.

        Raises:
            DeviceLost: if a fault took the device from this process.
            CudaError: if a CUDA call failed otherwise; the next task may go on.
        """
        gpu, memory, _, _ = self._open()
        with self._watched(gpu, memory, task):
            return self._run(task, binary, abort_above_us)

    def _open(self) -> tuple[Gpu, DeviceMemory, Clock, tuple[int, int] | None]:
        if self._opened is None:
            gpu = open_gpu(self._device)
            flush = None
            if self.protocol.cache == "cold":
                nbytes = FLUSHED_CACHES * max(self._device.l2_bytes, 1 << 20)
                flush = (gpu.allocate(nbytes), nbytes)
            self._opened = (gpu, DeviceMemory(gpu), Clock(gpu.pci_bus_id), flush)
        return self._opened

    @contextlib.contextmanager
    def _watched(self, gpu: Gpu, memory: DeviceMemory, task: Task) -> Iterator[None]:
        """Tell a fault that outlives the task from one that does not."""
        try:
            yield
        except CudaError as error:
            memory.forget_inputs()
            if (fault := gpu.lost()) is not None:
                detail = f"{task.variant.key} with {task.config} on {task.workload}: {error}"
                raise DeviceLost(fault, detail) from error
            raise

    def _run(self, task: Task, binary: Binary, abort_above_us: float | None) -> tuple[Outcome, Effort]:
        start = time.perf_counter()
        gpu, memory, clock, flush = self._open()
        inputs = self.input_set(task.workload, task.seed)
        check = self.check(inputs)
        launches = self._prepare(task, binary, inputs)
        worst, reason = self._verify(task, check, launches)
        verified = time.perf_counter()
        if reason is not None:
            return WrongResult(reason=reason), Effort(verify_s=verified - start)
        sampler = Sampler(gpu, clock, launches, flush=flush, max_clock_mhz=self._device.max_clock_mhz)
        stopped = collect(
            sampler.sample_us,
            self.protocol_for(task),
            abort_above_us=None if task.thorough else abort_above_us,
        )
        measured = time.perf_counter()
        detail = check.detail
        if task.thorough:  # what runs once may be right by chance
            again, reason = self._verify(task, check, launches)
            worst, detail = max(worst, again), f"{detail}; before and after timing"
        rechecked = time.perf_counter()
        effort = Effort(verify_s=verified - start + rechecked - measured, measure_s=measured - verified)
        if reason is not None:
            return WrongResult(reason=f"after timing: {reason}"), effort
        outcome = judge(
            stopped,
            cache=self.protocol.cache,
            verification=Verification(how="reference", detail=detail, worst=worst),
            abort_above_us=abort_above_us,
            conditions=sampler.conditions(stopped.samples_us),
        )
        return outcome, effort

    def _prepare(self, task: Task, binary: Binary, inputs: InputSet) -> tuple[Prepared, ...]:
        """Make one run ready: memory, kernels, parameters."""
        gpu, memory, _, _ = self._open()
        workload, variant = task.workload, task.variant
        assert isinstance(variant, GpuVariant)
        read, written = workload.inputs(), self._written(task)
        addresses = memory.hold(read, written)
        memory.upload(inputs)
        tensors = {tensor.name: tensor for tensor in (*read, *written)}
        planned = variant.launches(workload, task.config)
        kernels = gpu.load(binary.payload, binary.entries)
        return tuple(
            gpu.prepare(
                kernel,
                launch,
                kernel_arguments(variant, launch.arguments, tensors, addresses, inputs.inputs),
            )
            for kernel, launch in zip(kernels, planned, strict=True)
        )

    @staticmethod
    def _written(task: Task) -> tuple[Tensor, ...]:
        return (*task.workload.outputs(), *task.variant.scratch(task.workload, task.config))

    def _verify(
        self, task: Task, check: Check, launches: tuple[Prepared, ...]
    ) -> tuple[float, str | None]:
        """Run once on poisoned memory; return the worst error, and why the result is wrong, or None."""
        gpu, memory, _, _ = self._open()
        written = self._written(task)
        memory.poison(written)
        gpu.launch(launches)
        gpu.synchronize()
        outputs = {tensor.name: memory.download(tensor) for tensor in task.workload.outputs()}
        worst = check.worst(outputs)
        reason = None if worst <= 1 else check.describe(outputs, worst)
        if (name := memory.overrun(written)) is not None:
            reason = f"it wrote past the end of {name}{f'; {reason}' if reason else ''}"
        if reason is not None:
            memory.forget_inputs()
        return worst, reason

    def conditions(self) -> Mapping[str, Any]:
        """Return the device, its driver, and the versions of what compiled and launched the kernels."""
        packages = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numba-cuda", "numpy")
        versions = {name: version for name in packages if (version := _version(name)) is not None}
        if self._opened is None:
            return versions
        gpu, _, clock, _ = self._opened
        facts = {"gpu": gpu.name, "cuda": gpu.driver_version(), "driver": clock.driver()}
        return {**{name: value for name, value in facts.items() if value is not None}, **versions}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
