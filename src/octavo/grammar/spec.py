"""What an output is asked to be. A value; knows nothing of how it is enforced."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class GrammarKind(StrEnum):
    """What the text of a `GrammarSpec` is.

    JSON: a JSON schema. REGEX: the output as a whole matches. CHOICE: a JSON list of texts, one of which is the output. GRAMMAR: Lark
    as llguidance reads it, or EBNF as llama.cpp's GBNF. STRUCTURAL_TAG: a JSON object, see `octavo.grammar.tags`.
    """

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint. `field` is the request's field it came from, for messages about it.

    `any_whitespace`: JSON may have a blank or two, or a line break and indentation, between its parts; without it none. `whitespace`: a
    regex for them instead. `lenient`: keywords of a schema that cannot be enforced are left out instead of refused.
    """

    kind: GrammarKind
    text: str
    field: str
    any_whitespace: bool = True
    whitespace: str | None = None
    lenient: bool = False
