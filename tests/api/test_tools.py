"""Tool calls against a live server and the official SDK: required and named ones fit their schemas, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from support.live import Live, live

MODEL = "smollm2-135m"
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def options(choice: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "messages": ASK, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 120, "temperature": 1, "seed": 5,
        "parallel_tool_calls": False, **fields,
    }  # fmt: skip


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_that_must_be(client: openai.OpenAI, choice: Any, reason: str) -> None:
    whole = client.chat.completions.create(**options(choice)).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    assert whole.message.content is None
    assert whole.finish_reason == reason
    arguments, names, reasons, num_pieces = "", [], [], 0
    for chunk in client.chat.completions.create(**options(choice), stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.index == 0
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
            num_pieces += bool(delta.function.arguments)
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
    assert (names, arguments, reasons[-1]) == (["get_weather"], call.function.arguments, reason)
    assert num_pieces > 3


def test_the_stream_helper_gathers_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**options("required")) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments is not None


def test_auto_answers_and_history_goes_on(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**options("auto", temperature=0, max_tokens=40)).choices[0]
    assert bool(reply.message.tool_calls) == (reply.finish_reason == "tool_calls")
    call = client.chat.completions.create(**options("required")).choices[0].message
    (made,) = call.tool_calls or []
    history = [
        *ASK,
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.id, "content": "12 degrees"},
    ]
    again = client.chat.completions.create(**options("none", messages=history, max_tokens=8))
    assert again.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens > 60


def test_a_keyword_that_cannot_be_enforced_is_refused_where_strict(server: Live) -> None:
    function = {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    }
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        reply = server.chat(messages=ASK, tools=[{"type": "function", "function": function}], tool_choice=choice)
        assert reply.status == 400
        assert "uniqueItems" in reply.error()["message"]
        assert reply.error()["param"] == "tools"
    loose = {**function, "strict": False}
    reply = server.chat(
        messages=ASK, tools=[{"type": "function", "function": loose}], tool_choice="required", max_tokens=60
    )
    assert reply.status == 200
    assert isinstance(reply.json()["choices"][0]["message"]["tool_calls"], list)


def test_a_call_the_model_makes_by_itself_is_held_to_its_schema(smollm2: Path) -> None:
    """A history of calls leads the model to open one; what follows fits the schema, as the history does not."""
    messages: list[dict[str, Any]] = []
    for number, city in enumerate(("Rome", "Paris", "Berlin")):
        function = {"name": "get_weather", "arguments": json.dumps({"where": city})}
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]},
        ]
    messages += ASK
    with live("serve", "--max-model-len", "1024", "--kv-cache-memory", "64M", "--enable-auto-tool-choice") as server:
        fields = {"tools": [WEATHER], "max_tokens": 120}
        reply = server.chat(messages=messages, **fields).json()["choices"][0]
        assert reply["finish_reason"] == "tool_calls", reply
        for call in reply["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
