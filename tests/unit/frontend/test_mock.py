"""The mock engine: the same text for everybody, errors on demand."""

from __future__ import annotations

import asyncio
import time

import pytest

from octavo.config import Config, ModelConfig
from octavo.errors import EngineError
from octavo.frontend.engine import AsyncEngine
from octavo.frontend.mock import ANSWER, mock_engine
from octavo.frontend.params import SamplingParams
from octavo.frontend.stream import merge
from octavo.obs.events import EventLog


async def text_of(engine: AsyncEngine, content: str, params: SamplingParams) -> str:
    prepared = engine.builder.build_chat([{"role": "user", "content": content}], params)
    async with engine.submit(prepared) as handle:
        return merge([delta async for delta in handle]).text


def test_it_answers_at_its_pace() -> None:
    async def main() -> None:
        config = Config(model=ModelConfig(served_model_name=("a", "b")))
        engine = mock_engine(config, EventLog(), ttft_s=0.05, itl_s=0.001)
        await engine.start()
        assert engine.model.names == ("a", "b")
        started_s = time.perf_counter()
        assert await text_of(engine, "hi", SamplingParams(max_tokens=None)) == ANSWER
        assert time.perf_counter() - started_s >= 0.05 + 0.001 * len(ANSWER.split())
        longer = await text_of(engine, "hi", SamplingParams(max_tokens=100, ignore_eos=True))
        assert longer.startswith(ANSWER + ANSWER)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("count", [0, 3, 500])
def test_errors_on_demand(count: int) -> None:
    async def main() -> None:
        engine = mock_engine(Config(), EventLog())
        await engine.start()
        prepared = engine.builder.build(f"please [error after {count}]", SamplingParams(max_tokens=600))
        async with engine.submit(prepared) as handle:
            whole = merge([delta async for delta in handle])
        assert len(whole.token_ids) == count
        assert isinstance(whole.error, EngineError)
        await engine.close()

    asyncio.run(main())
