"""What a caller asks of sampling: vLLM's and OpenAI's names, every value checked when the object is made.

Checks that need the model (token ids within the vocabulary, room in the context) are made by `frontend.requests`. Knows no
tokenizer, no HTTP and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 100.0


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    """How one request is sampled. All defaults are vLLM's.

    n: choices per prompt, 1..128; choice i of a seeded request is the same whatever n is.
    presence_penalty, frequency_penalty: -2..2. repetition_penalty: 0.01..100, 1 is off.
    temperature: 0..100; below 1e-5 is greedy. top_p: 0..1; 0 keeps the most likely token only. top_k: 0 or -1 keeps all. min_p: 0..1.
    seed: -2^63..2^64-1, taken modulo 2^64; None draws one per request.
    stop: up to 16 strings of 1..1,024 characters. stop_token_ids: up to 1,024 ids. ignore_eos: go on after end-of-sequence.
    max_tokens: None generates up to the context limit. min_tokens: no end before so many tokens; at most max_tokens.
    logprobs, prompt_logprobs: number of alternatives, 0 for the token alone, -1 for the whole vocabulary, None for off; bounded by
    the server's max_logprobs. detokenize: False leaves all text empty.
    logit_bias: token id -> -100..100, up to 1,024 ids. allowed_token_ids: only these. bad_words: up to 1,024 texts never generated.
    spaces_between_special_tokens: only True is implemented.

    Raises InvalidRequestError or UnsupportedFieldError whose `param` is the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        raise NotImplementedError
