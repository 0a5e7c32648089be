"""From a Messages request to the chat request it means. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.server.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.protocol import ChatCompletionRequest

Block = dict[str, Any]


def chat_request(body: MessagesRequest | CountTokensRequest, *, can_switch_thinking: bool) -> ChatCompletionRequest:
    """The chat request. An assistant's message at the end is its answer's beginning. Raises InvalidRequestError naming the field."""
    messages = chat_messages(body.messages, body.system)
    prefilled = messages[-1]["role"] == "assistant"
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": prefilled or None}
    if body.thinking is not None and can_switch_thinking:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.output_config is not None and body.output_config.format is not None:
        fields["response_format"] = _response_format(body.output_config.format)
    if isinstance(body, MessagesRequest):
        _check(body)
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return ChatCompletionRequest(**fields)


_HINTS = frozenset({"type", "cache_control", "eager_input_streaming"})
"""Fields of a tool that ask for what happens anyway: prompts are cached, arguments are streamed as they come."""


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """Chat's form of a client's tool. Tools that Anthropic's servers run themselves are refused."""
    if tool.get("type", "custom") not in ("custom", None):
        raise UnsupportedFieldError(
            f"{place}.type {tool['type']!r:.60} is not supported; only custom is", param="tools"
        )
    if unknown := sorted(tool.keys() - _HINTS - {"name", "description", "input_schema", "strict"}):
        raise UnsupportedFieldError(f"{place}.{unknown[0][:60]} is not supported", param="tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequestError(f"{place}.input_schema must be a JSON schema, an object", param="tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(given: dict[str, Any]) -> dict[str, Any]:
    choices: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    kind = given.get("type")
    if not isinstance(kind, str) or (kind not in choices and kind != "tool"):
        raise InvalidRequestError(
            f"tool_choice.type is {kind!r:.60}; expected auto, any, tool or none", param="tool_choice"
        )
    if unknown := sorted(given.keys() - {"type", "name", "disable_parallel_tool_use"}):
        raise InvalidRequestError(f"tool_choice has the unknown field {unknown[0]!r:.60}", param="tool_choice")
    choices["tool"] = {"type": "function", "function": {"name": given.get("name")}}
    serial = given.get("disable_parallel_tool_use")
    if not isinstance(serial, (bool, type(None))):
        raise InvalidRequestError("tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice")
    return {"tool_choice": choices[kind], "parallel_tool_calls": False if serial else None}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind, schema = given.get("type"), given.get("schema")
    if kind != "json_schema" or given.keys() != {"type", "schema"} or not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(
            'output_config.format must be {"type": "json_schema", "schema": ...}', param="output_config"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _check(body: MessagesRequest) -> None:
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        budget = thinking.budget_tokens
        if budget is None or not 1 <= budget < body.max_tokens:
            raise InvalidRequestError(
                "thinking.budget_tokens must be at least 1 and less than max_tokens", param="thinking"
            )


def chat_messages(given: Sequence[Any], system: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """Chat messages of Anthropic's. Results of tools are messages of their own, before the rest of their message.

    Raises InvalidRequestError for malformed blocks, UnsupportedFieldError for kinds that are not built.
    """
    if not given:
        raise InvalidRequestError("messages is an empty list", param="messages")
    result: list[dict[str, Any]] = []
    if system is not None:
        parts = [
            _block_text(block, f"system[{number}]", "system") for number, block in enumerate(_blocks(system, "system"))
        ]
        result.append({"role": "system", "content": "\n\n".join(parts)})
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise InvalidRequestError(f"{place}.role is {role!r:.40}; expected user or assistant", param="messages")
        for name in message:
            if name not in ("role", "content"):
                raise InvalidRequestError(f"{place} has the unknown field {name[:80]!r}", param="messages")
        blocks = _blocks(message.get("content"), f"{place}.content")
        if role == "user":
            _add_user(result, blocks, place)
        else:
            result.append(_assistant(blocks, place))
    return result


def _add_user(result: list[dict[str, Any]], blocks: Sequence[Block], place: str) -> None:
    texts: list[str] = []
    for number, block in enumerate(blocks):
        where = f"{place}.content[{number}]"
        if block.get("type") == "tool_result":
            content = block.get("content")
            parts = [] if content is None else _blocks(content, f"{where}.content")
            text = "".join(_block_text(part, f"{where}.content[{index}]") for index, part in enumerate(parts))
            if block.get("is_error") is True:
                text = f"Error: {text}"
            result.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text})
        else:
            texts.append(_block_text(block, where))
    if texts or not blocks:
        result.append({"role": "user", "content": "".join(texts)})


def _assistant(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    texts: list[str] = []
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for number, block in enumerate(blocks):
        where = f"{place}.content[{number}]"
        match block.get("type"):
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + _string(block, "thinking", where)
            case "tool_use":
                if not isinstance(block.get("input"), dict):
                    raise InvalidRequestError(f"{where}.input must be an object", param="messages")
                function = {"name": _string(block, "name", where), "arguments": json.dumps(block["input"])}
                call = {"id": _string(block, "id", where), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case _:
                texts.append(_block_text(block, where))
    if texts:
        message["content"] = "".join(texts)
    return message


def _blocks(content: Any, place: str) -> Sequence[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequestError(f"{place} must be text or a list of blocks", param=place.partition("[")[0])
    return content


def _block_text(block: Block, place: str, param: str = "messages") -> str:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{place} must be a block with a type", param=param)
    if kind != "text":
        raise UnsupportedFieldError(f"{place}.type {kind!r:.60} is not supported here; only text is", param=param)
    return _string(block, "text", place, param)


def _string(block: Block, name: str, place: str, param: str = "messages") -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{name} must be a string", param=param)
    return value
