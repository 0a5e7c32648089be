"""The OpenAPI document and the server agree: what a schema accepts is accepted, what it does not is refused."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from octavo.config import Config, ServerConfig
from octavo.errors import InvalidRequestError
from octavo.obs.events import EventLog
from octavo.obs.metrics import Metrics
from octavo.server.app import App
from octavo.server.docs.openapi import REQUESTS, document
from octavo.server.docs.unions import FIELDS, PARTS
from octavo.server.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
    not_built_fields,
)
from octavo.server.responses.protocol import ResponsesRequest
from support.asgi import Call, application
from support.scripted import EOS, model_of, spell

DOCUMENT = document([(method, path, "text") for method, path in REQUESTS])
MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 5},
    CountTokensRequest: {"messages": MESSAGES},
    TokenizeRequest: {"prompt": "hi"},
    DetokenizeRequest: {"tokens": [1]},
}
PATHS = {kind: path for (_, path), kind in REQUESTS.items()}
POOL: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, -2, 100, 101, 128, 129, 1024, 1025, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 2**64,
    0.5, -0.5, 1.5, 2.5, -2.5, 0.001, 99.5, 100.5, 1e300,
    "", "x", "low", "xhigh", "left", "auto", "disabled", "medium", "required", "é", "a\nb", "x" * 64, "x" * 128, "x" * 129, "x" * 1024,
    "x" * 1025, "text", "default", "24h",
    [], ["x"], [""], ["x"] * 16, ["x"] * 17, ["x" * 1025], [0], [1.5], [-1], [2**31], [0] * 1025, [[]], [{}], ["text"],
    ["message.output_text.logprobs"], ["file_search_call.results"],
    {}, {"a": 1}, {"1": 5}, {"1": 101}, {"01": -100}, {"12345678901": 1}, {"x": 5}, {"1": None}, {"a": "b"}, {"k" * 65: "x"},
    {"k": "x" * 513}, {str(i): "x" for i in range(17)}, {str(i): 1 for i in range(1025)},
    {"type": "text"}, {"include_usage": True}, {"include_usage": 1}, {"include_obfuscation": False}, {"include_obfuscation": True},
    {"effort": "low"}, {"effort": "lots"}, {"summary": "auto"}, {"verbosity": "medium"}, {"verbosity": "low"}, {"type": "adaptive"},
    {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1d"}, {"user_id": "u"}, {"user_id": 7},
]  # fmt: skip


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


VALIDATORS = {kind: validator(kind.__name__) for kind in PLAIN}


def decoded(body: Any, kind: type[msgspec.Struct]) -> bool:
    try:
        decode(json.dumps(body).encode(), kind)
    except InvalidRequestError:
        return False
    return True


def fields_of(kind: type[msgspec.Struct]) -> list[str]:
    """Fields whose schema says all that decoding checks. The seed's bound is checked later, unions by whoever reads them."""
    open_fields = {*FIELDS.get(kind.__name__, ()), "seed"}
    return sorted({*kind.__struct_fields__, *not_built_fields(kind)} - open_fields)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_each_value_of_each_field_is_judged_alike(kind: type[msgspec.Struct]) -> None:
    check = VALIDATORS[kind]
    assert check.is_valid(PLAIN[kind])
    for field in fields_of(kind):
        for value in POOL:
            body = {**PLAIN[kind], field: value}
            assert check.is_valid(body) == decoded(body, kind), (field, value)
        if field in PLAIN[kind] and kind is not TokenizeRequest:
            assert not decoded({k: v for k, v in PLAIN[kind].items() if k != field}, kind)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whole_bodies_are_judged_alike(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    fields = st.sampled_from([*fields_of(kind), "nonsense"])
    body = {**PLAIN[kind], **data.draw(st.dictionaries(fields, st.sampled_from(POOL), max_size=4))}
    for field in data.draw(st.sets(st.sampled_from(sorted(PLAIN[kind])), max_size=1)):
        del body[field]
    assert VALIDATORS[kind].is_valid(body) == decoded(body, kind)


# --- unions: what the code reads by hand --------------------------------------------------------------------------------

FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": False}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ANTHROPIC_TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
SCHEMA = {"name": "answer", "schema": {"type": "object"}, "strict": True}
UNIONS: list[tuple[type[msgspec.Struct], str, Any]] = [
    (ChatCompletionRequest, "messages", [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "r"}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": []},
        {"role": "developer", "content": "d"},
    ]),
    (ChatCompletionRequest, "tools", TOOLS),
    (ChatCompletionRequest, "tool_choice", {"type": "function", "function": {"name": "add"}}),
    (ChatCompletionRequest, "tool_choice", "auto"),
    (ChatCompletionRequest, "tool_choice",
     {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}}),
    (CompletionRequest, "prompt", "text"),
    (CompletionRequest, "prompt", [1, 2, 3]),
    (CompletionRequest, "prompt", ["a", "b"]),
    (CompletionRequest, "prompt", [[1, 2], [3]]),
    (ResponsesRequest, "input", [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]),
    (ResponsesRequest, "tools", [{"type": "function", **FUNCTION}]),
    (ResponsesRequest, "tool_choice", {"type": "function", "name": "add"}),
    (ResponsesRequest, "tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}),
    (MessagesRequest, "messages", [
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h"}, {"type": "text", "text": "t"},
            {"type": "tool_use", "id": "c", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}]},
    ]),
    (MessagesRequest, "system", [{"type": "text", "text": "s"}]),
    (MessagesRequest, "tools", ANTHROPIC_TOOLS),
    (MessagesRequest, "tool_choice", {"type": "auto", "disable_parallel_tool_use": True}),
]  # fmt: skip
BESIDE: dict[tuple[type[msgspec.Struct], str], dict[str, Any]] = {
    (ChatCompletionRequest, "tool_choice"): {"tools": TOOLS},
    (ResponsesRequest, "tool_choice"): {"tools": [{"type": "function", **FUNCTION}]},
    (MessagesRequest, "tool_choice"): {"tools": ANTHROPIC_TOOLS},
}
"""What a field needs beside it to make sense."""
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    "x",
    "auto",
    "text",
    "user",
    "a b",
    [],
    ["x"],
    [1],
    [[]],
    {},
    {"type": "text"},
    {"x": 1},
]
MEANING = (
    "no structured output",
    "names",
    "empty",
    "no room",
    "prompt alone",
    "excludes",
    "refuses these messages",
    "cannot be continued",
)
"""Parts of refusals that are about what a fitting body asks for."""


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values within a value."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def changed(value: Any, place: tuple[Any, ...], change: str, junk: Any) -> Any:
    """A copy that differs at one place."""
    if not place:
        return junk
    value = copy.deepcopy(value)
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    if change == "drop":
        del parent[place[-1]]
    elif change == "add" and isinstance(parent, dict):
        parent["unheard_of"] = junk
    else:
        parent[place[-1]] = junk
    return value


class Served:
    """The application, for one request after another."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        model = model_of(call_format="hermes")
        context = application([*spell("ab"), EOS], model=model)
        self._app, _ = self._runner.run(self._stack.enter_async_context(context))

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        call = Call(self._app, path, body)
        result = self._runner.run(call.run())
        return call.status, result

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


@pytest.mark.parametrize(("kind", "field", "value"), UNIONS, ids=lambda part: getattr(part, "__name__", None) or "")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_unions_are_judged_alike(
    kind: type[msgspec.Struct], field: str, value: Any, served: Served, data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from(list(places(value))))
    mutated = changed(
        value, place, data.draw(st.sampled_from(["drop", "replace", "add"])), data.draw(st.sampled_from(JUNK))
    )
    body = {**PLAIN[kind], **BESIDE.get((kind, field), {}), field: mutated}
    if kind is not MessagesRequest:
        body["max_output_tokens" if kind is ResponsesRequest else "max_tokens"] = 3
    status, result = served.answer(PATHS[kind], body)
    if not VALIDATORS[kind].is_valid(body):
        assert status == 400, body
        assert result["error"]["type"] == "invalid_request_error"
    elif status != 200:
        assert status == 400, result
        assert any(part in result["error"]["message"] for part in MEANING), (result["error"], body)


@pytest.mark.parametrize(("kind", "field", "value"), UNIONS, ids=lambda part: getattr(part, "__name__", None) or "")
def test_the_examples_fit_and_are_answered(kind: type[msgspec.Struct], field: str, value: Any, served: Served) -> None:
    body = {**PLAIN[kind], **BESIDE.get((kind, field), {}), field: value}
    VALIDATORS[kind].validate(body)
    if field != "tool_choice" or value == "auto" or kind is MessagesRequest:  # others need a compiler of grammars
        assert served.answer(PATHS[kind], body)[0] == 200


# --- the document as a whole ------------------------------------------------------------------------------------------


def app(**server: Any) -> App:
    from octavo.frontend.mock import mock_engine

    config = Config(server=ServerConfig(**server))
    return App(config, mock_engine(config, EventLog()), EventLog(), Metrics("mock"))


def get(application: App, path: str) -> Call:
    call = Call(application, path, method="GET")
    asyncio.run(call.run())
    return call


def test_every_route_is_told() -> None:
    served = app()
    told = json.loads(b"".join(get(served, "/openapi.json").parts))
    assert {(method.upper(), path) for path, methods in told["paths"].items() for method in methods} == {
        (method, path.replace(":path}", "}")) for method, path in served.routes
    }
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            assert len(operation["summary"]) > 8, (method, path)
            assert ("requestBody" in operation) == ((method.upper(), path) in REQUESTS)
    for name, schema in told["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert name in PARTS or schema.get("title", name) == name


def test_o36_every_route_needs_the_key() -> None:
    """All that are registered, but the written list: liveness, readiness and the documentation; administration needs its own."""
    served = app(api_key=("key",))
    open_paths = {"/health", "/ready", "/live", "/openapi.json", "/docs", "/docs/{name}"}
    closed = {"/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"}
    for method, path in served.routes:
        for authorization in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "ke"}):
            call = Call(served, re.sub("{.*}", "start.js", path), {}, method=method, headers=authorization)
            asyncio.run(call.run())
            expected = 403 if path in closed else 401
            assert path in open_paths or call.status == expected, (method, path, call.status)
            assert path not in open_paths or call.status in (200, 503)


def test_wrong_methods_are_told_the_right_ones() -> None:
    for path, method, allowed in (("/version", "DELETE", "GET, HEAD"), ("/v1/responses/x", "PUT", "DELETE, GET, HEAD")):
        call = Call(app(), path, method=method)
        asyncio.run(call.run())
        assert (call.status, call.answer_headers["allow"]) == (405, allowed)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    served = app()
    page = get(served, "/docs")
    html = b"".join(page.parts).decode()
    assert "https://" not in html
    assert "http://" not in html
    assert page.answer_headers["content-security-policy"].startswith("default-src 'self'")
    for name in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js", "favicon-32x32.png"):
        assert f'"docs/{name}"' in html
        assert get(served, f"/docs/{name}").status == 200
    assert get(served, "/docs/swagger-ui-bundle.js").answer_headers["content-encoding"] == "gzip"
    for name in ("other.js", "routes.py", "LICENSE", "..%2froutes.py", "page.html.gz"):
        assert get(served, f"/docs/{name}").status == 404


def test_docs_need_no_key_and_can_be_switched_off() -> None:
    for path in ("/docs", "/openapi.json", "/docs/start.js"):
        assert get(app(api_key=("key",)), path).status == 200
        assert get(app(enable_docs=False), path).status == 404
        assert get(app(enable_docs=False, api_key=("key",)), path).status == 401
