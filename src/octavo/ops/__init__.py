"""The primitive array operations a model needs, as a Protocol over the backend's own array type; and weight handles.

A model's forward is written once against `Ops`. The numpy backend runs it with arrays; the cpu backend runs it once with symbolic
arrays and records a native program. Therefore a forward never branches on values or on the number of rows.

Arrays are two-dimensional [rows, columns], float32 in meaning; a backend may keep what lies between two ops in another form.
`T` tokens are computed in a step, `S` of them need logits. Nothing here knows files, requests or text.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import msgspec

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Activation(StrEnum):
    """Gate functions of the MLP."""

    SILU = "silu"


class RopeStyle(StrEnum):
    """Which two elements of a head are rotated together.

    HALVES: (i, i + d/2), the form of Hugging Face and of GGUF files of most families. INTERLEAVED: (2i, 2i + 1), the form of GGUF
    files of the llama architecture, whose converter permutes the rows of Q and K.
    """

    HALVES = "halves"
    INTERLEAVED = "interleaved"


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021): angle of pair i at position p is p * inverse_frequencies[i].

    `inverse_frequencies` has rotated_dim/2 entries, computed in float64 and already scaled (linear, llama3).
    cos and sin are of the float64 angle, rounded to float32, times `magnitude`.
    """

    head_dim: int
    style: RopeStyle
    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Causal grouped-query attention of one layer: query head h reads KV head h // (num_heads / num_kv_heads).

    `layer` indexes the model's layers; the KV layout says to which group it belongs. `window`: see `KVGroup`.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class Weight(Protocol):
    """A backend's handle of one weight: a matrix [out, in] used by `linear`/`head`/`embed`, or a vector (norm, bias)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [out, in] for matrices."""
        ...


class Inputs(Protocol, Generic[A_co]):
    """The step's arrays that a forward may name. Row structure and block tables are known to the backend, not to models."""

    @property
    def tokens(self) -> A_co:
        """Token ids, int32 [T]."""
        ...

    @property
    def logit_rows(self) -> A_co:
        """Indices in 0..T-1 of the tokens whose logits are wanted, int32 [S]."""
        ...


class Ops(Protocol, Generic[A]):
    """Primitive operations. Shapes are [rows, columns]; weights are handles made by the backend."""

    def embed(self, table: Weight, tokens: A) -> A:
        """Rows of `table` [vocab, d] -> [T, d], dequantized."""
        ...

    def norm(self, x: A, weight: Weight, eps: float) -> A:
        """RMSNorm (Zhang and Sennrich, 2019) of each row: x / sqrt(mean(x^2) + eps) * weight."""
        ...

    def linear(self, x: A, weight: Weight, bias: Weight | None = None) -> A:
        """x [T, k] times weight [n, k] transposed, plus bias [n] -> [T, n]."""
        ...

    def rope(self, x: A, rope: Rope) -> A:
        """Rotates each head of x [T, heads * head_dim] by its token's position."""
        ...

    def kv_write(self, attention: Attention, k: A, v: A) -> None:
        """Stores k and v [T, kv_heads * head_dim] of the step's tokens in the cache, rounded to its format."""
        ...

    def attention(self, attention: Attention, q: A) -> A:
        """softmax(scale * q k^T) v over the cached positions of each token's row -> [T, heads * head_dim].

        Reads K and V only from the cache, also for tokens of this step, so `kv_write` of the layer comes first.
        """
        ...

    def activate(self, kind: Activation, gate: A, up: A) -> A:
        """kind(gate) * up, elementwise."""
        ...

    def add(self, x: A, y: A) -> A:
        """x + y, elementwise."""
        ...

    def select(self, x: A, rows: A) -> A:
        """Rows of x [T, d] by index -> [S, d]."""
        ...

    def head(self, x: A, weight: Weight) -> A:
        """Like `linear` without bias; its result [S, vocab] float32 are the logits."""
        ...
