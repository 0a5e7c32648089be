"""Who may knock: names of the server that a request may use (`Host`), web pages that may call it (`Origin`), and CORS.

A page in a browser can reach servers on its user's machine. It cannot forge `Host` and `Origin`, so a server without keys looks at
both: one bound to loopback answers to loopback names only (DNS rebinding makes a foreign name point here), and pages of other origins are
refused.
Knows no routes and no keys, only whether there are any.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from octavo.config import ServerConfig
from octavo.errors import ConfigError, InvalidRequestError
from octavo.server.auth import OPEN_PATHS
from octavo.server.errors import error_response

_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:\[\]/@]+)(?::(\d{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD")


class ForbiddenError(InvalidRequestError):
    """Asked for under a foreign name, or by a foreign page."""

    code = "forbidden"
    http_status = 403


class Door:
    """Checks of one server. `bound_host` is the address it listens on."""

    def __init__(self, server: ServerConfig, bound_host: str) -> None:
        self._has_keys = bool(server.api_key)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in server.allowed_origins)
        self._any_origin = "*" in self._origins
        listed = {host.lower().rstrip(".") for host in server.allowed_hosts}
        restricted = bool(listed) or (not self._has_keys and _is_loopback(bound_host))
        self._hosts = {*listed, server.host.lower()} if restricted and "*" not in listed else None
        if self._any_origin and server.allow_credentials:
            raise ConfigError(
                "--allow-credentials with --allowed-origins '*' would let every web page act for its visitors: name the origins",
                param="allow_credentials",
            )
        for origin in self._origins - {"*", "null"}:
            parts = urlsplit(origin)
            if not parts.scheme or not parts.netloc or parts.path:
                raise ConfigError(
                    f"--allowed-origins {origin:.80} is no origin; expected one like https://chat.example.com",
                    param="allowed_origins",
                )

    def check(self, scope: Scope) -> None:
        """Raises ForbiddenError for a foreign host name or page. What orchestrators ask is open under every name."""
        if scope["path"] in OPEN_PATHS:
            return
        headers = Headers(scope=scope)
        names = headers.getlist("host")
        if self._hosts is not None and not all(self._is_ours(name) for name in names):
            raise ForbiddenError(
                f"this server does not answer to the host name {names[0][:80]!r}; start it with --allowed-hosts to let it",
                param="host",
            )
        origin = headers.get("origin")
        if origin is not None and not self._has_keys and not self._may_call(origin.lower(), names):
            raise ForbiddenError(
                f"web pages of {origin[:80]!r} may not use this server; start it with --allowed-origins to let them",
                param="origin",
            )

    def _is_ours(self, name: str) -> bool:
        found = _HOST.fullmatch(name.strip().lower())
        if found is None or self._hosts is None:
            return False
        host = found[1].strip("[]").rstrip(".")
        return host in self._hosts or _is_loopback(host)

    def _may_call(self, origin: str, hosts: Sequence[str]) -> bool:
        if self._any_origin or origin in self._origins:
            return True
        scheme, separator, place = origin.partition("://")
        if not separator or len(hosts) != 1:
            return False
        default = _DEFAULT_PORTS.get(scheme, "")
        own, theirs = _HOST.fullmatch(hosts[0].strip().lower()), _HOST.fullmatch(place)
        return (
            own is not None and theirs is not None and (own[1], own[2] or default) == (theirs[1], theirs[2] or default)
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Cors(CORSMiddleware):
    """Refusals have the shape of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks before it calls."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        refusal = error_response(ForbiddenError(bytes(response.body).decode(), param="origin"))
        refusal.headers["vary"] = "Origin"
        return refusal


def with_cors(app: ASGIApp, server: ServerConfig) -> ASGIApp:
    """The application, readable for pages of the allowed origins; without any, the application itself."""
    if not server.allowed_origins:
        return app
    return _Cors(
        app,
        allow_origins=[origin.rstrip("/") for origin in server.allowed_origins],
        allow_methods=_METHODS if "*" in server.allowed_methods else server.allowed_methods,
        allow_headers=server.allowed_headers,
        allow_credentials=server.allow_credentials,
        expose_headers=("x-request-id", "retry-after"),
    )
