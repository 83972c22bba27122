"""Clients of the dashboard that send or read slowly, or open many connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tunebench.report.dashboard import connection

uvicorn = pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")

HEADER_S = 0.3
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = b"x" * (32 << 20)
"""More than the buffers of a socket."""


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request with a byte, or with a large body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": LARGE if scope["path"] == "/large" else b"x"})


@contextlib.asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, Any]]:
    monkeypatch.setattr(connection, "HEADER_S", HEADER_S)
    monkeypatch.setattr(connection, "REPLY_S", 2 * HEADER_S)
    monkeypatch.setattr(connection, "MOST", 20)
    config = uvicorn.Config(
        answer, port=0, http=connection.connection_class(), lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1], server.server_state.connections
    server.should_exit = True
    await serving


def run(check: Callable[[int, Any], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve_and_check() -> None:
        async with served(monkeypatch) as (port, connections):
            await asyncio.wait_for(check(port, connections), 30)

    asyncio.run(serve_and_check())


async def ask(port: int, request: bytes = REQUEST) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", REQUEST])
def test_connection_without_a_request_ends(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(port: int, connections: Any) -> None:
        began = time.monotonic()
        reader, writer = await ask(port, sent)
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the server closes it
        assert HEADER_S * 0.9 < time.monotonic() - began < 10
        writer.close()

    run(check, monkeypatch)


def test_request_that_arrives_byte_by_byte_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(port: int, connections: Any) -> None:
        reader, writer = await ask(port, REQUEST)
        await reader.readuntil(b"x")
        for _ in range(1000):  # a second request on the same connection
            writer.write(b"G")
            if not connections:
                writer.close()
                return
            await asyncio.sleep(0.02)
        pytest.fail("the connection is still open")

    run(check, monkeypatch)


def test_client_that_does_not_read_its_reply_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(port: int, connections: Any) -> None:
        _, writer = await ask(port, REQUEST.replace(b"/ ", b"/large ", 1))
        while not connections:
            await asyncio.sleep(0.01)
        while connections:
            await asyncio.sleep(0.05)
        writer.close()

    run(check, monkeypatch)


def test_many_connections_keep_no_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(port: int, connections: Any) -> None:
        monkeypatch.setattr(connection, "HEADER_S", 60.0)
        idle = [await ask(port, b"GET") for _ in range(100)]
        reader, writer = await ask(port)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert len(connections) <= 20
        for _, other in (*idle, (reader, writer)):
            other.close()

    run(check, monkeypatch)
