"""The server's application without sockets: one call in, one answer out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from octavo.config import CacheConfig, Config, ResponsesConfig, ServerConfig
from octavo.obs.events import EventLog
from octavo.obs.metrics import Metrics
from octavo.server.app import App
from support.scripted import running


@dataclass
class Call:
    """A request as the application sees it. `leave` makes the client go away."""

    app: App
    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    query: bytes = b""
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        self.left.set()

    async def run(self) -> Any:
        """Runs to the end; returns the body, decoded unless it is a stream."""
        data = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        messages = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.answer_headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                self.parts.append(message.get("body", b""))
                self.answered.set()

        headers = [(b"content-type", b"application/json")]
        headers += [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {
            "type": "http", "method": self.method, "path": self.path, "headers": headers, "query_string": self.query, "root_path": "",
            "scheme": "http", "server": ("x", 80), "http_version": "1.1",
        }  # fmt: skip
        await self.app(scope, receive, send)
        whole = b"".join(self.parts)
        with contextlib.suppress(ValueError):
            return json.loads(whole)
        return whole


@contextlib.asynccontextmanager
async def application(
    script: Any, *, server: ServerConfig | None = None, responses: ResponsesConfig | None = None, **options: Any
) -> AsyncIterator[tuple[App, Metrics]]:
    """The application over an engine that answers by the script. `options` are those of `scripted.running`."""
    events, metrics = EventLog(), Metrics("scripted")
    events.add_sink(metrics)
    async with running(script, events=events, **options) as engine:
        config = Config(
            server=server or ServerConfig(),
            responses=responses or ResponsesConfig(),
            cache=CacheConfig(block_size=8),
        )
        app = App(config, engine, events, metrics)
        try:
            yield app, metrics
        finally:
            await engine.close()
            await app.close()


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    return sum(
        found.value
        for family in metrics.collect()
        for found in family.samples
        if found.name == name and labels.items() <= found.labels.items()
    )
