"""Items of the Responses API as chat messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.server.protocol import decode
from octavo.server.responses.convert import chat_request, drop_oldest, input_items, messages
from octavo.server.responses.protocol import ResponsesRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}


def say(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def test_a_text_is_a_users_message() -> None:
    assert messages(input_items("hi"), "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_an_agents_turn_is_one_message() -> None:
    items = [
        say("user", "1+?"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me add"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add."}],
            "status": "completed",
        },
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        say("assistant", "It is 2."),
        say("assistant", "Really."),
        say("developer", "stop"),
    ]
    user, turn, one, two, *rest = messages(items, None)
    assert user == {"role": "user", "content": "1+?"}
    assert turn["content"] == "I add."
    assert turn["reasoning_content"] == "let me add"
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert (one["content"], one["tool_call_id"], two["content"]) == ("1", "c1", "2")
    assert [(message["role"], message["content"]) for message in rest] == [
        ("assistant", "It is 2."), ("assistant", "Really."), ("developer", "stop"),
    ]  # fmt: skip


def test_messages_without_a_type_are_messages() -> None:
    assert messages(input_items([{"role": "user", "content": "hi"}]), None) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        ([], InvalidRequestError),
        ([{}], UnsupportedFieldError),
        ([{"type": 7}], UnsupportedFieldError),
        ([{"type": "item_reference", "id": "x"}], UnsupportedFieldError),
        ([{"type": "web_search_call"}], UnsupportedFieldError),
        ([{"role": "robot", "content": "x"}], InvalidRequestError),
        ([{"role": ["user"], "content": "x"}], InvalidRequestError),
        ([{"role": "user"}], InvalidRequestError),
        ([{"role": "user", "content": 7}], InvalidRequestError),
        ([{"role": "user", "content": ["x"]}], InvalidRequestError),
        ([{"role": "user", "content": [{"type": "input_text"}]}], InvalidRequestError),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}], UnsupportedFieldError),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], UnsupportedFieldError),
        ([{**CALL, "name": None}], InvalidRequestError),
        ([{**CALL, "arguments": {}}], InvalidRequestError),
        ([{"type": "function_call_output", "output": "x"}], InvalidRequestError),
        ([{"type": "function_call_output", "call_id": "c"}], InvalidRequestError),
    ],
)
def test_wrong_items_are_refused(items: list[dict[str, Any]], kind: type[Exception]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        messages(input_items(items), None)
    assert type(refusal.value) is kind
    assert refusal.value.param == "input"


def request(**fields: Any) -> ResponsesRequest:
    return decode(json.dumps({"input": "hi", **fields}).encode(), ResponsesRequest)


def test_fields_reach_chat_under_its_names() -> None:
    body = request(
        max_output_tokens=9, temperature=0.5, top_k=3, seed=4, stop=["x"], reasoning={"effort": "low"},
        include=["message.output_text.logprobs"], top_logprobs=2, metadata={"a": "b"}, user="u",
    )  # fmt: skip
    chat = chat_request(body, input_items(body.input))
    assert (chat.max_completion_tokens, chat.temperature, chat.top_k, chat.seed, chat.stop) == (9, 0.5, 3, 4, ["x"])
    assert (chat.reasoning_effort, chat.logprobs, chat.top_logprobs, chat.user) == ("low", True, 2, "u")
    assert chat_request(request(), []).logprobs is None


def test_formats_reach_chat() -> None:
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    for given, wanted in (
        ({"type": "json_schema", **schema}, {"type": "json_schema", "json_schema": schema}),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, {"type": "text"}),
    ):
        assert chat_request(request(text={"format": given}), input_items("hi")).response_format == wanted


def test_tools_reach_chat() -> None:
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
    for choice, wanted in (
        (None, None),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
        ),
    ):
        chat = chat_request(request(tools=[{"type": "function", **function}], tool_choice=choice), input_items("hi"))
        assert chat.tools == [{"type": "function", "function": function}]
        assert chat.tool_choice == wanted
    for kind in ("web_search", "custom", None, ["x"]):
        with pytest.raises(UnsupportedFieldError) as refusal:
            chat_request(request(tools=[{"type": kind}]), input_items("hi"))
        assert refusal.value.param == "tools"


@pytest.mark.parametrize("fields", [{"max_output_tokens": 0}, {"top_logprobs": 2}])
def test_contradictions_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        chat_request(request(**fields), input_items("hi"))
    assert refusal.value.param == next(iter(fields))


def test_the_oldest_messages_go_first_and_results_go_with_their_calls() -> None:
    items = [say("user", "1"), CALL, {"type": "function_call_output", "call_id": "c1", "output": "x"}, say("user", "2")]
    chat = chat_request(request(instructions="be brief"), items)
    shown = [[message["role"] for message in drop_oldest(chat, count).messages] for count in range(5)]
    assert shown == [
        ["system", "user", "assistant", "tool", "user"],
        ["system", "assistant", "tool", "user"],
        ["system", "user"],
        ["system", "user"],
        ["system"],
    ]
