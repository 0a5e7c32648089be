"""uvicorn's HTTP protocol with bounds on the request head: size, number of headers, and time to arrive.

A head that is too large or too slow is refused before any of it reaches the application, and its connection is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.errors import InvalidRequestError
from octavo.server.errors import error_body

MAX_HEADERS = 128
HEAD_TIMEOUT_S = 20.0


class _HeadRefused(Exception):
    """Raised inside parser callbacks to stop parsing; the answer is in `_refusal`."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `max_header_bytes` is set by `bounded_protocol`."""

    max_header_bytes: int = 32 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_head_timer()
        super().data_received(data)
        # The parser keeps an unfinished header to itself, so what arrived without completing the head is counted here.
        if self._in_head and self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._refusal = (431, f"the request head is larger than {self.max_header_bytes} bytes (--max-header-bytes)")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._parsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._parsed(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Also called by the base class when the parser fails, be it by our own refusal."""
        status, message = self._refusal or (400, "the request is not valid HTTP")
        self._stop_head_timer()
        error = InvalidRequestError(message)
        error.code = "request_too_large" if status == 431 else "invalid_http"
        body = error_body(error)
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()

    def _parsed(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > self.max_header_bytes:
            self._refuse(431, f"the request head is larger than {self.max_header_bytes} bytes (--max-header-bytes)")

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise _HeadRefused

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._parsed_bytes = 0
        self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._head_bytes == 0:
            self.transport.close()
            return
        self._refusal = (408, f"the request head did not arrive within {HEAD_TIMEOUT_S:.0f} s")
        self.send_400_response("")


def bounded_protocol(max_header_bytes: int) -> type[BoundedProtocol]:
    """The protocol class for uvicorn's `http` option."""
    return type("BoundedProtocol", (BoundedProtocol,), {"max_header_bytes": max_header_bytes})
