"""POST /v1/messages: blocks, events, ends and refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from octavo.config import ServerConfig
from octavo.runner.scripted import RowFailure
from octavo.server.messages.protocol import MessagesRequest
from support.asgi import Call, application
from support.scripted import EOS, model_of, spell

PATH = "/v1/messages"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
ANSWER = [*spell("Hello there"), EOS]


def ask(body: dict[str, Any], script: Any = ANSWER, path: str = PATH, headers: Any = None, **options: Any) -> Any:
    async def main() -> Any:
        async with application(script, **options) as (app, _):
            call = Call(app, path, body, headers=headers or {})
            result = await call.run()
            return call, result

    return asyncio.run(main())


def events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for block in stream.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
            if found[-1]["type"] not in ("ping", "error"):
                TypeAdapter(RawMessageStreamEvent).validate_python(found[-1])
    return found


def test_a_whole_message() -> None:
    hints = {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}
    call, result = ask({**ASK, "system": "be brief", "temperature": 0, **hints})
    message = Message.model_validate(result)
    assert [block.text for block in message.content] == ["Hello there"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(ANSWER)
    assert call.answer_headers["request-id"] == message.id
    _, counted = ask({"messages": ASK["messages"], "system": "be brief"}, path=f"{PATH}/count_tokens")
    assert counted == {"input_tokens": message.usage.input_tokens}


def test_a_stream_is_the_whole_message() -> None:
    _, result = ask({**ASK, "stream": True}, itl_s=0.002)
    stream = events(result)
    kinds = [event["type"] for event in stream]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in stream[3:-3]) == "Hello there"
    assert stream[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert stream[-2]["usage"]["output_tokens"] == len(ANSWER)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 5}, "max_tokens", None, "Hello"),
        ({"stop_sequences": ["lo t", "zz"]}, "stop_sequence", "lo t", "Hel"),
        ({"stop_sequences": []}, "end_turn", None, "Hello there"),
    ],
)
def test_ends(fields: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    _, whole = ask({**ASK, **fields})
    assert (whole["stop_reason"], whole["stop_sequence"], whole["content"][0]["text"]) == (reason, sequence, text)
    stream = events(ask({**ASK, **fields, "stream": True})[1])
    assert stream[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_goes_on_from_its_beginning() -> None:
    prompts: list[str] = []

    def script(start: Any) -> list[int]:
        prompts.append(bytes(start.token_ids[: start.num_prompt_tokens]).decode())
        return ANSWER

    ask({**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": "It is"}]}, script)
    assert prompts == ["user: hi\nassistant: It is"]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": ASK["messages"]}, 400, "invalid_request_error"),
        ({**ASK, "messages": []}, 400, "invalid_request_error"),
        ({**ASK, "max_tokens": 10**7}, 400, "invalid_request_error"),
        ({**ASK, "model": "claude"}, 404, "not_found_error"),
        ({**ASK, "n": 2}, 400, "invalid_request_error"),
        ({**ASK, "stop_sequences": ["x"] * 99}, 400, "invalid_request_error"),
        (b"x" * 9_000_000, 413, "request_too_large"),
    ],
)
def test_refusals_have_anthropics_shape(body: Any, status: int, kind: str) -> None:
    call, result = ask(body)
    assert (call.status, result["type"], result["error"]["type"]) == (status, "error", kind)
    assert result["error"]["message"]


def test_fields_that_are_not_built_are_refused_by_name() -> None:
    for name, neutral in MessagesRequest.not_built.items():
        call, result = ask({**ASK, name: {"not": "neutral"}})
        assert (call.status, result["error"]["param"]) == (400, name)
        for value in neutral:
            assert ask({**ASK, name: value})[0].status == 200


def test_errors_of_the_engine() -> None:
    call, result = ask({**ASK, "stream": True}, [RowFailure("broken")])
    assert (call.status, result["error"]["type"]) == (500, "api_error")
    _, result = ask({**ASK, "stream": True}, [*spell("abc"), RowFailure("broken")], itl_s=0.02)
    assert events(result)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken", "param": None, "code": "engine_error"},
    }


def test_keys_come_in_anthropics_header_too() -> None:
    server = ServerConfig(api_key=("alice:sesame",))
    for headers, status in (
        ({"x-api-key": "sesame"}, 200),
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "Bearer sesame", "x-api-key": "other"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "sesame"}, 401),
        ({"x-api-key": "other"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ):
        call, result = ask(ASK, headers=headers, server=server)
        assert call.status == status
        if status == 401:
            assert result["error"]["type"] == "authentication_error"


TOOLS = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "stop", "input_schema": {"type": "object"}},
]
AGENT = (
    "<think>hm, well</think>I will ask.\n<tool_call>\n"
    + json.dumps({"name": "weather", "arguments": {"city": "Oslo 🎉"}})
    + "\n</tool_call>\n<tool_call>\n"
    + json.dumps({"name": "stop", "arguments": {}})
    + "\n</tool_call>"
)


def test_an_agents_turn() -> None:
    model = model_of(call_format="hermes", reasoning_format="qwen3")
    body = {**ASK, "tools": TOOLS, "max_tokens": 900}
    _, whole = ask(body, [*spell(AGENT), EOS], model=model)
    Message.model_validate(whole)
    thinking, text, *calls = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm, well")
    assert text["text"].strip() == "I will ask."
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": "Oslo 🎉"}), ("stop", {})]
    assert whole["stop_reason"] == "tool_use"

    _, stream = ask({**body, "stream": True}, [*spell(AGENT), EOS], model=model, itl_s=0.001)
    told: dict[int, dict[str, Any]] = {}
    for event in events(stream):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(told)
                told[event["index"]] = {**event["content_block"], "said": ""}
            case "content_block_delta":
                delta = event["delta"]
                said = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                told[event["index"]]["said"] += delta[said[delta["type"]]]
            case "message_delta":
                assert event["delta"]["stop_reason"] == "tool_use"
    assert [block["type"] for block in told.values()] == ["thinking", "text", "tool_use", "tool_use"]
    assert told[0]["said"] == "hm, well"
    assert [json.loads(told[index]["said"] or "{}") for index in (2, 3)] == [{"city": "Oslo 🎉"}, {}]


def test_tools_that_cannot_be_are_refused() -> None:
    for fields in (
        {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tools": [{"type": "web_search_20250305", "name": "w"}]},
    ):
        call, result = ask({**ASK, **fields})
        assert (call.status, result["error"]["param"]) == (400, "tools")
    call, result = ask({**ASK, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}})
    assert (call.status, result["error"]["param"]) == (400, "tool_choice")
