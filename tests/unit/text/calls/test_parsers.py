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
from support.model_outputs import CASES, REASONING, TOOLS, outputs, parts_of

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
    parts = [text[start:end] for start, end in data.draw(parts_of(len(text)))]
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
