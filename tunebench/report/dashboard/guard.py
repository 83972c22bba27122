"""Middleware: refuses writing methods and foreign host names, and lets browsers load nothing else."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing a module needs no extra
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "is_loopback"]

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Return whether an address or name is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """ASGI middleware.

    A page of another site could resolve its own name to this machine (DNS rebinding) and then read the
    database. It cannot choose the `Host` header: only addresses and names of this machine are answered.

    Args:
        app: The application.
        names: Host names that are answered, besides addresses and ``localhost``.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name.lower().encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        app: ASGIApp = self._app
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("only GET and HEAD are allowed\n", 405, {"Allow": "GET, HEAD"})
        elif len(hosts) != 1 or not self._is_own(hosts[0]):
            app = PlainTextResponse(
                "requests for this host name are refused; start the dashboard with --allow-host NAME\n", 421
            )
        await app(scope, receive, send_with_headers)

    def _is_own(self, host: str) -> bool:
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower().rstrip(".") in self._names
        return True
