"""Writes grammars in llguidance's dialect of Lark: rules, literals with control tokens in them, free text with triggers.

Knows no requests and no formats of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.grammar.schema import check_length, prepare_schema
from octavo.grammar.spec import GrammarSpec

_UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029"\\\\]')
FREE_TEXT = r"/(.|\n)*/"


class Tag(msgspec.Struct, frozen=True):
    """A part of an output that must be as told: `begin`, `body` (terms of a rule), `end`. `begin` starts with its trigger."""

    begin: str
    body: str
    end: str


def literal(text: str) -> str:
    """A text as a Lark literal."""
    return '"' + _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + '"'


def regex_term(pattern: str) -> str:
    r"""A regular expression as a Lark term. \d means ASCII digits, which is what people mean."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'd')}/"


class LarkWriter:
    """Collects rules. `specials`: ids of control tokens by their text; where a literal holds one, the token itself is meant."""

    def __init__(self, spec: GrammarSpec, specials: Mapping[str, int]) -> None:
        self._spec = spec
        self._specials = specials
        alternatives = sorted(filter(None, specials), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, alternatives)) or r"(?!)")
        self._rules: list[str] = []
        self._num_rules = 0

    def text(self, start: str) -> str:
        """The whole grammar; `start` is the body of its start rule."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def rule(self, body: str, *, lazy: bool = False, terminal: bool = False) -> str:
        """Adds a rule, returns its name."""
        self._num_rules += 1
        name = f"{'T' if terminal else 'r'}{self._num_rules}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def words(self, text: str) -> str:
        """Terms for exactly this text. Raises InvalidRequestError when it is too long."""
        check_length(text, self._spec.field)
        terms: list[str] = []
        start = 0
        for found in self._special.finditer(text):
            if found.start() > start:
                terms.append(literal(text[start : found.start()]))
            terms.append(f"<[{self._specials[found[0]]}]>")
            start = found.end()
        if start < len(text) or not terms:
            terms.append(literal(text[start:]))
        return " ".join(terms)

    def json(self, schema: Any, spec: GrammarSpec | None = None) -> str:
        """A term for a JSON value of this schema. Raises what `prepare_schema` raises."""
        return self.rule(f"%json {json.dumps(prepare_schema(schema, spec or self._spec))}")

    def regex(self, pattern: str) -> str:
        """A term for a text that matches as a whole."""
        return self.rule(regex_term(pattern), terminal=True)

    def free_text(self) -> str:
        """A term for any text without control tokens."""
        return self.rule(FREE_TEXT, terminal=True)

    def text_until(self, end: str, text: str = FREE_TEXT) -> str:
        """Terms for a text up to the first place where `end` stands, and `end`. `text`: a terminal's body that says what it may be."""
        found = self._special.search(end)
        if found is not None and found.start() == 0:
            return f"{self.rule(text, terminal=True)} {self.words(end)}"
        head = end if found is None else end[: found.start()]
        term = self.rule(f"{text} {literal(head)}", lazy=True)
        return term if found is None else f"{term} {self.words(end[found.start() :])}"

    def any_of(self, alternatives: Sequence[str]) -> str:
        """A term for one of several sequences of terms."""
        return self.rule(" | ".join(alternatives))

    def tag(self, tag: Tag, *, after: str = "") -> str:
        """Terms of a tag, less the text `after` that its `begin` starts with."""
        begin = tag.begin[len(after) :]
        parts = [self.words(begin) if begin else "", tag.body, self.words(tag.end) if tag.end else ""]
        return " ".join(filter(None, parts))

    def triggered(
        self,
        tags: Sequence[Tag],
        triggers: Sequence[str],
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Terms for free text in which, once a trigger stands, a tag that begins with it must follow."""
        by_trigger: dict[str, list[Tag]] = {}
        for tag in tags:
            trigger = next(trigger for trigger in triggers if tag.begin.startswith(trigger))
            by_trigger.setdefault(trigger, []).append(tag)
        pieces = [
            f"{self.text_until(trigger)} {self.any_of([self.tag(tag, after=trigger) for tag in group])}"
            for trigger, group in by_trigger.items()
        ]
        piece = self.any_of(pieces)
        if stop_after_first:
            return piece if at_least_one else self.any_of([piece, self.free_text()])
        return f"{piece}{'+' if at_least_one else '*'} {self.free_text()}"
