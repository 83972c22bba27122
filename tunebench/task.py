"""A tuning task, and the protocol of the executor that runs it."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tunebench.device import Device
from tunebench.errors import VariantError
from tunebench.outcome import Result
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Executor", "Task", "revision_of"]


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


def revision_of(variant: Variant[Any], workload: Workload, config: Config) -> str:
    """Return the revision of a configuration, also if the variant's code fails for it.

    The failure is recorded when it is compiled, and is valid until the variant returns a source.

    Args:
        variant: The variant.
        workload: The workload.
        config: A valid point of the variant's space.
    """
    try:
        return variant.revision(workload, config)
    except VariantError:
        return hashlib.sha256(f"{variant.key} has no source for {config}".encode()).hexdigest()[:16]


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
