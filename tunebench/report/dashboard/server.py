"""The server of the dashboard: opens the database, listens, and stops at Ctrl-C."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tunebench.db.browse import open_browser
from tunebench.errors import EnvironmentFault, MissingDependency
from tunebench.report.dashboard.plan_file import check_folder

__all__ = ["Dashboard", "serve"]

_LIST_S = 5.0
"""Longest wait for the list of workloads before the first request."""

_LINGER_S = 2
"""Seconds that open requests may take after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """What the dashboard shows, and where it listens.

    Attributes:
        db: Path or URL of the database; None for the default one.
        host: Address or name to listen on.
        port: TCP port; 0 for a free one.
        plans: Folder of plans; None for none.
        names: Host names that are answered, besides addresses and those of this machine.
    """

    db: str | None = None
    host: str = "127.0.0.1"
    port: int = 8642
    plans: Path | None = None
    names: tuple[str, ...] = ()


def serve(dashboard: Dashboard, on_ready: Callable[[str], object]) -> None:
    """Serve until Ctrl-C.

    Args:
        dashboard: What to show.
        on_ready: Called with the URL as soon as requests are answered.

    Raises:
        MissingDependency: if the extra `dashboard` is not installed.
        InputError: if the folder of plans does not exist.
        DatabaseError: if the database does not exist or cannot be read.
        SchemaError: if its schema is older or newer than that of this version.
        EnvironmentFault: if the port cannot be used.
    """
    try:
        import jinja2  # noqa: F401 (only to see whether it is there)
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "starlette", "dashboard") from error
    from tunebench.report.dashboard.app import create_app
    from tunebench.report.dashboard.catalogue import Catalogue
    from tunebench.report.dashboard.connection import connection_class
    from tunebench.report.dashboard.page import Pages
    from tunebench.report.dashboard.prediction import prepare

    plans = check_folder(dashboard.plans) if dashboard.plans is not None else None
    with open_browser(dashboard.db) as browser, _listening(dashboard.host, dashboard.port) as listener:
        catalogue = Catalogue(browser, prepare)
        pages = Pages(browser, catalogue, plans)
        app = create_app(pages, names=(dashboard.host, *dashboard.names))
        config = uvicorn.Config(
            app,
            http=connection_class(),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LINGER_S,
        )
        catalogue.start()
        try:
            catalogue.snapshot(wait_s=_LIST_S)  # the first page need not wait for the list of workloads
            pages.prepare()
            on_ready(_url(dashboard.host, listener))
            with contextlib.suppress(KeyboardInterrupt):  # the usual end, after open requests were answered
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            catalogue.close()


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on a port, so that a port in use is an error of this command."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        raise EnvironmentFault(
            f"cannot listen on {host} port {port}: {reason}; name another one by --port, or 0 for a free one"
        ) from None
    with listener:
        yield listener


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (the user named it)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
