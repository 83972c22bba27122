"""Connections of the dashboard: how many there may be, and how long each may take.

Uvicorn limits neither the time in which a client sends a request and reads the reply, nor the number of
connections that do neither. A client that opens connections and sends nothing would use up the files that
this process may open.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing a module needs no extra
    from uvicorn.protocols.http.h11_impl import H11Protocol
else:
    H11Protocol = object

__all__ = ["HEADER_S", "MOST", "REPLY_S", "LimitedConnection", "connection_class"]

HEADER_S = 10.0
"""Time in which a client must send a whole request, from the start or the last reply, in seconds."""

REPLY_S = 120.0
"""Time in which a request must be answered and the reply be read, in seconds; queries end after 30 s."""

MOST = 200
"""Most connections; a further one ends the one that has waited for its request longest."""


class LimitedConnection(H11Protocol):
    """A connection that ends if its client is too slow, or if there are too many and it has no request.

    A mixin of a protocol of uvicorn (see `connection_class`).
    """

    _timer: asyncio.TimerHandle | None = None
    _waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; end another connection if there are too many."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > MOST:
            waiting = [
                other for other in self.connections if isinstance(other, LimitedConnection) and other.waits
            ]
            oldest = min(waiting, key=lambda other: other._waits_since, default=self)
            oldest.end()

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def end(self) -> None:
        """Close the connection at once, also if its client does not read."""
        self._set_timer(None)
        self.transport.abort()
        self.connections.discard(self)

    def handle_events(self) -> None:
        """Handle what the client has sent; a whole request begins the time of its reply."""
        had_none = self.waits
        super().handle_events()
        if had_none and not self.waits:
            self._set_timer(REPLY_S)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._await_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._set_timer(None)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._waits_since = self.loop.time()
        self._set_timer(HEADER_S)

    def _set_timer(self, limit_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop: Any = self.loop
        self._timer = None if limit_s is None else loop.call_later(limit_s, self.end)


def connection_class() -> type[H11Protocol]:
    """Return the class for uvicorn."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return type("Connection", (LimitedConnection, H11Protocol), {})
