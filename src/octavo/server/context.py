"""What handlers share: the engine, the configuration, the event log, and how they read bodies and notice that a client left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.config import Config
from octavo.errors import InvalidRequestError, ModelNotFoundError, NotReadyError, RequestTooLargeError
from octavo.frontend.engine import AsyncEngine, EngineState, RequestHandle
from octavo.frontend.model import ServedModel
from octavo.frontend.outputs import Delta
from octavo.frontend.requests import Prepared
from octavo.limits import BODY_TIMEOUT_S, MAX_REQUEST_ID_CHARACTERS
from octavo.obs.events import EventLog, RequestReceived
from octavo.server.protocol import decode

_INLINE_BYTES = 16 * 1024  # bodies up to this size are tokenized on the event loop: a hop to a thread would cost more

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, Delta], None]


class Context:
    """One per server. `tenant` names the caller of a request by its API key."""

    def __init__(self, config: Config, engine: AsyncEngine, events: EventLog) -> None:
        self.config = config
        self.engine = engine
        self.events = events

    @property
    def model(self) -> ServedModel:
        """The served model. Raises NotReadyError while it loads or after the engine died."""
        if self.engine.state in (EngineState.LOADING, EngineState.DEAD):
            raise NotReadyError(f"the engine is {self.engine.state}; try again later")
        return self.engine.model

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError for one that is not served."""
        names = self.model.names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ModelNotFoundError(
                f"the model {asked[:200]!r} does not exist; this server has {', '.join(names)}", param="model"
            )
        return asked

    async def body(self, request: Request, kind: type[R]) -> tuple[R, int]:
        """Reads and decodes a JSON body, and tells its size in bytes. The limit holds while reading, before it is all in memory."""
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise InvalidRequestError(f"content-type is {content_type[:80]!r}; expected application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            error = InvalidRequestError("compressed request bodies are not accepted; send the body as it is")
            error.http_status = 415
            raise error
        limit = self.config.server.max_body_bytes
        too_large = RequestTooLargeError(f"the request body is larger than {limit} bytes (--max-body-bytes)")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        parts = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    parts += chunk
                    if len(parts) > limit:
                        raise too_large
        except TimeoutError:
            error = InvalidRequestError(f"the request body did not arrive within {BODY_TIMEOUT_S:.0f} s")
            error.http_status = 408
            raise error from None
        body = bytes(parts)
        return await self.off_loop(len(body), lambda: decode(body, kind)), len(body)

    async def off_loop(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs work that grows with the input: at once when it is small, else in a thread, so that other streams go on."""
        return work() if size_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)

    async def _constrain(self, prepared: Sequence[Prepared]) -> Sequence[Prepared]:
        return await asyncio.gather(*(self.engine.constrain(one) for one in prepared))

    @contextlib.asynccontextmanager
    async def generate(
        self, request: Request, prepared: Sequence[Prepared]
    ) -> AsyncIterator[AsyncIterator[tuple[int, Delta]]]:
        """Runs requests and yields their deltas as (index of the prepared request, delta).

        Leaving the block, or the client leaving, cancels whatever is not finished; in the latter case the deltas end with
        ClientDisconnect. Nothing starts unless all are admitted.
        """
        self.engine.check_room(prepared)
        if any(one.grammar is not None for one in prepared):
            prepared = await _while_there(request, self._constrain(prepared))
            self.engine.check_room(prepared)
        async with contextlib.AsyncExitStack() as stack:
            handles = [await stack.enter_async_context(self.engine.submit(one)) for one in prepared]
            for one in prepared:
                self.events.emit(
                    RequestReceived(
                        one.requests[0].request_id,
                        request.url.path,
                        one.requests[0].tenant,
                        len(one.prompt_token_ids),
                        one.num_choices,
                    )
                )
            gone = asyncio.Event()
            watcher = asyncio.create_task(_cancel_when_gone(request, handles, gone))
            deltas = _merge(handles, gone)
            try:
                yield deltas
            finally:
                watcher.cancel()
                await deltas.aclose()


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work comes to. Raises ClientDisconnect, and cancels it, when the client leaves first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel_when_gone(request: Request, handles: Sequence[RequestHandle], gone: asyncio.Event) -> None:
    await _disconnected(request)
    gone.set()
    for handle in handles:
        handle.cancel()


async def _merge(handles: Sequence[RequestHandle], gone: asyncio.Event) -> Deltas:
    """The deltas of all handles as they come. Raises ClientDisconnect in place of what comes after the client has gone."""
    if len(handles) == 1:
        async for delta in handles[0]:
            if gone.is_set():
                raise ClientDisconnect
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue(maxsize=len(handles))

    async def pump(index: int, handle: RequestHandle) -> None:
        async for delta in handle:
            await queue.put((index, delta))
        await queue.put(None)

    pumps = [asyncio.create_task(pump(index, handle)) for index, handle in enumerate(handles)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif gone.is_set():
                raise ClientDisconnect
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()


def client_request_id(request: Request, from_body: str | None) -> str | None:
    """The client's own id for its logs, echoed as `x-request-id` and used for nothing else.

    Raises InvalidRequestError when it is not 1..128 printable ASCII characters.
    """
    given = from_body if from_body is not None else request.headers.get("x-request-id")
    if given is None:
        return None
    if not (0 < len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()):
        raise InvalidRequestError(
            f"the request id must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters", param="request_id"
        )
    return given
