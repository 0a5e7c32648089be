"""The process in which grammars are compiled first: `python -m octavo.grammar.helper FD`, started by `compiler.GrammarCompiler` only.

It holds the vocabulary ready and nothing else. Each grammar is compiled in a fork of it with bounds on time and memory, so that one
that crashes, hangs or swells ends only its fork. It listens on nothing, knows no requests, and ends when its socket does.

Fork-safe because it has one thread: nothing can hold a lock when it forks.
"""

from __future__ import annotations

import os
import random
import re
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError, OctavoError, UnsupportedFieldError
from octavo.grammar.limits import MAX_FORCED_BYTES, Limits, parser_limits
from octavo.grammar.source import source_of
from octavo.grammar.spec import GrammarSpec
from octavo.grammar.tokens import TokenTable, make_tokenizer

LENGTH = struct.Struct("<I")
MAX_FORKS = 2
"""Grammars compiled at a time; others wait."""
_STACK_BYTES = 6 << 20
"""Less than the threads have in which a grammar is compiled again, so that deep recursion is found out here."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_MEANINGS = {
    "NoExtensionBias": "no output fits it: it refers to itself without an end",
    "recursion limit exceeded": "it is nested too deeply",
}
"""Of llguidance's messages that say little."""
_TRIED_OUTPUTS, _TRIED_TOKENS = 3, 24
_CLOCK_FACTOR = 60
"""How much longer than its CPU time a fork may take by the clock. At the lowest priority beside busy CPUs it gets a small share of them,
and what is refused must not depend on that; only one that stands still is to be ended by the clock."""
_NO_MEMORY = 2


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """To the helper, first."""

    table: TokenTable
    limits: Limits


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """To the helper."""

    number: int
    spec: GrammarSpec


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """To the helper: nobody waits for this one any more."""

    number: int


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """From the helper. `memory_bytes`: what compiling took."""

    number: int
    source: str
    memory_bytes: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """From the helper: `unsupported` when it names something that exists but is not enforced here."""

    number: int
    message: str
    unsupported: bool = False


ToHelper = Setup | Compile | Forget
FromHelper = Compiled | Refused


class Buffer:
    """Frames of a stream: four bytes of length, then msgpack."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now."""
        self._data += data
        bodies = []
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[LENGTH.size : end]))
            del self._data[:end]
        return bodies


def frame(message: Any) -> bytes:
    """A message as it travels."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class _Fork:
    """One grammar being compiled."""

    def __init__(self, number: int, pid: int, pipe: int, deadline_s: float) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.deadline_s = deadline_s
        self.data = bytearray()
        self.timed_out = False


class _Helper:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._decoder = msgspec.msgpack.Decoder(ToHelper)
        self._buffer = Buffer()
        self._waiting: deque[Compile] = deque()
        self._forks: dict[int, _Fork] = {}
        self._tokenizer: Any = None
        self._specials: dict[str, int] = {}
        self._limits = Limits()

    def run(self) -> None:
        """Serves until the socket ends."""
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj is self._connection:
                    if not self._receive():
                        self._kill_all()
                        return
                else:
                    self._read(self._forks[key.fd])
            self._expire()
            while self._waiting and len(self._forks) < MAX_FORKS:
                self._start(self._waiting.popleft())

    def _timeout_s(self) -> float | None:
        if not self._forks:
            return None
        return max(0.0, min(fork.deadline_s for fork in self._forks.values()) - time.monotonic())

    def _receive(self) -> bool:
        data = self._connection.recv(1 << 20)
        for body in self._buffer.feed(data):
            match self._decoder.decode(body):
                case Setup(table, limits):
                    self._limits = limits
                    self._specials = {
                        table.pieces[token].decode("utf-8", "replace"): token for token in table.special_ids
                    }
                    self._tokenizer = make_tokenizer(table, lambda _: ())
                case Compile() as compile:
                    self._waiting.append(compile)
                case Forget(number):
                    self._forget(number)
        return bool(data)

    def _forget(self, number: int) -> None:
        self._waiting = deque(one for one in self._waiting if one.number != number)
        for fork in self._forks.values():
            if fork.number == number:
                os.kill(fork.pid, signal.SIGKILL)

    def _start(self, compile: Compile) -> None:
        reading, writing = os.pipe()
        limit_s = self._limits.compile_s
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                self._connection.close()
                _limit(self._limits)
                answer = _compile(compile, self._tokenizer, self._specials)
                with open(writing, "wb") as pipe:  # noqa: PTH123 - a descriptor
                    pipe.write(msgspec.msgpack.encode(answer))
                os._exit(0)
            except MemoryError:
                os._exit(_NO_MEMORY)
            except BaseException:  # noqa: BLE001 - nothing may reach the parent's loop from here
                os._exit(1)
        os.close(writing)
        self._forks[reading] = _Fork(compile.number, pid, reading, time.monotonic() + _CLOCK_FACTOR * limit_s)
        self._selector.register(reading, selectors.EVENT_READ)

    def _read(self, fork: _Fork) -> None:
        if data := os.read(fork.pipe, 1 << 20):
            fork.data += data
            return
        self._selector.unregister(fork.pipe)
        os.close(fork.pipe)
        del self._forks[fork.pipe]
        _, status = os.waitpid(fork.pid, 0)
        if status == 0:
            body = bytes(fork.data)
            self._connection.sendall(LENGTH.pack(len(body)) + body)
        else:
            self._connection.sendall(frame(Refused(fork.number, self._story(fork, status))))

    def _story(self, fork: _Fork, status: int) -> str:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if fork.timed_out or number in (signal.SIGXCPU, signal.SIGKILL):
            return f"is too complex: compiling it took more than {self._limits.compile_s:g} s; simplify it"
        # Native code that gets no memory aborts; one that recurses too deeply faults.
        if number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) or os.WEXITSTATUS(status) == _NO_MEMORY:
            return (
                f"is too complex: compiling it took more than {self._limits.memory_bytes >> 20} MiB, or nests too deeply; "
                "simplify it"
            )
        return "cannot be compiled: the compiler failed on it; simplify it"

    def _expire(self) -> None:
        now_s = time.monotonic()
        for fork in self._forks.values():
            if now_s >= fork.deadline_s and not fork.timed_out:
                fork.timed_out = True
                fork.deadline_s = now_s + 3600.0
                os.kill(fork.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for fork in self._forks.values():
            with suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGKILL)


def _limit(limits: Limits) -> None:
    """Bounds this process. Memory is bounded as address space, of which it has some already."""
    with open("/proc/self/statm", encoding="utf-8") as file:  # noqa: PTH123 - read once, in a fork
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    most_bytes = address_space + limits.memory_bytes
    seconds = max(1, int(limits.compile_s))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # native code tells there why it aborts
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))


def _compile(compile: Compile, tokenizer: Any, specials: dict[str, int]) -> FromHelper:
    from llguidance import LLMatcher

    spec = compile.spec
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        source = source_of(spec, specials)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            _try_out(matcher, spec.field)
    except OctavoError as error:
        return Refused(compile.number, error.message, isinstance(error, UnsupportedFieldError))
    except ValueError as error:
        return Refused(compile.number, f"{spec.field}: {_one_line(str(error))}")
    if matcher.is_error():
        return _refusal(compile, matcher.get_error())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Compiled(compile.number, source, grown * 1024)


def _try_out(matcher: Any, field: str) -> None:
    """Follows a few random outputs for some tokens, so that most of what would take too long beside others is found out here.

    Raises InvalidRequestError for a grammar that forces long texts. What else is wrong the matcher says.
    """
    rng = random.Random(0)
    for _ in range(_TRIED_OUTPUTS):
        one = matcher.deep_copy()
        for _ in range(_TRIED_TOKENS):
            forced = len(one.compute_ff_bytes())
            if forced > MAX_FORCED_BYTES:
                raise InvalidRequestError(
                    f"{field} leaves no choice in {forced} bytes of the output at a time; at most {MAX_FORCED_BYTES} are allowed",
                    param=field,
                )
            mask = int.from_bytes(one.compute_bitmask(), "little")
            if not mask or one.is_error():
                break
            one.consume_tokens(one.compute_ff_tokens() or [_random_bit(mask, rng)])
            if one.is_stopped():
                break


def _random_bit(mask: int, rng: random.Random) -> int:
    """The place of a bit that is set, the first one from somewhere on."""
    shift = rng.randrange(mask.bit_length())
    above = mask >> shift
    return shift + (above & -above).bit_length() - 1


def _refusal(compile: Compile, message: str) -> Refused:
    field = compile.spec.field
    for sign, meaning in _MEANINGS.items():
        if message.startswith(sign):
            return Refused(compile.number, f"{field}: {meaning}")
    if found := _UNIMPLEMENTED.search(message):
        keys = ", ".join(msgspec.json.decode(found[1], type=list[str]))
        return Refused(compile.number, f"{field}: the schema keyword {keys} cannot be enforced: remove it", True)
    if message.startswith("oneOf constraints"):
        return Refused(
            compile.number,
            f"{field}: the schema keyword oneOf cannot be enforced, since its alternatives overlap: use anyOf",
            True,
        )
    return Refused(compile.number, f"{field}: {_one_line(message)}")


def _one_line(message: str) -> str:
    """The message less what it quotes of the grammar at length."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines()]
    return " ".join(filter(None, lines))[:300] or "it is wrong"


def main(fd: int) -> int:
    """Serves until the socket ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What runs for others comes first.
    os.nice(19)
    _Helper(socket.socket(fileno=fd)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
