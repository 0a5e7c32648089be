"""The seam between the runner and what computes: a backend loads weights, owns the KV cache, runs the forward and samples.

A backend gets the model as a function over `Ops` (`Forward`), never as a family or a config. All arrays that cross are numpy arrays
in host memory, C-contiguous, owned by the caller and not kept after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.contracts import ForwardWork, KVLayout, TokenLogprobs, TokenSampling
from octavo.ops import Inputs, Ops, Weight
from octavo.quant import RawTensor

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

DType = Literal["auto", "bfloat16", "float16", "float32"]
KVDType = Literal["auto", "bfloat16", "int8"]
"""What a KV cache may be asked to hold. `auto`: what the activations are, in bfloat16 or float32."""
KVFormat = Literal["float32", "bfloat16", "int8"]
"""What a KV cache holds.

int8: for each token and head, K and V are levels -127..127 times a float32 scale, absmax / 127. A level is x * (127 / absmax) in
float32, rounded to nearest even. A head whose absmax is below 2^-100 is all zero. Written once, so that no later token changes it.
"""
KV_BYTES: dict[KVFormat, tuple[int, int]] = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}
"""Bytes in the native cache: of each value, and of the scale of each token's and head's K or V."""

Forward = Callable[[Ops[Any], Mapping[str, Weight], Inputs[Any]], Any]
"""(ops, weights by canonical name, inputs) -> logits array of the backend, [S, vocab]."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Batch(msgspec.Struct, frozen=True):
    """One step's rows, flattened: T tokens of R rows, tokens of a row adjacent and in ascending position.

    tokens, positions: [T]. row_starts: [R + 1], row r holds tokens row_starts[r]..row_starts[r+1]-1.
    tables: one per KV group, [R, most blocks of any row in this step], block ids in position order, `NULL_BLOCK` where freed or
    beyond the row.
    logit_rows: [S] ascending indices into 0..T-1.
    """

    tokens: I32
    positions: I32
    row_starts: I32
    tables: tuple[I32, ...]
    logit_rows: I32


class BackendModel(Protocol):
    """A loaded model on a backend. Not thread-safe: one thread calls it (with the GIL released inside native code)."""

    @property
    def bytes_per_kv_value(self) -> float:
        """Bytes that one K or V element takes in the cache."""
        ...

    @property
    def bytes_per_kv_scale(self) -> int:
        """Bytes of the scale that K or V of one token and head has in the cache, 0 where there is none."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory held by weights."""
        ...

    @property
    def arithmetic(self) -> str:
        """Names everything besides weights that decides bits: arithmetic version, KV format and, only where bits differ, the ISA."""
        ...

    @property
    def least_part(self) -> int | None:
        """Tokens of a forward from which on each more costs about the same, so that a step may as well be computed in parts of so many.

        None where that never pays. A matter of speed only.
        """
        ...

    def allocate_kv(self, layout: KVLayout) -> None:
        """Reserves the KV cache; pages are committed on first write. Called once, before `forward`."""
        ...

    def copy_blocks(self, group: int, sources: I32, targets: I32) -> None:
        """Copies KV blocks [n] of a group, one after the other, so that a later pair sees what an earlier one has written."""
        ...

    def read_blocks(self, group: int, blocks: I32) -> U8:
        """The content [n, bytes of a block] of KV blocks of a group, in the backend's own layout. A new array."""
        ...

    def write_blocks(self, group: int, blocks: I32, content: U8) -> None:
        """Puts content that `read_blocks` gave, perhaps in an earlier life, into KV blocks [n] of a group."""
        ...

    def forward(self, batch: Batch) -> F32:
        """Computes the step's tokens, writes their KV, and returns logits [S, vocab]. Valid until the next call."""
        ...

    def decode(self, sampler: Sampler, batch: Batch, slots: Sequence[int], most: int) -> list[list[Sampled]]:
        """At most `most` steps, each the forward of a row's one token and its sampling, on from the sampled tokens; one list per step.

        `sampler` is one that `make_sampler` gave, row r is sampled in slots[r], and none wants logprobs. Tables hold the blocks of all
        steps. Ends early after a step in which a row fails or gets one of its end or stop ids. Bits are those of single steps.
        """
        ...

    @property
    def last_work(self) -> ForwardWork | None:
        """What the last forward or `decode` took and had to do; None where it is not counted."""
        ...

    def make_sampler(self, max_num_seqs: int) -> Sampler:
        """A sampler with `max_num_seqs` slots."""
        ...

    def close(self) -> None:
        """Frees weights, cache and threads. Idempotent."""
        ...


class RowMasks(msgspec.Struct, frozen=True):
    """Tokens that rows may sample. words: [M, num_words], token t is bit t % 32 of word t // 32; tokens beyond the words are not allowed.

    rows: for each row of logits its row in `words`, -1 where all tokens are allowed.
    """

    words: npt.NDArray[np.uint32]
    rows: I32


class Sampled(msgspec.Struct, frozen=True):
    """One sampled token. With `error` (`NAN_LOGITS` or `NOTHING_LEFT`) there is none: `token` is -1 and the request must end."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


NAN_LOGITS = (
    "the model's logits hold NaN: no token can be chosen; its weights or activations are beyond the number format"
)
NOTHING_LEFT = (
    "no token is left to choose: structured output, allowed_token_ids, logit_bias, bad_words and min_tokens exclude them all together; "
    "relax one"
)


class Sampler(Protocol):
    """Turns logits into tokens. Holds per-slot state (parameters, token counts), nothing that couples two slots.

    A row's treatment, in this order, float32 throughout:

    1. the row's mask and allowed_token_ids mask all others (logit -inf); 2. logit_bias is added; 3. bad_words masks the last token of
    each word whose other tokens are the last known ones, prompt included; 4. min_tokens masks end and stop ids while fewer tokens
    have been generated, also when end-of-sequence is ignored; 5. repetition_penalty divides positive and multiplies other logits of
    tokens in the prompt or generated; 6. frequency_penalty times its count, then presence_penalty, are taken from a generated token's
    logit. A masked logit stays masked, and what becomes NaN in this (an infinite bias on an opposite infinity) is masked.
    7. Temperatures below 1e-5 are greedy: the token with the largest logit, ties to the lowest id. Otherwise z = (logit - largest
    logit) * float32(1 / temperature) and p = e^z; temperatures above 1e30 act as 1e30. 8. top_k keeps the k most likely: order of
    descending logit, ties by ascending id. 9. top_p keeps the shortest list of the most likely whose share of what top_k kept
    reaches top_p, at least one. 10. min_p keeps z >= log(min_p), that is p >= min_p times the largest. 11. The draw walks the kept
    tokens in ascending id and takes the first whose cumulative share exceeds u.

    u comes from Philox4x32-10 (Salmon et al., 2011): key (seed low, seed high), counter (position, choice, 0, 0),
    u = (first word + 0.5) / 2^32. Seeds are taken modulo 2^64.

    Logprobs are of the raw logits: logit - log(sum(e^logit)). Logits of +inf, raw or treated, share all probability equally.
    """

    def start(self, slot: int, sampling: TokenSampling, token_ids: I32, num_prompt_tokens: int) -> None:
        """Binds a slot: all known tokens, of which the first `num_prompt_tokens` are the prompt.

        Raises ValueError for a slot or token id out of range (end and stop ids that the model does not have are fine).
        """
        ...

    def extend(self, slot: int, token_ids: I32) -> None:
        """Adds tokens [n] that follow the last known one without having been sampled to a slot's counts.

        Raises ValueError, before anything changes, for a slot that is free or a token id out of range.
        """
        ...

    def stop(self, slot: int) -> None:
        """Frees a slot. Raises ValueError when it is free."""
        ...

    def sample(
        self, logits: F32, slots: Sequence[int], positions: Sequence[int], masks: RowMasks | None = None
    ) -> list[Sampled]:
        """One token per row of logits [S, vocab] (overwritten); `positions` are those the sampled tokens will have.

        The token is added to the slot's counts. Raises ValueError, before anything changes, for a slot that is free or named twice,
        or another shape.
        """
        ...

    def score(self, logits: F32, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probability of each row's target and of the `num_top` (-1: all) most likely tokens: prompt logprobs.

        Raises EngineError when a row holds NaN or only -inf, ValueError for a target out of range.
        """
        ...


class Backend(Protocol):
    """A way to compute: numpy or cpu."""

    name: str

    def load(
        self,
        forward: Forward,
        tensors: Mapping[str, RawTensor],
        *,
        dtype: DType,
        kv_dtype: KVDType = "auto",
        progress: Progress | None = None,
    ) -> BackendModel:
        """Makes weight handles of canonically named tensors and prepares the forward.

        Raises UnsupportedModelError or ConfigError by name for a format or dtype it does not have, before allocating.
        """
        ...
