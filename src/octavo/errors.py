"""The error tree: every error a user can see, with its code, HTTP status and whether a retry can help.

Knows nothing of HTTP libraries or of what raised it. A message is one line: what was wrong, what was expected, what to do.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Root of all errors meant for users. Anything else that escapes is a bug of ours.

    `param` names the request field, flag or file the message is about.
    """

    code: str | None = "internal_error"
    type: str = "server_error"
    http_status: int = 500
    retryable: bool = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(OctavoError):
    """The request is wrong and will stay wrong: a 4xx before anything reaches the engine."""

    code = "invalid_value"
    type = "invalid_request_error"
    http_status = 400


class UnsupportedFieldError(InvalidRequestError):
    """A field or value that exists in the API but that this server does not implement."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the model's served context."""

    code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    """Body, header or list beyond a documented bound."""

    code = "request_too_large"
    http_status = 413


class NotFoundError(InvalidRequestError):
    """Nothing is at this path."""

    code = "not_found"
    http_status = 404


class ModelNotFoundError(InvalidRequestError):
    """A model name that this server does not serve."""

    code = "model_not_found"
    http_status = 404


class AuthenticationError(OctavoError):
    """Missing or wrong API key."""

    code = "invalid_api_key"
    type = "authentication_error"
    http_status = 401


class PermissionDeniedError(OctavoError):
    """What the caller may not do, whatever key it has."""

    code = "permission_denied"
    type = "permission_error"
    http_status = 403


class OverloadedError(OctavoError):
    """The queue is full. Clients should retry after a pause."""

    code = "overloaded"
    type = "overloaded_error"
    http_status = 429
    retryable = True


class NotReadyError(OctavoError):
    """The model is loading, or the server is draining."""

    code = "not_ready"
    type = "service_unavailable"
    http_status = 503
    retryable = True


class WaitingTimeoutError(OctavoError):
    """A request waited longer than its limit before it could run. Nothing was computed."""

    code = "waiting_timeout"
    type = "timeout_error"
    http_status = 504
    retryable = True


class PrefillTimeoutError(OctavoError):
    """A prompt was not computed within its limit."""

    code = "prefill_timeout"
    type = "timeout_error"
    http_status = 504


class DecodeTimeoutError(OctavoError):
    """An answer was not complete within its limit after the first token."""

    code = "decode_timeout"
    type = "timeout_error"
    http_status = 504


class EngineError(OctavoError):
    """A step failed: the requests in it end with this error, the others go on."""

    code = "engine_error"
    http_status = 500
    retryable = True


class EngineDeadError(EngineError):
    """The engine loop ended or stalled: nothing will be answered until it is restarted."""

    code = "engine_dead"
    http_status = 503


class ConfigError(OctavoError):
    """A flag, environment variable or combination of them that cannot work. Exit status 2."""

    code = "invalid_config"


class ModelFileError(OctavoError):
    """A model file that is damaged, malicious or not what it claims to be."""

    code = "invalid_model_file"


class UnsupportedModelError(ModelFileError):
    """An architecture, tensor type or option of a model that octavo does not implement, refused by name."""

    code = "unsupported_model"


class ModelUnavailableError(OctavoError):
    """A model that cannot be found or fetched."""

    code = "model_unavailable"
