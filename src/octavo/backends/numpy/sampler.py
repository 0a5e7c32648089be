"""The reference sampler: `octavo.backends.base.Sampler` written to be read. Sorts whole rows; sums in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import F32, I32, NAN_LOGITS, NOTHING_LEFT, RowMasks, Sampled
from octavo.backends.numpy.philox import sampling_noise
from octavo.contracts import TokenLogprobs, TokenSampling
from octavo.errors import EngineError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_GREEDY_BELOW = 1e-5
_SMALLEST_SCALE = 1e-30


class _Slot:
    """One running sequence: its parameters and the tokens known so far."""

    def __init__(self, sampling: TokenSampling, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.sampling = sampling
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.generated = Counter(token_ids[num_prompt_tokens:])

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.generated[token] += 1


class NumpySampler:
    """A `Sampler` with `max_num_seqs` slots over a vocabulary of `vocab_size` tokens."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size

    def start(self, slot: int, sampling: TokenSampling, token_ids: I32, num_prompt_tokens: int) -> None:
        """Binds a slot. See `Sampler.start`."""
        if not 0 <= slot < len(self._slots):
            raise ValueError(f"slot {slot} is outside 0..{len(self._slots) - 1}")
        tokens = token_ids.tolist()
        if not 0 <= num_prompt_tokens <= len(tokens):
            raise ValueError(f"a prompt of {num_prompt_tokens} tokens among {len(tokens)} known ones")
        if not all(sampling.bad_words):
            raise ValueError("bad_words: an empty word")
        self._check_ids("known tokens", tokens)
        self._check_ids("logit_bias", [token for token, _ in sampling.logit_bias])
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_ids("bad_words", [token for word in sampling.bad_words for token in word])
        self._slots[slot] = _Slot(sampling, tokens, num_prompt_tokens)

    def extend(self, slot: int, token_ids: I32) -> None:
        """Adds known tokens. See `Sampler.extend`."""
        bound, tokens = self._bound(slot), token_ids.tolist()
        self._check_ids("forced tokens", tokens)
        for token in tokens:
            bound.append(token)

    def stop(self, slot: int) -> None:
        """Frees a slot."""
        self._bound(slot)
        self._slots[slot] = None

    def sample(
        self, logits: F32, slots: Sequence[int], positions: Sequence[int], masks: RowMasks | None = None
    ) -> list[Sampled]:
        """One token per row. See `Sampler.sample`."""
        self._check_shape(logits, len(slots))
        allowed = [None] * len(slots) if masks is None else self._allowed(masks, len(slots))
        bound = [self._bound(slot) for slot in slots]
        if len(set(slots)) < len(slots):
            raise ValueError(f"a slot appears twice in one step: {list(slots)}")
        return [_sample(*row) for row in zip(logits, bound, positions, allowed, strict=True)]

    def ends(self, slot: int, token: int) -> bool:
        """Whether a token is one of the slot's end or stop ids."""
        sampling = self._bound(slot).sampling
        return token in sampling.eos_token_ids or token in sampling.stop_token_ids

    def score(self, logits: F32, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of targets and of the most likely tokens. See `Sampler.score`."""
        self._check_shape(logits, len(targets))
        self._check_ids("targets", targets)
        for row in logits:
            if error := _unusable(row):
                raise EngineError(error)
        return [_logprobs(row, target, num_top) for row, target in zip(logits, targets, strict=True)]

    def _allowed(self, masks: RowMasks, rows: int) -> list[Bool | None]:
        """For each row which of all tokens its mask allows; None without a mask."""
        if masks.rows.shape != (rows,) or (masks.rows < -1).any() or (masks.rows >= len(masks.words)).any():
            raise ValueError(f"masks of rows {masks.rows.tolist()}; expected {rows} of -1..{len(masks.words) - 1}")
        bits = np.unpackbits(
            masks.words.astype("<u4").view(np.uint8), axis=1, count=self._vocab_size, bitorder="little"
        )
        return [None if row < 0 else bits[row].astype(np.bool_) for row in masks.rows]

    def _bound(self, slot: int) -> _Slot:
        bound = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if bound is None:
            raise ValueError(f"slot {slot} has not been started")
        return bound

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"{what}: token id {token} is outside the vocabulary 0..{self._vocab_size - 1}")

    def _check_shape(self, logits: F32, rows: int) -> None:
        if logits.shape != (rows, self._vocab_size):
            raise ValueError(f"logits of shape {logits.shape}; expected {(rows, self._vocab_size)}")


def _sample(logits: F32, slot: _Slot, position: int, allowed: Bool | None) -> Sampled:
    if error := _unusable(logits):
        return Sampled(-1, error=error)
    sampling = slot.sampling
    treated = logits.copy()
    if allowed is not None:
        treated[~allowed] = -np.inf
    treated = _treat(treated, slot)
    if _unusable(treated):
        return Sampled(-1, error=NOTHING_LEFT)
    token = _choose(_finite_maximum(treated), sampling, position)
    logprobs = None if sampling.logprobs is None else _logprobs(logits, token, sampling.logprobs)
    slot.append(token)
    return Sampled(token, logprobs)


def _unusable(logits: F32) -> str | None:
    if np.isnan(logits).any():
        return NAN_LOGITS
    return NOTHING_LEFT if logits.max() == -np.inf else None


def _finite_maximum(logits: F32) -> F32:
    """The limit of a distribution as some logits go to +inf: those share all probability."""
    if logits.max() < np.inf:
        return logits
    return np.where(logits == np.inf, np.float32(0), np.float32(-np.inf))


def _treat(logits: F32, slot: _Slot) -> F32:
    """Masks, bias and penalties: steps 1 to 6."""
    sampling = slot.sampling
    if sampling.allowed_token_ids is not None:
        allowed = list(sampling.allowed_token_ids)
        kept = logits[allowed]
        logits[:] = -np.inf
        logits[allowed] = kept
    with np.errstate(invalid="ignore", over="ignore"):
        for token, bias in sampling.logit_bias:
            logits[token] = _or_masked(logits[token] + np.float32(bias))
        for *before, last in sampling.bad_words:
            if slot.token_ids[len(slot.token_ids) - len(before) :] == before:
                logits[last] = -np.inf
        if len(slot.token_ids) - slot.num_prompt_tokens < sampling.min_tokens:
            for token in {*sampling.eos_token_ids, *sampling.stop_token_ids}:
                if 0 <= token < len(logits):
                    logits[token] = -np.inf
        repetition = np.float32(sampling.repetition_penalty)
        frequency, presence = np.float32(sampling.frequency_penalty), np.float32(sampling.presence_penalty)
        penalised = repetition != 1 or frequency != 0 or presence != 0
        for token in {*slot.token_ids} if penalised else ():
            value = logits[token]
            value = value / repetition if value > 0 else value * repetition
            if count := slot.generated[token]:
                value = value - frequency * np.float32(count) - presence
            logits[token] = _or_masked(value)
    return logits


def _or_masked(value: np.float32) -> np.float32:
    return np.float32(-np.inf) if np.isnan(value) else value


def _choose(logits: F32, sampling: TokenSampling, position: int) -> int:
    """Temperature, truncation and draw: steps 7 to 11. The largest logit is finite."""
    if sampling.temperature < _GREEDY_BELOW:
        return int(logits.argmax())
    scale = np.float32(max(1.0 / sampling.temperature, _SMALLEST_SCALE))
    with np.errstate(over="ignore", under="ignore"):
        z: F32 = (logits - logits.max()) * scale
        p: F64 = np.exp(z.astype(np.float64))
    order = _most_likely(logits)
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        cumulative = np.cumsum(p[order])
        order = order[: np.searchsorted(cumulative, sampling.top_p * cumulative[-1]) + 1]
    if sampling.min_p > 0:
        order = order[z[order] >= min(np.float32(math.log(sampling.min_p)), np.float32(0))]
    kept = np.sort(order)
    cumulative = np.cumsum(p[kept])
    u = sampling_noise(sampling.seed, position, sampling.choice)
    return int(kept[np.searchsorted(cumulative, u * cumulative[-1], side="right")])


def _most_likely(logits: F32) -> I64:
    """All token ids in descending order of their logits, ties by ascending id."""
    return np.argsort(-logits, kind="stable")


def _logprobs(logits: F32, token: int, num_top: int) -> TokenLogprobs:
    exact = _finite_maximum(logits).astype(np.float64)
    largest = exact.max()
    with np.errstate(under="ignore"):
        logprobs = (exact - (largest + np.log(np.exp(exact - largest).sum()))).astype(np.float32)
    order = _most_likely(_finite_maximum(logits))
    rank = int(np.flatnonzero(order == token)[0]) + 1
    ids = [token, *(order if num_top < 0 else order[:num_top]).tolist()]
    return TokenLogprobs(token_ids=tuple(ids), logprobs=tuple(logprobs[ids].tolist()), rank=rank)
