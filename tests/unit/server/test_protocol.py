"""Decoding of bodies: bounds that hold before objects are made."""

from __future__ import annotations

import difflib
import json
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, RequestTooLargeError
from octavo.server.protocol import MAX_PARTS, ChatCompletionRequest, CompletionRequest, decode


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b",".join([b"[5]"] * (MAX_PARTS + 1)) + b"]}",
        b'{"prompt":' + b"[" * (MAX_PARTS + 1),
        b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(MAX_PARTS + 1)) + b"}}",
        b'{"prompt":"a \\" \\\\",' + b'"k":[],' * (MAX_PARTS + 1) + b'"n":1}',
        b'{"prompt":"\\\\",' + b"[" * (MAX_PARTS + 1) + b'"',
    ],
)
def test_too_many_parts_are_refused(body: bytes) -> None:
    with pytest.raises(RequestTooLargeError, match="more than"):
        decode(body, CompletionRequest)


@pytest.mark.parametrize("text", ["[{:" * MAX_PARTS, '"[' * MAX_PARTS, "\\[" * MAX_PARTS, '\\"[' * MAX_PARTS, "\\\\"])
def test_texts_may_be_full_of_brackets(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "stop": ["\\", '"', "]"], "user": text}
    decoded = decode(json.dumps(body).encode(), ChatCompletionRequest)
    assert decoded.messages[0]["content"] == text
    assert decoded.stop == ["\\", '"', "]"]


def test_many_numbers_are_fine() -> None:
    ids = list(range(MAX_PARTS * 2))
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
