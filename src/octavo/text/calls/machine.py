"""What all parsers of a model's output share: text in, pieces out, character by character, so that no cut of the stream can matter.

A parser is a generator that receives one character at a time and the empty string at the end. It may look at most a marker's length ahead,
so its time is linear in the text. Knows no HTTP, no tokens and no requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

END = ""
"""What a parser receives after the last character."""

Steps = Generator[None, str, None]
Read = Generator[None, str, str]
Check = Generator[None, str, bool]
BLANKS = " \t\r\n"
_NOTHING = re.compile("(?!)")


class Kind(Enum):
    """What a piece of output is. CALL begins a tool call, its text is the tool's name; ARGUMENTS belong to the last call begun."""

    CONTENT = auto()
    REASONING = auto()
    CALL = auto()
    ARGUMENTS = auto()


class Piece(NamedTuple):
    """A piece of output. Pieces of one kind that follow each other are one, except CALL."""

    kind: Kind
    text: str


def drop(text: str) -> None:
    """Takes what nobody is to see."""


class Parser:
    """Base of parsers: subclasses write `_run`.

    tools: JSON schema of each tool's parameters by its name, as far as they are known. most_calls: calls beyond so many are left out.
    """

    markers: Sequence[str] = ()
    """Texts that may be control tokens of a vocabulary and that the parser has to see."""

    def __init__(self, tools: Mapping[str, Any] | None = None, *, most_calls: int | None = None) -> None:
        self.tools: Mapping[str, Any] = tools or {}
        self.num_calls = 0
        self._most_calls = most_calls
        self._pieces: list[Piece] = []
        self._back: list[str] = []
        self._record: list[str] | None = None
        self._blanks = ""
        self._trim_start = False
        self._quiet: tuple[re.Pattern[str], Callable[[str], None]] | None = None
        self._steps = self._run()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        """What is certain after this text."""
        place = 0
        while place < len(text):
            if self._quiet is not None:
                pattern, sink = self._quiet
                found = pattern.search(text, place)
                end = len(text) if found is None else found.start()
                if end > place:
                    sink(text[place:end])
                    place = end
                    continue
            self._steps.send(text[place])
            place += 1
        return self._take()

    def flush(self) -> list[Piece]:
        """The output has ended: what was held back."""
        try:
            self._steps.send(END)
        except StopIteration:
            pass
        else:
            raise AssertionError("the parser went on after the end")
        if self._blanks and not self.num_calls:
            self._add(Kind.CONTENT, self._blanks)
        return self._take()

    def _run(self) -> Steps:
        raise NotImplementedError

    # --- output -----------------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Adds content. Blanks around calls are dropped, so they wait until it is known what follows."""
        if self._trim_start:
            text = text.lstrip(BLANKS)
            self._trim_start = not text
        text = self._blanks + text
        bare = text.rstrip(BLANKS)
        self._blanks = text[len(bare) :]
        if bare:
            self._add(Kind.CONTENT, bare)

    def trim(self) -> None:
        """Drops the blanks that content begins with from here on."""
        self._trim_start = True

    def call(self, name: str) -> None:
        """Begins a tool call."""
        self._blanks = ""
        self._trim_start = True
        self.num_calls += 1
        self._add(Kind.CALL, name)

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        self._add(Kind.ARGUMENTS, text)

    def _add(self, kind: Kind, text: str) -> None:
        is_call = kind in (Kind.CALL, Kind.ARGUMENTS)
        if is_call and self._most_calls is not None and self.num_calls > self._most_calls:
            return
        if not text and kind is not Kind.CALL:
            return
        if self._pieces and kind is not Kind.CALL and self._pieces[-1].kind is kind:
            self._pieces[-1] = Piece(kind, self._pieces[-1].text + text)
        else:
            self._pieces.append(Piece(kind, text))

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- input ------------------------------------------------------------------------------------------------------

    def next(self) -> Read:
        """The next character, END at the end, again and again."""
        character = self._back.pop() if self._back else (yield)
        if character == END:
            self._back.append(END)
        elif self._record is not None:
            self._record.append(character)
        return character

    def unread(self, text: str) -> None:
        """Makes what was read last the next characters again. END needs no such call."""
        for character in reversed(text):
            self._back.append(character)
            if self._record is not None:
                self._record.pop()

    def record(self) -> None:
        """Begins to remember what is read, for `recorded`."""
        self._record = []

    def recorded(self) -> str:
        """What was read since `record`; remembers no more."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def next_visible(self) -> Read:
        """The next character that is no blank."""
        while True:
            character = yield from self.next()
            if character not in BLANKS or character == END:
                return character

    def until(self, markers: Sequence[str], sink: Callable[[str], None], *, whole: bool = False) -> Read:
        """Hands text to `sink` up to the first of the markers; the marker, or END. No marker begins another.

        `whole`: a marker that the end cuts short is not text.
        """
        firsts = re.compile(f"[{re.escape(''.join(marker[0] for marker in markers))}]")
        held = ""
        while True:
            if not held and not self._back and self._record is None:
                self._quiet = firsts, sink
            character = yield from self.next()
            self._quiet = None
            if character == END:
                sink("" if whole else held)
                return END
            held += character
            while held and not any(marker.startswith(held) for marker in markers):
                sink(held[0])
                held = held[1:]
            if held in markers:
                return held

    def rest(self, sink: Callable[[str], None]) -> Steps:
        """Hands all that follows to `sink`."""
        while True:
            if not self._back:
                self._quiet = _NOTHING, sink
            character = yield from self.next()
            self._quiet = None
            if character == END:
                return
            sink(character)

    def text_until(self, *markers: str) -> Generator[None, str, tuple[str, str]]:
        """The text up to a marker, and the marker or END."""
        parts: list[str] = []
        found = yield from self.until(markers, parts.append)
        return "".join(parts), found

    def exactly(self, *options: str) -> Read:
        """One of these texts if it is next, else END with nothing read. None of them begins another."""
        held = ""
        while True:
            character = yield from self.next()
            held += character
            if character != END and held in options:
                return held
            if character == END or not any(option.startswith(held) for option in options):
                self.unread(held)
                return END
