"""What a driver, its gateway to Ray and the actors there tell one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tunebench.device import Device

__all__ = ["LOSSES", "Answer", "Equipment", "Facts", "Job", "Kind", "Look", "State"]

LOSSES = 3
"""After so many workers that died with it, a task is what kills them: all but the first had no other."""

Kind = Literal["gpu", "cpu"]

Answer = tuple[Literal["done", "failed", "refused"], Any, float]
"""What became of a task: its pickled result, the pickled error, or why it was not run here; and for how long
this actor has compiled or measured anything, in seconds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a worker finds where it is.

    Attributes:
        device: What it would measure on; None if there is nothing of the kind.
        versions: Of Python and tunebench.
    """

    device: Device | None
    versions: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """What a worker needs to begin.

    Attributes:
        files: Users' files: the text of each, by its path on the driver.
        start: A pickled function that starts the worker's executor, given how many processes compile; 0 is
            one for each core.
    """

    files: dict[str, str]
    start: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Which workers are wanted.

    Attributes:
        address: Of the cluster; ``"local"`` starts one on this machine.
        kind: Of the device; None takes GPUs where there are any, else processors.
        labels: Nodes that tell what they have must have one of these resources; empty asks all.
        start_s: Longest to wait for the first workers.
        patience_s: Longest to go on without any.
    """

    address: str
    kind: Kind | None = None
    labels: frozenset[str] = frozenset()
    start_s: float = 60.0
    patience_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How the workers of one device are; sent whenever it changes (see `tunebench.executor.Fleet`)."""

    workers: int
    slots: int
    lost: tuple[str, ...]
    refused: tuple[str, ...]
    retried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of an actor's method that the driver wants answered.

    Attributes:
        number: Names it.
        device: Key of the device whose workers may do it.
        method: Of `WorkerActor`.
        arguments: For that.
        together: Whether it belongs to those that run in one place.
    """

    number: int
    device: str
    method: str
    arguments: tuple[Any, ...]
    together: bool = False
