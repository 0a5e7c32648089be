"""What compiles to what, what is refused and by which name, and that a grammar can hurt only itself."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from octavo.grammar import GrammarKind, GrammarSpec
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.limits import Limits
from octavo.limits import MAX_SCHEMA_BYTES
from support.vocabulary_table import table_of, tokenizer_of

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def compiler(smollm2: Path) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: table_of(tokenizer_of(smollm2)), Limits(compile_s=1.0, memory_bytes=256 << 20))
    yield made
    made.close()


def spec(kind: str, content: Any, **fields: Any) -> GrammarSpec:
    text = content if isinstance(content, str) else json.dumps(content)
    return GrammarSpec(kind=GrammarKind(kind), text=text, field="structured_outputs", **fields)


def refusal(compiler: GrammarCompiler, *arguments: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(spec(*arguments, **fields)).result(LIMIT_S)
    assert caught.value.param == "structured_outputs"
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        ("json", True),
        ("regex", r"\d{3}-[a-z]+/x"),
        ("choice", ["yes", 'n"o\\', "\u2028\x7f", "ü🎉"]),
        ("choice", [f"choice {number}" for number in range(5000)]),
        ("grammar", 'root ::= "a" digit+\ndigit ::= [0-9]'),
        ("grammar", "start: /ab+/"),
        (
            "structural_tag",
            {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]},
        ),
    ],
)
def test_what_is_right_compiles(compiler: GrammarCompiler, kind: str, content: Any) -> None:
    assert compiler.compile(spec(kind, content)).result(LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("json", "{bad"),
        ("json", "[" * 100_000),
        ("json", []),
        ("json", "null"),
        ("json", False),
        ("json", {"type": "strnig"}),
        ("json", {"type": ["object", 7]}),
        ("json", {"properties": []}),
        ("json", {"enum": "x"}),
        ("json", {"type": "string", "pattern": "*a"}),
        ("json", {"type": "string", "pattern": "(?<=x)+"}),
        ("json", {"type": "string", "pattern": "(" * 30_000}),
        ("json", {"$ref": "http://example.test/schema"}),
        ("json", {"type": "number", "minimum": 5, "maximum": 3}),
        ("regex", "[q-"),
        ("regex", "(?=a)b"),
        ("choice", []),
        ("choice", ["a", ""]),
        ("choice", "a"),
        ("choice", [1]),
        ("grammar", "root ::= missing"),
        ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
        ("grammar", ""),
        ("structural_tag", {"structures": [], "triggers": ["<f"]}),
        ("structural_tag", {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]}),
        ("structural_tag", {"format": {"type": "wish"}}),
        ("json", {"$ref": "#"}),
        ("json", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        ("json", {"allOf": [{"$ref": "#"}]}),
        ("json", {"enum": []}),
        ("json", {"anyOf": []}),
        ("json", {"type": []}),
        ("json", {"type": "string", "const": 3}),
        ("json", {"type": "string", "minLength": 5, "maxLength": 4}),
        ("json", {"type": "object", "required": ["a"], "additionalProperties": False}),
        ("json", {"type": "integer", "multipleOf": 100, "minimum": 1, "maximum": 50}),
        ("json", {"type": "integer", "minimum": 10**40}),
        ("json", {"type": "string", "maxLength": -1}),
        ("json", {"$schema": "http://json-schema.org/draft-03/schema#"}),
        ("regex", "(.{1,1000}){1,1000}"),
        ("regex", r"(a)\1"),
        ("grammar", "root ::= root"),
        ("grammar", 'root ::= root "a"'),
        ("structural_tag", {"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]}),
    ],
)
def test_what_is_wrong_is_refused(compiler: GrammarCompiler, kind: str, content: Any) -> None:
    """O-03."""
    began_s = time.monotonic()
    refusal(compiler, kind, content)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}}, "minProperties"),
        ({"anyOf": [{"type": "object", "minProperties": 3}]}, "minProperties"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_named(compiler: GrammarCompiler, schema: Any, keyword: str) -> None:
    """O-34: obey or refuse."""
    error = refusal(compiler, "json", schema)
    assert isinstance(error, UnsupportedFieldError)
    assert keyword in error.message


def test_lenient_leaves_out_what_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}
    assert compiler.compile(spec("json", schema, lenient=True)).result(LIMIT_S)
    refusal(compiler, "json", {"type": "strnig"}, lenient=True)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("regex", "(((a{100}){100}){100}){100}"),
        ("grammar", "root ::= x x x x x\nx ::= " + "y " * 3000 + "\ny ::= " + "z " * 3000 + '\nz ::= "a" "b"'),
    ],
)
def test_what_takes_too_much_ends_alone(compiler: GrammarCompiler, kind: str, content: str) -> None:
    """O-04: the bound holds, a neighbour is not held up, and the helper is still the same process."""
    compiler.compile(spec("regex", "a")).result(LIMIT_S)
    helper = compiler.helper_pid
    heavy = compiler.compile(spec(kind, content))
    began_s = time.monotonic()
    compiler.compile(spec("regex", f"b{time.time_ns()}")).result(LIMIT_S)
    assert time.monotonic() - began_s < 3.0
    with pytest.raises(InvalidRequestError, match="too complex"):
        heavy.result(LIMIT_S)
    assert compiler.helper_pid == helper


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("json", {"const": "x" * 20_000}),
        ("json", {"enum": ["a", ["x" * 10_000, "y" * 10_000]]}),
        ("json", {"type": "object", "properties": {"é" * 10_000: {"type": "integer"}}}),
        ("choice", ["a", "x" * 20_000]),
        ("regex", "x{20000}"),
        ("grammar", 'start: "a"{20000}'),
        ("structural_tag", {"structures": [{"begin": "<f>" * 9000, "schema": {}, "end": ""}], "triggers": ["<f>"]}),
    ],
)
def test_long_texts_that_an_output_must_repeat_are_refused(compiler: GrammarCompiler, kind: str, content: Any) -> None:
    """They are read at a time, while other streams wait."""
    assert "16384" in refusal(compiler, kind, content).message


def test_time_in_which_others_have_the_cpus_does_not_count(compiler: GrammarCompiler) -> None:
    """A fork that stood still for more than twice the limit: what is refused must not depend on the load."""
    properties = {f"property {number}": {"type": "string", "pattern": f"^[a-z]{{{number}}}$"} for number in range(400)}
    pending = compiler.compile(spec("json", {"type": "object", "properties": properties}))
    children = Path(f"/proc/{compiler.helper_pid}/task/{compiler.helper_pid}/children")
    until = time.monotonic() + LIMIT_S
    while not (forks := children.read_text(encoding="ascii").split()):
        assert time.monotonic() < until and not pending.done()
    os.kill(int(forks[0]), signal.SIGSTOP)
    time.sleep(2.5)
    assert not pending.done()
    os.kill(int(forks[0]), signal.SIGCONT)
    assert pending.result(LIMIT_S)


def test_what_leaves_no_choice_for_long_is_found_by_trying(compiler: GrammarCompiler) -> None:
    names = [f"property_{number}" for number in range(1000)]
    schema = {
        "type": "object",
        "properties": {name: {"const": name} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    assert compiler.compile(spec("json", schema)).result(LIMIT_S)
    error = refusal(compiler, "json", schema, any_whitespace=False)
    assert "leaves no choice in" in error.message


def test_cancelling_stops_the_work(smollm2: Path) -> None:
    compiler = GrammarCompiler(lambda: table_of(tokenizer_of(smollm2)), Limits(compile_s=30.0))
    try:
        future = compiler.compile(spec("regex", "(((a{100}){100}){100}){100}"))
        time.sleep(0.3)
        pid = compiler.helper_pid
        assert pid is not None
        assert future.cancel()
        deadline_s = time.monotonic() + 5
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"):
            assert time.monotonic() < deadline_s, children
            time.sleep(0.02)
    finally:
        compiler.close()


def test_what_was_compiled_is_remembered_within_bytes(smollm2: Path) -> None:
    compiler = GrammarCompiler(lambda: table_of(tokenizer_of(smollm2)), cache_bytes=2000)
    try:
        first = spec("regex", "a{1,3}")
        assert not compiler.compile(first).done()
        wait([compiler.compile(first)], LIMIT_S)
        assert compiler.compile(first).done()
        for number in range(20):
            compiler.compile(spec("regex", f"b{number}")).result(LIMIT_S)
        assert not compiler.compile(first).done()
    finally:
        compiler.close()


def test_too_much_at_once_is_overload_and_a_dead_helper_is_replaced(smollm2: Path) -> None:
    compiler = GrammarCompiler(lambda: table_of(tokenizer_of(smollm2)))
    try:
        compiler.compile(spec("regex", "a")).result(LIMIT_S)
        pid = compiler.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        futures = [compiler.compile(spec("regex", f"c{number}")) for number in range(64)]
        with pytest.raises(OverloadedError):
            compiler.compile(spec("regex", "one too many"))
        os.kill(pid, signal.SIGKILL)
        for future in futures:
            with pytest.raises(InvalidRequestError):
                future.result(LIMIT_S)
        assert compiler.compile(spec("regex", "c0")).result(LIMIT_S)
        assert compiler.helper_pid != pid
    finally:
        compiler.close()


def test_too_long_a_text_is_refused_before_anything_reads_it(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="longer than"):
        compiler.compile(spec("regex", "a" * (MAX_SCHEMA_BYTES + 1)))


def test_the_helper_ends_with_its_compiler(smollm2: Path) -> None:
    compiler = GrammarCompiler(lambda: table_of(tokenizer_of(smollm2)))
    compiler.compile(spec("regex", "a")).result(LIMIT_S)
    pid = compiler.helper_pid
    compiler.close()
    compiler.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(OverloadedError):
        compiler.compile(spec("regex", "b"))
