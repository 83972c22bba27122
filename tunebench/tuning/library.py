"""Libraries, timed in rounds: between the rounds of the finalists, so that a drift meets all alike."""

from __future__ import annotations

import dataclasses
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Self

from tunebench.device import Device
from tunebench.errors import ClusterLost
from tunebench.executor import Calls, PlaceLost, Stopped
from tunebench.executor.local import Stage
from tunebench.kernels import load_file, loaded_files
from tunebench.measure.baseline import Baseline, BaselineFailed, measure_baselines
from tunebench.measure.timing import Protocol
from tunebench.workload import Workload

__all__ = ["Libraries", "stage"]

TIMEOUT_S = 180.0


class Libraries:
    """The libraries that do a problem, in a process of their own; a context manager.

    Args:
        problem: The problem.
        device: Where.
        protocol: How samples are taken, in all rounds together.
        calls: Calls `stage` where the variants are timed.
        rounds: How many rounds there are to be.
    """

    def __init__(
        self, problem: Workload, device: Device, protocol: Protocol, calls: Calls, *, rounds: int
    ) -> None:
        self._problem, self._device = problem, device
        self._protocol = dataclasses.replace(
            protocol, max_s=protocol.max_s / rounds, min_samples=-(-protocol.min_samples // rounds)
        )
        self._calls = calls
        self.failure: str | None = None
        """Why they were given up, if they were."""
        self.failed: dict[str, str] = {}
        """Why single ones could not be timed, by name: they count in no round."""
        self.rounds: list[dict[str, Baseline]] = []
        """What each round has found, by the name of the library."""

    def time(self, seed: int) -> None:
        """Time every library once more; none again after a crash, a hang or an error."""
        if self.failure is not None:
            return
        try:
            answer = self._calls.call(self._problem, self._device, self._protocol, seed)
        except (ClusterLost, PlaceLost, Stopped, CancelledError):  # said nothing of libraries
            raise
        except Exception as error:  # the process boundary of measuring: a library's error ends no run
            self.failure = f"libraries could not be timed: {type(error).__name__}: {error}"
            return
        if isinstance(answer, list):
            self.rounds.append({one.name: one for one in answer if isinstance(one, Baseline)})
            self.failed |= {one.name: one.reason for one in answer if isinstance(one, BaselineFailed)}
        else:
            self.failure = f"libraries could not be timed: {answer.reason}"

    def forget(self) -> None:
        """Begin anew: what was timed so far was timed elsewhere."""
        self.rounds.clear()

    @property
    def failures(self) -> dict[str, str]:
        """Why libraries have no times, by name; those of all under `baselines`."""
        failures = {name: f"{name} could not be timed: {reason}" for name, reason in self.failed.items()}
        return failures if self.failure is None else {**failures, "baselines": self.failure}

    def baselines(self) -> tuple[Baseline, ...]:
        """Return what all rounds together say, fastest first."""
        names = dict.fromkeys(name for found in self.rounds for name in found if name not in self.failed)
        pooled = (
            Baseline.of(name, [us for found in self.rounds if name in found for us in found[name].samples_us])
            for name in names
        )
        return tuple(sorted(pooled, key=lambda baseline: baseline.median_us))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.__exit__(kind, error, trace)


def stage() -> Stage:
    """Return what times all libraries once."""
    return Stage(function=measure_baselines, start=_load, start_arguments=loaded_files(), timeout_s=TIMEOUT_S)


def _load(*files: str) -> None:
    """Start a worker that needs users' operators and nothing else."""
    for path in files:
        load_file(path)
