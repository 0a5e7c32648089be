"""Which parser reads which format, and which format a chat template writes. Knows no output."""

from __future__ import annotations

from octavo.text.calls.json_formats import (
    DeepSeekV3Parser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
)
from octavo.text.calls.machine import Parser
from octavo.text.calls.pythonic import PythonicParser
from octavo.text.calls.tagged import Glm45Parser, Qwen3CoderParser

CALL_FORMATS: dict[str, type[Parser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "deepseek_v3": DeepSeekV3Parser,
    "glm45": Glm45Parser,
    "glm47": Glm45Parser,
    "qwen3_coder": Qwen3CoderParser,
}


def infer_format(template: str) -> str | None:
    """The format in which a chat template writes an assistant's calls, None when it is none of these."""
    if "<arg_key>" in template:
        return "glm45" if "\n<arg_key>" in template or "\\n<arg_key>" in template else "glm47"
    for sign, name in (
        ("<parameter=", "qwen3_coder"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>", "hermes"),
        ("<|python_start|>", "pythonic"),
        ("func_name1(", "pythonic"),
        ("<|python_tag|>", "llama3_json"),
        ("Environment: ipython", "llama3_json"),
    ):
        if sign in template:
            return name
    return None
