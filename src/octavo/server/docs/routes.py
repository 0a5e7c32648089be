"""GET /openapi.json, and Swagger UI at /docs with assets of its own: the page loads nothing from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFoundError
from octavo.server.context import Context
from octavo.server.docs.openapi import document

PATHS = frozenset({"/openapi.json", "/docs"})
PREFIX = "/docs/"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".png": "image/png",
}
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


class DocsRoutes:
    """The routes of one server. Assets are read once, so that a running server opens no files."""

    def __init__(self, routes: Callable[[], Sequence[tuple[str, str, str]]]) -> None:
        """`routes` tells (method, path pattern, what it does) of all routes."""
        self._routes = routes
        self._document: bytes | None = None
        folder = files("octavo.server.docs").joinpath("swagger-ui")
        self._assets = {file.name: file.read_bytes() for file in folder.iterdir() if _media_type(file.name)}

    async def openapi(self, context: Context, request: Request) -> Response:
        """GET /openapi.json: this document."""
        if self._document is None:
            self._document = await asyncio.to_thread(lambda: msgspec.json.encode(document(list(self._routes()))))
        return Response(self._document, media_type="application/json")

    async def page(self, context: Context, request: Request) -> Response:
        """GET /docs: a page to read and try the API, Swagger UI."""
        return self._asset("page.html")

    async def asset(self, context: Context, request: Request) -> Response:
        """GET /docs/{name}: a file of the page."""
        return self._asset(request.path_params["name"])

    def _asset(self, name: str) -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        content = self._assets.get(name)
        if content is None and (content := self._assets.get(f"{name}.gz")) is not None:
            headers["content-encoding"] = "gzip"  # all browsers take it
        if content is None:
            raise NotFoundError("no such file of the page at /docs")
        return Response(content, 200, headers, media_type=_media_type(name))


def _media_type(name: str) -> str | None:
    return _MEDIA_TYPES.get("." + name.removesuffix(".gz").rpartition(".")[2])
