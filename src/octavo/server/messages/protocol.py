"""Requests of POST /v1/messages and /v1/messages/count_tokens, and their fields that this server does not have.

Blocks of `system` and `messages` are unions by a `type`; `octavo.server.messages.convert` reads them. Anthropic's API reference is the
source of names and meanings.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from octavo.server.fields import Share, StopStrings, Tokens, TopK


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for what happens anyway: all prompts are cached by their beginnings (`--enable-prefix-caching`)."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class MessagesMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`user_id`: a label for the caller's own books."""

    user_id: str | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Switches thinking of models whose template can switch it; others do as they always do. `max_tokens` bounds thinking too."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`format`: {"type": "json_schema", "schema": ...}, which the answer then obeys."""

    format: dict[str, Any] | None = None


class _Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None


_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "output_format": (),
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "prefill": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
    "betas": ([],),
}


class MessagesRequest(_Conversation, frozen=True, kw_only=True):
    """POST /v1/messages. None means not given."""

    max_tokens: Tokens
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    metadata: MessagesMetadata | None = None

    not_built: ClassVar[dict[str, tuple[Any, ...]]] = _NOT_BUILT


class CountTokensRequest(_Conversation, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    not_built: ClassVar[dict[str, tuple[Any, ...]]] = _NOT_BUILT
