"""The native sampler behind the `Sampler` protocol: parameters in, flat arrays out. Its arithmetic is in native/core/sampler.h."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import F32, I32, NAN_LOGITS, NOTHING_LEFT, Batch, RowMasks, Sampled
from octavo.backends.cpu import _native
from octavo.contracts import TokenLogprobs, TokenSampling
from octavo.errors import EngineError

_ERRORS = {1: NAN_LOGITS, 2: NOTHING_LEFT}
"""Messages of `RowStatus`; 0 is success."""


class CpuSampler:
    """A `Sampler` with `max_num_seqs` slots over a vocabulary of `vocab_size` tokens.

    `isa` names the instruction set (portable, avx2, avx512); None takes the one OCTAVO_ISA forces or the fastest. Raises ValueError
    for one that cannot run here. With a `pool` its threads share the rows; the calling thread alone otherwise.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, *, isa: str | None = None, pool: _native.Pool | None = None
    ) -> None:
        self._native = _native.Sampler(max_num_seqs, vocab_size, isa, pool)

    def start(self, slot: int, sampling: TokenSampling, token_ids: I32, num_prompt_tokens: int) -> None:
        """Binds a slot. See `Sampler.start`."""
        self._native.start(
            slot,
            np.ascontiguousarray(token_ids, np.int32),
            num_prompt_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed % 2**64,
            choice=sampling.choice,
            min_tokens=sampling.min_tokens,
            end_ids=[*sampling.eos_token_ids, *sampling.stop_token_ids],
            logit_bias=sampling.logit_bias,
            allowed_ids=sampling.allowed_token_ids,
            bad_words=sampling.bad_words,
            logprobs=sampling.logprobs,
        )

    def extend(self, slot: int, token_ids: I32) -> None:
        """Adds known tokens. See `Sampler.extend`."""
        self._native.extend(slot, token_ids)

    def stop(self, slot: int) -> None:
        """Frees a slot."""
        self._native.stop(slot)

    def sample(
        self, logits: F32, slots: Sequence[int], positions: Sequence[int], masks: RowMasks | None = None
    ) -> list[Sampled]:
        """One token per row. See `Sampler.sample`."""
        with_masks = () if masks is None else (masks.words, masks.rows)
        tokens, statuses, logprobs = self._native.sample(
            logits, np.array(slots, np.int32), np.array(positions, np.int64), *with_masks
        )
        if statuses is None or logprobs is None:
            return [Sampled(token) for token in tokens.tolist()]
        return [
            Sampled(token, error=_ERRORS[status]) if status else Sampled(token, entries)
            for token, status, entries in zip(
                tokens.tolist(), statuses.tolist(), _token_logprobs(*logprobs), strict=True
            )
        ]

    def decode(
        self, program: _native.Program, pool: _native.Pool, batch: Batch, slots: Sequence[int], most: int
    ) -> tuple[list[list[Sampled]], tuple[float, int, int, int]]:
        """Steps as `BackendModel.decode` says, and the work of their forwards."""
        tokens, statuses, work = program.decode(
            pool,
            self._native,
            batch.tokens,
            batch.positions,
            batch.row_starts,
            list(batch.tables),
            batch.logit_rows,
            np.array(slots, np.int32),
            most,
        )
        steps = [
            [Sampled(token) for token in tokens[begin : begin + len(slots)]]
            for begin in range(0, len(tokens), len(slots))
        ]
        if any(statuses):
            steps[-1] = [
                Sampled(token, error=_ERRORS[status] if status else None)
                for token, status in zip(tokens[-len(slots) :], statuses, strict=True)
            ]
        return steps, work

    def score(self, logits: F32, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of targets and of the most likely tokens. See `Sampler.score`."""
        statuses, logprobs = self._native.score(logits, np.array(targets, np.int32), num_top)
        if statuses.any():
            raise EngineError(_ERRORS[int(statuses[statuses.nonzero()[0][0]])])
        return [entries for entries in _token_logprobs(*logprobs) if entries is not None]


def _token_logprobs(offsets: npt.NDArray[np.int64], ids: I32, values: F32, ranks: I32) -> list[TokenLogprobs | None]:
    """Rows of the native module's flat arrays; None for a row without entries."""
    bounds = offsets.tolist()
    return [
        TokenLogprobs(tuple(ids[begin:end].tolist()), tuple(values[begin:end].tolist()), rank) if end > begin else None
        for begin, end, rank in zip(bounds, bounds[1:], ranks.tolist(), strict=False)
    ]
