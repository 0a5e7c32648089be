"""Random JSON schemas for loads of structured outputs: nested objects, bounded arrays, enums, patterns, bounded numbers, definitions,
recursion, alternatives and names in many scripts. The same seed gives the same schema. Knows no server.

Bounds are small, so that a small model finishes an output within a few hundred tokens.
"""

from __future__ import annotations

import random
import string
from typing import Any

_WORDS = (
    "name", "age", "city", "tags", "größe", "количество", "名前", "价格", "été", "a b", "id", "x-y",
    "price", "note", "e\u0301", "🎈", 'q"q', "back\\slash",
)  # fmt: skip
_TEXTS = (
    "red", "green", "blue", "ja", "да", "はい", "naïve", 'say "hi"', "tab\there", "line\nbreak", "🎉🎉", "a/b", "\u2028", "", "ÅÄÖ", "0",
)  # fmt: skip
_PATTERNS = (
    "^[A-Z]{2}-[0-9]{3}$", "^(foo|bar|baz){1,4}$", "^[a-f0-9]{8}$", "^\\d{4}-\\d{2}$", "^[^ ]{1,12}$",
    "^#[0-9A-F]{6}$", "^v\\d{1,2}\\.\\d{1,2}$",
)  # fmt: skip
_FORMATS = ("date", "uuid", "ipv4", "date")
_MAX_DEPTH = 3


def random_schema(seed: int) -> dict[str, Any]:
    """An object schema."""
    return _Maker(random.Random(seed)).root()


def large_schema(seed: int, num_bytes: int) -> dict[str, Any]:
    """A schema of about so many bytes of JSON: an object of many properties, as generated clients of large APIs have them."""
    rng = random.Random(seed)
    properties: dict[str, Any] = {}
    size = 0
    while size < num_bytes:
        name = "property_" + "".join(rng.choices(string.ascii_lowercase, k=8))
        properties[name] = {"type": "integer", "minimum": rng.randint(0, 99)}
        size += 2 * len(name) + 45
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        schema = self._object(0)
        if self._rng.random() < 0.15:
            schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
            self._definitions["node"] = self._node()
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _node(self) -> dict[str, Any]:
        """A schema that refers to itself."""
        child: dict[str, Any] = {"$ref": "#/$defs/node"}
        children = (
            {"type": "array", "items": child, "maxItems": 1}
            if self._rng.random() < 0.5
            else {"anyOf": [{"type": "null"}, child]}
        )
        properties = {"v": self._leaf(), "next": children}
        return {"type": "object", "properties": properties, "required": ["v"], "additionalProperties": False}

    def _any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kind = rng.random()
        if depth < _MAX_DEPTH and kind < 0.15:
            return self._object(depth)
        if depth < _MAX_DEPTH and kind < 0.3:
            return self._array(depth)
        if kind < 0.38:
            return {"anyOf": [self._leaf(), rng.choice([{"type": "null"}, self._leaf()])]}
        if kind < 0.44:
            name = f"def{len(self._definitions)}"
            self._definitions[name] = self._leaf()
            return {"$ref": f"#/$defs/{name}"}
        if kind < 0.48:
            return {"allOf": [{"type": "integer", "minimum": -5}, {"maximum": rng.randint(0, 50)}]}
        return self._leaf()

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_WORDS, rng.randint(1, 4 if depth == 0 else 2))
        properties = {name: self._any(depth + 1) for name in names}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        schema["required"] = [name for name in names if rng.random() < 0.7]
        schema["additionalProperties"] = False
        if depth > 0 and rng.random() < 0.1:
            schema = {"type": "object", "additionalProperties": self._leaf(), "minProperties": 1, "maxProperties": 2}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        least = rng.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "items": self._any(depth + 1), "minItems": least}
        schema["maxItems"] = least + rng.randint(0, 2)
        if rng.random() < 0.2:
            return {"type": "array", "prefixItems": [self._leaf(), self._leaf()], "items": False, "minItems": 2}
        return schema

    def _leaf(self) -> dict[str, Any]:
        rng = self._rng
        match rng.randint(0, 8):
            case 0:
                return {"type": "boolean"}
            case 1:
                low = rng.randint(-1000, 1000)
                return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
            case 2:
                least = rng.choice([-2.5, 0.0, 0.25, 10.0])
                return {"type": "number", "exclusiveMinimum": least, "maximum": least + rng.choice([0.5, 3.0, 100.0])}
            case 3:
                return {"type": "integer", "minimum": 0, "maximum": 200, "multipleOf": rng.choice([2, 5, 7])}
            case 4:
                more: list[Any] = rng.choice([[], [None], [3, True], [{"k": [1, "ü"]}]])
                return {"enum": [*rng.sample(_TEXTS, rng.randint(1, 4)), *more]}
            case 5:
                return {"type": "string", "pattern": rng.choice(_PATTERNS)}
            case 6:
                return {"type": "string", "format": rng.choice(_FORMATS)}
            case 7:
                return {"const": rng.choice([*_TEXTS, 12, -1.5, None, ["a", {"b": False}]])}
            case _:
                shortest = rng.randint(0, 3)
                return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 20)}
