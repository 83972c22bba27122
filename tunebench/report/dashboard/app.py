"""The ASGI application: routes, answers to errors, and caching."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import TYPE_CHECKING

from tunebench._console import printable
from tunebench.errors import DatabaseError, InputError, LookupMiss, TunebenchError
from tunebench.report.dashboard.catalogue import DAMAGE, damage_of
from tunebench.report.dashboard.guard import Guard
from tunebench.report.dashboard.page import Pages
from tunebench.report.dashboard.render import render
from tunebench.report.style import chart_script, style_sheet

if TYPE_CHECKING:  # importing a module needs no extra
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["create_app"]

_STATUS: Mapping[type[TunebenchError], int] = {InputError: 400, LookupMiss: 404, DatabaseError: 503}
_LARGEST_ID = 2**63 - 1
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="3" fill="#0f766e"/>'
    '<path d="M3 5h3v7h4V5h3" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)

Show = Callable[["Request"], str]


def create_app(pages: Pages, *, names: Iterable[str] = ()) -> Starlette:
    """Return the application.

    Args:
        pages: The pages; the caller starts and closes their catalogue.
        names: Host names that are answered, besides addresses and those of this machine.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    shown: Mapping[str, Show] = {
        "/": lambda request: pages.overview(request.query_params),
        "/workloads": lambda request: pages.workloads(request.query_params),
        "/workload": lambda request: pages.workload(request.query_params),
        "/trials/{number}": lambda request: pages.trial(_number(request.path_params["number"])),
        "/searches": lambda request: pages.searches(request.query_params),
        "/searches/{run}": lambda request: pages.search(request.path_params["run"]),
        "/compare": lambda request: pages.compare(request.query_params.getlist("side")),
        "/stale": lambda request: pages.stale(request.query_params),
        "/predictions": lambda request: pages.predictions(request.query_params),
        "/plans": lambda request: pages.plans(request.query_params),
    }
    files = {
        "/page.css": ("text/css", style_sheet() + _file("dashboard.css")),
        "/dashboard.js": ("text/javascript", chart_script() + _file("dashboard.js")),
        "/icon.svg": ("image/svg+xml", _ICON),
    }
    routes = [Route(path, _page(show, pages)) for path, show in shown.items()]
    routes += [Route(path, _fixed(*file)) for path, file in files.items()]

    def missing(request: Request, error: Exception) -> Response:
        return _failure(404, f"no page {request.url.path}", pages.database)

    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, names=tuple(names))],
        exception_handlers={404: missing},
    )


def _file(name: str) -> str:
    return resources.files("tunebench.report.dashboard").joinpath(name).read_text(encoding="utf-8")


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > _LARGEST_ID:
        raise LookupMiss(f"there is no trial {text[:40]!r}")
    return int(text)


def _page(show: Show, pages: Pages) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        try:
            with pages.paused():
                text = show(request)
            return _answer(request, text, "text/html")
        except TunebenchError as error:
            status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
            return _failure(status, str(error), pages.database)
        except DAMAGE as error:
            return _failure(503, damage_of(error, pages.db), pages.database)

    return answer


def _fixed(media_type: str, text: str) -> Callable[[Request], Response]:
    return lambda request: _answer(request, text, media_type)


def _answer(request: Request, text: str, media_type: str) -> Response:
    """Return a text, or only its hash if the browser has it already."""
    from starlette.responses import Response

    body = text.encode("utf-8", errors="replace")
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def _failure(status: int, reason: str, database: str) -> Response:
    from starlette.responses import Response

    text = render(
        "failure.html",
        title="Not found" if status == 404 else "Error",
        reason=printable(reason),
        database=database,
    )
    return Response(text, status, media_type="text/html")
