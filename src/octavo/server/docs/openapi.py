"""The OpenAPI document. Requests and answers come from the protocol structs; what these leave open from `unions`.

A body that fits its schema may still be refused for what it asks of the model: a context that is too short, a token that is none, two
fields that exclude each other. A body that does not fit is always refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

import octavo
from octavo.server.docs.notes import NOTES
from octavo.server.docs.unions import FIELDS, PARTS, Schema, ref
from octavo.server.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    PinRequest,
    TextCompletion,
    TokenizeRequest,
    UnpinRequest,
    not_built_fields,
)
from octavo.server.responses.protocol import ResponsesRequest

REQUESTS: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/chat/completions"): ChatCompletionRequest,
    ("POST", "/v1/completions"): CompletionRequest,
    ("POST", "/v1/responses"): ResponsesRequest,
    ("POST", "/v1/messages"): MessagesRequest,
    ("POST", "/v1/messages/count_tokens"): CountTokensRequest,
    ("POST", "/tokenize"): TokenizeRequest,
    ("POST", "/detokenize"): DetokenizeRequest,
    ("POST", "/pin_prefix"): PinRequest,
    ("POST", "/unpin_prefix"): UnpinRequest,
}
"""What each route reads."""
_ANSWERS: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/chat/completions"): ChatCompletion,
    ("POST", "/v1/completions"): TextCompletion,
    ("GET", "/v1/models"): ModelList,
    ("GET", "/v1/models/{name}"): ModelCard,
}
_CHUNKS: dict[tuple[str, str], type[msgspec.Struct] | None] = {
    ("POST", "/v1/chat/completions"): ChatChunk,
    ("POST", "/v1/completions"): TextCompletion,
    ("POST", "/v1/responses"): None,
    ("POST", "/v1/messages"): None,
}
_TEXT_ANSWERS = {("GET", "/metrics"): "text/plain", ("GET", "/docs"): "text/html"}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "the request is wrong; `param` names the field",
    "401": "the key is missing or wrong",
    "403": "a foreign host or page, or an administrative route without a key",
    "404": "no such model or response",
    "408": "the body did not come in time",
    "409": "the budget of pinned prefixes is used up",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "the queue is full; try again after `Retry-After` seconds",
    "500": "the engine failed; the request may be sent again",
    "503": "the model is loading, or the server is shutting down",
    "504": "a deadline of the request passed",
}


def document(routes: list[tuple[str, str, str]]) -> dict[str, Any]:
    """The document of a server with these routes: (method, path pattern, what it does)."""
    structs = list(
        dict.fromkeys([*REQUESTS.values(), *_ANSWERS.values(), *(kind for kind in _CHUNKS.values() if kind)])
    )
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for kind in REQUESTS.values():
        _complete(components[kind.__name__], kind)
    for name, fields in FIELDS.items():
        for field, schema in fields.items():
            known = components[name]["properties"][field]
            kept = {key: known[key] for key in ("default", "description") if key in known}
            components[name]["properties"][field] = {**kept, **schema}
    paths: dict[str, dict[str, Any]] = {}
    for method, pattern, text in routes:
        path = pattern.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, text)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": octavo.__version__,
            "description": inspect.cleandoc(__doc__ or "").partition("\n\n")[2],
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "./"}],
        "paths": paths,
        "components": {
            "schemas": {**components, **PARTS, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _complete(schema: Schema, kind: type[msgspec.Struct]) -> None:
    """Adds what fields do, and those that are known and refused: nothing but their neutral values is accepted."""
    for name in kind.__struct_fields__:
        schema["properties"][name] = {"description": NOTES[name], **schema["properties"][name]}
    for name, neutral in not_built_fields(kind).items():
        if name not in schema["properties"]:
            schema["properties"][name] = {
                "enum": [*neutral, None],
                "description": "Not built: refused with anything but these values.",
            }


def _operation(method: str, path: str, text: str) -> dict[str, Any]:
    key = (method, path)
    answer: Schema = ref(_ANSWERS[key].__name__) if key in _ANSWERS else {"type": "object"}
    content = {
        _TEXT_ANSWERS.get(key, "application/json"): {"schema": {"type": "string"} if key in _TEXT_ANSWERS else answer}
    }
    if key in _CHUNKS:
        chunk = _CHUNKS[key]
        event: Schema = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": event}
        if chunk is not None:
            text += f" As a stream, each event's data is a {chunk.__name__}; the last one is [DONE]."
    operation: dict[str, Any] = {
        "summary": text.partition(". ")[0].rstrip("."),
        "description": text,
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{
                status: {"description": meaning, "content": {"application/json": {"schema": ref("Error")}}}
                for status, meaning in _STATUSES.items()
            },
        },
    }
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if key in REQUESTS:
        schema = ref(REQUESTS[key].__name__)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
