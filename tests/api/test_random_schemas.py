"""A short form of `octavo bench structured`: outputs of random schemas at temperature 1 are valid, and nearly all come to an end."""

from __future__ import annotations

import asyncio

import aiohttp

from octavo.bench.http.structured import Server, check_validity, fault_of
from octavo.bench.schemas import large_schema, random_schema
from support.live import Live


def test_outputs_of_random_schemas_are_valid(server: Live) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            result = await check_validity(
                Server(session, server.url, "smollm2-135m"),
                30,
                seed=7,
                concurrency=12,
                max_tokens=200,
                progress=lambda *_: None,
            )
            assert not result.refused
            assert not result.invalid
            assert result.num_finished >= 24

    asyncio.run(main())


def test_schemas_are_what_their_seed_says_and_faults_are_found() -> None:
    assert random_schema(3) == random_schema(3) != random_schema(4)
    assert len(str(large_schema(1, 50_000))) > 40_000
    assert fault_of({"type": "integer"}, "1") is None
    assert fault_of({"type": "integer"}, "1.5") is not None
    assert fault_of({"type": "integer"}, "{") is not None
