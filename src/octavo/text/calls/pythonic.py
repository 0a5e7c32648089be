"""Calls as a list of Python calls, `[f(a=1, b="x"), g()]`: llama 3.2 and 4, and others. The arguments become JSON as they come."""

from __future__ import annotations

import json
from collections.abc import Callable

from octavo.text.calls.json_text import escaped
from octavo.text.calls.machine import END, Check, Parser, Read, Steps

_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_OPENING = {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")}
_HEX_LENGTH = {"x": 2, "u": 4, "U": 8}
MAX_DEPTH = 64


class PythonicParser(Parser):
    """The whole output is one list; text may follow it. What does not begin like a call of a known tool is content."""

    markers = ("<|python_start|>", "<|python_end|>")

    def _run(self) -> Steps:
        self.record()
        character = yield from self.next_visible()
        self.unread(character)
        if (yield from self.exactly("<|python_start|>")) != END:
            self.record()
        character = yield from self.next_visible()
        if character == "[":
            yield from self._calls()
        else:
            self.unread(character)
        self.content(self.recorded())
        while (yield from self.until(self.markers, self.content)) != END:
            pass

    def _calls(self) -> Steps:
        """Calls separated by commas, to the closing bracket. What is read after the last whole one is left recorded."""
        while True:
            name = yield from self._word()
            if name not in self.tools or (yield from self.next_visible()) != "(":
                return
            self.call(name)
            self.recorded()
            self.arguments("{")
            whole = yield from self._keywords()
            if whole:
                self.arguments("}")
            self.record()
            character = yield from self.next_visible()
            if character == "]" and whole:
                self.record()
                return
            if character != "," or not whole:
                self.unread(character)
                return
            character = yield from self.next_visible()
            if character == "]":  # a comma after the last
                self.record()
                return
            self.unread(character)

    def _word(self) -> Read:
        """A name, dots included."""
        word = ""
        character = yield from self.next_visible()
        while character != END and (character.isalnum() or character in "_.-"):
            word += character
            character = yield from self.next()
        self.unread(character)
        return word

    def _keywords(self) -> Check:
        """Arguments to the closing parenthesis. Whether they were as they should be."""
        first = True
        while True:
            character = yield from self.next_visible()
            if character == ")":
                return True
            self.unread(character)
            key = yield from self._word()
            if not key or (yield from self.next_visible()) != "=":
                return False
            self.arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            first = False
            if not (yield from self._value(0)):
                return False
            character = yield from self.next_visible()
            if character == ")":
                return True
            if character != ",":
                self.unread(character)
                return False

    def _value(self, depth: int) -> Check:
        character = yield from self.next_visible()
        if character == END or depth > MAX_DEPTH:
            return False
        if character in "'\"":
            return (yield from self._string(character))
        if character in _OPENING:
            return (yield from self._collection(character, depth))
        word = ""
        while character != END and (character.isalnum() or character in "+-._"):
            word += character
            character = yield from self.next()
        self.unread(character)
        text = _NAMES.get(word) or _number(word)
        self.arguments(text or "")
        return bool(text)

    def _collection(self, opening: str, depth: int) -> Check:
        written, closing = _OPENING[opening]
        self.arguments(written)
        first = True
        while True:
            character = yield from self.next_visible()
            if character == closing:
                self.arguments("}" if opening == "{" else "]")
                return True
            if not first:
                if character != ",":
                    self.unread(character)
                    return False
                character = yield from self.next_visible()
                if character == closing:  # a comma after the last
                    self.arguments("}" if opening == "{" else "]")
                    return True
                self.arguments(", ")
            first = False
            self.unread(character)
            if opening == "{":
                quote = yield from self.next_visible()
                if quote == END or quote not in "'\"" or not (yield from self._string(quote)):
                    return False
                if (yield from self.next_visible()) != ":":
                    return False
                self.arguments(": ")
            if not (yield from self._value(depth + 1)):
                return False

    def _string(self, quote: str) -> Check:
        """A string after its opening quote; three quotes of a kind open a long one."""
        end = quote
        if (yield from self.exactly(quote)) != END:
            if (yield from self.exactly(quote)) == END:
                self.arguments('""')
                return True
            end = quote * 3
        self.arguments('"')
        held = ""
        while True:
            character = yield from self.next()
            if character == END:
                self._text(held)
                return False
            if character == "\\":
                self._text(held)
                held = ""
                yield from self._escape(self._text)
                continue
            held += character
            while held and not end.startswith(held):
                self._text(held[0])
                held = held[1:]
            if held == end:
                self.arguments('"')
                return True

    def _text(self, text: str) -> None:
        self.arguments(escaped(text))

    def _escape(self, sink: Callable[[str], None]) -> Steps:
        escape = yield from self.next()
        if escape not in _HEX_LENGTH:
            sink(_ESCAPES.get(escape, escape if escape in "\\'\"" else "\\" + escape))
            return
        digits = ""
        while len(digits) < _HEX_LENGTH[escape]:
            character = yield from self.next()
            if character == END or character not in "0123456789abcdefABCDEF":
                self.unread(character)
                break
            digits += character
        code = int(digits or "0", 16)
        sink("\ufffd" if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code))


def _number(word: str) -> str | None:
    """A Python number as JSON writes it, None for what is none."""
    if word.strip("+-0123456789.eE_") or not any(character.isdigit() for character in word):
        return None
    plain = word.removeprefix("+").replace("_", "")
    try:
        json.loads(plain)
    except ValueError:
        try:
            return json.dumps(float(plain))
        except ValueError:
            return None
    return plain
