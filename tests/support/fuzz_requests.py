"""Random requests made from a server's own OpenAPI document: ones that fit it, and ones that are wrong in all kinds of ways."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

TEXTS = (
    "",
    "a",
    "hello",
    "Tell me a story.",
    "<|im_end|>",
    "é🎉\u0000\u2028",
    "{{ 7*7 }}",
    "x" * 300,
    "]]]",
    '"\\"',
    "user",
    "text",
    "auto",
)
NUMBERS = (0, 1, -1, 2, 3, 7, 128, 129, 1e-5, 0.5, 1.5, -2, 2**31, 2**63, 2**64, 1e308, 49_151, 49_152)
RAW = (
    b"NaN",
    b"Infinity",
    b"1e999",
    b'"\\ud83d"',
    b"[" * 300 + b"]" * 300,
    b"{" * 2000,
    b'"' + b"y" * 70_000 + b'"',
    b"",
)
TOKEN_LIMIT = 24
LABELS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True)
class Fuzz:
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    streams: bool
    has_deadline: bool


class Generator:
    """Requests for one document. `model` is a name the server knows; ids of kept responses are remembered by `learn`."""

    def __init__(self, document: dict[str, Any], model: str, seed: int) -> None:
        self._components = document["components"]["schemas"]
        self._operations = [
            (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        self._with_body = [operation for operation in self._operations if "requestBody" in operation[2]]
        self._model = model
        self._dice = random.Random(seed)
        self._ids = ["resp_unknown"]

    def learn(self, answer: Any) -> None:
        """Remembers the id of a response, to ask for it later."""
        if isinstance(answer, dict) and answer.get("object") == "response":
            self._ids = [*self._ids[-30:], answer["id"]]

    def request(self) -> Fuzz:
        """One request."""
        dice = self._dice
        method, path, operation = dice.choice(self._with_body if dice.random() < 0.9 else self._operations)
        if "requestBody" not in operation:
            for name in ("{id}", "{name}"):
                path = path.replace(name, dice.choice((*self._ids, self._model, "..", "%2e%2e", "a/b")))
            method = dice.choice(("GET", "POST", "PUT", "HEAD", "OPTIONS")) if dice.random() < 0.1 else method
            return Fuzz(method, path, None, self._headers(), False, False)
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = self._tame(path, self._sample(schema, 0))
        for _ in range(dice.choice((0, 0, 0, 1, 1, 2))):
            body = self._broken(body)
        streams = isinstance(body, dict) and body.get("stream") is True
        deadline = isinstance(body, dict) and any(
            body.get(f"{name}_timeout") for name in ("waiting", "prefill", "decode")
        )
        return Fuzz(method, path, self._encoded(body), self._headers(), streams, deadline)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "authorization": "Bearer admin"}
        if self._dice.random() < 0.05:
            odd = ({"content-type": "text/plain"}, {"x-request-id": "é\x01"}, {"content-encoding": "gzip"}, {"origin": "http://evil.test"},
                   {"x-request-id": "z" * 200}, {"authorization": "Bearer x"}, {"host": "evil.test"})  # fmt: skip
            headers |= self._dice.choice(odd)
        return headers

    def _tame(self, path: str, body: Any) -> Any:
        """Most bodies are to be answered, and soon."""
        dice = self._dice
        if not isinstance(body, dict):
            return body
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in body:
                body[name] = dice.randint(1, TOKEN_LIMIT)
        if path in LABELS[:2] and "max_completion_tokens" not in body:
            body["max_tokens"] = dice.randint(1, TOKEN_LIMIT)
        if path == LABELS[2]:
            body["max_output_tokens"] = dice.randint(1, TOKEN_LIMIT)
        if "model" in body:
            body["model"] = self._model if dice.random() < 0.95 else "other"
        if "n" in body:
            body["n"] = dice.randint(1, 3)
        if body.get("previous_response_id") is not None:
            body["previous_response_id"] = dice.choice(self._ids)
        for name in ("allowed_token_ids", "stop_token_ids", "tokens"):
            if isinstance(body.get(name), list) and dice.random() < 0.9:
                body[name] = [dice.randrange(49_152) for _ in range(dice.randint(1, 5))]
        for name in ("waiting_timeout", "prefill_timeout", "decode_timeout"):
            if name in body and dice.random() < 0.9:
                del body[name]
        if dice.random() < 0.5:
            body["stream"] = True
        return body

    def _sample(self, schema: dict[str, Any], depth: int) -> Any:
        """A value that fits a schema; of objects the required members and now and then another one."""
        dice = self._dice
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            return self._sample(dice.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return dice.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = dice.choice(kind)
        match kind:
            case "null":
                return None
            case "boolean":
                return dice.random() < 0.5
            case "integer":
                low, high = schema.get("minimum", 0), schema.get("maximum", 60_000)
                return dice.choice((low, high, dice.randint(low, min(high, low + 300))))
            case "number":
                return dice.uniform(schema.get("minimum", 0.0), schema.get("maximum", 2.0))
            case "string":
                return self._text(schema)
            case "array":
                count = dice.randint(schema.get("minItems", 0), max(schema.get("minItems", 0), 3))
                return [self._sample(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "object":
                return self._object(schema, depth)
        return dice.choice((None, 1, "x", [], {}))

    def _text(self, schema: dict[str, Any]) -> str:
        pattern = schema.get("pattern", "")
        if "0-9" in pattern and "a-z" not in pattern:
            return str(self._dice.randrange(49_152))
        if pattern:
            return self._dice.choice(("a", "add", "get_weather"))
        return self._dice.choice(TEXTS)[: schema.get("maxLength", 400)].ljust(schema.get("minLength", 0), "x")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required, properties = schema.get("required", ()), schema.get("properties", {})
        share = 0.08 if depth == 0 else 0.4
        value = {
            name: self._sample(inner, depth + 1)
            for name, inner in properties.items()
            if name in required or self._dice.random() < share
        }
        if isinstance(schema.get("additionalProperties"), dict):
            for _ in range(self._dice.randint(0, 3)):
                value[self._text(schema.get("propertyNames", {}))] = self._sample(
                    schema["additionalProperties"], depth + 1
                )
        return value

    def _broken(self, body: Any) -> Any:
        """A change somewhere within."""
        dice = self._dice
        if isinstance(body, dict) and body and dice.random() < 0.8:
            name = dice.choice(list(body))
            match dice.randrange(4):
                case 0:
                    return {key: value for key, value in body.items() if key != name}
                case 1:
                    return {
                        **body,
                        dice.choice((name, "unheard_of", "n", "tools", "response_format", "stream")): self._junk(),
                    }
                case _:
                    return {**body, name: self._broken(body[name])}
        if isinstance(body, list) and body and dice.random() < 0.8:
            index = dice.randrange(len(body))
            return [*body[:index], self._broken(body[index]), *body[index + 1 :]]
        return self._junk()

    def _junk(self) -> Any:
        dice = self._dice
        return dice.choice((
            None, True, dice.choice(TEXTS), dice.choice(NUMBERS), [dice.choice(TEXTS)], {dice.choice(TEXTS): dice.choice(NUMBERS)},
            [[]] * 3, {"type": dice.choice(TEXTS)}, {"type": "json_schema", "json_schema": {"schema": {"type": dice.choice(TEXTS)}}},
            [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}], _Raw(dice.choice(RAW)),
        ))  # fmt: skip

    def _encoded(self, body: Any) -> bytes:
        raws: list[_Raw] = []

        def stand_in(value: Any) -> str:
            raws.append(value)
            return f"\u241araw{len(raws) - 1}\u241a"

        data = json.dumps(body, default=stand_in).encode()
        for number, raw in enumerate(raws):
            data = data.replace(json.dumps(f"\u241araw{number}\u241a").encode(), raw.text)
        if self._dice.random() < 0.02:
            data = data[: self._dice.randrange(len(data) + 1)]
        return data


class _Raw:
    """Bytes that stand in a body as they are."""

    def __init__(self, text: bytes) -> None:
        self.text = text
