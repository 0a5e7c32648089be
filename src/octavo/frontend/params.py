"""What a caller asks of sampling: vLLM's and OpenAI's names, every value checked when the object is made.

Checks that need the model (token ids within the vocabulary, room in the context) are made by `frontend.requests`.
Knows no tokenizer, no HTTP and no engine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError
from octavo.frontend.structured import StructuredOutputsParams
from octavo.grammar import GrammarSpec
from octavo.limits import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
)


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    """How one request is sampled. All defaults are vLLM's.

    n: choices per prompt, 1..128; choice i of a seeded request is the same whatever n is. presence_penalty,
    frequency_penalty: -2..2. repetition_penalty: 0.01..100, 1 is off. temperature: 0..100; below 1e-5 is greedy.
    top_p: 0..1; 0 keeps the most likely token only. top_k: 0 or -1 keeps all. min_p: 0..1. seed: -2^63..2^64-1, taken
    modulo 2^64; None draws one per request. stop: up to 16 strings of 1..1,024 characters. stop_token_ids: up to
    1,024 ids. ignore_eos: go on after end-of-sequence. max_tokens: None generates up to the context limit.
    min_tokens: no end before so many tokens; at most max_tokens. logprobs, prompt_logprobs: number of alternatives, 0
    for the token alone, -1 for the whole vocabulary, None for off; bounded by the server's max_logprobs. detokenize:
    False leaves all text empty. logit_bias: token id -> -100..100, up to 1,024 ids. allowed_token_ids: only these.
    structured_outputs: what the output must be; guided_decoding is its older name. bad_words: up
    to 1,024 texts never generated. spaces_between_special_tokens: one text either way,
    as with vLLM's fast tokenizers, which put no spaces there.

    Raises InvalidRequestError whose `param` is the field.
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
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1, MAX_CHOICES)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_number("top_p", self.top_p, 0.0, 1.0)
        check_integer("top_k", self.top_k, -1, MAX_TOKENS)
        check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", param=name)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1, MAX_TOKENS)
        self._check_lists()

        self._check_constraint()

    def _check_constraint(self) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            if not isinstance(getattr(self, name), (StructuredOutputsParams, type(None))):
                raise InvalidRequestError(f"{name} must be a StructuredOutputsParams", param=name)
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidRequestError("give structured_outputs or guided_decoding, not both", param="guided_decoding")

    def _check_lists(self) -> None:
        if self.stop is not None:
            _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS)
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=true", param="stop")
        if self.stop_token_ids is not None:
            _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            _ids("allowed_token_ids", self.allowed_token_ids, MAX_TOKENS)
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids must hold at least one id", param="allowed_token_ids")
        if self.bad_words is not None:
            _texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidRequestError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} ids", param="logit_bias")
            _ids("logit_bias", tuple(self.logit_bias), MAX_LOGIT_BIAS)
            for bias in self.logit_bias.values():
                check_number("logit_bias", bias, -100.0, 100.0)

    @property
    def grammar(self) -> GrammarSpec | None:
        """What constrains the output. Raises InvalidRequestError for what cannot be written down."""
        if self.structured_outputs is not None:
            return self.structured_outputs.spec()
        return None if self.guided_decoding is None else self.guided_decoding.spec("guided_decoding")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuses what is no finite number in low..high. Comparisons alone would let NaN pass."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number", param=name)
    if not (abs(value) <= sys.float_info.max and math.isfinite(value) and low <= value <= high):
        raise InvalidRequestError(f"{name} must be a finite number from {low:g} to {high:g}", param=name)


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Refuses what is no integer in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}", param=name)


def _sequence(name: str, value: Any, most: int) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a list", param=name)
    if len(value) > most:
        raise InvalidRequestError(f"{name} may hold at most {most} entries, not {len(value)}", param=name)


def _texts(name: str, value: Any, most: int) -> None:
    _sequence(name, value, most)
    for text in value:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"each entry of {name} must be a text of 1 to {MAX_STOP_CHARACTERS} characters", param=name
            )


def _ids(name: str, value: Any, most: int) -> None:
    """Types only: which ids exist is the model's to say."""
    _sequence(name, value, most)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError(f"{name} must hold token ids (integers)", param=name)
