"""The one error renderer: any exception becomes a status and a body in OpenAI's shape."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.errors import OctavoError

_log = logging.getLogger("octavo.server")
_MESSAGE_LIMIT = 1000


def error_object(error: Exception) -> dict[str, Any]:
    """`{"message", "type", "param", "code"}`. Errors that are not ours say nothing of their insides."""
    if not isinstance(error, OctavoError):
        return {
            "message": "internal error; see the server's log",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    message = error.message if len(error.message) <= _MESSAGE_LIMIT else error.message[:_MESSAGE_LIMIT] + "..."
    return {"message": message, "type": error.type, "param": error.param, "code": error.code}


OPENAI, ANTHROPIC = "openai", "anthropic"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(error: Exception, dialect: str = OPENAI) -> bytes:
    """The JSON body `{"error": {...}}`; for Anthropic's clients with the types and the outer `type` that they look for."""
    inner = error_object(error)
    if dialect == OPENAI:
        return msgspec.json.encode({"error": inner})
    status = error.http_status if isinstance(error, OctavoError) else 500
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {**inner, "type": kind}})


def dialect_of(path: str) -> str:
    """Whose clients ask for a path."""
    return ANTHROPIC if path == "/v1/messages" or path.startswith("/v1/messages/") else OPENAI


def error_response(error: Exception, dialect: str = OPENAI) -> Response:
    """The whole HTTP answer. A retryable refusal carries `Retry-After`; an unknown error is logged with its trace."""
    headers: dict[str, str] = {}
    status = 500
    if isinstance(error, OctavoError):
        status = error.http_status
        if error.retryable and status in (429, 503):
            headers["retry-after"] = "1"
        if status == 401:
            headers["www-authenticate"] = "Bearer"
    else:
        _log.error("unexpected error in a handler", exc_info=error)
    return Response(error_body(error, dialect), status, headers, media_type="application/json")
