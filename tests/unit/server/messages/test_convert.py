"""Anthropic's blocks as chat messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.server.messages.convert import chat_messages, chat_request
from octavo.server.messages.protocol import MessagesRequest
from octavo.server.protocol import decode

TEXT = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_system_and_texts() -> None:
    assert chat_messages([user("a"), user([TEXT, TEXT])], [TEXT, {"type": "text", "text": "ho"}]) == [
        {"role": "system", "content": "hi\n\nho"}, {"role": "user", "content": "a"}, {"role": "user", "content": "hihi"},
    ]  # fmt: skip
    assert chat_messages([user("a")], "s")[0] == {"role": "system", "content": "s"}


def test_an_agents_turns() -> None:
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, TEXT, USE, USE]}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "1"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [TEXT], "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        TEXT,
    ]
    _, assistant, one, two, three, last = chat_messages([user("a"), turn, user(results)], None)
    assert (assistant["content"], assistant["reasoning_content"]) == ("hi", "hm")
    assert [call["id"] for call in assistant["tool_calls"]] == ["t1", "t1"]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert [message["content"] for message in (one, two, three)] == ["1", "Error: hi", ""]
    assert last == {"role": "user", "content": "hi"}
    assert [message["role"] for message in chat_messages([user(results[:1])], None)] == ["tool"]


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([], InvalidRequestError),
        ([{}], InvalidRequestError),
        ([{"role": "system", "content": "x"}], InvalidRequestError),
        ([{"role": ["user"], "content": "x"}], InvalidRequestError),
        ([user(None)], InvalidRequestError),
        ([user(["x"])], InvalidRequestError),
        ([user([{}])], InvalidRequestError),
        ([{**user("x"), "name": "bob"}], InvalidRequestError),
        ([user([{"type": "text"}])], InvalidRequestError),
        ([user([{"type": "image", "source": {}}])], UnsupportedFieldError),
        ([user([{"type": "document", "source": {}}])], UnsupportedFieldError),
        ([user([USE])], UnsupportedFieldError),
        ([user([{"type": "tool_result", "content": "x"}])], InvalidRequestError),
        ([user([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}])], UnsupportedFieldError),
        ([{"role": "assistant", "content": [{**USE, "input": "x"}]}], InvalidRequestError),
        ([{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}], UnsupportedFieldError),
    ],
)
def test_wrong_messages_are_refused(messages: list[Any], kind: type[Exception]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        chat_messages(messages, None)
    assert type(refusal.value) is kind
    assert refusal.value.param == "messages"


def request(**fields: Any) -> MessagesRequest:
    return decode(json.dumps({"messages": [user("x")], "max_tokens": 2000, **fields}).encode(), MessagesRequest)


def test_fields_reach_chat_under_its_names() -> None:
    body = request(stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=5, thinking={"type": "adaptive"})
    chat = chat_request(body, can_switch_thinking=True)
    assert (chat.max_completion_tokens, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (
        2000,
        ["x"],
        0.5,
        0.9,
        5,
    )
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat.continue_final_message is None
    assert chat_request(body, can_switch_thinking=False).chat_template_kwargs is None
    off = request(thinking={"type": "disabled"})
    assert chat_request(off, can_switch_thinking=True).chat_template_kwargs == {"enable_thinking": False}
    prefilled = request(messages=[user("x"), {"role": "assistant", "content": "It is"}])
    assert chat_request(prefilled, can_switch_thinking=False).continue_final_message is True


def test_a_schema_reaches_chat() -> None:
    body = request(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert chat_request(body, can_switch_thinking=False).response_format == wanted


TOOL = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}


def test_tools_reach_chat() -> None:
    for choice, wanted, parallel in (
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}, None),
    ):
        chat = chat_request(request(tools=[TOOL], tool_choice=choice), can_switch_thinking=False)
        function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
        assert chat.tools == [{"type": "function", "function": function}]
        assert (chat.tool_choice, chat.parallel_tool_calls) == (wanted, parallel)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"tools": [{**TOOL, "type": "bash_20250124"}]},
        {"tools": [{**TOOL, "defer_loading": True}]},
        {"tools": [{"name": "add"}]},
        {"tool_choice": {"type": "some"}},
        {"tool_choice": {"type": ["any"]}},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
        {"tool_choice": {"type": "any", "x": 1}},
        {"output_config": {"format": {"type": "text"}}},
        {"temperature": 1.5},
        {"temperature": -1},
        {"thinking": {"type": "enabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        chat_request(request(**fields), can_switch_thinking=True)
    assert refusal.value.param == next(iter(fields))
