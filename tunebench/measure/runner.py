"""Base class of runners: each runs compiled configurations on one kind of device."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench.binary.compiled import Binary
from tunebench.measure.judged import UNJUDGED, JudgedLaunches, answer_judge
from tunebench.measure.sampled import check_of
from tunebench.measure.timed_launches import spare_inputs
from tunebench.measure.timing import Protocol, Samples, median_interval
from tunebench.measure.verify import Errors, InputSet, OutputCheck, draw, draw_stress
from tunebench.outcome import Aborted, CacheState, Effort, Measured, Outcome, Verification, WrongResult
from tunebench.task import Task
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.measure._device_arrays import ReferenceDevice
    from tunebench.workload import Array

__all__ = ["THOROUGH", "Runner", "coverage", "first_errors", "judge"]

INPUT_SET_LIFE = 16
"""Configurations verified on one set of inputs before a new set is drawn."""

THOROUGH: dict[str, Any] = {"min_samples": 30, "max_samples": 100, "max_s": 1.0}
"""Changes of the protocol for a thorough task; each finalist is timed in several rounds."""


class Runner(ABC):
    """Runner of one compiled configuration at a time, in a worker process.

    A runner keeps inputs and references between tasks, never results. Exceptions other than `TunebenchError`
    become `LaunchFailed` at the process boundary.

    Args:
        protocol: How samples are taken.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self._inputs: tuple[Workload, int, InputSet] | None = None
        self._extreme: tuple[Workload, int, InputSet | None] | None = None
        self._checks: dict[int, tuple[InputSet, OutputCheck]] = {}
        self._spare: tuple[InputSet, Mapping[str, Array]] | None = None
        self._uses = 0
        self.observers: tuple[Any, ...] = ()
        """What observes each configuration while it is measured (see `tunebench.measure.observer`)."""

    @abstractmethod
    def run(self, task: Task, binary: Binary, abort_above_us: float | None) -> tuple[Outcome, Effort]:
        """Verify and time one configuration.

        Args:
            task: Variant, workload, configuration and device.
            binary: The compiled configuration.
            abort_above_us: Median of the incumbent in microseconds; None never aborts.

        Returns:
            The outcome, and the time that verifying and timing took.
        """

    def judged(self, task: Task, binary: Binary) -> JudgedLaunches:
        """Return the launches of one configuration, which a judge asks for (override).

        Args:
            task: Variant, workload, configuration and device.
            binary: The compiled configuration.
        """
        raise TypeError(f"{type(self).__name__} has no launches for a judge")

    def serve(self, task: Task, binary: Binary, channel: int) -> tuple[Outcome, Effort]:
        """Run the launches that a judge asks for.

        Args:
            task: Variant, workload, configuration and device.
            binary: The compiled configuration.
            channel: File descriptor of the connection to the judge.

        Returns:
            An outcome that the judge's verdict replaces, and the time that the launches took.
        """
        self._inputs = self._extreme = self._spare = None  # the judge has its own
        self._checks = {}
        began = time.perf_counter()
        answer_judge(channel, task.workload, lambda: self.judged(task, binary))
        return WrongResult(reason=UNJUDGED), Effort(measure_s=time.perf_counter() - began)

    def reference_device(self, workload: Workload) -> ReferenceDevice | None:
        """Return the device that computes the references of a workload (override); None is the host."""
        return None

    def conditions(self) -> Mapping[str, Any]:
        """Return the conditions of the results: versions, driver, host (override)."""
        return {}

    def input_set(self, workload: Workload, seed: int) -> InputSet:
        """Return inputs and their reference; a new set is drawn every `INPUT_SET_LIFE` configurations.

        Args:
            workload: The workload.
            seed: Seed of the inputs.
        """
        generation = self._uses // INPUT_SET_LIFE
        self._uses += 1
        if self._inputs is None or self._inputs[:2] != (workload, generation):
            self._forget(workload, seed)
            on = self.reference_device(workload)
            if on is not None:
                on.release()
            self._inputs = (workload, generation, draw(workload, seed, on))
        return self._inputs[2]

    def _forget(self, workload: Workload, seed: int) -> None:
        """Drop all inputs but extreme ones of this workload, which serve as long as it is measured."""
        self._inputs = self._spare = None
        if self._extreme is not None and self._extreme[:2] != (workload, seed):
            self._extreme = None
        extreme = None if self._extreme is None else self._extreme[2]
        self._checks = {key: pair for key, pair in self._checks.items() if pair[0] is extreme}

    def first_inputs(self, inputs: InputSet) -> InputSet:
        """Return the inputs of the first launch: half of them extreme, if the operator states any.

        Args:
            inputs: Inputs of timed launches, from `input_set`.
        """
        key = (inputs.workload, inputs.seed)
        if self._extreme is None or self._extreme[:2] != key:
            self._extreme = (*key, draw_stress(inputs))
        return self._extreme[2] or inputs

    def check(self, inputs: InputSet) -> OutputCheck:
        """Return the check of outputs computed from `inputs`; large outputs are checked in parts."""
        if id(inputs) not in self._checks:
            self._checks[id(inputs)] = (inputs, check_of(inputs))
        return self._checks[id(inputs)][1]

    def spare(self, inputs: InputSet) -> Mapping[str, Array]:
        """Return spare inputs from which timed launches exchange parts; each input set has new ones."""
        if self._spare is None or self._spare[0] is not inputs:
            self._spare = (inputs, spare_inputs(inputs.workload))
        return self._spare[1]

    def protocol_for(self, task: Task) -> Protocol:
        """Return the protocol, with more samples for a thorough task."""
        return dataclasses.replace(self.protocol, **THOROUGH) if task.thorough else self.protocol


def judge(
    samples: Samples,
    *,
    cache: CacheState,
    verification: Verification,
    abort_above_us: float | None,
    conditions: Mapping[str, Any],
) -> Outcome:
    """Return `Measured`, `Aborted` if the samples were hopeless, or `WrongResult` if the clock stood still.

    Args:
        samples: The samples.
        cache: State of the cache before each sample.
        verification: How the result was verified.
        abort_above_us: Median of the incumbent in microseconds.
        conditions: Conditions of the measurement, to record.
    """
    if samples.hopeless:
        return Aborted(samples_us=samples.samples_us, above_us=abort_above_us or 0.0)
    if min(samples.samples_us) <= 0:
        return WrongResult(
            reason=f"a sample took {significant(min(samples.samples_us), 6)} us: no kernel takes no time"
        )
    median_us, ci_us = median_interval(samples.samples_us)
    return Measured(
        median_us=median_us,
        ci_us=ci_us,
        samples_us=samples.samples_us,
        cache=cache,
        verification=verification,
        conditions=conditions,
    )


def coverage(check: OutputCheck, first: InputSet, inputs: InputSet) -> str:
    """Return what the first launch covered, for `Verification.detail`.

    Args:
        check: Check of its outputs.
        first: Its inputs.
        inputs: Inputs of timed launches.
    """
    return check.detail if first is inputs else f"{check.detail}, also for extreme inputs"


def first_errors(errors: Errors, first: InputSet, inputs: InputSet) -> Errors:
    """Return the errors of the first launch; on extreme inputs, only as a share of the tolerance.

    Args:
        errors: Its errors.
        first: Its inputs.
        inputs: Inputs of timed launches.
    """
    return errors if first is inputs else Errors(share=errors.share)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed
