"""Wishes that cancel each other out are the client's to change: a 4xx, never a fault of the server (P5 of the cases)."""

from __future__ import annotations

from typing import Any

import pytest

from support.live import Live


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [28], "bad_words": [","]},
        {"allowed_token_ids": [2], "min_tokens": 3},
        {"allowed_token_ids": [28, 2], "min_tokens": 3, "stop_token_ids": [28]},
    ],
)
def test_nothing_left_to_choose(server: Live, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        reply = server.complete(**fields, stream=stream)
        assert reply.status == 400, reply.body
        assert "no token is left" in reply.error()["message"]
    assert server.complete().status == 200


def test_nothing_left_in_the_middle_of_a_stream(server: Live) -> None:
    [cat] = server.post("/tokenize", {"prompt": " cat"}).json()["tokens"]
    body = {"prompt": "A", "allowed_token_ids": [cat], "bad_words": ["cat cat cat"], "max_tokens": 9}
    *events, last = server.stream("/v1/completions", body)
    assert [event["choices"][0]["text"] for event in events] == [" cat", " cat"]
    assert last["error"]["type"] == "invalid_request_error"
    whole = server.post("/v1/completions", body)
    assert whole.status == 400
