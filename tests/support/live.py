"""A real server process for API tests, and plain HTTP against it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT_S = 60.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error object, its shape checked."""
        error = self.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        return error


class Live:
    """`octavo VERB ...` as a child process."""

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, ready: bool = True, under: Sequence[str] = ()
    ) -> None:
        command = [*under, sys.executable, "-m", "octavo", *arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})}
        )
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        listening = self.wait_for_line(r"listens on (https?://\S+)")
        self.url = listening[1]
        parts = urllib.parse.urlsplit(self.url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        if ready:
            self.wait_for_line(r" ready after ")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            self._lines.put(line)
        self._lines.put(None)

    def wait_for_line(self, pattern: str, limit_s: float = START_LIMIT_S) -> re.Match[str]:
        deadline = time.monotonic() + limit_s
        while True:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            if line is None:
                raise AssertionError("the server ended:\n" + "\n".join(self.log))
            if found := re.search(pattern, line):
                return found

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 60
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Reply:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        return self.request("POST", path, body, **options)

    def chat(self, content: Any = "Say hello.", **fields: Any) -> Reply:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8, **fields})

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a stream up to [DONE]; an error event is the last one."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status == 200, reply.body
        payloads = [line[6:] for line in reply.body.decode().split("\n\n") if line.startswith("data: ")]
        if payloads[-1] == "[DONE]":
            payloads.pop()
        else:
            assert "error" in json.loads(payloads[-1])
        return [json.loads(payload) for payload in payloads]

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over all labels."""
        headers = {"Authorization": f"Bearer {self.key}"} if (self.key) else {}
        text = self.get("/metrics", headers=headers).body.decode()
        values = [
            float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)
        ]
        assert values, f"no metric {name}"
        return sum(values)

    key: str | None = None

    def idle_within(self, limit_s: float) -> bool:
        """True once nothing runs, waits or holds KV blocks."""
        deadline = time.monotonic() + limit_s
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while time.monotonic() < deadline:
            if not any(self.metric(gauge) for gauge in gauges):
                return True
            time.sleep(0.05)
        return False

    def rss_bytes(self) -> int:
        with Path(f"/proc/{self.process.pid}/status").open(encoding="utf-8") as status:
            line = next(line for line in status if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def stop(self, number: int = signal.SIGTERM, limit_s: float = 40) -> int:
        """Sends a signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(5)
            if self.process.stderr is not None:
                self.process.stderr.close()


@contextlib.contextmanager
def live(*arguments: str, **options: Any) -> Iterator[Live]:
    server = Live(*arguments, **options)
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)
