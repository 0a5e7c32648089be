"""Bounds of one connection that take time to show: bodies nobody wants, and answers nobody reads."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from octavo.server.http import BoundedProtocol, bounded_protocol

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"


@asynccontextmanager
async def serving(app: Any, **bounds: Any) -> AsyncIterator[int]:
    """A server of `app` with some bounds changed; yields its port."""
    protocol = type("Quick", (bounded_protocol(4096),), bounds)
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: protocol(config=config, server_state=server.server_state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await listener.wait_closed()


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def ends_within(reader: asyncio.StreamReader, limit_s: float) -> bytes:
    """What arrives until the other side closes."""
    async with asyncio.timeout(limit_s):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def test_a_body_after_its_answer_is_read_to_a_bound() -> None:
    async def run() -> None:
        async with serving(refuse, max_discarded_bytes=100_000) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 404")
            writer.write(b"x" * 50_000)
            with pytest.raises(TimeoutError):
                await ends_within(reader, 0.3)
            writer.write(b"x" * 60_000)
            await ends_within(reader, 5)
            writer.close()

    asyncio.run(run())


def test_a_body_after_its_answer_may_not_trickle_for_ever() -> None:
    async def run() -> None:
        async with serving(refuse, discard_timeout_s=0.2) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            await reader.readuntil(b"no")
            ended = asyncio.create_task(ends_within(reader, 5))
            while not ended.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
            await ended
            writer.close()

    asyncio.run(run())


def test_a_refused_body_that_ends_leaves_the_connection_usable() -> None:
    async def run() -> None:
        async with serving(refuse, discard_timeout_s=0.2) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n")
                assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 404")
                writer.write(b"abc")
                await asyncio.sleep(0.4)
            writer.close()

    asyncio.run(run())


def test_an_unread_answer_is_given_up() -> None:
    gone = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        reading = asyncio.create_task(receive())
        while not reading.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        assert reading.result() == {"type": "http.disconnect"}
        gone.set()

    async def run() -> None:
        async with serving(endless, unread_timeout_s=0.2) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                async with asyncio.timeout(10):
                    await gone.wait()

    asyncio.run(run())


def test_a_slow_reader_is_waited_for() -> None:
    size = 2 * 1024 * 1024

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    def read_slowly(port: int) -> int:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            received = 0
            while data := client.recv(32768):
                received += len(data)
                time.sleep(0.01)
            return received

    async def run() -> int:
        async with serving(large, unread_timeout_s=0.2) as port:
            return await asyncio.to_thread(read_slowly, port)

    began = time.monotonic()
    assert asyncio.run(run()) > size
    assert time.monotonic() - began > 0.4


def test_bounds_are_per_server() -> None:
    assert bounded_protocol(4096).max_header_bytes == 4096
    assert BoundedProtocol.max_header_bytes == 32 * 1024
