"""The gateway: a process that connects to Ray, starts workers, dispatches jobs, and retries lost ones.

Ray ends a process whose cluster is lost, and a local cluster with the process that started it. To protect the
driver, Ray runs in this process, which the driver starts and talks to over a pipe (see
`docs/decisions/0038-ray-runs-in-a-separate-process.md`). Tasks and results pass through it pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from tunebench.executor import PoolStatus
from tunebench.executor._driver import DriverConnection
from tunebench.executor._head import connect
from tunebench.executor._worker_actor import WorkerActor, versions
from tunebench.executor._worker_pool import PendingJob, Worker, WorkerLocation, WorkerPool
from tunebench.executor.accelerator import may_have
from tunebench.executor.message import LOSSES, Job, WorkerRequest, WorkerSetup

__all__ = ["Gateway", "main"]

ATTEMPTS = 3
"""Number of workers that may die at one location without finishing a job before it is given up."""
POLL_S = 1.0
CLOSE_S = 5.0
GRACE_S = 5.0
"""Time limit for a new node to join when all locations are given up, in seconds."""


class Gateway:
    """Starts workers and dispatches jobs until the driver closes the pipe.

    Args:
        driver: The connection to the driver.
        request: The workers that the driver wants.
        ray: The module `ray`, connected.
    """

    def __init__(self, driver: DriverConnection, request: WorkerRequest, ray: Any) -> None:
        self._driver, self._request, self._ray = driver, request, ray
        self._actor_class = ray.remote(WorkerActor)
        self._pools: dict[str, WorkerPool] = {}
        self._idle: list[Worker] = []
        self._locations: dict[WorkerLocation, asyncio.Task[None]] = {}
        self._alive: set[str] = set()
        self._refused: dict[WorkerLocation | str, str] = {}
        self._assigned = False
        self._heard = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: list[asyncio.Task[None]] = []
        self._done = asyncio.Event()

    # -- messages of the driver --------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve the driver until it closes the pipe."""
        self._driver.listen(asyncio.get_running_loop(), self._take)
        self._spawn(self._find())
        await self._done.wait()
        await self._dismiss(
            [*self._idle, *(worker for pool in self._pools.values() for worker in pool.workers)]
        )
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("begin", dict() as setups):
                self._begin(setups)
            case ("job", Job() as job):
                self._pools[job.device].waiting.append(PendingJob(job))
                self._dispatch(self._pools[job.device])
            case ("same_worker", str() as device):
                self._pools[device].pinned = None
            case ("bye",):
                self._done.set()
            case ("stop", str() as device):
                pool = self._pools.pop(device)
                self._leaving.append(self._spawn(self._dismiss(pool.workers)))

    def _send(self, *message: Any) -> None:
        self._driver.send(*message)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._send("lost", None, f"{type(task.exception()).__name__}: {task.exception()}")
            self._done.set()

    # -- workers -----------------------------------------------------------------------------

    async def _find(self) -> None:
        """Start the wanted workers, send their devices to the driver, then poll for changes."""
        began = time.monotonic()
        await self._poll()
        while not (self._locations and self._answered()) and time.monotonic() - began < self._request.start_s:
            await asyncio.sleep(0.02)
        late = {
            location: f"{location} started no worker in {time.monotonic() - began:.0f} s: it may be busy"
            for location in self._locations
            if location not in self._refused and not any(worker.location == location for worker in self._idle)
        }
        devices = {worker.device.key: worker.device for worker in self._idle if worker.device is not None}
        self._send("found", list(devices.values()), [*self._refused.values(), *late.values()])
        while True:
            await asyncio.sleep(POLL_S)
            await self._poll()
            self._check_empty_pools()

    def _answered(self) -> bool:
        return len(self._idle) + len(self._refused.keys() & self._locations.keys()) == len(self._locations)

    async def _poll(self) -> None:
        """List the nodes of the cluster, and start workers on new ones."""
        ask = asyncio.get_running_loop().run_in_executor(None, self._ray.nodes)
        try:
            nodes = await asyncio.wait_for(asyncio.shield(ask), max(POLL_S, self._request.patience_s))
        except Exception as error:  # any error of Ray or the network: reported after the time limit
            if time.monotonic() - self._heard >= self._request.patience_s:
                reason = str(error).partition("\n")[0] or type(error).__name__
                silent_s = self._request.patience_s
                self._send("lost", None, f"the cluster has not answered for {silent_s:.0f} s: {reason}")
            return
        self._heard = time.monotonic()
        alive = [node for node in nodes if node["Alive"]]
        self._alive = {node["NodeID"] for node in alive}
        for location in self._worker_locations(alive):
            if location not in self._locations:
                self._locations[location] = self._spawn(self._keep_worker(location))

    def _worker_locations(self, nodes: list[dict[str, Any]]) -> list[WorkerLocation]:
        kind = self._request.kind or ("gpu" if any(n["Resources"].get("GPU", 0) for n in nodes) else "cpu")
        locations: list[WorkerLocation] = []
        for node in nodes:
            resources, host = node["Resources"], node["NodeManagerHostname"]
            cpus, gpus = resources.get("CPU", 0), int(resources.get("GPU", 0))
            if kind == "cpu":
                locations += [WorkerLocation(node["NodeID"], host, kind, cpus, 0)] if cpus else []
            elif self._request.labels and not may_have(resources, self._request.labels):
                self._refused[node["NodeID"]] = (
                    f"{host} was skipped: its resources are "
                    f"{', '.join(sorted(name for name in resources if ':' in name and 'node:' not in name))}"
                )
            else:
                locations += [
                    WorkerLocation(node["NodeID"], host, kind, cpus // gpus, index) for index in range(gpus)
                ]
        return locations

    async def _keep_worker(self, location: WorkerLocation) -> None:
        """Keep a worker at a location while its node lives, restarting it when it dies."""
        unserved = 0
        while unserved < ATTEMPTS:
            worker = await self._start_worker(location)
            if worker is None:
                break
            await worker.gone.wait()
            unserved = 0 if worker.served or worker.blamed else unserved + 1
            await asyncio.sleep(POLL_S / 2)  # the death of a node is noticed later than that of its actor
            if location.node not in self._alive:
                break
        else:
            self._refuse(location, f"{location}: {ATTEMPTS} workers died there without finishing a job")

    async def _start_worker(self, location: WorkerLocation) -> Worker | None:
        """Start an actor; None if its device is not wanted or it is unusable."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._actor_class.options(
            num_cpus=location.cpus,
            num_gpus=int(location.kind == "gpu"),
            scheduling_strategy=NodeAffinitySchedulingStrategy(location.node, soft=False),
            max_restarts=0,
            max_task_retries=0,
        ).remote()
        worker = Worker(location, actor)
        try:
            info = await _value(actor.describe.remote(location.kind))
            reason = _unusable(location, info)
            if reason is None:
                worker.device = info.device
                return worker if await self._assign(worker) else None
        except Exception as error:  # a worker of another version may fail in any way: keep the reason
            reason = f"{location}: {_message_of(error)}"
        self._refuse(location, reason)
        self._kill(worker)
        return None

    async def _assign(self, worker: Worker) -> bool:
        """Add a worker to its pool, or keep it idle until the driver begins; False if it is not wanted."""
        pool = self._pool_of(worker)
        if pool is None and self._assigned:
            self._kill(worker)
            return False
        if pool is not None:
            await self._set_up(pool, worker)
        else:
            self._idle.append(worker)
        self._spawn(self._watch(worker))
        return True

    def _pool_of(self, worker: Worker) -> WorkerPool | None:
        return None if worker.device is None else self._pools.get(worker.device.key)

    def _begin(self, setups: dict[str, WorkerSetup]) -> None:
        self._assigned = True
        idle, self._idle = self._idle, []
        for device, setup in setups.items():
            self._pools[device] = WorkerPool(setup)
        for worker in idle:
            pool = self._pool_of(worker)
            if pool is not None:
                self._spawn(self._set_up_or_refuse(pool, worker))
            else:
                self._kill(worker)

    async def _set_up_or_refuse(self, pool: WorkerPool, worker: Worker) -> None:
        try:
            await self._set_up(pool, worker)
        except Exception as error:  # as above
            self._refuse(worker.location, f"{worker.location}: {_message_of(error)}")
            self._locations[worker.location].cancel()
            self._kill(worker)

    async def _set_up(self, pool: WorkerPool, worker: Worker) -> None:
        # GPUs of one node share its cores; on a CPU, compiling and measuring alternate.
        compilers = max(1, int(worker.location.cpus)) if worker.location.kind == "gpu" else 0
        worker.slots = await _value(worker.actor.begin.remote(pool.setup, compilers))
        pool.workers.append(worker)
        self._send_status(pool)
        self._dispatch(pool)

    async def _watch(self, worker: Worker) -> None:
        """Notice the death of an actor, even of an idle one."""
        try:
            await _value(worker.actor.watch.remote())
        except Exception as error:  # any error of Ray or the network means that the worker is lost
            self._lose(worker, error)

    # -- jobs -----------------------------------------------------------------------------

    def _dispatch(self, pool: WorkerPool) -> None:
        """Start the jobs that can run now; suspect jobs come first, and run alone."""
        for pool_worker in pool.workers:
            pool_worker.reserved = False
        for pending in sorted(pool.waiting, key=lambda pending: -pending.losses):
            if pending.job.same_worker and pool.pinned is not None and pool.pinned not in pool.workers:
                pool.waiting.remove(pending)
                self._send("answer", pending.job.number, "moved", None, 0.0, "")
                continue
            worker = pool.worker_for(pending)
            if worker is not None:
                pool.waiting.remove(pending)
                worker.running.add(pending)
                self._spawn(self._run(pool, pending, worker))

    async def _run(self, pool: WorkerPool, pending: PendingJob, worker: Worker) -> None:
        try:
            kind, content, busy_s = await _value(
                getattr(worker.actor, pending.job.method).remote(*pending.job.arguments)
            )
        except self._ray.exceptions.RayTaskError as error:  # an internal error
            worker.running.discard(pending)
            fault = pickle.dumps(RuntimeError(_message_of(error)))
            self._send("answer", pending.job.number, "failed", fault, 0.0, "")
        except Exception as error:  # the actor is gone, or the connection to it
            worker.blamed = worker.runs_suspect
            self._lose(worker, error)
            worker.running.discard(pending)
            self._retry(pool, pending, _message_of(error))
        else:
            worker.running.discard(pending)
            if kind == "refused":
                self._reject(pool, pending, worker, content)
            else:
                worker.served = True
                self._send("answer", pending.job.number, kind, content, busy_s, str(id(worker)))
        self._dispatch(pool)

    def _retry(self, pool: WorkerPool, pending: PendingJob, reason: str) -> None:
        if pending.job.same_worker:  # the context cannot continue on another worker
            self._send("answer", pending.job.number, "moved", None, 0.0, "")
            return
        pending.losses += 1
        if pending.losses >= LOSSES:
            self._send("answer", pending.job.number, "killed", reason, 0.0, "")
            return
        pool.retried += 1
        pool.waiting.append(pending)
        self._send_status(pool)

    def _reject(self, pool: WorkerPool, pending: PendingJob, worker: Worker, reason: str) -> None:
        """Remove a worker that refused a job, and run the job elsewhere."""
        pool.waiting.append(pending)
        if worker in pool.workers:
            pool.workers.remove(worker)
            self._locations[worker.location].cancel()
            self._refuse(worker.location, f"{worker.location}: {reason}")
        self._kill(worker)

    def _lose(self, worker: Worker, error: Exception) -> None:
        """Remove a worker whose actor died."""
        worker.gone.set()
        if worker in self._idle:
            self._idle.remove(worker)
        pool = self._pool_of(worker)
        if pool is None or worker not in pool.workers:
            return
        pool.workers.remove(worker)
        pool.empty_since = time.monotonic()
        pool.lost.append(f"{worker.location}: {_message_of(error)}")
        self._kill(worker)
        self._send_status(pool)

    def _kill(self, worker: Worker) -> None:
        with contextlib.suppress(Exception):  # it is gone, or the cluster is
            self._ray.kill(worker.actor, no_restart=True)

    async def _dismiss(self, workers: list[Worker]) -> None:
        """Stop the processes of workers, wait for their cleanup, and end them."""
        await asyncio.gather(*map(self._leave, workers))

    async def _leave(self, worker: Worker) -> None:
        if (task := self._locations.get(worker.location)) is not None:
            task.cancel()
        for last in (worker.actor.close, worker.actor.watch):
            with contextlib.suppress(Exception):  # it may end during the call, or before
                await asyncio.wait_for(_value(last.remote()), CLOSE_S)
        self._kill(worker)

    # -- status -----------------------------------------------------------------------

    def _refuse(self, location: WorkerLocation, reason: str) -> None:
        self._refused[location] = reason
        for pool in self._pools.values():
            self._send_status(pool)

    def _send_status(self, pool: WorkerPool) -> None:
        device = next((key for key, candidate in self._pools.items() if candidate is pool), None)
        if device is None:  # the driver stopped this device
            return
        status = PoolStatus(
            workers=len(pool.workers),
            slots=sum(worker.slots for worker in pool.workers),
            lost=tuple(pool.lost),
            refused=tuple(self._refused.values()),
            retried=pool.retried,
        )
        self._send("status", device, status)

    def _check_empty_pools(self) -> None:
        for device, pool in self._pools.items():
            waited_s = time.monotonic() - pool.empty_since
            given_up = all(task.done() for task in self._locations.values())
            patience_s = min(GRACE_S, self._request.patience_s) if given_up else self._request.patience_s
            if not pool.workers and waited_s >= patience_s:
                reasons = (
                    "; ".join([*pool.lost[-2:], *list(self._refused.values())[-2:]]) or "none has started"
                )
                self._send("lost", device, f"there has been no worker for {waited_s:.0f} s ({reasons})")


async def _value(reference: Any) -> Any:
    """Await an object reference of Ray or of Ray Client."""
    return await reference


def _unusable(location: WorkerLocation, info: Any) -> str | None:
    """Return why a worker is unusable; None if it is usable."""
    mine = versions()
    if info.versions != mine:
        theirs = f"Python {info.versions[0]} and tunebench {info.versions[1]}"
        return f"{location} has {theirs}; this driver has Python {mine[0]} and tunebench {mine[1]}"
    if info.device is None:
        return f"{location}: Ray counts a GPU there that is not visible to the process"
    return None


def _message_of(error: BaseException) -> str:
    """Return an error of Ray in one line: the exception on the worker, or how its process ended."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    text = str(error)
    if "No module named 'tunebench'" in text:
        return "tunebench is not installed there: install it with its extra cluster"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explanations = [line for line in lines if line.startswith("The actor ") and "because" in line]
    return (explanations or lines or [type(error).__name__])[0][:300]


# -- main -------------------------------------------------------------------------------------


def main() -> None:
    """Serve the driver over the pipe whose file descriptor is the first argument."""
    driver = DriverConnection(Connection(int(sys.argv[1])))
    folder = None
    try:
        try:
            ray, folder = connect(driver.request)
        except Exception as error:  # any error of Ray or the network: the driver reports it
            driver.send("unreachable", f"{type(error).__name__}: {error}".partition("\n")[0])
            return
        driver.send("connected")
        asyncio.run(Gateway(driver, driver.request, ray).serve())
        ray.shutdown()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
