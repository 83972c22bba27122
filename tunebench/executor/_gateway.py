"""The process that speaks with Ray: it hires workers, hands them jobs, and begins again what was lost.

Ray ends a process that has lost its cluster, and its cluster with a process that started it. So that neither
happens to a run of `tune`, Ray is in a process of its own, which the driver starts and speaks with through a
pipe (see `docs/decisions/0038-ray-runs-in-a-separate-process.md`). Tasks and results pass unopened.
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

from tunebench.executor._accelerator import may_have
from tunebench.executor._driver import Driver
from tunebench.executor._head import connect
from tunebench.executor._message import LOSSES, Equipment, Job, Look, State
from tunebench.executor._worker_actor import WorkerActor, versions
from tunebench.executor._worker_pool import PendingJob, Place, Worker, WorkerPool

__all__ = ["Gateway", "main"]

ATTEMPTS = 3
"""So often a place is tried again while its workers die without having finished anything."""
POLL_S = 1.0
CLOSE_S = 5.0
GRACE_S = 5.0
"""Longest to wait for a new node where every place that there is has been given up."""


class Gateway:
    """Hires workers and hands them jobs, for as long as the driver lives.

    Args:
        driver: Whom to serve.
        look: Which workers are wanted.
        ray: The module, connected.
    """

    def __init__(self, driver: Driver, look: Look, ray: Any) -> None:
        self._driver, self._look, self._ray = driver, look, ray
        self._actor_class = ray.remote(WorkerActor)
        self._crews: dict[str, WorkerPool] = {}
        self._idle: list[Worker] = []
        self._places: dict[Place, asyncio.Task[None]] = {}
        self._alive: set[str] = set()
        self._refused: dict[Place | str, str] = {}
        self._settled = False
        self._heard = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: list[asyncio.Task[None]] = []
        self._done = asyncio.Event()

    # -- with the driver --------------------------------------------------------------------------

    async def serve(self) -> None:
        """Answer the driver until it closes the pipe."""
        self._driver.listen(asyncio.get_running_loop(), self._take)
        self._spawn(self._find())
        await self._done.wait()
        await self._dismiss([*self._idle, *(seat for crew in self._crews.values() for seat in crew.seats)])
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("begin", dict() as equipment):
                self._begin(equipment)
            case ("job", Job() as job):
                self._crews[job.device].waiting.append(PendingJob(job))
                self._dispatch(self._crews[job.device])
            case ("together", str() as device):
                self._crews[device].pinned = None
            case ("bye",):
                self._done.set()
            case ("stop", str() as device):
                crew = self._crews.pop(device)
                self._leaving.append(self._spawn(self._dismiss(crew.seats)))

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

    # -- who is there -----------------------------------------------------------------------------

    async def _find(self) -> None:
        """Hire whoever has what is wanted, tell the driver which devices there are, and stay watchful."""
        began = time.monotonic()
        await self._poll()
        while not (self._places and self._answered()) and time.monotonic() - began < self._look.start_s:
            await asyncio.sleep(0.02)
        late = {
            place: f"{place} did not start a worker in {time.monotonic() - began:.0f} s: it may be busy"
            for place in self._places
            if place not in self._refused and not any(seat.place == place for seat in self._idle)
        }
        devices = {seat.device.key: seat.device for seat in self._idle if seat.device is not None}
        self._send("found", list(devices.values()), [*self._refused.values(), *late.values()])
        while True:
            await asyncio.sleep(POLL_S)
            await self._poll()
            self._check_patience()

    def _answered(self) -> bool:
        return len(self._idle) + len(self._refused.keys() & self._places.keys()) == len(self._places)

    async def _poll(self) -> None:
        """See which nodes there are, and staff those that are new."""
        ask = asyncio.get_running_loop().run_in_executor(None, self._ray.nodes)
        try:
            nodes = await asyncio.wait_for(asyncio.shield(ask), max(POLL_S, self._look.patience_s))
        except Exception as error:  # whatever Ray or the network says: it is told when patience ends
            if time.monotonic() - self._heard >= self._look.patience_s:
                reason = str(error).partition("\n")[0] or type(error).__name__
                self._lose_cluster(
                    f"the cluster has not answered for {self._look.patience_s:.0f} s: {reason}"
                )
            return
        self._heard = time.monotonic()
        alive = [node for node in nodes if node["Alive"]]
        self._alive = {node["NodeID"] for node in alive}
        for place in self._wanted_places(alive):
            if place not in self._places:
                self._places[place] = self._spawn(self._staff(place))

    def _wanted_places(self, nodes: list[dict[str, Any]]) -> list[Place]:
        kind = self._look.kind or ("gpu" if any(n["Resources"].get("GPU", 0) for n in nodes) else "cpu")
        places: list[Place] = []
        for node in nodes:
            resources, host = node["Resources"], node["NodeManagerHostname"]
            cpus, gpus = resources.get("CPU", 0), int(resources.get("GPU", 0))
            if kind == "cpu":
                places += [Place(node["NodeID"], host, kind, cpus, 0)] if cpus else []
            elif self._look.labels and not may_have(resources, self._look.labels):
                self._refused[node["NodeID"]] = (
                    f"{host} was not asked: of its GPUs it tells "
                    f"{', '.join(sorted(name for name in resources if ':' in name and 'node:' not in name))}"
                )
            else:
                places += [Place(node["NodeID"], host, kind, cpus // gpus, i) for i in range(gpus)]
        return places

    async def _staff(self, place: Place) -> None:
        """Keep a worker in a place, for as long as its node lives and it is of use."""
        fruitless = 0
        while fruitless < ATTEMPTS:
            hired = await self._hire(place)
            if hired is None:
                break
            await hired.gone.wait()
            fruitless = 0 if hired.served or hired.blamed else fruitless + 1
            await asyncio.sleep(POLL_S / 2)  # the death of a node is known a little later than its actor's
            if place.node not in self._alive:
                break
        else:
            self._refuse(place, f"{place}: {ATTEMPTS} workers died there, and none of them finished anything")

    async def _hire(self, place: Place) -> Worker | None:
        """Start an actor; None if there is nothing for it to do here."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._actor_class.options(
            num_cpus=place.cpus,
            num_gpus=int(place.kind == "gpu"),
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
            max_restarts=0,
            max_task_retries=0,
        ).remote()
        seat = Worker(place, actor)
        try:
            facts = await _value(actor.describe.remote(place.kind))
            reason = _misfit(place, facts)
            if reason is None:
                seat.device = facts.device
                return seat if await self._place(seat) else None
        except Exception as error:  # another version may fail in any way: the reason is kept
            reason = f"{place}: {_words(error)}"
        self._refuse(place, reason)
        self._kill(seat)
        return None

    async def _place(self, seat: Worker) -> bool:
        """Put a worker to work, or let it wait until the driver says what is tuned; False: not that."""
        crew = self._crew_of(seat)
        if crew is None and self._settled:
            self._kill(seat)
            return False
        if crew is not None:
            await self._equip(crew, seat)
        else:
            self._idle.append(seat)
        self._spawn(self._watch(seat))
        return True

    def _crew_of(self, seat: Worker) -> WorkerPool | None:
        return None if seat.device is None else self._crews.get(seat.device.key)

    def _begin(self, equipment: dict[str, Equipment]) -> None:
        self._settled = True
        idle, self._idle = self._idle, []
        for device, equip in equipment.items():
            self._crews[device] = WorkerPool(equip)
        for seat in idle:
            crew = self._crew_of(seat)
            if crew is not None:
                self._spawn(self._equip_or_refuse(crew, seat))
            else:
                self._kill(seat)

    async def _equip_or_refuse(self, crew: WorkerPool, seat: Worker) -> None:
        try:
            await self._equip(crew, seat)
        except Exception as error:  # likewise
            self._refuse(seat.place, f"{seat.place}: {_words(error)}")
            self._places[seat.place].cancel()
            self._kill(seat)

    async def _equip(self, crew: WorkerPool, seat: Worker) -> None:
        # GPUs of one node share its cores; on a processor, compiling and measuring take turns.
        compilers = max(1, int(seat.place.cpus)) if seat.place.kind == "gpu" else 0
        seat.slots = await _value(seat.actor.begin.remote(crew.equipment, compilers))
        crew.seats.append(seat)
        self._tell(crew)
        self._dispatch(crew)

    async def _watch(self, seat: Worker) -> None:
        """Notice an actor's death even where it has nothing to do."""
        try:
            await _value(seat.actor.watch.remote())
        except Exception as error:
            self._lose(seat, error)

    # -- what they do -----------------------------------------------------------------------------

    def _dispatch(self, crew: WorkerPool) -> None:
        """Hand out what can be; what may kill its worker comes first, and rides alone."""
        for one in crew.seats:
            one.reserved = False
        for ride in sorted(crew.waiting, key=lambda ride: -ride.losses):
            if ride.job.together and crew.pinned is not None and crew.pinned not in crew.seats:
                crew.waiting.remove(ride)
                self._send("answer", ride.job.number, "moved", None, 0.0, "")
                continue
            seat = crew.seat_for(ride)
            if seat is not None:
                crew.waiting.remove(ride)
                seat.running.add(ride)
                self._spawn(self._ride(crew, ride, seat))

    async def _ride(self, crew: WorkerPool, ride: PendingJob, seat: Worker) -> None:
        try:
            kind, content, busy_s = await _value(
                getattr(seat.actor, ride.job.method).remote(*ride.job.arguments)
            )
        except self._ray.exceptions.RayTaskError as error:  # a fault of ours
            seat.running.discard(ride)
            fault = pickle.dumps(RuntimeError(_words(error)))
            self._send("answer", ride.job.number, "failed", fault, 0.0, "")
        except Exception as error:  # the actor is gone, or the connection to it
            seat.blamed = seat.alone
            self._lose(seat, error)
            seat.running.discard(ride)
            self._begin_again(crew, ride, _words(error))
        else:
            seat.running.discard(ride)
            if kind == "refused":
                self._turn_away(crew, ride, seat, content)
            else:
                seat.served = True
                self._send("answer", ride.job.number, kind, content, busy_s, str(id(seat)))
        self._dispatch(crew)

    def _begin_again(self, crew: WorkerPool, ride: PendingJob, words: str) -> None:
        if ride.job.together:  # its companions ran there
            self._send("answer", ride.job.number, "moved", None, 0.0, "")
            return
        ride.losses += 1
        if ride.losses >= LOSSES:
            self._send("answer", ride.job.number, "killed", words, 0.0, "")
            return
        crew.retried += 1
        crew.waiting.append(ride)
        self._tell(crew)

    def _turn_away(self, crew: WorkerPool, ride: PendingJob, seat: Worker, reason: str) -> None:
        """Make no more use of a worker that is not what it seemed."""
        crew.waiting.append(ride)
        if seat in crew.seats:
            crew.seats.remove(seat)
            self._places[seat.place].cancel()
            self._refuse(seat.place, f"{seat.place}: {reason}")
        self._kill(seat)

    def _lose(self, seat: Worker, error: Exception) -> None:
        """Strike off a worker whose actor does not answer any more."""
        seat.gone.set()
        if seat in self._idle:
            self._idle.remove(seat)
        crew = self._crew_of(seat)
        if crew is None or seat not in crew.seats:
            return
        crew.seats.remove(seat)
        crew.empty_since = time.monotonic()
        crew.lost.append(f"{seat.place}: {_words(error)}")
        self._kill(seat)
        self._tell(crew)

    def _kill(self, seat: Worker) -> None:
        with contextlib.suppress(Exception):  # it is gone, or the cluster is
            self._ray.kill(seat.actor, no_restart=True)

    async def _dismiss(self, seats: list[Worker]) -> None:
        """Stop the processes of workers, let them clean up, and end them."""
        await asyncio.gather(*map(self._leave, seats))

    async def _leave(self, seat: Worker) -> None:
        if (task := self._places.get(seat.place)) is not None:
            task.cancel()
        for last in (seat.actor.close, seat.actor.watch):
            with contextlib.suppress(Exception):  # it ends while it answers, or has ended before
                await asyncio.wait_for(_value(last.remote()), CLOSE_S)
        self._kill(seat)

    # -- what becomes of it -----------------------------------------------------------------------

    def _refuse(self, place: Place, reason: str) -> None:
        self._refused[place] = reason
        for crew in self._crews.values():
            self._tell(crew)

    def _tell(self, crew: WorkerPool) -> None:
        device = next((key for key, one in self._crews.items() if one is crew), None)
        if device is None:  # nobody listens any more
            return
        slots = sum(seat.slots for seat in crew.seats)
        refused = tuple(self._refused.values())
        state = State(
            workers=len(crew.seats), slots=slots, lost=tuple(crew.lost), refused=refused, retried=crew.retried
        )
        self._send("state", device, state)

    def _check_patience(self) -> None:
        for device, crew in self._crews.items():
            waited_s = time.monotonic() - crew.empty_since
            turned_away = all(task.done() for task in self._places.values())
            patience_s = min(GRACE_S, self._look.patience_s) if turned_away else self._look.patience_s
            if not crew.seats and waited_s >= patience_s:
                ends = "; ".join([*crew.lost[-2:], *list(self._refused.values())[-2:]]) or "none has started"
                self._send("lost", device, f"there has been no worker for {waited_s:.0f} s ({ends})")

    def _lose_cluster(self, reason: str) -> None:
        self._send("lost", None, reason)


async def _value(reference: Any) -> Any:
    """Await what Ray calls a reference; under Ray Client it is awaitable too."""
    return await reference


def _misfit(place: Place, facts: Any) -> str | None:
    """Tell why a worker is of no use, whatever it measures on."""
    mine = versions()
    if facts.versions != mine:
        theirs = f"Python {facts.versions[0]} and tunebench {facts.versions[1]}"
        return f"{place} has {theirs}, and this driver Python {mine[0]} and tunebench {mine[1]}"
    if facts.device is None:
        return f"{place}: Ray counts a GPU there that the driver does not show to a process"
    return None


def _words(error: BaseException) -> str:
    """Return an error of Ray's in one line: what was raised on the worker, or how its process ended."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    text = str(error)
    if "No module named 'tunebench'" in text:
        return "tunebench is not installed there; run: pip install 'tunebench[cluster]'"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("The actor ") and "because" in line]
    return (said or lines or [type(error).__name__])[0][:300]


# -- the cluster -------------------------------------------------------------------------------------


def main() -> None:
    """Serve the driver at the other end of a pipe, whose file descriptor is the first argument."""
    driver = Driver(Connection(int(sys.argv[1])))
    folder = None
    try:
        try:
            ray, folder = connect(driver.look)
        except Exception as error:  # whatever Ray or the network says: the driver tells it
            driver.send("unreachable", f"{type(error).__name__}: {error}".partition("\n")[0])
            return
        driver.send("connected")
        asyncio.run(Gateway(driver, driver.look, ray).serve())
        ray.shutdown()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
