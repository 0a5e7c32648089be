"""What comes back: finished results in vLLM's shapes for the offline `LLM`, and `Delta`s for streams. Plain values,
no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from octavo.contracts import FinishReason, RequestTimes
from octavo.errors import OctavoError


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position. `rank` is 1-based; `decoded_token` the token's own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `logprobs` has one mapping per generated token: the token itself first, then the most likely ones.

    `finish_reason` is "stop", "length" or "abort"; `stop_reason` the stop string or stop token id that ended it, None
    for end-of-sequence. `cumulative_logprob` sums the tokens' own logprobs, None unless logprobs were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its choices. `prompt` is None when the prompt was given as token ids.

    `prompt_logprobs` has one entry per prompt token, the first None. `num_cached_tokens` counts prompt tokens whose
    KV was reused. `metrics` tells when the engine began and ended the first choice, None when a stop string ended it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestTimes | None = None


# Structs without garbage collection: a long prompt's logprobs are hundreds of thousands of them, made on the event loop.


class TopEntry(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens at a position. `bytes` are the token's own, also when they are no complete
    character. An id of the model that is no token of the tokenizer has neither text nor bytes.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float


class LogprobEntry(msgspec.Struct, frozen=True, gc=False):
    """The token at a position, its log-probability and 1-based rank, and as many of the most likely tokens as were
    asked for.

    `top` is in descending probability and holds the token itself only if it is among them.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopEntry, ...]


class Delta(msgspec.Struct, frozen=True):
    """News of one choice. The deltas of a choice, joined, are its whole answer; exactly one, the last, has a
    `finish_reason`.

    index: the choice. text: final text that no later token can change. token_ids: new tokens; their text may come in
    a later delta. logprobs: parallel to token_ids when asked for. prompt_logprobs, num_cached_tokens and, if it was
    asked to pin them, num_pinned_tokens: in the first delta of a choice only. stop_reason: the stop string or stop
    token id that ended it. error: set when finish_reason is ERROR.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobEntry, ...] | None = None
    prompt_logprobs: tuple[LogprobEntry | None, ...] | None = None
    num_cached_tokens: int | None = None
    num_pinned_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: OctavoError | None = None
