"""Server-sent events: an ASGI response over an iterator of ready-made payloads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    """Sends each piece as it comes. The iterator ends the stream; it is closed when the client is gone.

    `X-Accel-Buffering: no` keeps proxies from holding tokens back.
    """

    def __init__(self, pieces: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> None:
        self._pieces = pieces
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
