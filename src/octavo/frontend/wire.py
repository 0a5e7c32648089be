"""Messages between a server and its engine child: length-prefixed msgpack frames over a socket pair.

Both ends are the same program, so there is no version in the frames; what arrives is still decoded strictly. Floats
cross as eight bytes, so logprobs keep their bits. Knows no engine and no asyncio.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from octavo.config import Config
from octavo.contracts import Add, Cancel, EngineOutput, ResetPrefixCache, Shutdown, UnpinPrefix

_LENGTH = struct.Struct("<I")


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What loading has decided: context length, embedding rows and tokens one sequence can have in the KV cache."""

    max_model_len: int
    vocab_rows: int
    max_request_tokens: int
    warnings: tuple[str, ...] = ()


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """To the child, first: what to load. The model is a local file or folder; the server section, with its keys, is
    empty.
    """

    config: Config


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """From the child: bytes done, bytes in all."""

    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """From the child: ready for requests."""

    facts: EngineFacts


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """From the child: it could not load. `kind` names a class of `octavo.errors`, anything else is a bug's report."""

    kind: str
    message: str


class Crashed(msgspec.Struct, frozen=True, tag="crashed"):
    """From the child: its loop raised and it is about to exit."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """From the child, twice a second whatever its loop does: I am not stopped."""


ToChild = Configure | Add | Cancel | ResetPrefixCache | UnpinPrefix | Shutdown
FromChild = LoadProgress | Loaded | LoadFailed | Crashed | Beat | EngineOutput


def to_child_decoder() -> msgspec.msgpack.Decoder[ToChild]:
    """Decodes what a child receives."""
    return msgspec.msgpack.Decoder(ToChild)


def from_child_decoder() -> msgspec.msgpack.Decoder[FromChild]:
    """Decodes what a child sends."""
    return msgspec.msgpack.Decoder(FromChild)


R = TypeVar("R")


class Channel(Generic[R]):
    """One end of the socket pair, on which messages of type R arrive. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[R]) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._lock = threading.Lock()

    def send(self, message: ToChild | FromChild) -> None:
        """Sends one message. Raises OSError when the other end is gone."""
        with self._lock:
            body = self._encoder.encode(message)
            self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> R | None:
        """The next message; None when the other end is gone, also in the middle of a frame."""
        head = self._read(_LENGTH.size)
        body = None if head is None else self._read(_LENGTH.unpack(head)[0])
        return None if body is None else self._decoder.decode(body)

    def shut(self) -> None:
        """Ends the connection in both directions, which wakes a blocked `receive`. Idempotent, from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Frees the descriptor. Called by the receiving thread when it is done, so that nobody reads a reused one."""
        self._connection.close()

    def _read(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view = memoryview(data)
        filled = 0
        while filled < count:
            try:
                received = self._connection.recv_into(view[filled:])
            except OSError:
                return None
            if received == 0:
                return None
            filled += received
        return data
