"""What chat and text completions share: running a request whole or as a stream, usage, and how an early end is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo.contracts import FinishReason
from octavo.errors import EngineError, InvalidRequestError, NotReadyError, OctavoError
from octavo.frontend.outputs import Delta, LogprobEntry
from octavo.frontend.requests import Prepared, Truncation
from octavo.frontend.stream import merge
from octavo.server.context import Context
from octavo.server.errors import error_body
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest, PromptTokensDetails, StreamOptions, Usage
from octavo.server.sse import DONE, EventStream, event

LOGPROB_FLOOR = -9999.0  # JSON has no -inf
_encoder = msgspec.json.Encoder()


class Ids:
    """Identity of one answer: `id` with the API's prefix, creation time, the model's name as asked for."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of a response struct."""
        return {"id": self.id, "created": self.created, "model": self.model}


class UsageCount:
    """Adds up token counts over the deltas of a call. The prompt of each prepared request counts once."""

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        self._prompt_tokens = sum(len(one.prompt_token_ids) for one in prepared)
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        self._pinned: dict[int, int] | None = {} if prepared[0].requests[0].pin else None

    def take(self, prompt: int, delta: Delta) -> None:
        """Counts one delta of the request number `prompt`."""
        self._completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None:
            # Other choices find what the first of them has computed, which was not there for the request.
            self._cached[prompt] = min(self._cached.get(prompt, delta.num_cached_tokens), delta.num_cached_tokens)
        if delta.num_pinned_tokens is not None and self._pinned is not None:
            self._pinned[prompt] = delta.num_pinned_tokens

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            self._prompt_tokens,
            self._completion_tokens,
            self._prompt_tokens + self._completion_tokens,
            PromptTokensDetails(
                sum(self._cached.values()), UNSET if self._pinned is None else sum(self._pinned.values())
            ),
        )


def failure(delta: Delta) -> OctavoError | None:
    """The error that ended a choice, also when the server had to abort it; None for a natural end or none yet."""
    if delta.finish_reason is FinishReason.ERROR:
        return delta.error or EngineError("the engine failed; try again")
    if delta.finish_reason is FinishReason.ABORT:
        return NotReadyError("the request was aborted because the server is shutting down; try again later")
    return None


def stream_options(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """Checked options. Raises InvalidRequestError when they are given for an answer that is no stream."""
    if options is not None and not stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
    return options or StreamOptions()


def stream_interval(is_stream: bool | None, interval: int | None) -> int:
    """Tokens to collect for a chunk, checked. Raises InvalidRequestError."""
    if interval is None:
        return 1
    if not is_stream:
        raise InvalidRequestError("stream_interval is only allowed when stream is true", param="stream_interval")
    return interval


def truncation(body: ChatCompletionRequest | CompletionRequest) -> Truncation | None:
    """How the request wants an over-long prompt cut, if it does. Raises InvalidRequestError."""
    if body.truncate_prompt_tokens is None:
        if body.truncation_side is not None:
            raise InvalidRequestError("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return None
    return Truncation(body.truncate_prompt_tokens, body.truncation_side or "left")


@dataclass(frozen=True)
class Frames:
    """How an API writes a stream: each chunk, an error that ends it, and its natural end."""

    chunk: Callable[[Any], bytes]
    error: Callable[[OctavoError], bytes]
    end: bytes = b""


OPENAI_FRAMES = Frames(
    chunk=lambda chunk: event(_encoder.encode(chunk)), error=lambda error: event(error_body(error)), end=DONE
)


class _Pacer:
    """Holds deltas of a choice back until `interval` tokens have come; the first one and the last one pass at once."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[int, int], list[Delta]] = {}

    def pass_on(self, prompt: int, delta: Delta) -> Delta | None:
        """What is due now. An error is never merged with what came before it, which is dropped: the stream ends there."""
        if self._interval == 1 or delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return delta
        key = (prompt, delta.index)
        held = self._held.get(key)
        if held is None:
            self._held[key] = []
            return delta
        held.append(delta)
        if delta.finish_reason is None and sum(len(one.token_ids) for one in held) < self._interval:
            return None
        self._held[key] = []
        return merge(held)


async def whole(
    context: Context, request: Request, prepared: Sequence[Prepared], take: Callable[[int, Delta], None]
) -> None:
    """Runs to the end, handing each delta to `take(prompt, delta)`. Raises the error of the first choice that failed."""
    async with context.generate(request, prepared) as deltas:
        async for prompt, delta in deltas:
            if (error := failure(delta)) is not None:
                raise error
            take(prompt, delta)


async def stream(
    context: Context,
    request: Request,
    prepared: Sequence[Prepared],
    render: Callable[[int, Delta], Iterable[Any]],
    last: Callable[[], Awaitable[Sequence[Any]]],
    headers: dict[str, str],
    interval: int = 1,
    frames: Frames = OPENAI_FRAMES,
) -> ASGIApp:
    """Runs as a stream: chunks of `render(prompt, delta)`, then those of `last()`, then the end that `frames` has for it. Deltas of a
    choice are put together until they hold `interval` tokens.

    An error before the first delta is raised, so that it becomes a plain HTTP error; a later one is an error event that ends the
    stream without a finish reason.
    """
    stack = contextlib.AsyncExitStack()
    try:
        deltas = await stack.enter_async_context(context.generate(request, prepared))
        first_prompt, first = await anext(deltas)
        if (error := failure(first)) is not None:
            raise error
    except BaseException:
        await stack.aclose()
        raise

    def work(prompt: int, delta: Delta) -> list[bytes]:
        return [frames.chunk(chunk) for chunk in render(prompt, delta)]

    async def rendered(prompt: int, delta: Delta) -> list[bytes]:
        # A long prompt's logprobs take as long as many tokens; other streams go on meanwhile.
        is_long = delta.prompt_logprobs is not None
        return await asyncio.to_thread(work, prompt, delta) if is_long else work(prompt, delta)

    pacer = _Pacer(interval)
    pacer.pass_on(first_prompt, first)

    async def pieces() -> AsyncIterator[bytes]:
        async with stack:
            for piece in await rendered(first_prompt, first):
                yield piece
            async for prompt, arrived in deltas:
                if (delta := pacer.pass_on(prompt, arrived)) is None:
                    continue
                if (failed := failure(delta)) is not None:
                    yield frames.error(failed)
                    return
                for piece in await rendered(prompt, delta):
                    yield piece
            for chunk in await last():
                yield frames.chunk(chunk)
            if frames.end:
                yield frames.end

    return EventStream(pieces(), headers)


async def json_response(
    build: Callable[[], msgspec.Struct], headers: dict[str, str], prepared: Sequence[Prepared]
) -> Response:
    """A 200 with a struct as JSON. It is built in a thread when it has logprobs, which can be large, so that streams go on."""

    def work() -> Response:
        return Response(_encoder.encode(build()), 200, headers, media_type="application/json")

    params = prepared[0].params
    is_long = params.logprobs is not None or params.prompt_logprobs is not None
    return await asyncio.to_thread(work) if is_long else work()


def check_count(field: str, count: int | None, most: int) -> None:
    """Refuses a number of alternatives beyond the server's bound; -1, the whole vocabulary, is allowed where there is no bound (-1)."""
    if count is None or 0 <= count <= most or (most == -1 and count >= -1):
        return
    allowed = "at least -1" if most == -1 else f"between 0 and {most}"
    raise InvalidRequestError(f"{field} is {count}; it must be {allowed}", param=field)


def more(one: int, other: int) -> int:
    """The larger number of alternatives, where -1 means all."""
    return -1 if -1 in (one, other) else max(one, other)


def finite(logprob: float) -> float:
    """A logprob as JSON can hold it."""
    return max(logprob, LOGPROB_FLOOR)


def token_string(token: str, token_id: int, as_id: bool) -> str:
    """A token's text, or `token_id:N` when the request wants ids instead (return_tokens_as_token_ids)."""
    return f"token_id:{token_id}" if as_id else token


def prompt_logprobs_json(entries: Sequence[LogprobEntry | None]) -> list[dict[str, dict[str, Any]] | None]:
    """Prompt logprobs in vLLM's shape: per position a mapping from token id to logprob, rank and text; the first is null."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        position = {
            str(top.token_id): {"logprob": finite(top.logprob), "rank": rank, "decoded_token": top.token}
            for rank, top in enumerate(entry.top, start=1)
        }
        position[str(entry.token_id)] = {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.token,
        }
        result.append(position)
    return result
