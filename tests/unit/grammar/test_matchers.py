"""Matchers: what they allow, that copies do not depend on each other, and the life of one beside an engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench.schemas import random_schema
from octavo.contracts import RequestId, Slot
from octavo.grammar import GrammarKind, GrammarSpec, limits
from octavo.grammar.matchers import MatcherPool
from octavo.grammar.source import source_of
from octavo.text.tokenizer import Tokenizer
from support.vocabulary_table import spell_of, table_of, tokenizer_of


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return tokenizer_of(smollm2)


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> Iterator[MatcherPool]:
    made = MatcherPool(lambda: (table_of(tokenizer), spell_of(tokenizer)), num_threads=2)
    yield made
    made.stop()


def source(kind: str, content: Any, specials: dict[str, int] | None = None) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    return source_of(GrammarSpec(kind=GrammarKind(kind), text=text, field="x"), specials or {})


def opened(pool: MatcherPool, name: str, text: str) -> RequestId:
    request_id = RequestId(name)
    pool.open(request_id, text)
    deadline_s = time.monotonic() + 20
    while True:
        for found, problem in pool.opened():
            assert problem is None
            if found == request_id:
                return request_id
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def allowed(pool: MatcherPool, *request_ids: RequestId) -> list[set[int]]:
    masks = pool.masks([(Slot(index), request_id) for index, request_id in enumerate(request_ids)])
    bits = masks.wait()
    assert list(masks.slots) == list(range(len(request_ids)))
    assert not bits.failures
    rows = np.frombuffer(bits.words, np.uint8).reshape(len(request_ids), -1)
    return [set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()) for row in rows]


def accepts(pool: MatcherPool, tokenizer: Tokenizer, text: str, grammar: str, *, ends: bool = True) -> bool:
    """Whether an output may be this text, in its usual spelling, and end after it."""
    request_id = opened(pool, "accepts", grammar)
    try:
        for token in tokenizer.encode(text, add_special_tokens=False):
            if token not in allowed(pool, request_id)[0]:
                return False
            pool.advance(request_id, token, jump=False)
        return not ends or tokenizer.eos_token_ids[0] in allowed(pool, request_id)[0]
    finally:
        pool.close(request_id)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("kind", "content", "right", "wrong"),
    [
        ("json", OBJECT, ['{"a":1}', '{ "a": -20}', '{\n  "a": 3\n}'], ['{"a":1.5}', '{"b":1}', '{"a"   : 1}', "1"]),
        ("json", {"type": "string", "maxLength": 2}, ['"🎉é"', '"\\n"'], ['"abc"', '"\\u0041"']),
        # A name may be written in one way only, so that none is hidden from its schema.
        ("json", {"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"b":1}'], ['{"\\u0061":"x"}']),
        ("json", {"const": "\u0001"}, ['"\\u0001"'], ['"a"']),
        # llguidance 1.9 by itself lets 10 through here.
        (
            "json",
            {"type": "number", "exclusiveMinimum": 10, "maximum": 10.5},
            ["10.1", "10.5"],
            ["10", "10.0", "10.50001"],
        ),
        ("json", {"type": "number", "minimum": -10.5, "exclusiveMaximum": -10}, ["-10.5", "-10.01"], ["-10", "-10.0"]),
        (
            "json",
            {"type": "string", "format": "date"},
            ['"0001-01-01"', '"2024-02-29"'],
            ['"0000-01-01"', '"2024-2-29"'],
        ),
        ("json", {"format": "date-time"}, ['"2024-02-29T01:02:03Z"', "1"], ['"0000-01-01T00:00:00Z"', '"2024-02-29"']),
        ("json", {"enum": ["x", 1], "format": "date"}, ["1"], ['"2024-02-29"']),
        ("json", {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, ["4", "5"], ["3", "6"]),
        ("regex", r"\d{2}/x", ["12/x"], ["1/x", "12/xx", "\u0661\u0662/x"]),
        ("choice", ["yes", "no", "no way"], ["yes", "no", "no way"], ["maybe", "no wa", "yess"]),
        ("grammar", 'root ::= "a" [0-9]+', ["a1", "a123"], ["a", "b"]),
    ],
)
def test_outputs(
    pool: MatcherPool, tokenizer: Tokenizer, kind: str, content: Any, right: list[str], wrong: list[str]
) -> None:
    grammar = source(kind, content)
    assert [accepts(pool, tokenizer, text, grammar) for text in right] == [True] * len(right)
    assert [accepts(pool, tokenizer, text, grammar) for text in wrong] == [False] * len(wrong)


def test_blanks_are_bounded(pool: MatcherPool, tokenizer: Tokenizer) -> None:
    """O-33: however fond of blanks a model is, the object comes to its end."""
    request_id = opened(pool, "blanks", source("json", {"type": "object", "maxProperties": 0}))
    generated: list[int] = []
    while True:
        options = allowed(pool, request_id)[0]
        if tokenizer.eos_token_ids[0] in options:
            break
        blanks = [token for token in options if tokenizer.token_bytes(token).isspace()]
        generated.append(min(blanks, key=lambda token: len(tokenizer.token_bytes(token)), default=min(options)))
        pool.advance(request_id, generated[-1], jump=False)
        assert len(generated) < 60
    pool.close(request_id)
    assert json.loads(tokenizer.decode(generated, skip_special_tokens=True)) == {}


def test_structural_tags(pool: MatcherPool, tokenizer: Tokenizer) -> None:
    grammar = source(
        "structural_tag", {"structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f"]}
    )
    for text in ("plain text", 'see <f>{"a":1}</f>.', 'a <b> <f>{"a":1}</f><f>{"a":2}</f>', ""):
        assert accepts(pool, tokenizer, text, grammar), text
    for text in ("<f", "<f>", "<fx", '<f>{"b":1}</f>', '<f>{"a":1}'):
        assert not accepts(pool, tokenizer, text, grammar), text


def test_control_tokens_in_tags(pool: MatcherPool, tokenizer: Tokenizer) -> None:
    specials = dict(tokenizer.special_tokens)
    tag = {"type": "tag", "begin": "<|im_start|>x", "content": {"type": "any_text"}, "end": "<repo_name>"}
    form = {"format": {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [tag]}}
    grammar = source("structural_tag", form, specials)
    assert accepts(pool, tokenizer, "a <|im_start|>x y<repo_name> b", grammar)
    assert not accepts(pool, tokenizer, "a <|im_start|>y", grammar, ends=False)


def test_formats(pool: MatcherPool, tokenizer: Tokenizer) -> None:
    number = {
        "type": "tag",
        "begin": "n",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": ";",
    }
    form: dict[str, Any] = {
        "type": "sequence",
        "elements": [
            {"type": "or", "elements": [{"type": "const_string", "value": "A"}, {"type": "regex", "pattern": "b/+"}]},
            {"type": "tags_with_separator", "tags": [number], "separator": ", ", "at_least_one": True},
        ],
    }
    grammar = source("structural_tag", {"format": form})
    for text in ("An1;", "b//n1;, n22;"):
        assert accepts(pool, tokenizer, text, grammar), text
    for text in ("A", "n1;", "An1;n2;", "An1;, "):
        assert not accepts(pool, tokenizer, text, grammar), text


def walk(pool: MatcherPool, request_id: RequestId, tokens: Sequence[int]) -> list[set[int]]:
    masks = []
    for token in tokens:
        masks.append(allowed(pool, request_id)[0])
        pool.advance(request_id, token, jump=False)
    return masks


def test_rows_do_not_depend_on_each_other(pool: MatcherPool, tokenizer: Tokenizer) -> None:
    """Alone, beside others and after others: the same masks."""
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "pattern": "^(ab|c)*$"}, "n": {"type": "number"}},
        "required": ["s", "n"],
    }
    grammar = source("json", schema)
    text = tokenizer.encode('{"s": "abcab", "n": -1.5e3}', add_special_tokens=False)
    alone = walk(pool, opened(pool, "alone", grammar), text)
    pool.close(RequestId("alone"))
    ids = [opened(pool, f"r{index}", grammar) for index in range(5)]
    for step, token in enumerate(text):
        # Row i is i steps behind.
        rows = [index for index in range(5) if 0 <= step - index < len(text)]
        for index, mask in zip(rows, allowed(pool, *[ids[index] for index in rows]), strict=True):
            assert mask == alone[step - index]
        for index in rows:
            pool.advance(ids[index], text[step - index], jump=False)
        assert token is not None
    for request_id in ids:
        pool.close(request_id)
    assert walk(pool, opened(pool, "later", grammar), text) == alone
    pool.close(RequestId("later"))


def test_jumps_go_where_masks_leave_one_token_and_nowhere_else(pool: MatcherPool, tokenizer: Tokenizer) -> None:
    eos = set(tokenizer.eos_token_ids)
    rng = random.Random(3)
    num_forced = 0
    for seed in range(20):
        grammar = source("json", random_schema(seed))
        jumping, walking = opened(pool, "jumping", grammar), opened(pool, "walking", grammar)
        for _ in range(30):
            options = allowed(pool, jumping)[0]
            token = rng.choice(sorted(options)[:40])
            if token in eos:
                break
            forced = pool.advance(jumping, token, jump=True)
            assert not pool.advance(walking, token, jump=False)
            for only in forced:
                assert allowed(pool, walking)[0] == {only}
                assert not pool.advance(walking, only, jump=False)
            after, same = allowed(pool, walking, jumping)
            assert after == same
            assert len(after) > 1 or after <= eos
            num_forced += len(forced)
        pool.close(jumping)
        pool.close(walking)
    assert num_forced > 100


def test_a_worn_lexer_is_made_anew(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies share a lexer with a bound on its states; when one output has used it up, neither it nor the others end."""
    monkeypatch.setitem(limits.MATCHER_LIMITS, "max_lexer_states", 300)
    pool = MatcherPool(lambda: (table_of(tokenizer), spell_of(tokenizer)), num_threads=1)
    grammar = source("json", {"type": "string", "maxLength": 5000})
    text = tokenizer.encode('"' + "hello wörld " * 6 + '"', add_special_tokens=False)
    expected = walk(pool, opened(pool, "first", grammar), text)
    for number in range(6):
        assert walk(pool, opened(pool, f"r{number}", grammar), text) == expected
    pool.stop()


def test_a_matcher_that_cannot_go_on_says_so(tokenizer: Tokenizer) -> None:
    pool = MatcherPool(lambda: (table_of(tokenizer), spell_of(tokenizer)), num_threads=1)
    fine = opened(pool, "fine", source("regex", "a+"))
    lost = opened(pool, "lost", source("regex", "a+"))
    assert not pool.advance(lost, tokenizer.encode("b", add_special_tokens=False)[0], jump=True)
    masks = pool.masks([(Slot(3), lost), (Slot(1), fine)])
    bits = masks.wait()
    assert list(bits.failures) == [0]
    assert "cannot go on" in bits.failures[0]
    row_bytes = 4 * bits.num_words
    assert not any(bits.words[:row_bytes])
    assert any(bits.words[row_bytes:])
    pool.stop()


def test_a_grammar_that_forces_too_much_ends_its_output(tokenizer: Tokenizer) -> None:
    pool = MatcherPool(lambda: (table_of(tokenizer), spell_of(tokenizer)), num_threads=1)
    lost = opened(pool, "lost", source("regex", "b|a( x){20000}"))
    assert not pool.advance(lost, tokenizer.encode("a", add_special_tokens=False)[0], jump=True)
    bits = pool.masks([(Slot(0), lost)]).wait()
    assert "no choice in 20000 tokens" in bits.failures[0]
    assert not any(bits.words)
    pool.stop()


def test_opening_closing_and_what_is_kept(tokenizer: Tokenizer) -> None:
    pool = MatcherPool(lambda: (table_of(tokenizer), spell_of(tokenizer)), num_threads=1, cache_bytes=600_000)
    pool.open(RequestId("gone"), source("regex", "x"))
    pool.close(RequestId("gone"))
    same = source("regex", "y")
    for name in ("one", "two"):
        pool.open(RequestId(name), same)
    names: list[str] = []
    deadline_s = time.monotonic() + 20
    while len(names) < 2 and time.monotonic() < deadline_s:
        names += [request_id for request_id, _ in pool.opened()]
    assert sorted(names) == ["one", "two"]
    assert allowed(pool, RequestId("one"), RequestId("two"))[0]
    for number in range(5):
        pool.close(opened(pool, "many", source("regex", f"z{number}")))
    assert len(pool._kept) == 2
    pool.close(RequestId("never opened"))
    bad = RequestId("bad")
    pool.open(bad, "start: [")
    while not (news := pool.opened()):
        time.sleep(0.001)
    assert news[0][0] == bad
    assert news[0][1]
    pool.stop()
