"""Who works on a cluster: places, the actors that sit there, and what they have been given to do."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tunebench.device import Device
from tunebench.executor._message import Equipment, Job, Kind

__all__ = ["PendingJob", "Place", "Worker", "WorkerPool"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor may be: one GPU of a node, or its processor."""

    node: str
    host: str
    kind: Kind
    cpus: float
    index: int

    def __str__(self) -> str:
        what = f", GPU {self.index} of those" if self.kind == "gpu" and self.index else ""
        return f"{self.host} (node {self.node[:8]}{what})"


@dataclass(slots=True, eq=False)
class Worker:
    """A place with its actor at work."""

    place: Place
    actor: Any
    device: Device | None = None
    slots: int = 0
    running: set[PendingJob] = field(default_factory=set)
    reserved: bool = False
    served: bool = False
    blamed: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alone(self) -> bool:
        """Whether a task that may kill workers has it for itself."""
        return any(ride.losses for ride in self.running)


@dataclass(slots=True, eq=False)
class PendingJob:
    """A job, and how many workers have died while they had it."""

    job: Job
    losses: int = 0


@dataclass(slots=True, eq=False)
class WorkerPool:
    """The workers of one device, and what waits for them."""

    equipment: Equipment
    seats: list[Worker] = field(default_factory=list)
    waiting: deque[PendingJob] = field(default_factory=deque)
    lost: list[str] = field(default_factory=list)
    retried: int = 0
    pinned: Worker | None = None
    empty_since: float = field(default_factory=time.monotonic)

    def seat_for(self, ride: PendingJob) -> Worker | None:
        """Return who may take a job now."""
        if ride.job.together:
            if self.pinned is None and self.seats:
                self.pinned = min(self.seats, key=lambda seat: len(seat.running))
            return self.pinned if self.pinned in self.seats else None
        if ride.losses:
            return self._empty_seat()
        free = [s for s in self.seats if not s.alone and not s.reserved and len(s.running) < s.slots]
        return min(free, key=lambda seat: len(seat.running) / seat.slots, default=None)

    def _empty_seat(self) -> Worker | None:
        """Return one that has nothing to do, or keep further jobs from one until it has nothing."""
        seat = min(self.seats, key=lambda seat: len(seat.running), default=None)
        if seat is not None and seat.running:
            seat.reserved = True
            return None
        return seat
