"""What callers ask of an output's form, in vLLM's and OpenAI's names, as a `GrammarSpec`. Knows no tokens and no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar import GrammarKind, GrammarSpec

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What an output must be; exactly one of the first six is given.

    json: a JSON schema, as an object or its text. regex: the output as a whole matches. choice: one of these texts. grammar: EBNF (GBNF) or
    Lark. json_object: any JSON object. structural_tag: the text of a JSON object, see `octavo.grammar.tags`. disable_any_whitespace: no
    blanks between the parts of JSON. whitespace_pattern: a regex for them instead. disable_additional_properties: objects have no
    properties but those their schema names. disable_fallback: changes nothing, there is one way to enforce a constraint.

    Raises InvalidRequestError or UnsupportedFieldError.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        field = "structured_outputs"
        given = [
            name
            for name in _KINDS
            if getattr(self, name) not in (None, False) or (name == "json" and self.json is False)
        ]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequestError(
                f"{field} needs exactly one of {', '.join(_KINDS)}; {found} is given", param=field
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise InvalidRequestError(f"{field}.{name} must be a text", param=field)
        for name in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{field}.{name} must be true or false", param=field)
        if self.disable_additional_properties:
            raise UnsupportedFieldError(
                f'{field}.disable_additional_properties is not supported: put "additionalProperties": false into the schema',
                param=field,
            )
        if not (self.json is not None or self.json_object):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    raise InvalidRequestError(f"{field}.{name} is only allowed with json or json_object", param=field)

    def spec(self, field: str = "structured_outputs") -> GrammarSpec:
        """The constraint. `field` is what messages about it name."""
        blanks = {"any_whitespace": not self.disable_any_whitespace, "whitespace": self.whitespace_pattern}
        if self.json is not None:
            return _spec(GrammarKind.JSON, self.json, f"{field}.json", field, **blanks)
        if self.json_object:
            return _spec(GrammarKind.JSON, {"type": "object"}, f"{field}.json_object", field, **blanks)
        if self.structural_tag is not None:
            return _spec(GrammarKind.STRUCTURAL_TAG, self.structural_tag, f"{field}.structural_tag", field)
        if self.choice is not None:
            if isinstance(self.choice, (str, bytes)) or not isinstance(self.choice, Sequence):
                raise InvalidRequestError(f"{field}.choice must be a list of texts", param=field)
            return _spec(GrammarKind.CHOICE, list(self.choice), f"{field}.choice", field)
        kind, text = (GrammarKind.REGEX, self.regex) if self.regex is not None else (GrammarKind.GRAMMAR, self.grammar)
        assert text is not None
        return GrammarSpec(kind=kind, text=text, field=field)


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def response_format_spec(value: Any) -> GrammarSpec | None:
    """The constraint of OpenAI's `response_format`, None for plain text.

    A schema is obeyed whether or not `strict` is set. Raises InvalidRequestError, UnsupportedFieldError.
    """
    field = "response_format"
    if not isinstance(value, Mapping) or not isinstance(kind := value.get("type"), str):
        raise InvalidRequestError(f"{field} must be an object with a type", param=field)
    match kind:
        case "text":
            _only(value, {"type"}, field)
            return None
        case "json_object":
            _only(value, {"type"}, field)
            return _spec(GrammarKind.JSON, {"type": "object"}, field, field)
        case "json_schema":
            _only(value, {"type", "json_schema"}, field)
            return _spec(GrammarKind.JSON, _schema_of(value.get("json_schema"), field), f"{field}.json_schema", field)
        case "structural_tag":
            return _spec(GrammarKind.STRUCTURAL_TAG, value, field, field)
    raise UnsupportedFieldError(
        f"{field}.type is {kind!r:.40}; expected text, json_object, json_schema or structural_tag", param=field
    )


def _schema_of(value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{field}.json_schema must be an object with name and schema", param=field)
    _only(value, {"name", "description", "schema", "strict"}, f"{field}.json_schema")
    if not isinstance(value.get("name", ""), str) or not isinstance(value.get("description") or "", str):
        raise InvalidRequestError(f"{field}.json_schema: name and description must be texts", param=field)
    if not isinstance(value.get("strict"), (bool, type(None))):
        raise InvalidRequestError(f"{field}.json_schema.strict must be true or false", param=field)
    if "schema" not in value:
        raise InvalidRequestError(f"{field}.json_schema needs a schema", param=field)
    return value["schema"]


def _only(value: Mapping[str, Any], known: set[str], place: str) -> None:
    if unknown := sorted(set(value) - known):
        raise UnsupportedFieldError(f"{place} has the unknown field {unknown[0]!r:.60}", param=place.partition(".")[0])


def _spec(kind: GrammarKind, content: Any, place: str, field: str, **options: Any) -> GrammarSpec:
    """A text is taken as the JSON it is; anything else is written as JSON."""
    try:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{place} cannot be written as JSON: {error}", param=field) from None
    return GrammarSpec(kind=kind, text=text, field=field, **options)
