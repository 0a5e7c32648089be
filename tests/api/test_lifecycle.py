"""Disconnects, overload, death and shutdown of a real server (cases O-25, O-26, O-41, O-42, O-43, O-44)."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.live import Live, live

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
SMALL = ("--max-model-len", "1024", "--kv-cache-memory", "64M", "--max-num-seqs", "8")


def send(server: Live, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns the open connection."""
    data = json.dumps(body).encode()
    connection = socket.create_connection((server.host, server.port), timeout=30)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def test_o25_client_gone_means_work_stops(server: Live) -> None:
    aborted = server.metric("vllm:request_success_total")
    connections = [send(server, LONG | {"prompt": f"Story {i}", "stream": i % 2 == 0}) for i in range(20)]
    deadline = time.monotonic() + 10
    while server.metric("vllm:num_requests_running") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for connection in connections:
        connection.close()
    assert server.idle_within(2.0)
    assert server.metric("vllm:request_success_total") == aborted + 20


def test_o25_half_close_and_slow_reader(server: Live) -> None:
    connection = send(server, LONG | {"max_tokens": 4})
    connection.shutdown(socket.SHUT_WR)
    answer = connection.recv(65536)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    connection.close()
    idle_reader = send(server, LONG | {"stream": True})
    time.sleep(0.2)
    began = time.monotonic()
    assert server.chat(max_tokens=4).status == 200
    assert time.monotonic() - began < 5
    idle_reader.close()
    assert server.idle_within(5)


def test_o26_random_disconnects_leak_nothing(server: Live) -> None:
    """Short form of the soak: 300 requests of mixed lengths, about 100 of which are dropped."""
    dice = random.Random(26)
    plans = [(dice.randint(1, 60), dice.randint(1, 20), dice.random() < 1 / 3, dice.random() * 0.3) for _ in range(300)]
    before_threads = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))

    def one(plan: tuple[int, int, bool, float]) -> None:
        length, tokens, drop, delay = plan
        body = {
            "prompt": [1000 + (length + i) % 3000 for i in range(length)],
            "max_tokens": tokens,
            "stream": length % 2 == 0,
        }
        connection = send(server, body | {"ignore_eos": True})
        if drop:
            time.sleep(delay)
        else:
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            assert reply.status == 200
            reply.read()
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        list(threads.map(one, plans))
    assert server.idle_within(5)
    assert len(list(Path(f"/proc/{server.process.pid}/task").iterdir())) <= before_threads + 2


def test_o41_killed_child_engine_is_seen(smollm2: Path) -> None:
    with live("serve", *SMALL, "--engine-process") as server:
        [child] = children(server.process.pid)
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            replies = [threads.submit(server.post, TEXT, LONG) for _ in range(3)]
            time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
            began = time.monotonic()
            assert all(reply.result(10).status >= 500 for reply in replies)
            assert time.monotonic() - began < 5
        assert server.process.wait(10) == 1


def test_o41_frozen_child_engine_is_seen(smollm2: Path) -> None:
    with live("serve", *SMALL, "--engine-process") as server:
        [child] = children(server.process.pid)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            reply = threads.submit(server.post, TEXT, LONG)
            time.sleep(0.5)
            os.kill(child, signal.SIGSTOP)
            assert reply.result(10).status >= 500
        assert server.process.wait(10) == 1


def test_o41_child_engine_restarts_when_told_so(smollm2: Path) -> None:
    with live("serve", *SMALL, "--engine-process", "--engine-restart") as server:
        text = server.complete().json()["choices"][0]["text"]
        [child] = children(server.process.pid)
        os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (
            server.get("/ready").status != 200 or children(server.process.pid) == [child]
        ):
            time.sleep(0.1)
        assert server.complete().json()["choices"][0]["text"] == text
        assert any("died and is replaced" in line for line in server.log)


def test_o42_event_loop_stays_free(server: Live) -> None:
    slowest = 0.0
    stop = threading.Event()

    def poll() -> None:
        nonlocal slowest
        while not stop.is_set():
            began = time.monotonic()
            assert server.get("/live").status == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.05)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for content in ("word " * 1_000_000, "<|im_start|>" * 200_000, "a" * 5_000_000):
            began = time.monotonic()
            reply = server.chat(content)
            assert reply.status == 400
            assert reply.error()["code"] == "context_length_exceeded"
            assert time.monotonic() - began < 3
    finally:
        stop.set()
        poller.join()
    assert slowest < 0.5


def test_o43_overload_is_refused_quickly(smollm2: Path) -> None:
    with live("serve", *SMALL, "--max-num-queued-reqs", "8") as server:
        with concurrent.futures.ThreadPoolExecutor(40) as threads:
            replies = list(
                threads.map(lambda i: server.complete(f"Story {i}", max_tokens=60, ignore_eos=True), range(40))
            )
        statuses = {reply.status for reply in replies}
        assert statuses == {200, 429}
        assert sum(reply.status == 200 for reply in replies) >= 8
        refused = next(reply for reply in replies if reply.status == 429)
        assert refused.error()["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.complete(n=9, temperature=1).status == 429
        assert server.get("/health").status == 200
        assert server.idle_within(5)


def test_o44_sigterm_drains(smollm2: Path) -> None:
    with live("serve", *SMALL) as server:
        kept = http.client.HTTPConnection(server.host, server.port, timeout=30)
        kept.request("GET", "/live")
        kept.getresponse().read()
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            running = [threads.submit(server.stream, TEXT, LONG | {"max_tokens": 150}) for _ in range(4)]
            while server.metric("vllm:num_requests_running") < 4:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            kept.request("GET", "/ready")
            reply = kept.getresponse()
            assert reply.status == 503
            reply.read()
            assert server.complete().status == 503
            assert server.get("/live").status == 200
            for stream in running:
                events = stream.result(30)
                assert events[-1]["choices"][0]["finish_reason"] == "length"
        kept.close()
        assert server.process.wait(10) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.host, server.port), timeout=2)


def test_o44_drain_time_is_bounded(smollm2: Path) -> None:
    with live("serve", *SMALL, "--shutdown-timeout", "0.2") as server:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            running = threads.submit(server.stream, TEXT, LONG)
            while server.metric("vllm:num_requests_running") < 1:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            events = running.result(10)
            assert "error" in events[-1]
        assert server.process.wait(10) == 0


def test_o44_second_sigterm_ends_at_once(smollm2: Path) -> None:
    with live("serve", *SMALL, "--engine-process") as server:
        [child] = children(server.process.pid)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            running = threads.submit(server.stream, TEXT, LONG)
            while server.metric("vllm:num_requests_running") < 1:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            assert "error" in running.result(10)[-1]
        assert server.process.wait(10) == 0
        assert not Path(f"/proc/{child}").exists()


def test_keep_alive_outlives_ten_seconds(server: Live) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.request("GET", "/live")
    connection.getresponse().read()
    time.sleep(10.5)
    connection.request("GET", "/live")
    assert connection.getresponse().status == 200
    connection.close()


def test_loading_answers_503_and_live(smollm2: Path) -> None:
    with live("serve", *SMALL, ready=False) as server:
        assert server.get("/live").status == 200
        first = server.get("/ready").status
        assert first in (200, 503)
        server.wait_for_line(" ready after ")
        assert server.get("/ready").status == 200


def test_port_in_use_is_said(server: Live) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
