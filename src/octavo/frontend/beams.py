"""Beam search: the likeliest continuations of a prompt, found by extending the best ones token by token.

Every round asks the engine for one token of each beam with the logprobs of the likeliest ones; the prefix cache holds what the beams
share, and copies the block that each ends in. Names and scores are vLLM's. This module does not know how requests run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import msgspec

from octavo.errors import InvalidRequestError
from octavo.frontend.outputs import Logprob
from octavo.frontend.params import check_integer, check_number
from octavo.limits import MAX_BEAM_WIDTH, MAX_TOKENS


class BeamSearchParams(msgspec.Struct, kw_only=True, frozen=True):
    """How to search. All defaults are vLLM's.

    beam_width: continuations kept after each token, 1..64. max_tokens: most tokens of one. ignore_eos: go on after end-of-sequence.
    temperature: 0 ranks by the model's own probabilities; another value is refused, as logprobs are of the raw logits. length_penalty:
    a sequence's score is its log-probability over its length, prompt included, to this power. include_stop_str_in_output: the text of
    a finished sequence shows its end-of-sequence token. Raises InvalidRequestError whose `param` is the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        check_number("temperature", self.temperature, 0.0, 100.0)
        if self.temperature != 0:
            raise InvalidRequestError(
                "beam search ranks by raw probabilities: leave temperature at 0", param="temperature"
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", param=name)


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation. `tokens` and `text` include the prompt, `logprobs` are of the tokens after it."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The `beam_width` best sequences of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt. `live` are the beams to be extended; there are none when it is over."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos_token_ids: Set[int]) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._num_left = params.max_tokens
        self._finished: list[BeamSearchSequence] = []
        self.live = [BeamSearchSequence(list(prompt))]

    def extend(self, logprobs: Sequence[dict[int, Logprob]]) -> None:
        """Goes on by one token: `logprobs` are those of the likeliest next tokens of each live beam."""
        width = self._params.beam_width
        candidates: list[BeamSearchSequence] = []
        for beam, position in zip(self.live, logprobs, strict=True):
            likeliest = sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))[: 2 * width]
            for token, entry in likeliest:
                total = beam.cum_logprob + entry.logprob
                longer = BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, position], total)
                if token in self._eos:
                    longer.finish_reason, longer.stop_reason = "stop", token
                    self._finished.append(longer)
                else:
                    candidates.append(longer)
        candidates.sort(key=lambda beam: -beam.cum_logprob)  # stable: of equal ones the earlier beam's likelier token
        self.live = candidates[:width]
        self._num_left -= 1
        if self._num_left == 0:
            for beam in self.live:
                beam.finish_reason = "length"
            self._finished += self.live
            self.live = []

    def best(self) -> list[BeamSearchSequence]:
        """The best sequences of a search that is over."""
        return sorted(self._finished, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos)
        return beam.cum_logprob / math.pow(max(length, 1), self._params.length_penalty)
