"""API keys: every path needs one, except a short written list. A key may have a name, which becomes the request's tenant.

Keys are compared as SHA-256 digests in constant time; the server keeps no key in clear.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import Scope

from octavo.errors import AuthenticationError, ConfigError, PermissionDeniedError

OPEN_PATHS = frozenset({"/health", "/ready", "/live"})
"""Paths that need no key: what an orchestrator asks. Compared with the decoded path, exactly."""

DEFAULT_TENANT = "default"


class Keys:
    """The accepted keys. Without any, everything is open."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants: list[tuple[bytes, str]] = []
        for key in keys:
            name, colon, secret = key.partition(":")
            if not colon:
                name, secret = DEFAULT_TENANT, key
            if not secret or not name:
                raise ConfigError("an API key is empty; expected --api-key KEY or --api-key NAME:KEY", param="api_key")
            self._tenants.append((hashlib.sha256(secret.encode()).digest(), name))

    def tenant(self, scope: Scope) -> str:
        """The caller's tenant. Raises AuthenticationError."""
        if not self._tenants:
            return DEFAULT_TENANT
        digest = _bearer_digest(scope)
        found = None
        for known, name in self._tenants:  # all of them, so that time does not tell which one matched
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise AuthenticationError(
                "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        return found


class AdminKeys:
    """The keys of administrative routes. Without any these are closed."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(keys):
            raise ConfigError("an admin API key is empty; expected --admin-api-key KEY", param="admin_api_key")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, scope: Scope) -> None:
        """Raises PermissionDeniedError when there are no keys, AuthenticationError when the request does not have one of them."""
        if not self._digests:
            raise PermissionDeniedError("administrative routes are closed; start the server with --admin-api-key KEY")
        digest = _bearer_digest(scope)
        found = [hmac.compare_digest(known, digest) for known in self._digests]
        if not any(found):
            raise AuthenticationError("missing or wrong admin API key; send it as 'Authorization: Bearer KEY'")


def _bearer_digest(scope: Scope) -> bytes:
    """Digest of the one bearer key of a request, or of its x-api-key, which Anthropic's clients send; without one, of nothing, which is
    no key's.
    """
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    bare = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if not given and len(bare) == 1:
        return hashlib.sha256(bare[0].strip()).digest()
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    return hashlib.sha256(key.strip() if scheme.lower() == b"bearer" else b"").digest()


def tenant_of(request: Request) -> str:
    """The tenant that the door found for this request."""
    tenant: str = request.scope.get("octavo.tenant", DEFAULT_TENANT)
    return tenant
