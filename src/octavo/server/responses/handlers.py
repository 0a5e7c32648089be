"""POST /v1/responses, and what is kept of it: retrieve, input items, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from octavo.errors import ContextLengthError, InvalidRequestError, NotReadyError, OctavoError, UnsupportedFieldError
from octavo.frontend.outputs import Delta
from octavo.frontend.requests import Prepared
from octavo.server.auth import tenant_of
from octavo.server.chat import ChatStream, prepare_chat
from octavo.server.context import Context, client_request_id
from octavo.server.generation import Frames, Ids, UsageCount, stream, stream_interval, whole
from octavo.server.protocol import ChatCompletionRequest, StreamOptions
from octavo.server.responses.answer import ResponseAnswer
from octavo.server.responses.convert import Item, chat_request, drop_oldest, input_items
from octavo.server.responses.protocol import ResponsesRequest
from octavo.server.responses.store import ResponseStore, Stored
from octavo.server.sse import event

_log = logging.getLogger("octavo.server")
_PARAMS = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""What chat calls a field, and what it is called here."""


class ResponseNotFoundError(InvalidRequestError):
    """No such response: never made, of somebody else, not stored, or forgotten."""

    code = "response_not_found"
    http_status = 404


class ResponsesApi:
    """The routes of one server. `store` is None where nothing is kept."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store
        self._background: dict[str, _Background] = {}

    async def close(self) -> None:
        """Waits for what still runs in the background, whose sequences have ended, and closes the store."""
        for one in tuple(self._background.values()):
            await asyncio.gather(one.task, return_exceptions=True)
        if self._store is not None:
            self._store.close()

    async def create(self, context: Context, request: Request) -> ASGIApp:
        """POST /v1/responses: answers a conversation of items, as OpenAI's Responses API does."""
        body, size = await context.body(request, ResponsesRequest)
        with _named_as_here():
            return await self._create(context, request, body, size)

    async def _create(self, context: Context, request: Request, body: ResponsesRequest, size: int) -> ASGIApp:
        model = context.model_name(body.model)
        keep = self._keeps(body)
        headers = {"x-request-id": echoed} if (echoed := client_request_id(request, body.request_id)) else {}
        interval = stream_interval(body.stream, body.stream_interval)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
        tenant = tenant_of(request)
        own = input_items(body.input)
        history = await self._history(tenant, body.previous_response_id)
        chat = chat_request(body, [*history, *own])
        prepared = await context.off_loop(
            size + 1024 * len(history), lambda: _prepare(context, request, chat, body.truncation == "auto")
        )
        answer = ResponseAnswer(body, model, prepared.params, store=keep is not None)
        run = _Run(context, chat, prepared, model, answer)

        async def end() -> list[dict[str, Any]]:
            events = list(answer.finish(run.usage.usage()))
            if keep is not None:
                await _put(keep, tenant, answer, own, history)
            return events

        if body.background:
            if keep is None:
                raise InvalidRequestError("background needs store to be true", param="background")
            if body.stream:
                raise UnsupportedFieldError("background and stream together are not supported", param="background")
            return await self._start(context, request, run, keep, own, history, headers)
        if not body.stream:
            await whole(context, request, [prepared], lambda _, delta: run.take(delta))
            await end()
            return Response(msgspec.json.encode(answer.body()), 200, headers, media_type="application/json")
        frames = Frames(chunk=_frame, error=lambda error: _frame(answer.fail(error)))
        return await stream(
            context, request, [prepared], lambda _, delta: run.events(delta), end, headers, interval, frames
        )

    async def retrieve(self, context: Context, request: Request) -> ASGIApp:
        """GET /v1/responses/{id}: a kept response."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise UnsupportedFieldError("stream: a kept response cannot be streamed again", param="stream")
        stored = await self._stored(request)
        running = self._background.get(stored.body["id"])
        return _json(running.answer.body() if running else stored.body)

    async def items(self, context: Context, request: Request) -> ASGIApp:
        """GET /v1/responses/{id}/input_items: the items that a kept response was made for."""
        stored = await self._stored(request)
        items = [{"id": f"{stored.body['id']}_{number}", **item} for number, item in enumerate(stored.input)]
        if request.query_params.get("order", "desc") == "desc":
            items.reverse()
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return _json({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})

    async def cancel(self, context: Context, request: Request) -> ASGIApp:
        """POST /v1/responses/{id}/cancel: ends a background response; one that has ended stays as it is."""
        stored = await self._stored(request)
        if not stored.body["background"]:
            raise InvalidRequestError("only responses made with background can be cancelled")
        running = self._background.get(stored.body["id"])
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            stored = await self._stored(request)
        return _json(stored.body)

    async def delete(self, context: Context, request: Request) -> ASGIApp:
        """DELETE /v1/responses/{id}: forgets a response. One that is still running in the background is cancelled."""
        response_id = request.path_params["id"]
        running = self._background.get(response_id)
        if running is not None and running.tenant == tenant_of(request):
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
        if self._store is None or not await asyncio.to_thread(self._store.delete, tenant_of(request), response_id):
            self._missing(response_id, None)
        return _json({"id": response_id, "object": "response", "deleted": True})

    def _keeps(self, body: ResponsesRequest) -> ResponseStore | None:
        """Where to keep the response. Raises InvalidRequestError where it ought to be kept but cannot be."""
        if body.store and self._store is None:
            raise UnsupportedFieldError("store: this server keeps no responses (--responses-store)", param="store")
        return self._store if body.store is not False else None

    async def _history(self, tenant: str, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        found = await asyncio.to_thread(self._store.get, tenant, response_id) if self._store else None
        if found is None:
            self._missing(response_id, "previous_response_id")
        if found.body["status"] in ("in_progress", "queued"):
            raise InvalidRequestError(f"the response {response_id:.80} is not complete", param="previous_response_id")
        return found.history

    async def _stored(self, request: Request) -> Stored:
        response_id = request.path_params["id"]
        found = await asyncio.to_thread(self._store.get, tenant_of(request), response_id) if self._store else None
        if found is None:
            self._missing(response_id, None)
        return found

    def _missing(self, response_id: str, param: str | None) -> NoReturn:
        why = "" if self._store else "; this server keeps none (--responses-store)"
        error = ResponseNotFoundError(f"no response {response_id[:80]!r}{why}", param=param)
        if param is not None:
            error.http_status = 400
        raise error

    async def _start(
        self,
        context: Context,
        request: Request,
        run: _Run,
        store: ResponseStore,
        own: Sequence[Item],
        history: Sequence[Item],
        headers: dict[str, str],
    ) -> Response:
        context.engine.check_room([run.prepared])
        tenant, answer = tenant_of(request), run.answer
        await _put(store, tenant, answer, own, history)

        async def work() -> None:
            # Nobody waits for it, so nobody can leave.
            alone = Request({**request.scope}, _never)
            try:
                await whole(context, alone, [run.prepared], lambda _, delta: run.take(delta))
                _exhaust(answer.finish(run.usage.usage()))
            except asyncio.CancelledError:
                answer.fail(NotReadyError("cancelled"), status="cancelled")
            except OctavoError as error:
                answer.fail(error)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the response in progress for ever
                _log.error("a background response failed", exc_info=error)
                answer.fail(OctavoError("internal error; see the server's log"))
            finally:
                await _put(store, tenant, answer, own, history)
                del self._background[answer.id]

        self._background[answer.id] = _Background(tenant, asyncio.create_task(work()), answer)
        return Response(msgspec.json.encode(answer.body()), 200, headers, media_type="application/json")


class _Background(msgspec.Struct):
    tenant: str
    task: asyncio.Task[None]
    answer: ResponseAnswer


class _Run:
    """One response's way from deltas to its answer."""

    def __init__(
        self, context: Context, chat: ChatCompletionRequest, prepared: Prepared, model: str, answer: ResponseAnswer
    ) -> None:
        self.prepared = prepared
        self.answer = answer
        self.usage = UsageCount([prepared])
        self._chat = ChatStream(context, chat, prepared, Ids("chatcmpl", model), self.usage, StreamOptions())
        self._begun = False

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a delta adds to the stream."""
        if not self._begun:
            self._begun = True
            yield from self.answer.begin()
        for chunk in self._chat.chunks(delta):
            yield from self.answer.take(chunk)

    def take(self, delta: Delta) -> None:
        """Takes a delta where nobody listens."""
        for chunk in self._chat.chunks(delta):
            _exhaust(self.answer.take(chunk))


def _prepare(context: Context, request: Request, chat: ChatCompletionRequest, may_drop: bool) -> Prepared:
    """The rendered conversation. One that is too long loses as few of its oldest messages as it must, where that is allowed."""
    try:
        return prepare_chat(context, request, chat)
    except ContextLengthError:
        if not may_drop:
            raise
    low, high = 1, len(chat.messages)
    fitting: Prepared | None = None
    while low < high:
        count = (low + high) // 2
        try:
            fitting = prepare_chat(context, request, drop_oldest(chat, count))
            high = count
        except ContextLengthError:
            low = count + 1
        except InvalidRequestError:  # nothing is left that could be answered
            high = count
    return fitting or prepare_chat(context, request, chat)


@contextlib.contextmanager
def _named_as_here() -> Iterator[None]:
    """Errors name the fields of this API."""
    try:
        yield
    except OctavoError as error:
        root = (error.param or "").partition("[")[0]
        error.param = _PARAMS.get(root, error.param)
        raise


async def _put(
    store: ResponseStore, tenant: str, answer: ResponseAnswer, own: Sequence[Item], history: Sequence[Item]
) -> None:
    conversation = [*history, *own, *answer.output]
    await asyncio.shield(asyncio.to_thread(store.put, tenant, Stored(answer.body(), list(own), conversation)))


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def _exhaust(events: Iterable[object]) -> None:
    for _ in events:
        pass


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _frame(one: dict[str, Any]) -> bytes:
    kind: str = one["type"]
    return b"event: " + kind.encode() + b"\n" + event(msgspec.json.encode(one))
