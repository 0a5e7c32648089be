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


def error_body(error: Exception) -> bytes:
    """The JSON body `{"error": {...}}`."""
    return msgspec.json.encode({"error": error_object(error)})


def error_response(error: Exception) -> Response:
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
    return Response(error_body(error), status, headers, media_type="application/json")
