"""What the front needs to know about the model being served. A value; knows no weights and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.frontend.params import SamplingParams

if TYPE_CHECKING:
    from octavo.text.template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as clients see it.

    names: what clients may call it, the first is what it calls itself. chat_template: None with `chat_template_error`
    saying why. max_model_len: prompt plus output in tokens. vocab_size: rows of the embedding that the tokenizer
    knows; ids from there on are refused. default_sampling: the model's own preferences (generation_config.json),
    empty when they are switched off. created: Unix time. max_logprobs: the most alternatives a request may ask for,
    -1 without bound. call_format, reasoning_format: how the model writes tool calls and reasoning, by the names of
    `octavo.text.calls`; constrains_auto_calls: whether calls it makes by itself are held to their schemas.
    max_request_tokens: tokens of one sequence that the whole KV cache can hold, None without bound.
    max_pinned_tokens: tokens of prompts that may be pinned in the prefix cache.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    chat_template_error: str | None
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    created: int = 0
    max_logprobs: int = 20
    max_request_tokens: int | None = None
    call_format: str | None = None
    reasoning_format: str | None = None
    constrains_auto_calls: bool = False
    max_pinned_tokens: int = 0

    def sampling_params(self, **given: Any) -> SamplingParams:
        """SamplingParams of the given values, the rest from `default_sampling`, then the class's defaults.

        Raises what SamplingParams raises.
        """
        return SamplingParams(**{**self.default_sampling, **given})
