"""Schemas of what structs leave open: unions by a `type` or a `role`, which the code reads by hand. JSON Schema, as OpenAPI 3.1 has it.

Knows what is accepted, not how it is answered.
"""

from __future__ import annotations

from typing import Any

from octavo.limits import MAX_PROMPTS, MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_ID: Schema = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, required: list[str], *, closed: bool = False) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False} if closed else schema


def _tagged(kind: str | list[str], properties: Schema, required: list[str], *, closed: bool = False) -> Schema:
    kinds = [kind] if isinstance(kind, str) else kind
    return _object({"type": {"enum": kinds}, **properties}, ["type", *required], closed=closed)


def _content(parts: list[Schema]) -> Schema:
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": parts}, "minItems": 1}]}


# --- chat -----------------------------------------------------------------------------------------------------------

_CHAT_PARTS = [_tagged("text", {"text": _TEXT}, ["text"]), _tagged("refusal", {"refusal": _TEXT}, ["refusal"])]
_CALLED = _object({"name": _TEXT, "arguments": {"type": ["string", "object", "null"]}}, ["name"])
_CHAT_CALL = _object({"id": {}, "type": {}, "function": _CALLED}, ["function"])
_CHAT_MESSAGE: Schema = {
    "description": "A message of a conversation. An assistant's content may be absent.",
    "anyOf": [
        _object(
            {
                "role": {"enum": ["system", "developer", "user", "tool", "function"]},
                "content": _content(_CHAT_PARTS),
                "name": {},
                "tool_call_id": {},
            },
            ["role", "content"],
        ),
        _object(
            {
                "role": {"enum": ["assistant"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _CHAT_PARTS}}, {"type": "null"}]},
                "name": {},
                "reasoning_content": {},
                "tool_calls": {"type": ["array", "null"], "items": _CHAT_CALL},
            },
            ["role"],
        ),
    ],
}
_NAME: Schema = {"type": "string", "pattern": f"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}$"}
_FUNCTION: Schema = {
    "name": _NAME,
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"]},
    "strict": {"type": ["boolean", "null"]},
}
_CHAT_TOOL = _object(
    {"type": {"enum": ["function"]}, "function": _object(_FUNCTION, ["name"], closed=True)}, ["type", "function"]
)
_NAMED = _object({"type": {"enum": ["function"]}, "function": _object({"name": _TEXT}, ["name"])}, ["type", "function"])
_ALLOWED = _object({"function": _object({"name": _TEXT}, ["name"])}, ["function"])
_CHAT_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED,
        _tagged(
            "allowed_tools",
            {
                "allowed_tools": _object(
                    {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": _ALLOWED, "minItems": 1},
                    },
                    ["mode", "tools"],
                )
            },
            ["allowed_tools"],
        ),
    ]
}
_JSON_SCHEMA: Schema = {
    "name": _TEXT,
    "description": {"type": ["string", "null"]},
    "schema": {"type": ["object", "boolean"]},
    "strict": {"type": ["boolean", "null"]},
}
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        _tagged(["text", "json_object"], {}, [], closed=True),
        _tagged(
            "json_schema", {"json_schema": _object(_JSON_SCHEMA, ["schema"], closed=True)}, ["json_schema"], closed=True
        ),
        _tagged("structural_tag", {}, []),
    ]
}

# --- responses ------------------------------------------------------------------------------------------------------

_TEXT_KINDS = ["input_text", "output_text", "text", "summary_text", "reasoning_text"]
_ITEM_CONTENT: Schema = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": {
                "anyOf": [
                    _tagged(_TEXT_KINDS, {"text": _TEXT}, ["text"]),
                    _tagged("refusal", {"refusal": _TEXT}, ["refusal"]),
                ]
            },
        },
    ]
}
_ITEM: Schema = {
    "description": "A message, a call, a call's result or reasoning.",
    "anyOf": [
        _object(
            {
                "type": {"enum": ["message"]},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _ITEM_CONTENT,
            },
            ["role", "content"],
        ),
        _tagged(
            "function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}, ["call_id", "name", "arguments"]
        ),
        _tagged("function_call_output", {"call_id": _TEXT, "output": _ITEM_CONTENT}, ["call_id", "output"]),
        _tagged("reasoning", {"content": {"anyOf": [_ITEM_CONTENT, {"type": "null"}]}}, []),
    ],
}
_ITEM_TOOL = _tagged("function", _FUNCTION, ["name"], closed=True)
_ITEM_NAMED = _tagged("function", {"name": _TEXT}, ["name"])
_ITEM_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _ITEM_NAMED,
        _tagged(
            "allowed_tools",
            {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _ITEM_NAMED, "minItems": 1}},
            ["mode", "tools"],
        ),
    ]
}
_ITEM_FORMAT: Schema = {
    "anyOf": [
        _tagged(["text", "json_object"], {}, [], closed=True),
        _tagged("json_schema", _JSON_SCHEMA, ["schema"], closed=True),
        _tagged("structural_tag", {}, []),
    ]
}

# --- messages -------------------------------------------------------------------------------------------------------

_BLOCK = _tagged("text", {"text": _TEXT}, ["text"])
_BLOCKS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]}
_RESULT = _tagged(
    "tool_result",
    {"tool_use_id": _TEXT, "content": {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}, {"type": "null"}]}},
    ["tool_use_id"],
)
_USE = _tagged("tool_use", {"id": _TEXT, "name": _TEXT, "input": {"type": "object"}}, ["id", "name", "input"])
_THOUGHT = _tagged("thinking", {"thinking": _TEXT}, ["thinking"])
_ANTHROPIC_MESSAGE: Schema = {
    "description": "A turn of a conversation. An assistant's turn at the end is its answer's beginning.",
    "anyOf": [
        _object(
            {
                "role": {"enum": ["user"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_BLOCK, _RESULT]}}]},
            },
            ["role", "content"],
            closed=True,
        ),
        _object(
            {
                "role": {"enum": ["assistant"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_BLOCK, _USE, _THOUGHT]}}]},
            },
            ["role", "content"],
            closed=True,
        ),
    ],
}
_ANTHROPIC_TOOL = _object(
    {
        "type": {"enum": ["custom", None]},
        "name": _NAME,
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
        "cache_control": {},
        "eager_input_streaming": {},
    },
    ["name", "input_schema"],
    closed=True,
)
_ANTHROPIC_CHOICE = _object(
    {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": _TEXT,
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
    ["type"],
    closed=True,
)

PARTS: dict[str, Schema] = {
    "Message": _CHAT_MESSAGE,
    "Tool": _CHAT_TOOL,
    "ToolChoice": _CHAT_CHOICE,
    "ResponseFormat": _RESPONSE_FORMAT,
    "Item": _ITEM,
    "ItemTool": _ITEM_TOOL,
    "ItemToolChoice": _ITEM_CHOICE,
    "TextFormat": _ITEM_FORMAT,
    "AnthropicMessage": _ANTHROPIC_MESSAGE,
    "AnthropicTool": _ANTHROPIC_TOOL,
    "AnthropicToolChoice": _ANTHROPIC_CHOICE,
    "AnthropicBlocks": _BLOCKS,
}
"""Components that no struct is behind."""


def _list(name: str, **bounds: int) -> Schema:
    return {"type": "array", "items": ref(name), **bounds}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_CHAT_FIELDS: dict[str, Schema] = {
    "messages": _list("Message", minItems=1),
    "tools": _or_null(_list("Tool", maxItems=MAX_TOOLS)),
    "tool_choice": _or_null(ref("ToolChoice")),
    "response_format": _or_null(ref("ResponseFormat")),
}
_ANTHROPIC_FIELDS: dict[str, Schema] = {
    "messages": _list("AnthropicMessage", minItems=1),
    "system": _or_null(ref("AnthropicBlocks")),
    "tools": _or_null(_list("AnthropicTool", maxItems=MAX_TOOLS)),
    "tool_choice": _or_null(ref("AnthropicToolChoice")),
}
FIELDS: dict[str, dict[str, Schema]] = {
    "ChatCompletionRequest": _CHAT_FIELDS,
    "CompletionRequest": {
        "prompt": {
            "description": "A text, token ids, or a list of either, without mixing.",
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _ID, "minItems": 1},
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                {
                    "type": "array",
                    "items": {"type": "array", "items": _ID, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ],
        },
        "response_format": _or_null(ref("ResponseFormat")),
    },
    "TokenizeRequest": {"messages": _or_null(_list("Message", minItems=1)), "tools": _or_null(_list("Tool"))},
    "ResponsesRequest": {
        "input": {"anyOf": [_TEXT, _list("Item", minItems=1)]},
        "tools": _or_null(_list("ItemTool", maxItems=MAX_TOOLS)),
        "tool_choice": _or_null(ref("ItemToolChoice")),
    },
    "TextOptions": {"format": _or_null(ref("TextFormat"))},
    "MessagesRequest": _ANTHROPIC_FIELDS,
    "CountTokensRequest": _ANTHROPIC_FIELDS,
    "OutputConfig": {
        "format": _or_null(_tagged("json_schema", {"schema": {"type": ["object", "boolean"]}}, ["schema"], closed=True))
    },
}
"""Fields of structs that are told in more detail than their types do: struct -> field -> schema."""
