"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo.errors import OctavoError
from octavo.frontend.outputs import Delta
from octavo.server.chat import ChatStream, prepare_chat, tokenize_chat
from octavo.server.context import Context, client_request_id
from octavo.server.errors import ANTHROPIC, error_body
from octavo.server.generation import Frames, Ids, UsageCount, stream, whole
from octavo.server.messages.answer import MessageAnswer
from octavo.server.messages.convert import chat_request
from octavo.server.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.protocol import StreamOptions
from octavo.server.sse import event

_PARAMS = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
"""What chat calls a field, and what it is called here."""


async def create_message(context: Context, request: Request) -> ASGIApp:
    """POST /v1/messages: answers a conversation, as Anthropic's API does."""
    body, size = await context.body(request, MessagesRequest)
    with _named_as_here():
        return await _create(context, request, body, size)


async def _create(context: Context, request: Request, body: MessagesRequest, size: int) -> ASGIApp:
    model = context.model_name(body.model)
    echoed = client_request_id(request, None)
    chat = chat_request(body, can_switch_thinking=_can_switch_thinking(context))
    prepared = await context.off_loop(size, lambda: prepare_chat(context, request, chat))
    answer, usage = MessageAnswer(model), UsageCount([prepared])
    headers = {"request-id": answer.id} | ({"x-request-id": echoed} if echoed else {})
    chunks = ChatStream(context, chat, prepared, Ids("chatcmpl", model), usage, StreamOptions())
    begun = False

    def events(delta: Delta) -> Iterator[dict[str, Any]]:
        nonlocal begun
        added = list(chunks.chunks(delta))
        if not begun:
            begun = True
            yield from answer.begin(usage.usage())
        for chunk in added:
            yield from answer.take(chunk)

    async def end() -> list[dict[str, Any]]:
        return list(answer.finish(usage.usage()))

    if body.stream:
        frames = Frames(chunk=_frame, error=lambda error: b"event: error\n" + event(error_body(error, ANTHROPIC)))
        return await stream(context, request, [prepared], lambda _, delta: events(delta), end, headers, frames=frames)
    await whole(context, request, [prepared], lambda _, delta: _exhaust(events(delta)))
    await end()
    return Response(msgspec.json.encode(answer.body()), 200, headers, media_type="application/json")


async def count_tokens(context: Context, request: Request) -> ASGIApp:
    """POST /v1/messages/count_tokens: counts the tokens of a conversation."""
    body, size = await context.body(request, CountTokensRequest)
    context.model_name(body.model)
    with _named_as_here():
        chat = chat_request(body, can_switch_thinking=_can_switch_thinking(context))
        count = await context.off_loop(size, lambda: len(tokenize_chat(context, chat)))
    return Response(msgspec.json.encode({"input_tokens": count}), media_type="application/json")


def _can_switch_thinking(context: Context) -> bool:
    template = context.model.chat_template
    return template is not None and template.mentions("enable_thinking")


@contextlib.contextmanager
def _named_as_here() -> Iterator[None]:
    """Errors name the fields of this API."""
    try:
        yield
    except OctavoError as error:
        root = (error.param or "").partition("[")[0]
        error.param = _PARAMS.get(root, error.param)
        raise


def _exhaust(events: Iterator[object]) -> None:
    for _ in events:
        pass


def _frame(one: dict[str, Any]) -> bytes:
    kind: str = one["type"]
    return b"event: " + kind.encode() + b"\n" + event(msgspec.json.encode(one))
