"""Every parser of tool calls and reasoning: what it reads, and that no cut of the stream changes it (O-11, O-13)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.calls import CALL_FORMATS, Kind, Piece, ReasoningParser, Router, infer_format

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
Outcome = list[tuple[Kind, str]]


def joined(pieces: Sequence[Piece]) -> Outcome:
    """Pieces with neighbours of one kind put together."""
    result: Outcome = []
    for piece in pieces:
        if result and piece.kind is not Kind.CALL and result[-1][0] is piece.kind:
            result[-1] = (piece.kind, result[-1][1] + piece.text)
        else:
            result.append((piece.kind, piece.text))
    return result


def router(name: str | None, *, begun: bool | None = None, most_calls: int | None = None) -> Router:
    return Router(
        None if begun is None else ReasoningParser(begun=begun),
        None if name is None else CALL_FORMATS[name](TOOLS, most_calls=most_calls),
    )


def parse(name: str | None, parts: Sequence[str], **options: Any) -> Outcome:
    made = router(name, **options)
    pieces = [piece for part in parts for piece in made.push(part)]
    return joined(pieces + made.flush())


def calls_of(outcome: Outcome) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for kind, text in outcome:
        if kind is Kind.CALL:
            calls.append([text, ""])
        elif kind is Kind.ARGUMENTS:
            calls[-1][1] += text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def content_of(outcome: Outcome) -> str:
    return "".join(text for kind, text in outcome if kind is Kind.CONTENT)


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


def test_every_format_has_cases() -> None:
    assert CASES.keys() == CALL_FORMATS.keys()


@pytest.mark.parametrize("name", CASES)
def test_what_is_read(name: str) -> None:
    for text, calls, content in CASES[name]:
        outcome = parse(name, [text])
        assert calls_of(outcome) == calls, text
        assert content_of(outcome) == content, text


@pytest.mark.parametrize("name", CASES)
def test_one_character_at_a_time(name: str) -> None:
    for text, _, _ in CASES[name]:
        assert parse(name, list(text)) == parse(name, [text]), text


@pytest.mark.parametrize("name", CASES)
def test_only_one_call_where_one_is_allowed(name: str) -> None:
    text, calls, content = CASES[name][0]
    outcome = parse(name, [text], most_calls=1)
    assert calls_of(outcome) == calls[:1]
    assert content_of(outcome) == content


@pytest.mark.parametrize("name", CASES)
def test_an_output_that_is_cut_short_keeps_what_came(name: str) -> None:
    text, calls, _ = CASES[name][0]
    whole = parse(name, [text])
    for end in range(len(text)):
        outcome = parse(name, [text[:end]])
        names = [piece for kind, piece in outcome if kind is Kind.CALL]
        assert names == [call for call, _ in calls][: len(names)]
        if len(names) == 1:
            cut = "".join(piece for kind, piece in outcome if kind is Kind.ARGUMENTS)
            first = next(piece for kind, piece in whole if kind is Kind.ARGUMENTS)
            assert first.startswith(cut)


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


@settings(max_examples=400, deadline=None)
@given(
    outputs(),
    st.sampled_from([*REASONING, ""]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, 1]),
    st.data(),
)
def test_no_cut_changes_anything(
    output: tuple[str, str], before: str, begun: bool | None, most_calls: int | None, data: st.DataObject
) -> None:
    name, text = output
    text = before + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options: dict[str, Any] = {"begun": begun, "most_calls": most_calls}
    assert parse(name, parts, **options) == parse(name, list(text), **options)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nI wonder.\n</think>\n\nYes.", False, "I wonder.", "Yes."),
        ("I wonder.\n</think>\n\nYes.", True, "I wonder.", "Yes."),
        ("<think>I wonder.</think>Yes.", True, "I wonder.", "Yes."),
        ("Yes.", False, "", "Yes."),
        (" Yes. <think>", False, "", " Yes. <think>"),
        ("never ends \n", True, "never ends ", ""),
        ("a </thin b", True, "a </thin b", ""),
    ],
)
def test_reasoning(text: str, begun: bool, reasoning: str, content: str) -> None:
    outcome = parse(None, [text], begun=begun)
    assert outcome == [piece for piece in [(Kind.REASONING, reasoning), (Kind.CONTENT, content)] if piece[1]]


def test_calls_after_reasoning() -> None:
    outcome = parse(
        "hermes",
        ['<think><tool_call>{"name": "g"}</tool_call></think>\n<tool_call>{"name": "g"}</tool_call>'],
        begun=False,
    )
    assert [kind for kind, _ in outcome] == [Kind.REASONING, Kind.CALL, Kind.ARGUMENTS]


@pytest.mark.parametrize("name", [*CALL_FORMATS, None])
def test_time_is_linear(name: str | None) -> None:
    """Also in texts that nearly are something else all the time."""
    parts = [
        "<tool_cal",
        "[TOOL_CAL",
        "<｜tool▁call",
        '{"name',
        "<function",
        '<tool_call>{"name": "f", "arguments": {"s": "' + "\\\\" * 50,
    ]

    def seconds(times: int) -> float:
        text = "".join(parts) * times
        began_s = time.process_time()
        parse(name, [text[start : start + 7] for start in range(0, len(text), 7)], begun=False)
        return time.process_time() - began_s

    seconds(20)
    short, long = (min(seconds(times) for _ in range(3)) for times in (50, 500))  # a collection of garbage may meet one
    assert long < 30 * short + 0.1


def test_inference_from_templates() -> None:
    for template, name in (
        ("{{ '<tool_call>' + x + '\\n<arg_key>' }}", "glm45"),
        ("{{ '<tool_call>' + x + '<arg_key>' }}", "glm47"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>", "hermes"),
        ("Environment: ipython", "llama3_json"),
        ("[func_name1(params", "pythonic"),
        ("{{ messages }}", None),
    ):
        assert infer_format(template) == name
