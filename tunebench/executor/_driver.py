"""The connection of the gateway to its driver, the process that runs `tune`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tunebench.executor.message import WorkerRequest

__all__ = ["DriverConnection"]

END_S = 15.0
"""Time limit for the gateway to end after its driver, in seconds."""


class DriverConnection:
    """The pipe to the driver. When the driver closes it, this process ends, even if Ray hangs.

    Args:
        connection: The pipe.

    Attributes:
        request: The workers that the driver wants.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._deliver: Callable[[], None] = lambda: None
        self.request: WorkerRequest = connection.recv()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._messages.put(self._connection.recv())
                self._deliver()
        self._messages.put(("bye",))
        self._deliver()
        time.sleep(END_S)
        os._exit(1)

    def listen(self, loop: asyncio.AbstractEventLoop, take: Callable[[tuple[Any, ...]], None]) -> None:
        """Deliver messages to an event loop, including those received before.

        Args:
            loop: The event loop.
            take: Called in the loop with each message.
        """

        def empty() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    take(self._messages.get_nowait())

        self._deliver = lambda: _soon(loop, empty)
        self._deliver()

    def send(self, *message: Any) -> None:
        """Send a message to the driver; does nothing if the driver is gone."""
        with contextlib.suppress(OSError):
            self._connection.send(message)


def _soon(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(do)
