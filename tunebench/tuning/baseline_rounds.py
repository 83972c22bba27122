"""Timing of the baselines between the rounds of the finalists, so that drift affects all of them equally."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import CancelledError

from tunebench.device import Device
from tunebench.errors import ClusterLost
from tunebench.executor import CalledStage, ExecutorClosed, FunctionCaller, WorkerLost, baseline_judge
from tunebench.executor.judged_call import JudgedStage
from tunebench.executor.process import ProcessStage
from tunebench.kernels import loaded_files, preload
from tunebench.measure.baseline import Baseline, BaselineFailed, measure_baselines, serve_baselines
from tunebench.measure.machine import keep_freed_memory, spin_only_if_idle
from tunebench.measure.timing import Protocol
from tunebench.workload import Workload

__all__ = ["JUDGE_TIMEOUT_S", "BaselineRounds", "gpu_stage", "judged_stage", "stage_for"]

JUDGE_TIMEOUT_S = 1200.0
"""Time limit of a judge, in seconds: longer than what its measuring process may take, which ends first."""


class BaselineRounds:
    """Times the baselines of a workload in a separate process.

    Args:
        workload: The workload.
        device: The device.
        protocol: How samples are taken, over all rounds together.
        caller: Calls the stage of `stage_for` on the worker that times the variants. Enter it before.
        rounds: Number of rounds.

    Attributes:
        failure: Why timing was given up for all baselines; None if it was not.
        failed: Why single baselines could not be timed, by name; they count in no round.
        rounds: Times of each round, by name of the baseline.
    """

    def __init__(
        self, workload: Workload, device: Device, protocol: Protocol, caller: FunctionCaller, *, rounds: int
    ) -> None:
        self._workload, self._device = workload, device
        self._protocol = dataclasses.replace(
            protocol, max_s=protocol.max_s / rounds, min_samples=-(-protocol.min_samples // rounds)
        )
        self._caller = caller
        self.failure: str | None = None
        self.failed: dict[str, str] = {}
        self.rounds: list[dict[str, Baseline]] = []

    def time(self) -> None:
        """Time every baseline once; after a crash, a timeout or an error none is timed again."""
        if self.failure is not None:
            return
        try:
            answer = self._caller.call(self._workload, self._device, self._protocol)
        except (ClusterLost, WorkerLost, ExecutorClosed, CancelledError):  # not an error of a baseline
            raise
        except Exception as error:  # the process boundary of measuring: an error of a baseline ends no run
            self.failure = f"baselines could not be timed: {type(error).__name__}: {error}"
            return
        if isinstance(answer, list):
            self.rounds.append(
                {baseline.name: baseline for baseline in answer if isinstance(baseline, Baseline)}
            )
            self.failed |= {
                failed.name: failed.reason for failed in answer if isinstance(failed, BaselineFailed)
            }
        else:
            self.failure = f"baselines could not be timed: {answer.reason}"

    def discard(self) -> None:
        """Discard all rounds: they ran on a worker that is lost."""
        self.rounds.clear()

    @property
    def failures(self) -> dict[str, str]:
        """Why baselines have no times, by name; key `baselines` if all of them failed."""
        failures = {name: f"{name} could not be timed: {reason}" for name, reason in self.failed.items()}
        return failures if self.failure is None else {**failures, "baselines": self.failure}

    def baselines(self) -> tuple[Baseline, ...]:
        """Return the times over all rounds, fastest first."""
        names = dict.fromkeys(name for times in self.rounds for name in times if name not in self.failed)
        pooled = (
            Baseline.of(name, [us for times in self.rounds if name in times for us in times[name].samples_us])
            for name in names
        )
        return tuple(sorted(pooled, key=lambda baseline: baseline.median_us))


def stage_for(device: Device) -> Callable[[], CalledStage]:
    """Return the function that makes the stage which times all baselines of a workload once.

    Args:
        device: The device.
    """
    return gpu_stage if device.kind == "gpu" else judged_stage


def gpu_stage() -> ProcessStage:
    """Return the stage that times baselines on a GPU, where it prepares the memory of the device itself."""
    return ProcessStage(
        function=measure_baselines,
        start=_start,
        start_arguments=(loaded_files(),),
        timeout_s=baseline_judge.LIMIT_S,
    )


def judged_stage() -> JudgedStage:
    """Return the stage that times baselines on a processor, under the conditions of finalists."""
    return JudgedStage(
        measuring=ProcessStage(
            function=serve_baselines,
            start=_start,
            start_arguments=(loaded_files(),),
            timeout_s=baseline_judge.LIMIT_S,
        ),
        judging=ProcessStage(
            function=baseline_judge.time_baselines, start=baseline_judge.start, timeout_s=JUDGE_TIMEOUT_S
        ),
        case_of=baseline_judge.case_of,
    )


def _start(files: tuple[str, ...]) -> None:
    spin_only_if_idle()
    keep_freed_memory()
    preload(files)
