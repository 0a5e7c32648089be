"""uvicorn's HTTP protocol with bounds on what one connection can cost: size, number of headers and time of a request's head, what is
read of a body that nobody wants any more, and how long a client may leave an answer unread.

A head that is too large or too slow is refused before any of it reaches the application, and its connection is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.errors import InvalidRequestError
from octavo.limits import HEAD_TIMEOUT_S, MAX_HEADERS, UNREAD_TIMEOUT_S
from octavo.server.errors import error_body

_UPGRADE_TOKENS = (b"upgrade", b"http2-settings")


class _HeadRefused(Exception):
    """Raised inside parser callbacks to stop parsing; the answer is in `_refusal`."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `max_header_bytes` is set by `bounded_protocol`; the other bounds are the same for every server."""

    max_header_bytes: int = 32 * 1024
    head_timeout_s = HEAD_TIMEOUT_S
    max_discarded_bytes = 16 * 1024 * 1024
    """Read and dropped of a body that comes after its answer, so that the client can read that answer and use the connection again."""
    discard_timeout_s = 10.0
    unread_timeout_s = UNREAD_TIMEOUT_S
    """A client that takes not one byte of its waiting answer for so long is gone or hostile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._discarded_bytes = 0
        self._unread_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_discard_timer()
        self._stop_unread_timer()
        # The base class tells the request that came last; with pipelining another one is being answered.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_head_timer()
        self._unset_keepalive_if_required()
        self._feed(data)
        # The parser keeps an unfinished header to itself, so what arrived without completing the head is counted here.
        if self._in_head and self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._refusal = (431, f"the request head is larger than {self.max_header_bytes} bytes (--max-header-bytes)")
            self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # No other protocol is spoken here, and an offer of one (Java's client makes it with every request) may be
                # ignored, RFC 9110 section 7.8. The parser takes the body for the other protocol, so it reads the request again.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in the base class
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("")
                return
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name in _UPGRADE_TOKENS:
                continue
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _UPGRADE_TOKENS)
            lines.append(name + b": " + value)
        return b"\r\n".join((*lines, b"", b""))

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
        if self.parser.get_method() == b"CONNECT":
            self._refuse(405, "CONNECT is not allowed: this is no proxy")
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._in_body = True
        self._head_bytes = 0
        self._discarded_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self.max_discarded_bytes:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._stop_discard_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._stop_discard_timer()
            self._discard_timer = self.loop.call_later(self.discard_timeout_s, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Also called when the parser fails, be it by our own refusal."""
        status, message = self._refusal or (400, "the request is not valid HTTP")
        self._stop_head_timer()
        error = InvalidRequestError(message)
        error.code = {431: "request_too_large", 405: "method_not_allowed"}.get(status, "invalid_http")
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
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_too_slow)

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
        self._refusal = (408, f"the request head did not arrive within {self.head_timeout_s:.0f} s")
        self.send_400_response("")

    def _stop_discard_timer(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _watch_unread(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.unread_timeout_s, self._still_unread)

    def _still_unread(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._watch_unread()
        else:
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def bounded_protocol(max_header_bytes: int) -> type[BoundedProtocol]:
    """The protocol class for uvicorn's `http` option."""
    return type("BoundedProtocol", (BoundedProtocol,), {"max_header_bytes": max_header_bytes})
