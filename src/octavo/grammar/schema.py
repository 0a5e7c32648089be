"""JSON schemas as llguidance takes them, and what it would take silently but not enforce. Knows no tokens.

llguidance refuses keywords it does not implement by name. Left to do here: its own options must not come from clients, and
`minProperties` must not be met by one key written twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar.spec import GrammarSpec

WHITESPACE = r"(\r?\n[ \t]{0,16}| {1,2})?"
"""Between the parts of JSON: bounded, so that a model that loves blanks still comes to its end, and wide enough for usual indentation."""
_OPTIONS = "x-guidance"
_ESCAPES = 'nrbtf\\"'
"""Escapes in JSON strings. Without `u`, so that no property's name can be written in a second way."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "propertyNames",
    "not", "if", "then", "else",
)  # fmt: skip
MAX_DEPTH = 128
"""Deepest nesting of subschemas."""


def parse_schema(text: str, field: str) -> Any:
    """A schema from its text. Raises InvalidRequestError when it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is not valid JSON: {error}", param=field) from None


def prepare_schema(schema: Any, spec: GrammarSpec) -> dict[str, Any]:
    """The schema with llguidance's options in it.

    Raises InvalidRequestError for what is no schema, UnsupportedFieldError naming a keyword that cannot be enforced.
    """
    field = spec.field
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{field}: the schema must be an object, not {type(schema).__name__}", param=field)
    if _OPTIONS in schema:
        raise UnsupportedFieldError(f"{field}: the schema keyword {_OPTIONS} is not accepted: remove it", param=field)
    if not spec.lenient:
        for subschema in _subschemas(schema, field):
            _check_min_properties(subschema, field)
    prepared = dict(schema)
    prepared[_OPTIONS] = _options(spec, _text_of(schema))
    return prepared


_KNOWN_FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")


def known_schema(schema: Any, depth: int = 0) -> Any:
    """A copy without formats and patterns that llguidance does not have, for those who would rather do without them."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [known_schema(one, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {}
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in _KNOWN_FORMATS:
            continue
        if name == "pattern" and isinstance(value, str) and not _is_plain_pattern(value):
            continue
        if name in _MAPS and isinstance(value, Mapping):
            result[name] = {key: known_schema(one, depth + 1) for key, one in value.items()}
        elif name in _LISTS or name in _ONES:
            result[name] = known_schema(value, depth + 1)
        else:
            result[name] = value
    return result


def _is_plain_pattern(pattern: str) -> bool:
    """Whether it has none of what llguidance lacks and Python's own expressions have: looking around and back."""
    return not any(sign in pattern for sign in _LOOKAROUND) and re.search(r"\\[1-9k]|\(\?[P(]", pattern) is None


def _options(spec: GrammarSpec, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "whitespace_pattern": spec.whitespace or WHITESPACE if spec.any_whitespace else "",
        "lenient": spec.lenient,
        "coerce_one_of": spec.lenient,
    }
    # A control character within a constant can only be written as an escape.
    if "\\u00" not in text and "\x7f" not in text:
        options["json_allowed_escapes"] = _ESCAPES
    return options


def _text_of(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _subschemas(schema: Mapping[str, Any], field: str) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it. What is malformed is left to llguidance to name."""
    layer: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in layer:
            if not isinstance(one, Mapping):
                continue
            yield one
            for name in _MAPS:
                if isinstance(value := one.get(name), Mapping):
                    inner.extend(value.values())
            for name in _LISTS:
                if isinstance(value := one.get(name), list):
                    inner.extend(value)
            for name in _ONES:
                value = one.get(name)
                inner.extend(value if isinstance(value, list) else [value])
        layer = [one for one in inner if isinstance(one, Mapping)]
        if not layer:
            return
    raise InvalidRequestError(f"{field}: the schema is nested more than {MAX_DEPTH} levels deep", param=field)


def _check_min_properties(schema: Mapping[str, Any], field: str) -> None:
    """A key written twice counts once. Declared properties come in their order, once each; others could repeat."""
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return
    free = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if free and least > len(set(map(str, required))) + 1:
        raise UnsupportedFieldError(
            f"{field}: the schema keyword minProperties cannot be enforced here, where names are free: list them as required",
            param=field,
        )
