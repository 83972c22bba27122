"""The other end of a gateway's pipe: the process that drives a run."""

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

from tunebench.executor._message import Look

__all__ = ["Driver"]

END_S = 15.0
"""Longest that this process outlives its driver."""


class Driver:
    """The other end of the pipe. Once that is closed, this process ends, whatever Ray is about.

    Args:
        connection: The pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._deliver: Callable[[], None] = lambda: None
        self.look: Look = connection.recv()
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
        """Have messages delivered to a loop, those that have come before it began too."""

        def empty() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    take(self._messages.get_nowait())

        self._deliver = lambda: _soon(loop, empty)
        self._deliver()

    def send(self, *message: Any) -> None:
        """Tell the driver something; one that is gone is not told."""
        with contextlib.suppress(OSError):
            self._connection.send(message)


def _soon(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(do)
