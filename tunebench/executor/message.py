"""Messages between the driver, its gateway to Ray, and the worker actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tunebench.device import Device

__all__ = ["LOSSES", "Answer", "Job", "Kind", "WorkerInfo", "WorkerRequest", "WorkerSetup"]

LOSSES = 3
"""Number of workers that must die with a task before it counts as crashed; all but the first ran it alone."""

Kind = Literal["gpu", "cpu"]

Answer = tuple[Literal["done", "failed", "refused"], Any, float]
"""Answer of an actor to a job: its pickled result, a pickled error, or the reason why it was refused; and the
time in which the actor compiled or measured so far, in seconds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Device and versions of a worker.

    Attributes:
        device: Its device; None if there is none of the wanted kind.
        versions: Versions of Python and tunebench.
    """

    device: Device | None
    versions: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Setup of a worker.

    Attributes:
        files: Text of each user file, by its path on the driver.
        start: Pickled function that starts the executor of the worker, given the number of compile processes;
            0 is one per core.
    """

    files: dict[str, str]
    start: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """The workers that a driver wants.

    Attributes:
        address: Address of the cluster; ``"local"`` starts one on this machine.
        kind: Kind of the devices; None uses GPUs if there are any, else CPUs.
        labels: Ray resources; a node is used if it has at least one of them (see `_accelerator.may_have`).
            Empty uses all nodes.
        start_s: Time limit for the first workers to start, in seconds.
        patience_s: Time limit for a cluster to be without workers, in seconds.
    """

    address: str
    kind: Kind | None = None
    labels: frozenset[str] = frozenset()
    start_s: float = 60.0
    patience_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of a method of `WorkerActor`, requested by the driver.

    Attributes:
        number: Identifies the job.
        device: Key of the device whose workers may run it.
        method: Name of the method.
        arguments: Its arguments.
        same_worker: Whether it must run on the same worker as the other jobs of its context.
    """

    number: int
    device: str
    method: str
    arguments: tuple[Any, ...]
    same_worker: bool = False
