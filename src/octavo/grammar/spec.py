"""What an output is asked to be. A value; knows nothing of how it is enforced."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class GrammarKind(StrEnum):
    """What the text of a `GrammarSpec` is.

    JSON: a JSON schema. REGEX: the output as a whole matches. CHOICE: a JSON list of texts, one of which is the output. GRAMMAR: Lark
    as llguidance reads it, or EBNF as llama.cpp's GBNF. STRUCTURAL_TAG: a JSON object, see `octavo.grammar.tags`.
    CALLS: a `CallsSpec` as JSON.
    """

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    CALLS = "calls"


class Reasoning(StrEnum):
    """What may stand before that which is constrained: BEGUN, the output starts within it; POSSIBLE, it may begin with it."""

    BEGUN = "begun"
    POSSIBLE = "possible"


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
    reasoning: Reasoning | None = None


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that may be called. Without `strict`, keywords of its schema that cannot be enforced are left out."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False


class CallsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Tool calls in a model's format, by the names of `octavo.grammar.calls`.

    `required`: the output is calls and nothing else; otherwise a text in which calls are as they must be. `parallel`: more than one is
    allowed. `content`: what the output must be where it is no call.
    """

    format: str
    tools: tuple[ToolSpec, ...]
    required: bool
    parallel: bool = True
    content: GrammarSpec | None = None
