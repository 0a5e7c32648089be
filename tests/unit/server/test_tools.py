"""Tools and reasoning in chats, over scripted outputs (O-11, O-12, O-13): whole and streamed alike, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.asgi import Call, application
from support.scripted import EOS, model_of, spell

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
ARGUMENTS = {"city": 'Oslo "Øst" \\ 🎉', "days": 3}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": '
    + json.dumps(ARGUMENTS, ensure_ascii=False)
    + '}\n</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


def answer(script: str, body: dict[str, Any], model: Any = None, itl_s: float = 0.0) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        served = model or model_of(call_format="hermes")
        async with application([*spell(script), EOS], model=served, itl_s=itl_s) as (app, _):
            call = Call(app, CHAT, {"messages": ASK, "max_tokens": 900, **body})
            result = await call.run()
            return call.status, result

    return asyncio.run(main())


def streamed(
    script: str, body: dict[str, Any], model: Any = None, itl_s: float = 0.0
) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """The message put together from a stream, its finish reason, and the deltas. Without time between tokens several may come as one."""
    status, result = answer(script, {**body, "stream": True}, model, itl_s)
    assert status == 200, result
    lines = [line[6:] for line in result.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    message: dict[str, Any] = {"content": "", "tool_calls": [], "reasoning": ""}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert not {"id", "type"} & call.keys()
                assert "name" not in call["function"]
            message["tool_calls"][-1]["arguments"] += call["function"].get("arguments", "")
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return message, choices[-1]["finish_reason"], [choice["delta"] for choice in choices]


def whole(script: str, body: dict[str, Any], model: Any = None) -> tuple[dict[str, Any], str]:
    status, result = answer(script, body, model)
    assert status == 200, result
    choice = result["choices"][0]
    message = choice["message"]
    calls = [
        {"id": call["id"], **call["function"]} for call in message.get("tool_calls", ()) if call["type"] == "function"
    ]
    return {**message, "tool_calls": calls}, choice["finish_reason"]


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def test_calls_whole_and_streamed() -> None:
    message, reason = whole(CALLS, {"tools": TOOLS})
    assert message["content"] == "Let me see."
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "stop"]
    assert [json.loads(call["arguments"]) for call in message["tool_calls"]] == [ARGUMENTS, {}]
    assert reason == "tool_calls"
    stream, stream_reason, deltas = streamed(CALLS, {"tools": TOOLS}, itl_s=0.002)
    assert without_ids(stream["tool_calls"]) == without_ids(message["tool_calls"])
    assert (stream["content"], stream_reason) == (message["content"], reason)
    pieces = [
        delta for delta in deltas if any(call["function"].get("arguments") for call in delta.get("tool_calls", ()))
    ]
    assert len(pieces) > 1


def test_content_is_null_when_there_are_only_calls() -> None:
    message, _ = whole('<tool_call>{"name": "stop"}</tool_call>', {"tools": TOOLS})
    assert message["content"] is None
    stream, _, deltas = streamed('<tool_call>{"name": "stop"}</tool_call>', {"tools": TOOLS})
    assert stream["content"] == ""
    assert "<" not in json.dumps([delta.get("content", "") for delta in deltas])


def test_one_call_without_parallel_tool_calls() -> None:
    options = {"tools": TOOLS, "parallel_tool_calls": False}
    message, reason = whole(CALLS, options)
    stream, stream_reason, _ = streamed(CALLS, options)
    assert [call["name"] for call in message["tool_calls"]] == ["weather"]
    assert without_ids(stream["tool_calls"]) == without_ids(message["tool_calls"])
    assert reason == stream_reason == "tool_calls"


@pytest.mark.parametrize(
    "options", [{}, {"tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
)
def test_no_tools_no_calls(options: dict[str, Any]) -> None:
    message, reason = whole(CALLS, options)
    stream, stream_reason, _ = streamed(CALLS, options)
    assert message["content"] == stream["content"] == CALLS
    assert not message["tool_calls"]
    assert not stream["tool_calls"]
    assert reason == stream_reason == "stop"


def test_an_answer_without_a_call_is_content() -> None:
    message, reason = whole("It rains. \n", {"tools": TOOLS})
    assert (message["content"], message["tool_calls"], reason) == ("It rains. \n", [], "stop")


def test_a_call_that_is_cut_short_is_no_finished_one() -> None:
    message, reason = whole(CALLS, {"tools": TOOLS, "max_tokens": 90})
    stream, stream_reason, _ = streamed(CALLS, {"tools": TOOLS, "max_tokens": 90})
    assert reason == stream_reason == "length"
    assert without_ids(stream["tool_calls"]) == without_ids(message["tool_calls"])
    assert not message["tool_calls"][0]["arguments"].endswith("}")


def test_reasoning_whole_streamed_and_left_out() -> None:
    model = model_of(call_format="hermes", reasoning_format="qwen3")
    script = "<think>\nIs it wet?\n</think>\n\n" + CALLS
    message, reason = whole(script, {"tools": TOOLS}, model)
    stream, _, _ = streamed(script, {"tools": TOOLS}, model)
    assert message["reasoning"] == message["reasoning_content"] == stream["reasoning"] == "Is it wet?"
    assert message["content"] == stream["content"] == "Let me see."
    assert len(message["tool_calls"]) == len(stream["tool_calls"]) == 2
    assert reason == "tool_calls"
    left_out, _ = whole(script, {"include_reasoning": False}, model)
    assert "reasoning" not in left_out
    assert left_out["content"] == CALLS
    begun, _ = whole("Hm.</think>Yes.", {}, model_of(reasoning_format="deepseek_r1"))
    assert (begun["reasoning"], begun["content"]) == ("Hm.", "Yes.")
    cut, _ = whole("Hm.", {}, model_of(reasoning_format="deepseek_r1"))
    assert (cut["reasoning"], cut["content"]) == ("Hm.", None)


def test_choices_are_read_apart() -> None:
    status, result = answer(CALLS, {"tools": TOOLS, "n": 2, "temperature": 1})
    assert status == 200
    for choice in result["choices"]:
        assert len(choice["message"]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "wizard", "function": {"name": "a"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "wish": 1}}]}, "tools"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"tools": [TOOLS[1]] * 129}, "tools"),
        ({"tools": "weather"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no_such_tool"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused(body: dict[str, Any], param: str) -> None:
    status, result = answer("x", body)
    assert status == 400, result
    assert result["error"]["param"] == param


def test_a_model_whose_format_is_not_known_calls_nothing() -> None:
    status, result = answer("x", {"tools": TOOLS}, model_of(call_format=None))
    assert status == 400
    assert "--tool-call-parser" in result["error"]["message"]


def prompt_text(messages: list[dict[str, Any]], **body: Any) -> str:
    status, result = answer("x", {"messages": messages, "return_prompt_text": True, **body})
    assert status == 200, result
    return result["prompt_text"]


def test_a_template_without_tools_gets_them_in_plain_text() -> None:
    told = prompt_text(ASK, tools=TOOLS)
    assert told.startswith("system: ")
    assert '"name": "weather"' in told
    assert "<tool_call>" in told
    assert prompt_text([{"role": "system", "content": "Be brief."}, *ASK], tools=TOOLS).startswith(
        "system: Be brief.\n"
    )
    assert prompt_text(ASK, tools=TOOLS, tool_choice="none") == prompt_text(ASK)


def test_the_history_of_calls_reaches_the_prompt_in_every_form() -> None:
    def history(**assistant: Any) -> list[dict[str, Any]]:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        return [
            *ASK,
            {"role": "assistant", "tool_calls": [call], **assistant},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "wet"}]},
            {"role": "user", "content": "And tomorrow?"},
        ]

    texts = [prompt_text(history(**content)) for content in ({}, {"content": None}, {"content": ""}, {"content": []})]
    assert len(set(texts)) == 1
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in texts[0]
    assert "user: <tool_response>\n12 degrees\n</tool_response>\n<tool_response>\nwet\n</tool_response>" in texts[0]
    assert "Hm.\n<tool_call>" in prompt_text(history(content="Hm."))
