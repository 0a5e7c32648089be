"""JSON schemas as llguidance takes them, and what it would take silently but not enforce. Knows no tokens.

llguidance refuses keywords it does not implement by name. Left to do here: its own options must not come from clients, and
`minProperties` must not be met by one key written twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar.limits import MAX_FORCED_BYTES
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
    if str(schema.get("$schema")).rstrip("#").endswith("draft-03/schema"):
        raise UnsupportedFieldError(f"{field}: $schema names draft 3; write the schema by a later draft", param=field)
    for subschema in _subschemas(schema, field):
        _check_constants(subschema, field)
        if not spec.lenient:
            _check_min_properties(subschema, field)
    text = json.dumps(schema, ensure_ascii=False)
    prepared = dict(_changed(schema, _narrowed) if '"exclusiveM' in text or '"date' in text else schema)
    prepared[_OPTIONS] = _options(spec, text)
    return prepared


_FROM_YEAR_1 = "^(000[1-9]|00[1-9]|0[1-9]|[1-9])"
_NEARLY = 1e-9
_WHOLE = 10**6
"""Above it a float64 has no room for a distance of `_NEARLY`, times the number, that is worth keeping."""
_KNOWN_FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")


def known_schema(schema: Any) -> Any:
    """A copy without formats and patterns that llguidance does not have, for those who would rather do without them."""

    def known(name: str, value: Any) -> bool:
        if name == "format":
            return not isinstance(value, str) or value in _KNOWN_FORMATS
        return name != "pattern" or not isinstance(value, str) or _is_plain_pattern(value)

    return _changed(schema, lambda own: {name: value for name, value in own.items() if known(name, value)})


def _narrowed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with exclusive bounds that are whole numbers moved inwards by next to nothing, as inclusive ones, and dates from year 1.

    llguidance 1.9 lets the bare number through when the other bound has the same whole part: 10 for more than 10 and at most 10.5.
    The year 0000 is right by RFC 3339, but Python and others have none.
    """
    narrowed = dict(schema)
    if schema.get("format") in ("date", "date-time") and not schema.keys() & {"pattern", "enum", "const"}:
        narrowed["pattern"] = _FROM_YEAR_1
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound = schema.get(exclusive)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or bound != bound // 1 or abs(bound) > _WHOLE:
            continue
        moved = bound + sign * max(_NEARLY, abs(bound) * _NEARLY)
        other = schema.get(inclusive)
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            moved = max(moved, other) if sign > 0 else min(moved, other)
        del narrowed[exclusive]
        narrowed[inclusive] = moved
    return narrowed


def _changed(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], depth: int = 0) -> Any:
    """A copy with the keywords of every subschema changed. What is nested too deeply is left as it is."""
    if isinstance(schema, list):
        return [_changed(one, change, depth) for one in schema]
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        return schema
    result = dict(change(schema))
    for name, value in result.items():
        if name in _MAPS and isinstance(value, Mapping):
            result[name] = {key: _changed(one, change, depth + 1) for key, one in value.items()}
        elif name in _LISTS or name in _ONES:
            result[name] = _changed(value, change, depth + 1)
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


def check_length(text: str, field: str) -> None:
    """Raises InvalidRequestError for a text that is to be written as it stands and is too long for it."""
    if len(text) > MAX_FORCED_BYTES // 4 and (size := len(text.encode("utf-8", "replace"))) > MAX_FORCED_BYTES:
        raise InvalidRequestError(
            f"{field} has a text of {size} bytes that the output must repeat; at most {MAX_FORCED_BYTES} are allowed",
            param=field,
        )


def _check_constants(schema: Mapping[str, Any], field: str) -> None:
    values = schema.get("enum")
    for value in (schema.get("const"), *(values if isinstance(values, list) else ())):
        if isinstance(value, (str, list, Mapping)):
            check_length(json.dumps(value, ensure_ascii=False), field)
    properties = schema.get("properties")
    for name in properties if isinstance(properties, Mapping) else ():
        check_length(name, field)


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
