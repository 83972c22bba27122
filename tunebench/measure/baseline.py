"""Timing of baselines: NumPy and torch on a CPU, torch (with cuBLAS and cuDNN) on a GPU.

Baselines run in a process of their own, which loads no kernel. On a CPU, a judge prepares their launches as
it prepares those of finalists, so that the times are comparable: inputs in the same memory, new for each
launch, and caches that another process flushed. A program is timed as its users call it: it returns new
tensors, from memory that the allocator kept. torch is used if it is installed, and never required. The
programs are in `tunebench.libraries`.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tunebench import libraries
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import DeviceError, MissingDependency
from tunebench.measure.arena import SlotArena
from tunebench.measure.cpu import CpuTimer
from tunebench.measure.judged import answer_judge, take_channel
from tunebench.measure.timing import Protocol, collect, median_interval
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.measure._torch_gpu import TorchGpu

__all__ = [
    "Baseline",
    "BaselineFailed",
    "LibraryLaunches",
    "fastest_first",
    "measure_baselines",
    "serve_baselines",
]

T = TypeVar("T")

LONGEST_REASON = 500
"""Maximum length of a stored reason, in characters: some libraries print their stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Time of a baseline.

    Attributes:
        name: Name of the baseline, such as ``"numpy"``.
        median_us: Median time of one run.
        ci_us: 95 % confidence interval of the median.
        samples_us: All samples, in the order taken.
    """

    name: str
    median_us: float
    ci_us: tuple[float, float]
    samples_us: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, samples_us: Sequence[float]) -> Baseline:
        """Return the baseline with the median and confidence interval of samples.

        Args:
            name: Name of the baseline.
            samples_us: Samples in microseconds.
        """
        median_us, ci_us = median_interval(samples_us)
        return cls(name=name, median_us=median_us, ci_us=ci_us, samples_us=tuple(samples_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFailed:
    """A baseline that could not be timed: the library rejects the workload, or failed.

    Attributes:
        name: Name of the baseline.
        reason: The library's error.
    """

    name: str
    reason: str


def fastest_first(timings: Sequence[Baseline | BaselineFailed]) -> list[Baseline | BaselineFailed]:
    """Return timed baselines, fastest first, then those that failed."""
    return sorted(
        timings, key=lambda baseline: baseline.median_us if isinstance(baseline, Baseline) else math.inf
    )


def _or_failed(name: str, do: Callable[[], T]) -> T | BaselineFailed:
    try:
        return do()
    except Exception as error:  # libraries may raise anything: keep the reason, time the other baselines
        return BaselineFailed(name=name, reason=f"{type(error).__name__}: {error}"[:LONGEST_REASON])


# -- CPU ---------------------------------------------------------------------------------------------


def numpy_cpu(workload: Workload, inputs: libraries.Tensors) -> dict[str, libraries.LibraryCall]:
    """Return NumPy's program for a workload, if there is one, as ``{"numpy": program}``.

    Args:
        workload: The workload.
        inputs: Inputs by name.
    """
    call = libraries.numpy_call(workload, inputs)
    return {} if call is None else {"numpy": call}


def torch_cpu(workload: Workload, inputs: libraries.Tensors) -> dict[str, libraries.LibraryCall]:
    """Return torch's programs for a workload on this processor; empty if torch is not installed.

    Args:
        workload: The workload.
        inputs: Inputs by name.
    """
    try:
        import torch
    except ImportError:
        return {}
    tensors = {name: libraries.torch_tensor(value) for name, value in inputs.items()}

    def without_gradients(call: libraries.LibraryCall) -> libraries.LibraryCall:
        def run() -> object:
            with torch.inference_mode():
                return call()

        return run

    calls = libraries.torch_calls(workload, tensors)
    return {name: without_gradients(call) for name, call in calls.items()}


class LibraryLaunches:
    """Launches of all baselines of a workload for a judge (see `JudgedPrograms`).

    Args:
        workload: The workload.
        device: This machine's processor.
        protocol: State of the caches before a launch.
    """

    def __init__(self, workload: Workload, device: Device, protocol: Protocol) -> None:
        self._workload, self._protocol = workload, protocol
        self._stopwatch = CpuTimer(device, protocol)
        self._calls: list[Mapping[str, libraries.LibraryCall]] = []
        self._failed: dict[str, str] = {}
        self._results: dict[int, Any] = {}
        self._chosen = ""

    def attach(self, arena: SlotArena) -> None:
        """Make the programs of each slot."""
        self._arena = arena
        self._calls = [self._calls_of(arena.inputs(slot)) for slot in range(arena.slots)]

    def _calls_of(self, inputs: libraries.Tensors) -> dict[str, libraries.LibraryCall]:
        calls: dict[str, libraries.LibraryCall] = {}
        for library, calls_of in (("numpy", numpy_cpu), ("torch", torch_cpu)):
            programs = _or_failed(library, functools.partial(calls_of, self._workload, inputs))
            if isinstance(programs, BaselineFailed):
                self._failed[library] = programs.reason
            else:
                calls |= programs
        return calls

    def launch(self, slot: int, repeats: int) -> None:
        """Run the chosen program; the first run of a program shows whether its library computes it."""
        for _ in range(repeats):
            result = _or_failed(self._chosen, self._calls[slot][self._chosen])
            if isinstance(result, BaselineFailed):
                self._failed[self._chosen] = result.reason

    def time_us(self, slot: int) -> float:
        """Run the chosen program and return its time in microseconds, with that of new tensors.

        With cold caches, the result stays until the slot's next run: the allocator would give its memory,
        which the caches hold, to the next run of the batch.
        """
        call = self._calls[slot][self._chosen]
        if self._protocol.cache == "warm":
            self._arena.warm(slot)
            return self._stopwatch.time_us(call, flush=False)
        self._results.pop(slot, None)

        def run() -> None:
            self._results[slot] = call()

        return self._stopwatch.time_us(run, flush=False)

    def choose(self, program: str) -> None:
        """Choose the program of the next launches.

        Args:
            program: Its name.
        """
        self._chosen = program
        self._results.clear()

    def finish(self) -> tuple[str | None, Mapping[str, Any]]:
        """Return the names of the programs, and why libraries and programs failed, by name."""
        names = [name for name in self._calls[0] if name not in self._failed]
        return None, {"programs": names, "failed": self._failed}


def serve_baselines(workload: Workload, device: Device, protocol: Protocol) -> None:
    """Run the baselines of a workload on this machine's processor as a judge asks.

    Args:
        workload: The workload.
        device: This machine's processor.
        protocol: How samples are taken.
    """
    channel = take_channel()
    if channel is None:
        raise RuntimeError("serve_baselines needs a connection to a judge")
    answer_judge(channel, workload, functools.partial(LibraryLaunches, workload, device, protocol))


# -- GPU ---------------------------------------------------------------------------------------------


def measure_baselines(
    workload: Workload, device: Device, protocol: Protocol
) -> list[Baseline | BaselineFailed]:
    """Time every baseline of a workload on a GPU.

    Args:
        workload: The workload.
        device: One of this machine's GPUs.
        protocol: How samples are taken.

    Returns:
        Timed baselines, fastest first, then those that failed; empty if torch is not installed, or sees no
        GPU, or does not have the operator.
    """
    from tunebench.measure._torch_gpu import TorchGpu

    try:
        gpu = TorchGpu(device)
    except (MissingDependency, DeviceError):
        return []
    gpu.allow_for(workload)
    inputs = workload.draw(np.random.default_rng(secrets.randbits(128)))
    calls = _or_failed("torch", lambda: libraries.torch_calls(workload, gpu.tensors(inputs)))
    if isinstance(calls, BaselineFailed):
        return [calls]
    return fastest_first(
        [
            _or_failed(name, functools.partial(_time, name, call, gpu, protocol))
            for name, call in calls.items()
        ]
    )


def _time(name: str, call: libraries.LibraryCall, gpu: TorchGpu, protocol: Protocol) -> Baseline:
    return Baseline.of(name, collect(gpu.sampler(call, protocol).sample_us, protocol).samples_us)
