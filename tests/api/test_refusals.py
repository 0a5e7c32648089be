"""Bad requests end as a 4xx in OpenAI's shape and harm nobody (cases O-01, O-02, O-05, O-06, O-08, O-16, O-18, O-20, O-22, O-35, O-36)."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

import pytest

from support.live import Live, Reply

VOCABULARY = 49_152
CONTEXT = 1024


@pytest.fixture(autouse=True)
def unharmed(server: Live) -> Any:
    """P1 and P2 of the cases: afterwards a plain request answers as before."""
    before = server.chat().json()["choices"][0]["message"]["content"]
    yield
    assert server.chat().json()["choices"][0]["message"]["content"] == before
    assert server.get("/health").status == 200
    assert server.idle_within(5)


def refused(reply: Reply, param: str | None = None, code: str | None = None) -> None:
    assert reply.status == 400, reply.body
    error = reply.error()
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error


@pytest.mark.parametrize(
    "bias", [{str(VOCABULARY): 5}, {"-1": 5}, {"abc": 1}, {"3": 101}, {"1.5": 1}, {"3": "much"}, {"3": None}, 7]
)
def test_o01_logit_bias(server: Live, bias: Any) -> None:
    refused(server.chat(logit_bias=bias), "logit_bias")


@pytest.mark.parametrize("ids", [[-1], [VOCABULARY], [2**31], [2**63 - 1], [2**63], [1.5], [1000, 10**7, 1001], [True]])
def test_o01_prompt_ids(server: Live, ids: Any) -> None:
    refused(server.complete(ids), "prompt")
    assert server.post("/detokenize", {"tokens": ids}).status == 400


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_o01_other_ids(server: Live, field: str) -> None:
    for ids in ([-1], [VOCABULARY], [2**63]):
        refused(server.complete(**{field: ids}), field)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[1], []]])
def test_o02_empty_prompt(server: Live, prompt: Any) -> None:
    refused(server.complete(prompt), "prompt")


def test_o05_numeric_blow_ups(server: Live) -> None:
    for fields in (
        {"n": 10**6},
        {"best_of": 10**6},
        {"logprobs": True, "top_logprobs": 10**5},
        {"stop": ["x"] * 10**5},
        {"stop": "x" * 10**6},
        {"max_tokens": 10**12},
        {"n": 0},
        {"n": -1},
        {"n": 1.5},
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"seed": 2**80},
        {"stop_token_ids": list(range(5000))},
    ):
        began = time.monotonic()
        refused(server.chat(**fields))
        assert time.monotonic() - began < 1.0, fields
    refused(server.complete(logprobs=10**5), "logprobs")


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_o06_not_finite(server: Live, field: str) -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "-9", '"0.5"', "[]"):
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 2, "{field}": {text}}}'
        reply = server.post("/v1/chat/completions", body.encode())
        assert reply.status == 400, (field, text, reply.body)
        reply.error()


def test_o06_extreme_but_legal(server: Live) -> None:
    greedy = server.chat(max_tokens=12).json()["choices"][0]["message"]["content"]
    for fields in (
        {"temperature": 1e-6},
        {"temperature": 5e-324},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "top_k": 1},
    ):
        assert server.chat(**{"max_tokens": 12, **fields}).json()["choices"][0]["message"]["content"] == greedy, fields
    refused(server.chat(repetition_penalty=0), "repetition_penalty")
    assert server.chat(top_k=10**9).status in (200, 400)


def test_o07_lone_surrogates(server: Live) -> None:
    for field in ('"content":"half \\ud83d"', '"content":"x"},{"role":"user","content":"\\udc00"'):
        body = b'{"messages":[{"role":"user",' + field.encode() + b'}],"max_tokens":2,"stream":true}'
        assert server.post("/v1/chat/completions", body).status == 400
    pair = b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}],"max_tokens":2}'
    assert server.post("/v1/chat/completions", pair).status == 200


def test_o16_context_limit(server: Live) -> None:
    def ids(count: int) -> list[int]:
        return [1000 + i % 2000 for i in range(count)]

    one_left = server.complete(ids(CONTEXT - 1), max_tokens=1)
    assert one_left.json()["choices"][0]["finish_reason"] == "length"
    for count, max_tokens in ((CONTEXT, 1), (CONTEXT + 1, 1), (10, CONTEXT), (CONTEXT - 1, 2)):
        reply = server.complete(ids(count), max_tokens=max_tokens)
        refused(reply, code="context_length_exceeded")
        message = reply.error()["message"]
        assert str(CONTEXT) in message and str(count) in message, message
    filled = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Go on"}], "ignore_eos": True}
    )
    usage = filled.json()["usage"]
    assert filled.json()["choices"][0]["finish_reason"] == "length"
    assert usage["total_tokens"] == CONTEXT
    refused(server.chat("The password is swordfish. " + "word " * 3 * CONTEXT), code="context_length_exceeded")


def test_o18_batches(server: Live) -> None:
    prompts = ["The capital of Italy is", "Two plus two equals", "My favourite colour is"]
    singles = [server.complete(prompt).json()["choices"][0]["text"] for prompt in prompts]
    batch = server.complete(prompts).json()
    assert [choice["text"] for choice in batch["choices"]] == singles
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    six = {"prompt": prompts, "n": 2, "temperature": 1, "seed": 3, "max_tokens": 8}
    whole = server.post("/v1/completions", six).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    streamed = dict.fromkeys(range(6), "")
    for event in server.stream("/v1/completions", six):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert [streamed[index] for index in range(6)] == [choice["text"] for choice in whole["choices"]]
    ids = [[1000, 1001, 1002], [1500, 1501]]
    assert server.complete(ids).json()["usage"]["prompt_tokens"] == 5
    for bad in (
        [1000, "text"],
        [[1000], "text"],
        ["ok", [1]],
        [[1000], {"no": 1}],
        [[1], [10**9]],
        [[5], list(range(5, 5 + CONTEXT))],
    ):
        refused(server.complete(bad))


def test_o20_min_tokens(server: Live) -> None:
    end = {"logit_bias": {"2": 100}, "max_tokens": 20}
    assert server.complete(**end).json()["usage"]["completion_tokens"] == 1
    late = server.complete(**end, min_tokens=4).json()
    assert late["usage"]["completion_tokens"] == 5
    assert late["choices"][0]["finish_reason"] == "stop"
    full = server.complete(logit_bias={"2": 100}, max_tokens=4, min_tokens=4).json()
    assert full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["completion_tokens"] == 4
    refused(server.complete(min_tokens=9, max_tokens=4), "min_tokens")
    refused(server.complete(min_tokens=-1), "min_tokens")


def test_o22_odd_messages(server: Live) -> None:
    for messages in (
        [],
        None,
        "hello",
        ["hello"],
        [{"content": "hi"}],
        [{"role": 3, "content": "hi"}],
        [{"role": "user"}],
    ):
        refused(server.chat(messages=messages))
    for content in (
        None,
        7,
        {"type": "text", "text": "hi"},
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}],
    ):
        refused(server.chat(content))
    joined = server.chat("Say hello.").json()["usage"]
    parts = server.chat([{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]).json()["usage"]
    assert parts["prompt_tokens"] == joined["prompt_tokens"]
    named = server.chat(messages=[{"role": "user", "name": "bob", "content": "Say hello."}])
    assert named.json()["usage"]["prompt_tokens"] == joined["prompt_tokens"]
    assert server.chat(stop=None).status == 200
    for stop in ("", [""]):
        reply = server.chat(stop=stop)
        assert reply.status == 400 or reply.json()["usage"]["completion_tokens"] > 1


def test_unknown_and_unsupported_fields_are_named(server: Live) -> None:
    reply = server.chat(temprature=1)
    refused(reply, "temprature")
    assert "temperature" in reply.error()["message"]
    for field, value in (
        ("tools", [{"type": "wizard"}]),
        ("best_of", 3),
    ):
        refused(server.chat(**{field: value}), field, "unsupported_parameter")
    assert server.chat(tools=[], response_format={"type": "text"}).status == 200
    refused(server.chat(top_logprobs=5), "top_logprobs")
    refused(server.chat(stream_options={"include_usage": True}), "stream_options")
    assert server.chat(model="no-such-model").status == 404
    for model in (7, ["m"], True):
        refused(server.chat(model=model), "model")


def test_o35_request_ids(server: Live) -> None:
    replies = [
        server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers={"X-Request-Id": "same"})
        for _ in range(2)
    ]
    assert len({reply.json()["id"] for reply in replies}) == 2
    assert all(reply.headers["x-request-id"] == "same" for reply in replies)
    for bad in ("x" * 129, "tab\there"):
        assert (
            server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers={"X-Request-Id": bad}).status
            == 400
        )
    refused(server.complete(request_id="split\r\nheader"), "request_id")


def test_malformed_bodies(server: Live) -> None:
    for body in (b"", b"{", b"[1]", b'"text"', b"null", b"[" * 100_000, b'{"messages": [}', b"\xff\xfe"):
        assert server.post("/v1/chat/completions", body).status == 400
    assert server.post("/v1/chat/completions", b"{}", headers={"Content-Type": "text/plain"}).status == 400
    assert server.post("/v1/chat/completions", b"{}", headers={"Content-Encoding": "gzip"}).status == 415
    assert server.get("/v1/chat/completions").status == 405
    assert server.get("/nowhere").status == 404


def test_o08_heads_are_bounded(server: Live) -> None:
    def answer(data: bytes) -> bytes:
        with socket.create_connection((server.host, server.port), timeout=10) as connection:
            with contextlib.suppress(OSError):  # it may refuse before it has read everything
                connection.sendall(data)
            return connection.recv(65536)

    assert b" 431 " in answer(b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"a" * 200_000 + b"\r\n\r\n")
    assert b" 431 " in answer(b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"a" * 100_000)
    assert b" 431 " in answer(b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1000 + b"\r\n")
    assert b" 400 " in answer(b"NONSENSE\r\n\r\n")
    big = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50000000000\r\n\r\n{"
    assert b" 413 " in answer(big)


def test_o08_bodies_are_bounded_while_they_come(server: Live) -> None:
    """A body without end is refused at its bound, and compressed ones and those of strange lengths at once."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 40 << 20 and not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
                sent += 65536
        assert b" 413 " in connection.recv(65536)
        assert sent < 40 << 20
    before = server.rss_bytes()
    for header, status in (
        (b"Content-Encoding: gzip\r\nContent-Length: 100", b" 415 "),
        (b"Content-Encoding: br\r\nContent-Length: 100", b" 415 "),
        (b"Content-Length: -1", b" 400 "),
        (b"Content-Length: 1e3", b" 400 "),
        (b"Content-Length: 5\r\nContent-Length: 6", b" 400 "),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", b" 400 "),
        (b"Transfer-Encoding: gzip", b" 400 "),
    ):
        with socket.create_connection((server.host, server.port), timeout=20) as connection:
            connection.sendall(head + header + b"\r\n\r\n")
            assert status in connection.recv(65536), header
    assert server.rss_bytes() < before + (8 << 20)


def test_o08_slow_clients_hold_up_nobody(server: Live) -> None:
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((server.host, server.port), timeout=10)) for _ in range(500)
        ]
        for text in (b"P", b"O", b"S"):
            for connection in slow:
                connection.sendall(text)
            began = time.monotonic()
            assert server.get("/health").status == 200
            assert server.complete(max_tokens=1).status == 200
            assert time.monotonic() - began < 5


def test_o36_every_route_needs_the_key(guarded: Live) -> None:
    from octavo.server.app import App  # noqa: F401 - the routes below must be all of them

    for method, path in (
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/smollm2-135m"),
        ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/nowhere"),
        ("POST", "/v1/chat/completions/"), ("POST", "//v1/completions"), ("POST", "/V1/completions"), ("GET", "/v1/%6dodels"),
        ("GET", "/health/../v1/models"), ("GET", "/live/"),
    ):  # fmt: skip
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": "Basic sesame"},
                        {"Authorization": "Bearer SESAME"}, {"Authorization": "Bearer sesam"}, {"Authorization": "Bearer clé"},
                        {"Authorization": "Bearer alice:sesame"}):  # fmt: skip
            encoded = {name: value.encode("utf-8").decode("latin-1") for name, value in headers.items()}
            reply = guarded.request(method, path, {} if method == "POST" else None, headers=encoded)
            assert reply.status == 401, (method, path, headers, reply.status)
            assert reply.error()["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/live"):
        assert guarded.get(path).status == 200
    for scheme in ("Bearer", "bearer"):
        assert guarded.get("/v1/models", headers={"Authorization": f"{scheme} sesame"}).status == 200


def test_secrets_are_not_logged(guarded: Live) -> None:
    guarded.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    assert not any("sesame" in line for line in guarded.log)
    assert "sesame" not in guarded.get("/metrics", headers={"Authorization": "Bearer sesame"}).body.decode()


def test_error_bodies_are_json(server: Live) -> None:
    reply = server.chat("x" * 9_000_000)
    assert reply.status == 413
    assert json.loads(reply.body)["error"]["code"] == "request_too_large"
