"""Outputs of models: calls in every format, what they say, reasoning, and random damage to them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "m": {"type": ["string", "null"]},
            "l": {"type": "array"},
            "r": {"$ref": "#/$defs/text"},
        },
        "$defs": {"text": {"type": "string"}},
    },
    "g": {"type": "object", "properties": {}},
}
BOTH = [("f", {"a": 1, "s": 'x "q" \\ \n é🎉'}), ("g", {})]
_ARGUMENTS = json.dumps(BOTH[0][1])
_RAW = BOTH[0][1]["s"]
CASES: dict[str, list[tuple[str, list[tuple[str, Any]], str]]] = {
    "hermes": [
        (
            f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {_ARGUMENTS}}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
            BOTH,
            "Let me see.",
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> done', [("f", {"a": 1})], "done"),
        ('<tool_call>{"name": "g"}</tool_call>', [("g", {})], ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}', [("f", {"a": 1}), ("g", {})], ""),
        ("a < b <tool_call> is a tag </tool_call>", [], "a < b <tool_call> is a tag </tool_call>"),
        ('<tool_call>{"a": 1}</tool_call>', [], '<tool_call>{"a": 1}</tool_call>'),
        ("plain \n", [], "plain \n"),
        ('<tool_call>{"name": "\\u0067"}</tool_call>', [("g", {})], ""),
    ],
    "llama3_json": [
        (
            f'{{"name": "f", "parameters": {_ARGUMENTS}}}; {{"type": "function", "name": "g", "parameters": {{}}}}',
            BOTH,
            "",
        ),
        ('<|python_tag|>{"name": "g", "parameters": {}}', [("g", {})], ""),
        ('{"answer": 42, "name": "f"}', [], '{"answer": 42, "name": "f"}'),
        ('{"name": "unknown", "parameters": {}}', [], '{"name": "unknown", "parameters": {}}'),
        ('{"name": "f"}', [], '{"name": "f"}'),
        ("  see {x}", [], "  see {x}"),
    ],
    "mistral": [
        (
            f'Well.[TOOL_CALLS] [{{"name": "f", "arguments": {_ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]',
            BOTH,
            "Well.",
        ),
        (f"[TOOL_CALLS]f{_ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", BOTH, ""),
        ("[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}", [("g", {})], ""),
        ("a [list] of [TOOL_CALLS] nothing", [], "a [list] of [TOOL_CALLS] nothing"),
    ],
    "pythonic": [
        ("[f(a=1, s='x \"q\" \\\\ \\n é🎉'), g()]", BOTH, ""),
        (
            '<|python_start|>[f(l=[1, -2.5, True, None, {"k": ("v",)}], m=None, s="""a\n"b" c""")]<|python_end|>',
            [("f", {"l": [1, -2.5, True, None, {"k": ["v"]}], "m": None, "s": 'a\n"b" c'})],
            "",
        ),
        ("[f(s=''),]", [("f", {"s": ""})], ""),
        ("[1] is a footnote", [], "[1] is a footnote"),
        ("[unknown(a=1)]", [], "[unknown(a=1)]"),
        ("[f(a=1)] and more", [("f", {"a": 1})], "and more"),
    ],
    "deepseek_v3": [
        (
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            f"{_ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{{}}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            BOTH,
            "Hm.",
        ),
        (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{{}}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            BOTH,
            "",
        ),
    ],
    "glm45": [
        (
            "Sure.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
            f"<arg_value>{_RAW}</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
            BOTH,
            "Sure.",
        ),
        (
            '<tool_call>f<arg_key>m</arg_key><arg_value>null</arg_value><arg_key>l</arg_key><arg_value>[1, "x"]</arg_value>'
            "<arg_key>r</arg_key><arg_value>12</arg_value><arg_key>other</arg_key><arg_value>12</arg_value></tool_call>",
            [("f", {"m": None, "l": [1, "x"], "r": "12", "other": 12})],
            "",
        ),
        ("<tool_call> is a tag", [], "<tool_call> is a tag"),
    ],
    "qwen3_coder": [
        (
            "Go.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n"
            f"{_RAW}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            BOTH,
            "Go.",
        ),
        ("<function=f><parameter=s>\n\nx\n\n</parameter></function> ok", [("f", {"s": "\nx\n"})], "ok"),
        (
            "<function=f>\n<parameter=a>\n1\n<parameter=s>\nx\n</function>\n</tool_call>",
            [("f", {"a": 1, "s": "x"})],
            "</tool_call>",
        ),
        ("<tool_call> is a tag", [], "<tool_call> is a tag"),
    ],
}
CASES["qwen"], CASES["glm47"] = CASES["hermes"], CASES["glm45"]
EXAMPLES = [(name, text) for name, cases in CASES.items() for text, _, _ in cases]
REASONING = [
    "<think>\nI wonder.\n</think>\n\nYes.",
    "I wonder </ th\n</think>Yes.",
    "No thought.",
    " \n<think>cut",
    "<thin</think></think>",
]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, str]:
    """A format and a text: an example, two of them, or one that was damaged."""
    name, text = draw(st.sampled_from(EXAMPLES))
    match draw(st.integers(0, 3)):
        case 0:
            text += draw(st.sampled_from(EXAMPLES))[1]
        case 1:
            start = draw(st.integers(0, len(text)))
            text = text[:start] + text[start + draw(st.integers(0, 12)) :]
        case 2:
            start = draw(st.integers(0, len(text)))
            alphabet = st.sampled_from(
                ['"', "\\", "{", "}", "<", ">", "[", "]", "\n", "\\u", "\\ud83d", "é", "x", "</", "=", ","]
            )
            text = text[:start] + draw(st.lists(alphabet, max_size=5).map("".join)) + text[start:]
        case _:
            pass
    return name, text


def parts_of(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ways to cut something into parts, some of them empty: begin and end of each."""
    cuts = st.lists(st.integers(0, length), max_size=12).map(sorted)
    return cuts.map(lambda places: list(pairwise([0, *places, length])))
