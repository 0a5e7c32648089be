"""The ASGI application: one door for every request (key, errors, timing), then a table of routes."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import Config, ResponsesConfig
from octavo.errors import InvalidRequestError, NotFoundError, NotReadyError
from octavo.frontend.engine import AsyncEngine
from octavo.loaders.catalogue import cache_folder
from octavo.obs.events import EventLog, HttpRequestDone, RequestRefused
from octavo.obs.metrics import Metrics
from octavo.server import admin, utility
from octavo.server.admin import ADMIN_PATHS
from octavo.server.auth import OPEN_PATHS, AdminKeys, Keys
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.context import Context
from octavo.server.docs import routes as docs_routes
from octavo.server.docs.routes import DocsRoutes
from octavo.server.door import Door, with_cors
from octavo.server.errors import dialect_of, error_object, error_response
from octavo.server.messages.handlers import count_tokens, create_message
from octavo.server.responses.handlers import ResponsesApi
from octavo.server.responses.store import ResponseStore

_DOC_HEAD = re.compile(r"^(GET|POST|DELETE) [^:]*: ")

Handler = Callable[[Context, Request], Awaitable[ASGIApp]]


class MethodNotAllowed(InvalidRequestError):
    """The route exists, for other methods."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(f"{method[:20]} is not allowed for this path; {self.allowed} is")


class App:
    """The server's ASGI app. `metrics` is a sink that the caller has added to `events`; `bound_host` the address it listens on, where
    that differs from what is configured.
    """

    def __init__(
        self, config: Config, engine: AsyncEngine, events: EventLog, metrics: Metrics, *, bound_host: str | None = None
    ) -> None:
        self.context = Context(config, engine, events)
        self._events = events
        self._keys = Keys(config.server.api_key)
        self._admin_keys = AdminKeys(config.server.admin_api_key)
        self._door = Door(config.server, bound_host or config.server.host)
        self._http = with_cors(self._serve, config.server)
        self._responses = ResponsesApi(_store(config.responses))
        self._tells_docs = config.server.enable_docs
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", chat_completions),
            ("POST", "/v1/completions", completions),
            ("POST", "/v1/responses", self._responses.create),
            ("GET", "/v1/responses/{id}", self._responses.retrieve),
            ("DELETE", "/v1/responses/{id}", self._responses.delete),
            ("POST", "/v1/responses/{id}/cancel", self._responses.cancel),
            ("GET", "/v1/responses/{id}/input_items", self._responses.items),
            ("GET", "/v1/models", utility.models),
            ("GET", "/v1/models/{name:path}", utility.one_model),
            ("POST", "/v1/messages", create_message),
            ("POST", "/v1/messages/count_tokens", count_tokens),
            ("POST", "/tokenize", utility.tokenize),
            ("POST", "/detokenize", utility.detokenize),
            ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
            ("POST", "/pin_prefix", admin.pin_prefix),
            ("POST", "/unpin_prefix", admin.unpin_prefix),
            ("GET", "/health", utility.ready),
            ("GET", "/ready", utility.ready),
            ("GET", "/live", utility.live),
            ("GET", "/version", utility.version),
            ("GET", "/metrics", utility.MetricsRoute(metrics)),
            *self._docs_routes(),
        ]
        self._routes = [(Route(path, _unused, methods=[method]), handler) for method, path, handler in table]

    async def close(self) -> None:
        """Ends what requests have left behind. To be called after the engine's end."""
        await self._responses.close()

    @property
    def routes(self) -> list[tuple[str, str]]:
        """(method, path pattern) of every route."""
        return [
            (method, route.path)
            for route, _ in self._routes
            for method in sorted(route.methods or ())
            if method != "HEAD"
        ]

    @property
    def described_routes(self) -> list[tuple[str, str, str]]:
        """(method, path pattern, what it does) of every route."""
        by_route = {(method, route.path): handler for route, handler in self._routes for method in route.methods or ()}
        return [
            (
                method,
                path,
                _DOC_HEAD.sub("", " ".join((inspect.getdoc(by_route[method, path]) or "").split("\n\n")[0].split())),
            )
            for method, path in self.routes
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or answers the lifespan protocol."""
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        await self._http(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        status, started = 500, False

        async def watched_send(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
            await send(message)

        route: Route | None = None
        try:
            self._door.check(scope)
            if scope["path"] in ADMIN_PATHS:
                self._admin_keys.check(scope)
            elif not self._is_open(scope["path"]):
                scope["octavo.tenant"] = self._keys.tenant(scope)
            route, handler = self._match(scope)
            response = await handler(self.context, Request(scope, receive))
            await response(scope, receive, watched_send)
        except ClientDisconnect:
            status = 499
        except asyncio.CancelledError:  # uvicorn gives up what is left when the server stops, and wants nothing of it
            if not started:
                refusal = NotReadyError("the server is shutting down: send the request elsewhere")
                response = error_response(refusal, dialect_of(scope["path"]))
                await response(scope, receive, watched_send)
        except Exception as error:
            if started:
                raise
            response = error_response(error, dialect_of(scope["path"]))
            if isinstance(error, MethodNotAllowed):
                response.headers["allow"] = error.allowed
            if response.status_code != 401 or scope["path"] in {path for _, path in self.routes}:
                self._events.emit(
                    RequestRefused(
                        route.path if route else "none", response.status_code, str(error_object(error)["code"])
                    )
                )
            await response(scope, receive, watched_send)
        finally:
            duration_s = time.perf_counter() - began
            self._events.emit(HttpRequestDone(route.path if route else "none", scope["method"], status, duration_s))

    def _docs_routes(self) -> list[tuple[str, str, Handler]]:
        if not self._tells_docs:
            return []
        docs = DocsRoutes(lambda: self.described_routes)
        return [
            ("GET", "/openapi.json", docs.openapi),
            ("GET", "/docs", docs.page),
            ("GET", "/docs/{name}", docs.asset),
        ]

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or (
            self._tells_docs and (path in docs_routes.PATHS or path.startswith(docs_routes.PREFIX))
        )

    def _match(self, scope: Scope) -> tuple[Route, Handler]:
        allowed: set[str] = set()
        for route, handler in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route, handler
            if match is Match.PARTIAL:
                allowed |= route.methods or set()
        if allowed:
            raise MethodNotAllowed(scope["method"], allowed)
        raise NotFoundError("no such path; the API is under /v1")

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            raise HTTPException(400, "only HTTP is served")
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


def _store(config: ResponsesConfig) -> ResponseStore | None:
    if not config.responses_store:
        return None
    path = config.responses_store_path
    return ResponseStore(config, Path(path) if path else cache_folder().parent / "responses.sqlite")


async def _unused(request: Request) -> ASGIApp:
    raise AssertionError("routes are only matched here; App calls the handlers")
