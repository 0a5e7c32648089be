"""Grammars of tool calls: whatever they allow, the format's parser reads, and the arguments fit the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar import CallsSpec, GrammarKind, GrammarSpec, Reasoning, ToolSpec
from octavo.grammar.source import source_of
from octavo.grammar.tokens import TokenTable, make_tokenizer
from octavo.text.calls import CALL_FORMATS, Kind, ReasoningParser, Router
from support.walks import matcher_of, walk

SPECIALS = (
    "<eos>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "[TOOL_CALLS]",
)
PIECES = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPECIALS))
EOS = 256
TABLE = TokenTable(pieces=PIECES, special_ids=tuple(range(256, len(PIECES))), eos_ids=(EOS,))
ENDINGS = (b"</arg_value>\n", b"\n</parameter>\n")
"""Free text ends only where these are written."""
IDS = {text: 256 + index for index, text in enumerate(SPECIALS)}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ['Oslo "Øst" \\ 1', "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"type": "string", "maxLength": 6},
            "unit": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/unit"}]},
            "when": {
                "type": "object",
                "properties": {"d": {"type": "boolean"}},
                "required": ["d"],
                "additionalProperties": False,
            },
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": [1, 2]}},
    },
    "stop": {},
}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    yield make_tokenizer(TABLE, lambda _: ())


def calls_spec(
    name: str, tools: dict[str, dict[str, Any]] = TOOLS, *, strict: bool = True, **options: Any
) -> CallsSpec:
    specs = tuple(ToolSpec(name=tool, parameters=schema, strict=strict) for tool, schema in tools.items())
    return CallsSpec(format=name, tools=specs, **{"required": True, **options})


def grammar(calls: CallsSpec, reasoning: Reasoning | None = None, specials: dict[str, int] = IDS) -> str:
    text = msgspec.json.encode(calls).decode()
    return source_of(GrammarSpec(kind=GrammarKind.CALLS, text=text, field="tools", reasoning=reasoning), specials)


def parsed(name: str, text: str, reasoning: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    router = Router(ReasoningParser(begun=False) if reasoning else None, CALL_FORMATS[name](TOOLS))
    content, calls = "", []
    for piece in router.push(text) + router.flush():
        match piece.kind:
            case Kind.CONTENT:
                content += piece.text
            case Kind.CALL:
                calls.append([piece.text, ""])
            case Kind.ARGUMENTS:
                calls[-1][1] += piece.text
            case Kind.REASONING:
                assert reasoning
    return content, [(called, json.loads(arguments)) for called, arguments in calls]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_required_calls_fit_their_schemas(tokenizer: Any, name: str) -> None:
    source = grammar(calls_spec(name))
    seen: set[str] = set()
    for seed in range(12):
        text = walk(tokenizer, PIECES, EOS, source, seed, endings=ENDINGS)
        content, calls = parsed(name, text)
        assert calls, text
        assert not content.strip(), text
        for called, arguments in calls:
            jsonschema.validate(arguments, TOOLS[called] or {"type": "object", "maxProperties": 0})
            seen.add(called)
    assert seen == set(TOOLS)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_one_call_where_one_is_allowed(tokenizer: Any, name: str) -> None:
    source = grammar(calls_spec(name, parallel=False))
    assert {len(parsed(name, walk(tokenizer, PIECES, EOS, source, seed, endings=ENDINGS))[1]) for seed in range(8)} == {
        1
    }


EXAMPLE = {
    "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "stop", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "stop", "arguments": {}}]',
    "pythonic": "[stop()]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "glm45": "<tool_call>stop\n</tool_call>",
    "glm47": "<tool_call>stop</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
}
EXAMPLE["qwen"] = EXAMPLE["hermes"]


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        special = next((name for name in SPECIALS if text.startswith(name)), None)
        if special is None:
            ids += text[0].encode()
            text = text[1:]
        else:
            ids.append(IDS[special])
            text = text[len(special) :]
    return ids


def accepts(tokenizer: Any, source: str, text: str) -> bool:
    """Whether an output may be this and end."""
    matcher = matcher_of(tokenizer, source)
    ids = encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_auto_leaves_text_free_until_a_call_is_opened(tokenizer: Any, name: str) -> None:
    source = grammar(calls_spec(name, required=False))
    whole_output = name in ("llama3_json", "pythonic")
    for text in ("Hello, [you] {there} <b>!", "", "1 < 2", EXAMPLE[name]):
        assert accepts(tokenizer, source, text), text
    if not whole_output:
        assert accepts(tokenizer, source, "I will. " + EXAMPLE[name])
    wrong = EXAMPLE[name].replace("stop", "stpo")
    if not whole_output:
        assert not accepts(tokenizer, source, wrong)
    assert not accepts(tokenizer, source, EXAMPLE[name][:-1] + "x") or whole_output
    assert json.loads(json.dumps(parsed(name, EXAMPLE[name])[1])) == [["stop", {}]]


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_an_output_that_begins_like_a_call_is_one(tokenizer: Any, name: str) -> None:
    source = grammar(calls_spec(name, required=False))
    assert not accepts(tokenizer, source, EXAMPLE[name][:-2])
    assert not accepts(tokenizer, source, EXAMPLE[name] + " and text")


def test_reasoning_comes_before_what_is_constrained(tokenizer: Any) -> None:
    call = EXAMPLE["hermes"]
    begun = grammar(calls_spec("hermes"), Reasoning.BEGUN)
    possible = grammar(calls_spec("hermes"), Reasoning.POSSIBLE)
    assert accepts(tokenizer, begun, f"well <tool_call>\n</think>\n\n{call}")
    assert not accepts(tokenizer, begun, call)
    assert accepts(tokenizer, possible, f"<think>well</think>{call}")
    assert accepts(tokenizer, possible, call)
    choice = GrammarSpec(kind=GrammarKind.CHOICE, text='["a", "b"]', field="x", reasoning=Reasoning.BEGUN)
    assert accepts(tokenizer, source_of(choice, IDS), "hm</think>a")
    schema = GrammarSpec(kind=GrammarKind.JSON, text='{"const": 1}', field="x", reasoning=Reasoning.POSSIBLE)
    for text in ("<think>2</think>\n1", "1"):
        assert accepts(tokenizer, source_of(schema, IDS), text)


def test_calls_or_a_form(tokenizer: Any) -> None:
    form = GrammarSpec(kind=GrammarKind.JSON, text='{"const": [1]}', field="response_format")
    source = grammar(calls_spec("hermes", required=False, content=form))
    for text in ("[1]", EXAMPLE["hermes"]):
        assert accepts(tokenizer, source, text)
    assert not accepts(tokenizer, source, "text")


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "pythonic"])
def test_keywords_that_a_format_cannot_enforce(tokenizer: Any, name: str) -> None:
    for schema, keyword in (
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {}}, "patternProperties"),
    ):
        with pytest.raises(UnsupportedFieldError, match=keyword):
            grammar(calls_spec(name, {"f": schema}))
        matcher_of(tokenizer, grammar(calls_spec(name, {"f": schema}, strict=False)))
    with pytest.raises(InvalidRequestError, match="object"):
        grammar(calls_spec(name, {"f": {"anyOf": []}}, strict=False))


def test_tools_that_are_not_strict_may_have_what_cannot_be_enforced(tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "p": {"type": "string", "pattern": "(?=a)b"},
            "u": {"type": "string", "format": "uri-reference"},
            "l": {"type": "array", "uniqueItems": True, "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        },
    }
    for name in CALL_FORMATS:
        matcher_of(tokenizer, grammar(calls_spec(name, {"f": schema}, strict=False)))
