"""A tuning task, and the protocol of the executor that runs it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tunebench.device import Device
from tunebench.outcome import Result
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Executor", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One configuration of one variant, to be compiled, verified and timed.

    Attributes:
        variant: The variant.
        workload: The workload.
        config: A valid point of the variant's space.
        device: The device to run on or to compile for.
        seed: Seed of the random inputs.
        predicted_us: Predicted time, in microseconds; for devices that are absent.
        interval_us: 90 % prediction interval of `predicted_us`.
        thorough: Whether to take many samples, as for finalists, and never to abort.
        prune: Whether to skip the measurement if the lower bound of the binary exceeds the incumbent's time.
    """

    variant: Variant[Any]
    workload: Workload
    config: Config
    device: Device
    seed: int = 0
    predicted_us: float | None = None
    interval_us: tuple[float, float] | None = None
    thorough: bool = False
    prune: bool = False


T_contra = TypeVar("T_contra", contravariant=True)


class Executor(Protocol[T_contra]):
    """Conversion of tasks to results, as the search loop uses it.

    Attributes:
        capacity: Number of tasks worth keeping in flight; may change between tasks.
        abort_above_us: Median time of the incumbent. Measurements that are clearly slower are aborted; None
            aborts none.
    """

    @property
    def capacity(self) -> int:
        """Number of tasks worth keeping in flight."""

    abort_above_us: float | None

    def submit(self, task: T_contra, /) -> Future[Result]:
        """Start a task; crashes and timeouts are outcomes of its result.

        Args:
            task: Task to run.

        Returns:
            A future of the result.
        """
