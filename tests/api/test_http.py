"""What HTTP clients do to a server beside asking well: pipelining, offers of other protocols, odd methods."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

import pytest

from support.live import Live

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


def head_and_body(body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = (
        f"POST {TEXT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers,
    )  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode() + data


def test_a_pipelining_client_that_leaves_frees_everything(server: Live) -> None:
    aborted = server.metric("vllm:request_success_total")
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(head_and_body(LONG) + head_and_body(LONG) + b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while server.metric("vllm:num_requests_running") < 1:
            time.sleep(0.01)
    assert server.idle_within(2.0)
    assert server.metric("vllm:request_success_total") == aborted + 1


@pytest.mark.parametrize("split", [None, 60])
def test_an_offered_upgrade_is_ignored(server: Live, split: int | None) -> None:
    """Java's HttpClient offers HTTP/2 with every request, also one with a body."""
    offer = ("Connection: Upgrade, HTTP2-Settings, keep-alive", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    request = head_and_body({"prompt": "Hi", "max_tokens": 2}, *offer)
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        for _ in range(2):
            connection.sendall(request[:split])
            if split is not None:
                time.sleep(0.05)
                connection.sendall(request[split:])
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            assert reply.status == 200, reply.read()
            assert json.loads(reply.read())["usage"]["completion_tokens"] == 2
    websocket = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eA==",
    }
    assert server.get("/live", headers=websocket).status == 200
    assert not any("pip install" in line for line in server.log)


def test_many_offers_in_one_packet(server: Live) -> None:
    one = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(one * 1500)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(65536)
    assert server.get("/live").status == 200


def test_connect_is_refused(server: Live) -> None:
    with socket.create_connection((server.host, server.port), timeout=30) as connection:
        connection.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 405")
