"""Checks grammars in a helper process before an engine sees them, and remembers what came of it. Knows no engine and no event loop.

The helper starts with the first grammar (a few tenths of a second) and stays. It has bounds of its own; what stops here is the number
of grammars that wait and the bytes that are remembered.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from octavo.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from octavo.grammar.helper import Buffer, Compile, Compiled, Forget, FromHelper, Refused, Setup, frame
from octavo.grammar.limits import Limits
from octavo.grammar.spec import GrammarSpec
from octavo.grammar.tokens import TokenTable
from octavo.limits import MAX_SCHEMA_BYTES

_log = logging.getLogger("octavo")

MAX_WAITING = 64
"""Grammars being compiled or waiting for it; further ones are refused as overload."""
CACHE_BYTES = 32 << 20
"""Sources and refusals that are remembered."""


@dataclass
class _Job:
    """A grammar in the helper, and who waits for it."""

    number: int
    spec: GrammarSpec
    futures: list[Future[str]]

    def settle(self, message: Compiled | Refused) -> None:
        for future in self.futures:
            if future.set_running_or_notify_cancel():
                _settle(future, message, self.spec)


class GrammarCompiler:
    """`limits` bound each grammar. All methods may be called from any thread."""

    def __init__(
        self, table: Callable[[], TokenTable], limits: Limits | None = None, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._table = table
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._remembered: OrderedDict[bytes, Compiled | Refused] = OrderedDict()
        self._remembered_bytes = 0
        self._cache_bytes = cache_bytes
        self._waiting: dict[bytes, _Job] = {}
        self._keys: dict[int, bytes] = {}
        self._last_number = 0
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def compile(self, spec: GrammarSpec) -> Future[str]:
        """The source of a constraint, in a future that is done at once when it is remembered.

        The future fails with InvalidRequestError or UnsupportedFieldError. Cancelling it stops the work. Blocks while the helper starts.
        Raises InvalidRequestError for too long a text, OverloadedError.
        """
        if len(spec.text.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
            raise InvalidRequestError(f"{spec.field} is longer than {MAX_SCHEMA_BYTES} bytes", param=spec.field)
        key = hashlib.sha256(msgspec.msgpack.encode(spec)).digest()
        future: Future[str] = Future()
        with self._lock:
            if (known := self._remembered.get(key)) is not None:
                self._remembered.move_to_end(key)
                _settle(future, known, spec)
                return future
            if (job := self._waiting.get(key)) is not None:
                job.futures.append(future)
            else:
                self._submit(key, spec, future)
        future.add_done_callback(lambda done: self._forget(key, done) if done.cancelled() else None)
        return future

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper, None while there is none."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the helper. What waits fails. Idempotent."""
        with self._lock:
            self._closed = True
            connection, process = self._connection, self._process
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()
            process.wait()

    def _submit(self, key: bytes, spec: GrammarSpec, future: Future[str]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} grammars are waiting to be compiled: try again later")
        connection = self._start()
        self._last_number += 1
        self._waiting[key] = _Job(self._last_number, spec, [future])
        self._keys[self._last_number] = key
        with suppress(OSError):  # The reader notices that the helper is gone.
            connection.sendall(frame(Compile(self._last_number, spec)))

    def _start(self) -> socket.socket:
        """The connection to a helper that runs."""
        if self._closed:
            raise OverloadedError("the server is shutting down")
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.grammar.helper", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""},
                process_group=0,
            )
        self._connection = ours
        ours.sendall(frame(Setup(self._table(), self._limits)))
        threading.Thread(
            target=self._read, args=(ours, self._process), name="octavo-grammar-reader", daemon=True
        ).start()
        return ours

    def _read(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(FromHelper)
        buffer = Buffer()
        with suppress(OSError):
            while data := connection.recv(1 << 20):
                for body in buffer.feed(data):
                    self._answer(decoder.decode(body))
        process.kill()
        process.wait()
        with self._lock:
            if self._connection is connection:
                self._connection = self._process = None
            waiting, self._waiting = self._waiting, {}
            self._keys.clear()
            closed = self._closed
        connection.close()
        if not closed:
            _log.warning("the grammar compiler ended and will be started again when it is needed")
        for job in waiting.values():
            job.settle(Refused(job.number, f"{job.spec.field}: the compiler ended while it worked on it"))

    def _answer(self, message: Compiled | Refused) -> None:
        with self._lock:
            key = self._keys.pop(message.number, None)
            if key is None:
                return
            job = self._waiting.pop(key)
            self._remember(key, message)
        job.settle(message)

    def _remember(self, key: bytes, message: Compiled | Refused) -> None:
        self._remembered[key] = message
        self._remembered_bytes += _size(message)
        while self._remembered_bytes > self._cache_bytes and len(self._remembered) > 1:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_bytes -= _size(oldest)

    def _forget(self, key: bytes, future: Future[str]) -> None:
        """Stops the work once nobody waits for it."""
        with self._lock:
            job = self._waiting.get(key)
            if job is None or future not in job.futures:
                return
            job.futures.remove(future)
            if job.futures:
                return
            del self._waiting[key], self._keys[job.number]
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.sendall(frame(Forget(job.number)))


def _size(message: Compiled | Refused) -> int:
    return 200 + len(message.source if isinstance(message, Compiled) else message.message)


def _settle(future: Future[str], message: Compiled | Refused, spec: GrammarSpec) -> None:
    if isinstance(message, Compiled):
        future.set_result(message.source)
        return
    text = message.message
    text = f"{spec.field} {text}" if text.startswith(("is ", "cannot ")) else text
    kind = UnsupportedFieldError if message.unsupported else InvalidRequestError
    future.set_exception(kind(text, param=spec.field))
