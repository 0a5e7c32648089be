"""The request of POST /v1/responses, and its fields that this server does not have.

Items of `input`, `tools` and `text.format` are unions by a `type`; `octavo.server.responses.convert` reads them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from octavo.server.fields import (
    Alternatives,
    AnswerFields,
    ReasoningEffort,
    Tokens,
)


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort` as in chat. Reasoning is shown as it is; there is nobody to summarize it, so "auto" gives no summary."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`format`: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name", "schema", ...}."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Obfuscation pads events against eavesdroppers who see their sizes; this server does not pad."""

    include_obfuscation: Literal[False] | None = None


Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesRequest(AnswerFields, frozen=True, kw_only=True):
    """POST /v1/responses. None means not given.

    `include` "reasoning.encrypted_content" is for carrying reasoning from one stateless request to the next: reasoning items have
    their text in `content`, in clear, and may be sent back as they are. `max_tool_calls` bounds calls of built-in tools, of which
    this server has none.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: Tokens | None = None
    max_tool_calls: Tokens | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    not_built: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "service_tier": ("auto", "default"),
        "previous_input_messages": (),
        "enable_response_messages": (False,),
        "vllm_xargs": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "watermarking": (False,),
        "media_io_kwargs": (),
        "mm_processor_kwargs": (),
        "mm_payload": (),
        "return_mm_kwargs": (False,),
    }
