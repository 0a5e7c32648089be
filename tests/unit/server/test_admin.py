"""Administrative routes: who may call them, and what they do to the prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.config import ServerConfig
from octavo.server.app import App
from support.asgi import Call, application
from support.scripted import EOS, model_of, spell

KEY = {"Authorization": "Bearer boss"}
TEXT = "/v1/completions"
PROMPT = "0123456789" * 4


def serve(work: Any, *, keys: tuple[str, ...] = ("boss",), api_keys: tuple[str, ...] = (), **options: Any) -> Any:
    async def main() -> Any:
        server = ServerConfig(admin_api_key=keys, api_key=api_keys)
        async with application([*spell("ok"), EOS], server=server, model=model_of(max_model_len=128), **options) as (
            app,
            _,
        ):
            return await work(app)

    return asyncio.run(main())


async def post(app: App, path: str, body: Any, headers: dict[str, str] = KEY) -> tuple[int, Any]:
    call = Call(app, path, body, headers=headers)
    answer = await call.run()
    return call.status, answer


async def cached(app: App, prompt: str = PROMPT, **fields: Any) -> dict[str, int]:
    status, answer = await post(app, TEXT, {"prompt": prompt, "max_tokens": 1, **fields})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"])
@pytest.mark.parametrize(
    ("keys", "headers", "status", "code"),
    [
        ((), KEY, 403, "permission_denied"),
        (("boss",), {}, 401, "invalid_api_key"),
        (("boss",), {"Authorization": "Bearer user"}, 401, "invalid_api_key"),
        (("boss",), {"Authorization": "boss"}, 401, "invalid_api_key"),
        (("boss",), {"Authorization": "Bearer "}, 401, "invalid_api_key"),
    ],
)
def test_without_the_admin_key_they_are_closed(
    path: str, keys: tuple[str, ...], headers: dict[str, str], status: int, code: str
) -> None:
    async def work(app: App) -> None:
        found, answer = await post(app, path, {}, headers)
        assert (found, answer["error"]["code"]) == (status, code)

    serve(work, keys=keys, api_keys=("user",))


def test_the_admin_key_opens_nothing_else() -> None:
    async def work(app: App) -> None:
        assert (await post(app, "/tokenize", {"prompt": "x"}))[0] == 401
        assert (await post(app, "/reset_prefix_cache", None))[0] == 200

    serve(work, api_keys=("user",))


def test_the_prefix_cache_is_forgotten() -> None:
    async def work(app: App) -> None:
        assert await cached(app) == {"cached_tokens": 0}
        assert await cached(app) == {"cached_tokens": 39}
        assert await post(app, "/reset_prefix_cache", {}) == (200, {})
        assert await cached(app) == {"cached_tokens": 0}

    serve(work)


def test_a_pinned_prompt_survives_what_evicts_all_others() -> None:
    async def work(app: App) -> None:
        assert await post(app, "/pin_prefix", {"prompt": PROMPT}) == (200, {"prompt_tokens": 40, "pinned_tokens": 40})
        other = "x" * 40
        assert await cached(app, other, cache_pin=True) == {"cached_tokens": 0, "pinned_tokens": 0}
        for number in range(6):
            await cached(app, f"{number}" * 40)
        assert (await cached(app, PROMPT + "!"))["cached_tokens"] == 40
        assert (await cached(app, other))["cached_tokens"] == 0
        # What is pinned once more, or begins alike, needs no further room.
        assert await cached(app, PROMPT, cache_pin=True) == {"cached_tokens": 39, "pinned_tokens": 40}
        status, answer = await post(app, "/pin_prefix", {"prompt": PROMPT[:32] + "y" * 8})
        assert (status, answer["error"]["code"]) == (409, "pin_budget_exhausted")
        assert await post(app, "/unpin_prefix", {"prompt": PROMPT}) == (200, {})
        assert (await cached(app, other, cache_pin=True))["pinned_tokens"] == 40
        assert await post(app, "/unpin_prefix", {}) == (200, {})
        assert (await cached(app, PROMPT, cache_pin=True))["pinned_tokens"] == 40

    serve(work, num_blocks=14, max_pinned_tokens=40)


def test_pins_of_different_salts_are_different() -> None:
    async def work(app: App) -> None:
        assert (await post(app, "/pin_prefix", {"prompt": PROMPT, "cache_salt": "a"}))[0] == 200
        assert (await post(app, "/unpin_prefix", {"prompt": PROMPT}))[0] == 200
        assert (await post(app, "/pin_prefix", {"prompt": PROMPT}))[0] == 409
        assert (await post(app, "/unpin_prefix", {"prompt": PROMPT, "cache_salt": "a"}))[0] == 200
        assert (await post(app, "/pin_prefix", {"prompt": PROMPT}))[0] == 200

    serve(work, max_pinned_tokens=40)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pin_prefix", {}, "prompt"),
        ("/pin_prefix", {"prompt": "x", "messages": []}, "prompt"),
        ("/pin_prefix", {"prompt": "short"}, "prompt"),
        ("/pin_prefix", {"prompt": "x" * 41}, "cache_pin"),
        ("/pin_prefix", {"prompt": [5, "x"]}, "prompt"),
        ("/pin_prefix", {"prompt": PROMPT, "pinned": True}, "pinned"),
        ("/pin_prefix", {"prompt": PROMPT, "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/unpin_prefix", {"cache_salt": "a"}, "cache_salt"),
        ("/unpin_prefix", {"prompt": [1], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_what_cannot_be_pinned_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async def work(app: App) -> None:
        status, answer = await post(app, path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer

    serve(work, max_pinned_tokens=40)


def test_without_a_budget_pinning_is_refused_by_name() -> None:
    async def work(app: App) -> None:
        status, answer = await post(app, TEXT, {"prompt": PROMPT, "cache_pin": True})
        assert (status, answer["error"]["param"]) == (400, "cache_pin")
        assert "--max-pinned-tokens" in answer["error"]["message"]

    serve(work)
