"""Types of request fields with their bounds, from which decoding and the OpenAPI document are made alike; and fields that APIs share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.limits import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_REQUEST_ID_CHARACTERS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_STREAM_INTERVAL,
    MAX_TOKENS,
)

Seconds = Annotated[float, Meta(gt=0.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
# msgspec's own bounds end at 2^63, so SamplingParams checks this one.
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokenIds = list[TokenId]
StopTokenIds = Annotated[TokenIds, Meta(max_length=MAX_STOP_TOKEN_IDS)]
AllowedTokenIds = Annotated[TokenIds, Meta(min_length=1)]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100.0, le=100.0)]],
    Meta(max_length=MAX_LOGIT_BIAS),
]

ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = ShortText | Annotated[list[ShortText], Meta(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[list[ShortText], Meta(max_length=MAX_STOP_STRINGS)]
BadWords = Annotated[list[ShortText], Meta(max_length=MAX_BAD_WORDS)]

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokensOrNone = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Alternatives = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
"""A number of logprobs; -1 for the whole vocabulary. How many a server gives is its `--max-logprobs`."""
StreamInterval = Annotated[int, Meta(ge=1, le=MAX_STREAM_INTERVAL)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY - 1)]

RequestId = Annotated[str, Meta(pattern=f"^[ -~]{{1,{MAX_REQUEST_ID_CHARACTERS}}}$")]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

Object = dict[str, Any]
Objects = list[Object]


class AnswerFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request for an answer in one of OpenAI's APIs: chat, text completions, responses. None means not given."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    min_tokens: TokensOrNone | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: StreamInterval | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    cache_pin: bool | None = None
    priority: Priority | None = None
    waiting_timeout: Seconds | None = None
    prefill_timeout: Seconds | None = None
    decode_timeout: Seconds | None = None
    request_id: RequestId | None = None
    # Labels for the caller's own books; by definition no answer depends on them.
    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None
