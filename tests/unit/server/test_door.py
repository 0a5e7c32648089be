"""Foreign host names, foreign web pages and CORS (case O-45)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.door import Door, ForbiddenError
from support.asgi import Call, application
from support.scripted import spell

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


def knocks(config: ServerConfig, bound: str = "127.0.0.1", path: str = CHAT, **headers: str) -> bool:
    """Whether the door lets a request in."""
    scope = {"type": "http", "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    try:
        Door(config, bound).check(scope)
    except ForbiddenError as error:
        assert error.http_status == 403
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "a.localhost:80",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.8.9.1",
        "[::1]:8000",
    ],
)
def test_o45_loopback_names_are_ours(host: str) -> None:
    assert knocks(ServerConfig(), host=host)


@pytest.mark.parametrize(
    "host",
    ["evil.test", "evil.test:8000", "localhost.evil.test", "127.0.0.1.evil.test", "10.0.0.1", "", "a b", "evil.test@localhost",
     "localhost/evil", "127.1", "[::2]", "[::1", "2130706433", "localhost:8000:80", "localhost, evil.test"],
)  # fmt: skip
def test_o45_other_names_are_foreign_on_a_loopback_server_without_a_key(host: str) -> None:
    assert not knocks(ServerConfig(), host=host)
    assert not knocks(ServerConfig(), "::1", host=host)
    assert knocks(ServerConfig(), path="/health", host=host)
    assert knocks(ServerConfig(api_key=("key",)), host=host)
    assert knocks(ServerConfig(host="0.0.0.0"), "0.0.0.0", host=host)
    assert knocks(ServerConfig(allowed_hosts=("*",)), host=host)


def test_listed_names_hold_everywhere() -> None:
    for config in (
        ServerConfig(allowed_hosts=("Chat.example.com",)),
        ServerConfig(allowed_hosts=("Chat.example.com",), api_key=("key",), host="0.0.0.0"),
    ):
        assert knocks(config, config.host, host="chat.example.com:443")
        assert knocks(config, config.host, host="localhost:8000")
        assert not knocks(config, config.host, host="evil.test")


def test_o45_pages_of_other_origins_are_refused_without_a_key() -> None:
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert knocks(ServerConfig(), **own)
    public = ServerConfig(host="0.0.0.0")
    assert knocks(public, "0.0.0.0", host="chat.example.com", origin="https://chat.example.com")
    assert knocks(public, "0.0.0.0", host="chat.example.com:443", origin="https://CHAT.example.com")
    for origin in (
        "http://evil.test",
        "null",
        "http://localhost:3000",
        "https://localhost",
        "file://",
        "x",
        "http://localhost:8000/x",
    ):
        assert not knocks(ServerConfig(), host="localhost:8000", origin=origin)
        assert not knocks(public, "0.0.0.0", host="localhost:8000", origin=origin)
        assert knocks(ServerConfig(api_key=("key",)), host="localhost:8000", origin=origin)
        assert knocks(ServerConfig(allowed_origins=("*",)), host="localhost:8000", origin=origin)
    assert knocks(
        ServerConfig(allowed_origins=("http://Evil.test/",)), host="localhost:8000", origin="http://evil.test"
    )


def test_unsafe_or_impossible_origins_are_no_configuration() -> None:
    with pytest.raises(ConfigError, match="every web page"):
        Door(ServerConfig(allowed_origins=("*",), allow_credentials=True), "127.0.0.1")
    for origin in ("example.com", "https://example.com/chat", "https://"):
        with pytest.raises(ConfigError, match="no origin"):
            Door(ServerConfig(allowed_origins=(origin,)), "127.0.0.1")


def exchange(server: ServerConfig, method: str, headers: dict[str, str]) -> tuple[Call, Any]:
    async def main() -> tuple[Call, Any]:
        async with application(spell("abc"), server=server) as (app, _):
            call = Call(app, CHAT, BODY, method=method, headers={"host": "localhost"} | headers)
            return call, await call.run()

    return asyncio.run(main())


def test_cors_for_listed_origins_only() -> None:
    server = ServerConfig(allowed_origins=("https://chat.test",), api_key=("key",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    call, _ = exchange(server, "OPTIONS", {"origin": "https://chat.test", **asked})
    assert call.status == 200
    assert call.answer_headers["access-control-allow-origin"] == "https://chat.test"
    assert "authorization" in call.answer_headers["access-control-allow-headers"]
    call, body = exchange(server, "OPTIONS", {"origin": "https://evil.test", **asked})
    assert (call.status, body["error"]["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in call.answer_headers
    call, _ = exchange(server, "POST", {"origin": "https://chat.test", "authorization": "Bearer key"})
    assert call.status == 200
    assert call.answer_headers["access-control-allow-origin"] == "https://chat.test"
    call, body = exchange(server, "POST", {"origin": "https://chat.test"})
    assert (call.status, body["error"]["code"]) == (401, "invalid_api_key")
    assert call.answer_headers["access-control-allow-origin"] == "https://chat.test"


def test_o45_no_cors_without_the_flag() -> None:
    call, body = exchange(
        ServerConfig(), "OPTIONS", {"origin": "http://evil.test", "access-control-request-method": "POST"}
    )
    assert (call.status, body["error"]["code"]) == (403, "forbidden")
    assert not any(name.startswith("access-control") for name in call.answer_headers)
