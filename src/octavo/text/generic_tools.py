"""Tools for models whose chat template does not know of any: told in a system message, called and answered in plain text.

The format is that of `<tool_call>` tags around JSON, which the parser `hermes` reads. Knows no template and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

GENERIC_FORMAT = "hermes"
_INTRODUCTION = (
    "You may call these functions. Each line between the tags describes one as a JSON object.\n<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and arguments as a JSON object between tags of their own:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{...}}}}\n</tool_call>'
)


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools told in the first one, a system message."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines)
    first, *rest = messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *map(dict, rest)]
    return [{"role": "system", "content": text}, *map(dict, messages)]


def spell_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with an assistant's calls in its text, and results of tools as messages of the user, one for those that follow
    each other.
    """
    spelled: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] in ("tool", "function")
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                spelled[-1]["content"] += f"\n{text}"
            else:
                spelled.append({"role": "user", "content": text})
        else:
            spelled.append(_with_calls(message))
        after_result = is_result
    return spelled


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    spelled = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        content = {"name": function.get("name"), "arguments": function.get("arguments")}
        texts.append(f"<tool_call>\n{json.dumps(content, ensure_ascii=False)}\n</tool_call>")
    spelled["content"] = "\n".join(texts)
    return spelled
