"""Decoding of bodies: bounds that hold before objects are made."""

from __future__ import annotations

import difflib
import json
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, RequestTooLargeError
from octavo.limits import MAX_JSON_DEPTH, MAX_JSON_PARTS
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest, decode


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b",".join([b"[5]"] * (MAX_JSON_PARTS + 1)) + b"]}",
        b'{"prompt":' + b"[" * (MAX_JSON_PARTS + 1),
        b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(MAX_JSON_PARTS + 1)) + b"}}",
        b'{"prompt":"a \\" \\\\",' + b'"k":[],' * (MAX_JSON_PARTS + 1) + b'"n":1}',
        b'{"prompt":"\\\\",' + b"[" * (MAX_JSON_PARTS + 1) + b'"',
    ],
)
def test_too_many_parts_are_refused(body: bytes) -> None:
    with pytest.raises(RequestTooLargeError, match="more than"):
        decode(body, CompletionRequest)


@pytest.mark.parametrize(
    "text", ["[{:" * MAX_JSON_PARTS, '"[' * MAX_JSON_PARTS, "\\[" * MAX_JSON_PARTS, '\\"[' * MAX_JSON_PARTS, "\\\\"]
)
def test_texts_may_be_full_of_brackets(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "stop": ["\\", '"', "]"], "user": text}
    decoded = decode(json.dumps(body).encode(), ChatCompletionRequest)
    assert decoded.messages[0]["content"] == text
    assert decoded.stop == ["\\", '"', "]"]


def test_deep_bodies_are_refused() -> None:
    """O-08: nesting is bounded, and the bound is not off by one."""

    def body(levels: int) -> bytes:
        return b'{"messages":[],"chat_template_kwargs":{"a":' + b"[" * levels + b"1" + b"]" * levels + b"}}"

    decode(body(MAX_JSON_DEPTH - 2), ChatCompletionRequest)
    for levels in (MAX_JSON_DEPTH - 1, MAX_JSON_DEPTH, 900, 5_000, 49_000):
        with pytest.raises(InvalidRequestError):
            decode(body(levels), ChatCompletionRequest)


def test_many_numbers_are_fine() -> None:
    ids = list(range(MAX_JSON_PARTS * 2))
    assert decode(json.dumps({"prompt": ids}).encode(), CompletionRequest).prompt == ids


def test_a_long_name_is_not_compared_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    real = difflib.get_close_matches

    def spy(word: str, *arguments: Any, **options: Any) -> list[str]:
        compared.append(word)
        return real(word, *arguments, **options)

    monkeypatch.setattr(difflib, "get_close_matches", spy)
    with pytest.raises(InvalidRequestError, match="unknown field"):
        decode(json.dumps({"prompt": "x", "temprature" * 100_000: 1}).encode(), CompletionRequest)
    assert max(map(len, compared)) <= 100
