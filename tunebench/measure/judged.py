"""The measuring process's side of a judged measurement: it runs the launches that a judge asks for.

The judge (`tunebench.executor.judge`) is a process that loads no kernel. It owns the memory of inputs and
outputs, and decides which launches run, when and how many. This process runs user code, so nothing that it
says about its results counts, and what it says about its times is compared with the judge's own clock.
Messages are JSON: the judge unpickles nothing that this process sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from tunebench.measure.arena import SlotArena
from tunebench.measure.task_limit import outside_limit
from tunebench.workload import Workload

__all__ = ["UNJUDGED", "JudgedLaunches", "JudgedPrograms", "answer_judge", "offer_channel", "take_channel"]

UNJUDGED = "the process that verifies results reached no verdict"
"""Reason of the outcome of a judged measurement until the judge's verdict replaces it."""

_channels: list[int] = []


def offer_channel(descriptor: int) -> None:
    """Keep the connection to a judge for the next measurement of this process.

    Args:
        descriptor: File descriptor of a stream socket.
    """
    _channels[:] = [descriptor]


def take_channel() -> int | None:
    """Return the connection to the judge of this measurement, once; None if it has no judge."""
    return _channels.pop() if _channels else None


class JudgedLaunches(Protocol):
    """Launches of one configuration on the slots of an arena."""

    def attach(self, arena: SlotArena) -> None:
        """Prepare launches on the slots of an arena, which holds the inputs of the first slot."""

    def launch(self, slot: int, repeats: int) -> None:
        """Launch on a slot and wait for the end.

        Args:
            slot: The slot.
            repeats: Number of launches.
        """

    def time_us(self, slot: int) -> float:
        """Launch on a slot and return the time of the run in microseconds."""

    def finish(self) -> tuple[str | None, Mapping[str, Any]]:
        """Return why the configuration is wrong, or None, and the conditions of the timed launches."""


@runtime_checkable
class JudgedPrograms(JudgedLaunches, Protocol):
    """Launches of several programs; the conditions of `finish` have their names."""

    def choose(self, program: str) -> None:
        """Choose the program of the next launches.

        Args:
            program: Its name.
        """


def answer_judge(channel: int, workload: Workload, load: Callable[[], JudgedLaunches]) -> None:
    """Run launches as the judge asks, until it closes the connection.

    The judge has its own limit of the time in which a launch must end.

    Args:
        channel: File descriptor of the connection, which is closed at the end.
        workload: The workload.
        load: Loads the configuration, within the time limit of the task.
    """
    connection = Connection(channel)
    with contextlib.closing(connection):
        launches = load()
        with outside_limit():
            _answer(connection, workload, launches)


def _answer(connection: Connection, workload: Workload, launches: JudgedLaunches) -> None:
    arena = _receive_arena(connection, workload)
    if arena is None:
        return
    launches.attach(arena)
    _send(connection, {})
    while (request := _receive(connection)) is not None:
        if request["do"] == "finish":
            wrong, conditions = launches.finish()
            _send(connection, {"wrong": wrong, "conditions": dict(conditions)})
        elif request["do"] == "choose" and isinstance(launches, JudgedPrograms):
            launches.choose(request["program"])
            _send(connection, {})
        elif request["do"] == "time":
            _send(connection, {"us": [launches.time_us(slot) for slot in request["slots"]]})
        else:
            for slot in request["slots"]:
                launches.launch(slot, request["repeats"])
            _send(connection, {})


def _receive_arena(connection: Connection, workload: Workload) -> SlotArena | None:
    """Return the memory of the judge; None if it closed the connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setblocking(True)
        message, descriptors, _, _ = socket.recv_fds(end, 8, 1)
    if not descriptors:
        return None
    try:
        return SlotArena(workload, int.from_bytes(message), descriptors[0])
    finally:
        os.close(descriptors[0])


def _receive(connection: Connection) -> dict[str, Any] | None:
    """Return the next request; None if the judge closed the connection."""
    try:
        request: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return request


def _send(connection: Connection, reply: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the judge closed the connection: the next request is None
        connection.send_bytes(json.dumps(reply, default=str).encode())
