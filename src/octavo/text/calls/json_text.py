"""JSON read character by character: strings, values, and objects that are calls. Tolerant of what models get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from octavo.text.calls.machine import BLANKS, END, Check, Parser, Read, Steps, drop

_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_OUTSIDE_STRINGS = frozenset('{}[]:,+-.0123456789eEtrufalsn"' + BLANKS)
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", *_ARGUMENT_KEYS, "type", "id", "index"})


def escaped(text: str) -> str:
    """A text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Call:
    """A call whose name may come after its arguments."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._early: list[str] = []
        self.name: str | None = None
        self.begun = False
        self.has_arguments = False

    def begin(self) -> None:
        """The name is known: what came before it goes out."""
        assert self.name is not None
        if not self.begun:
            self.begun = True
            self._parser.call(self.name)
            self._parser.arguments("".join(self._early))

    def add(self, text: str) -> None:
        """Arguments."""
        if self.begun:
            self._parser.arguments(text)
        else:
            self._early.append(text)


class JsonParser(Parser):
    """Base of parsers of formats whose calls are JSON objects."""

    def string(self, sink: Callable[[str], None], *, raw: bool = False) -> Read:
        """The rest of a string after its opening quote, decoded, or `raw` with its escapes and the closing quote.

        Returns the quote, or END when there is none.
        """
        while True:
            character = yield from self.next()
            if character in (END, '"'):
                if raw:
                    sink(character)
                return character
            if character != "\\":
                sink(character)
                continue
            escape = yield from self.next()
            if raw:
                sink(character + escape)
            elif escape == "u":
                sink((yield from self._code_point()))
            else:
                sink(_ESCAPES.get(escape, escape))

    def _code_point(self) -> Read:
        """The character of an escape \\uXXXX, whose second half may follow in an escape of its own."""
        code = yield from self._hex()
        if 0xD800 <= code < 0xDC00 and (yield from self.exactly("\\u")) != END:
            low = yield from self._hex()
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
            return "\ufffd" + ("\ufffd" if 0xD800 <= low < 0xDC00 else chr(low))
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)

    def _hex(self) -> Generator[None, str, int]:
        digits = ""
        while len(digits) < 4:
            character = yield from self.next()
            if character == END or character not in "0123456789abcdefABCDEF":
                self.unread(character)
                break
            digits += character
        return int(digits or "0", 16)

    def value(self, first: str, sink: Callable[[str], None]) -> Steps:
        """A value that begins with `first`, as it is written, up to its end or to what cannot be in it."""
        depth = 0
        character = first
        while True:
            if character == END or character not in _OUTSIDE_STRINGS or (depth == 0 and character in ",}]:" + BLANKS):
                self.unread(character)
                return
            sink(character)
            if character == '"':
                yield from self.string(sink, raw=True)
            depth += (character in "{[") - (character in "}]")
            if depth == 0 and character in '"}]':
                return
            character = yield from self.next()

    def call_object(self, *, known_only: bool = False) -> Check:
        """The rest of an object after its brace, as a call. Whether a call was begun.

        `known_only`: where no marker says that this is a call, only an object that looks like one of a known tool is.
        """
        call = _Call(self)
        while True:
            character = yield from self.next_visible()
            if character == ",":
                continue
            if character == "}":
                if call.name is None or (known_only and not call.has_arguments):
                    return call.begun
                call.begin()
                if not call.has_arguments:
                    self.arguments("{}")
                return True
            if character != '"':
                self.unread(character)
                return call.begun
            key = yield from self._collected()
            character = yield from self.next_visible()
            if character != ":" or (known_only and key not in _CALL_KEYS):
                self.unread(character)
                return call.begun
            character = yield from self.next_visible()
            if key == "name" and character == '"' and call.name is None:
                call.name = yield from self._collected()
                if not call.name or (known_only and call.name not in self.tools):
                    return False
                if call.has_arguments:
                    call.begin()
            elif key in _ARGUMENT_KEYS and not call.has_arguments:
                call.has_arguments = True
                if call.name is not None:
                    call.begin()
                if character == '"':  # JSON within a string
                    yield from self.string(call.add)
                else:
                    yield from self.value(character, call.add)
            else:
                yield from self.value(character, drop)

    def _collected(self) -> Read:
        """The rest of a string, decoded."""
        parts: list[str] = []
        yield from self.string(parts.append)
        return "".join(parts)
