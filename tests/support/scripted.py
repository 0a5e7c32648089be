"""A model whose tokens tests choose: a tokenizer of bytes and given words, and engines over the scripted executor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from octavo.config import CacheConfig, Config, SchedulerConfig
from octavo.contracts import FinishReason, RequestId, SlotStart, TokenEvent, TokenLogprobs
from octavo.frontend.engine import AsyncEngine
from octavo.frontend.mock import word_model, word_tokenizer
from octavo.frontend.model import ServedModel
from octavo.frontend.outputs import Delta
from octavo.frontend.params import SamplingParams
from octavo.frontend.requests import RequestBuilder
from octavo.frontend.stream import OutputStream, merge
from octavo.obs.events import EventLog
from octavo.runner.scripted import ScriptedExecutor

EOS = 256
WORD = 257
"""Id of the first word."""


def model_of(words: Sequence[str] = (), **changes: Any) -> ServedModel:
    """A model whose ids from `WORD` on are the words."""
    return replace(word_model(Config(), word_tokenizer(words)), **changes)


def spell(text: str) -> list[int]:
    """Ids of a text, one per byte."""
    return list(text.encode())


def stream_all(model: ServedModel, events: Sequence[TokenEvent], **params: Any) -> tuple[list[Delta], Delta]:
    """Pushes events through one stream. Returns the deltas one by one, and merged."""
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    request = RequestBuilder(model).build("x", sampling).requests[0]
    stream = OutputStream(request, sampling, model)
    deltas = []
    for event in events:
        if (delta := stream.push(event)) is not None:
            deltas.append(delta)
        if stream.finished:
            break
    return deltas, merge(deltas)


def one_by_one(
    token_ids: Sequence[int], reason: FinishReason | None = FinishReason.LENGTH, *, logprobs: bool = False, **last: Any
) -> list[TokenEvent]:
    """One event per token; the last one is terminal."""
    events = [
        TokenEvent(
            request_id=RequestId("r"),
            token_ids=(token,),
            logprobs=(TokenLogprobs((token, token, 7), (-0.5, -0.5, -1.5), 1),) if logprobs else None,
        )
        for token in token_ids
    ]
    events[-1] = msgspec.structs.replace(events[-1], finish_reason=reason, **last)
    return events


@contextlib.asynccontextmanager
async def running(
    script: Callable[[SlotStart], Sequence[int | Exception]] | Sequence[int | Exception],
    *,
    model: ServedModel | None = None,
    itl_s: float = 0.0,
    events: EventLog | None = None,
    on_death: Callable[[str], None] | None = None,
    num_blocks: int | None = None,
    max_pinned_tokens: int = 0,
    **scheduler: Any,
) -> AsyncIterator[AsyncEngine]:
    """A ready engine that answers every request by the script; closed at the end."""
    call = script if callable(script) else lambda _: script
    served = model or model_of()
    engine = AsyncEngine.with_executor(
        Config(
            scheduler=SchedulerConfig(**scheduler), cache=CacheConfig(block_size=8, max_pinned_tokens=max_pinned_tokens)
        ),
        events or EventLog(),
        served,
        lambda: ScriptedExecutor(call, itl_s=itl_s, vocab_size=served.vocab_size),
        on_death=on_death,
        num_blocks=num_blocks,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Waits for a condition, looking often."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.005)
