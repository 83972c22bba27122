"""The workers of a cluster: where they run, their actors, and their jobs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tunebench.device import Device
from tunebench.executor.message import Job, Kind, WorkerSetup

__all__ = ["PendingJob", "Worker", "WorkerLocation", "WorkerPool"]


@dataclass(frozen=True, slots=True)
class WorkerLocation:
    """Where a worker may run: one GPU of a node, or its CPU."""

    node: str
    host: str
    kind: Kind
    cpus: float
    index: int

    def __str__(self) -> str:
        gpu = f", GPU {self.index}" if self.kind == "gpu" and self.index else ""
        return f"{self.host} (node {self.node[:8]}{gpu})"


@dataclass(slots=True, eq=False)
class Worker:
    """A worker with its actor.

    Attributes:
        location: Where it runs.
        actor: The Ray actor handle.
        device: Its device, once described.
        slots: Number of jobs that it takes at once.
        running: Its jobs.
        reserved: Whether it gets no further jobs, so that a suspect job can run alone.
        served: Whether it finished any job.
        blamed: Whether it died while it ran a suspect job.
        gone: Set when its actor died.
    """

    location: WorkerLocation
    actor: Any
    device: Device | None = None
    slots: int = 0
    running: set[PendingJob] = field(default_factory=set)
    reserved: bool = False
    served: bool = False
    blamed: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def runs_suspect(self) -> bool:
        """Whether it runs a job that was lost before, which runs alone."""
        return any(pending.losses for pending in self.running)


@dataclass(slots=True, eq=False)
class PendingJob:
    """A job, and the number of workers that died running it; a job with a dead worker is suspect."""

    job: Job
    losses: int = 0


@dataclass(slots=True, eq=False)
class WorkerPool:
    """The workers of one device, and its waiting jobs.

    Attributes:
        setup: Setup of its workers.
        workers: The workers.
        waiting: Jobs that no worker runs.
        lost: Workers that died, each with the reason.
        retried: Number of retries of jobs whose worker died.
        pinned: The worker of the current `same_worker` context.
        empty_since: Reading of `time.monotonic` when the last worker died.
    """

    setup: WorkerSetup
    workers: list[Worker] = field(default_factory=list)
    waiting: deque[PendingJob] = field(default_factory=deque)
    lost: list[str] = field(default_factory=list)
    retried: int = 0
    pinned: Worker | None = None
    empty_since: float = field(default_factory=time.monotonic)

    def worker_for(self, pending: PendingJob) -> Worker | None:
        """Return the worker that can run a job now, or None."""
        if pending.job.same_worker:
            if self.pinned is None and self.workers:
                self.pinned = min(self.workers, key=lambda worker: len(worker.running))
            return self.pinned if self.pinned in self.workers else None
        if pending.losses:
            return self._idle_worker()
        free = [
            worker
            for worker in self.workers
            if not worker.runs_suspect and not worker.reserved and len(worker.running) < worker.slots
        ]
        return min(free, key=lambda worker: len(worker.running) / worker.slots, default=None)

    def _idle_worker(self) -> Worker | None:
        """Return a worker without jobs; if there is none, reserve the least busy one."""
        worker = min(self.workers, key=lambda worker: len(worker.running), default=None)
        if worker is not None and worker.running:
            worker.reserved = True
            return None
        return worker
