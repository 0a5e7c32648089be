"""From text and parameters to `GenerateRequest`s: the last place that sees text, and the door for everything that
needs the model.

Knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.contracts import GenerateRequest
from octavo.frontend.model import ServedModel
from octavo.frontend.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: n engine requests with one prompt. `prompt` is the rendered text, None when ids were
    given.
    """

    requests: tuple[GenerateRequest, ...]
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def num_choices(self) -> int:
        """Sequences this request runs."""
        return len(self.requests)


class RequestBuilder:
    """Builds and validates requests for one model. Thread-safe; raises InvalidRequestError and its kin, never
    anything else for bad input.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def build(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "default",
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
        add_special_tokens: bool = True,
    ) -> Prepared:
        """A completion of a text or of token ids. Raises InvalidRequestError, ContextLengthError."""
        raise NotImplementedError

    def build_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tenant: str = "default",
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> Prepared:
        """An answer to a conversation, through the model's chat template. Raises InvalidRequestError,
        ContextLengthError.
        """
        raise NotImplementedError
