"""Grammars in requests over a scripted engine: compiled beside the event loop, stopped when nobody waits (O-04, O-26)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from support.asgi import Call, application
from support.scripted import spell, until

CHAT = "/v1/chat/completions"
HEAVY = {"structured_outputs": {"regex": "(((a{100}){100}){100}){100}"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_compiler_and_holds_up_nobody(stream: bool) -> None:
    async def main() -> None:
        async with application(spell("abcdef")) as (app, _):
            first = Call(app, CHAT, body(structured_outputs={"choice": ["a"]}))
            await first.run()  # the helper runs; this engine has no matchers
            assert first.status == 400
            compiler = app.context.engine._door._compiler  # type: ignore[union-attr]
            children = Path(f"/proc/{compiler.helper_pid}/task/{compiler.helper_pid}/children")
            heavy = Call(app, CHAT, body(**HEAVY, stream=stream))
            running = asyncio.create_task(heavy.run())
            await until(lambda: children.read_text() != "")
            began_s = time.monotonic()
            plain = Call(app, CHAT, body())
            await plain.run()
            assert plain.status == 200
            assert time.monotonic() - began_s < 1.0
            heavy.leave()
            async with asyncio.timeout(5):
                await running
            await until(lambda: children.read_text() == "")
            assert heavy.status == 0
            assert app.context.engine.num_unfinished == 0

    asyncio.run(main())


def test_an_engine_without_matchers_says_so() -> None:
    async def main() -> None:
        async with application(spell("abcdef")) as (app, _):
            for stream in (False, True):
                call = Call(app, CHAT, body(structured_outputs={"regex": "a+"}, stream=stream))
                answer = await call.run()
                assert call.status == 400
                assert answer["error"]["code"] == "unsupported_parameter"

    asyncio.run(main())
