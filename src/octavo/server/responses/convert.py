"""From a Responses request to the chat request it means. Knows no engine and no store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.responses.protocol import ResponsesRequest

Item = dict[str, Any]

_SAME = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatCompletionRequest.__struct_fields__
    and name not in ("stream", "stream_options", "tools", "tool_choice")
)
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ROLES = ("assistant", "developer", "system", "user")


def input_items(given: str | Sequence[Item]) -> list[Item]:
    """`input` as a list of items. Raises InvalidRequestError for an empty one."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not given:
        raise InvalidRequestError("input is an empty list", param="input")
    return [{"type": "message", **item} if "role" in item else item for item in given]


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """The chat request for a conversation of items. Raises InvalidRequestError naming the field."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields["messages"] = messages(items, body.instructions)
    fields["max_completion_tokens"] = body.max_output_tokens
    if wants_logprobs(body):
        fields["logprobs"] = True
    elif body.top_logprobs:
        raise InvalidRequestError(
            'top_logprobs needs include to hold "message.output_text.logprobs"', param="top_logprobs"
        )
    else:
        fields["top_logprobs"] = None
    fields["tools"] = _tools(body.tools)
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return ChatCompletionRequest(**fields)


def _tools(given: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Chat's form of tools, where what belongs to a function is an object of its own."""
    if given is None:
        return None
    tools = []
    for number, tool in enumerate(given):
        if tool.get("type") != "function":
            raise UnsupportedFieldError(
                f"tools[{number}].type {tool.get('type')!r:.60} is not supported; only function is", param="tools"
            )
        tools.append({"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}})
    return tools


def _tool_choice(given: Any) -> Any:
    """Chat's form of a choice; what is none is refused there."""
    if not isinstance(given, dict):
        return given
    if given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if given.get("type") == "allowed_tools" and isinstance(given.get("tools"), list):
        tools = [_tool_choice(tool) for tool in given["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": tools}}
    return given


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """Chat's form of `text.format`, where what belongs to the schema is an object of its own."""
    if given.get("type") != "json_schema":
        return given
    inner = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the answer's text carries logprobs."""
    return "message.output_text.logprobs" in (body.include or ())


def messages(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages of items. An assistant's reasoning, text and calls that follow one another are one message.

    Raises InvalidRequestError for malformed items, UnsupportedFieldError for kinds of items and parts that are not built.
    """
    result: list[dict[str, Any]] = []
    if instructions is not None:
        result.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        place = f"input[{number}]"
        match item.get("type"):
            case "message":
                _add_message(result, item, place)
            case "function_call":
                call = {name: _string(item, name, place) for name in ("call_id", "name", "arguments")}
                function = {"name": call["name"], "arguments": call["arguments"]}
                calls = _assistant(result).setdefault("tool_calls", [])
                calls.append({"id": call["call_id"], "type": "function", "function": function})
            case "function_call_output":
                content = _text(item.get("output"), f"{place}.output")
                result.append({"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": content})
            case "reasoning":
                text = "".join(
                    _text(item[name], f"{place}.{name}")
                    for name in ("content", "summary")
                    if item.get(name) is not None
                )
                if text:
                    result.append({"role": "assistant", "content": None, "reasoning_content": text})
            case kind:
                raise UnsupportedFieldError(
                    f"{place}.type {kind!r:.60} is not supported; expected message, function_call, function_call_output or reasoning",
                    param="input",
                )
    return result


def _add_message(result: list[dict[str, Any]], item: Item, place: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(f"{place}.role is {role!r:.40}; expected one of {', '.join(_ROLES)}", param="input")
    text = _text(item.get("content"), f"{place}.content")
    if role == "assistant":
        message = _assistant(result)
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = text
            return
    result.append({"role": role, "content": text})


def _assistant(result: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not result or result[-1]["role"] != "assistant":
        result.append({"role": "assistant", "content": None})
    return result[-1]


def _string(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{name} must be a string", param="input")
    return value


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place} must be text or a list of parts", param="input")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and (kind in _TEXT_PARTS or kind == "refusal"):
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise InvalidRequestError(f"{place}[{number}].text must be a string", param="input")
            texts.append(text)
        elif isinstance(kind, str):
            raise UnsupportedFieldError(
                f"{place}[{number}].type {kind!r:.60} is not supported; only text is", param="input"
            )
        else:
            raise InvalidRequestError(f"{place}[{number}] must be an object with a type", param="input")
    return "".join(texts)


def drop_oldest(chat: ChatCompletionRequest, count: int) -> ChatCompletionRequest:
    """The conversation without its `count` oldest messages that are no instructions; what follows a dropped call goes with it."""
    head = [message for message in chat.messages if message["role"] in ("system", "developer")]
    rest = [message for message in chat.messages if message["role"] not in ("system", "developer")][count:]
    while rest and rest[0]["role"] == "tool":
        rest.pop(0)
    return msgspec.structs.replace(chat, messages=[*head, *rest])
