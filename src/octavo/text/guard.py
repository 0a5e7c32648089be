"""Keeps control-token text that clients send from becoming control tokens. Knows no tokenizer and no template.

A control token is recognised in a prompt by its text. A `MARK` is put inside each occurrence in a client's strings before
they are rendered into the prompt; the tokenizer then does not recognise them, drops the marks and encodes what remains
as ordinary text, in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MARK = "\ufdd0"
"""A noncharacter: Unicode reserves it for internal use, text for interchange does not hold it."""


class ControlTextGuard:
    """Finds and marks the texts of a set of control tokens, in time linear in the text for any number of tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        by_first: dict[str, list[str]] = {}
        for text in texts:
            # The mark goes after the first character, so a token of one character cannot be broken up.
            if len(text) > 1:
                by_first.setdefault(text[0], []).append(text[1:])
        # A lookahead leaves the rest of a token unread, so that tokens overlapping it are found too.
        alternatives = [f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in sorted(by_first.items())]
        self._pattern = re.compile("|".join(alternatives) or r"(?!)")

    def finds(self, text: str) -> bool:
        """Whether the text of a control token occurs."""
        return self._pattern.search(text) is not None

    def protect(self, text: str) -> str:
        """The text with each control token's text broken up by a mark. Marks already in it are removed first."""
        return self._pattern.sub(_with_mark, unmarked(text))


def unmarked(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "")


def any_string(value: Any, predicate: Callable[[str], bool]) -> bool:
    """Whether the predicate holds for any string in a JSON-like value, keys included."""
    if isinstance(value, str):
        return predicate(value)
    if isinstance(value, Mapping):
        return any(any_string(key, predicate) or any_string(item, predicate) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return any(any_string(item, predicate) for item in value)
    return False


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


def _with_mark(match: re.Match[str]) -> str:
    return match[0] + MARK


def _any_of(texts: list[str]) -> str:
    """A pattern that matches where any of the texts begins: a prefix tree, so that alternatives share their beginnings."""
    if "" in texts:
        return ""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[0], []).append(text)
    alternatives = []
    for group in by_first.values():
        shared = _shared_beginning(min(group), max(group))
        alternatives.append(re.escape(shared) + _any_of([text[len(shared) :] for text in group]))
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _shared_beginning(one: str, other: str) -> str:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return one[:index]
    return min(one, other, key=len)
