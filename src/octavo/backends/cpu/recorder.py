"""Records a forward: `Ops` over symbolic values, each call of which appends one instruction to a native program.

The forward runs once per model. What it does with values it cannot know (tokens, positions, the number of rows) the program repeats
for every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec

from octavo.backends.base import Forward
from octavo.backends.cpu import _native
from octavo.ops import Activation, Attention, Rope, RopeStyle, Weight


class CpuWeight(msgspec.Struct, frozen=True):
    """Handle of a declared weight: its index among the matrices (2 dimensions) or vectors (1) of the native `Weights`."""

    shape: tuple[int, ...]
    index: int


class Value(msgspec.Struct, frozen=True):
    """A value of the recorded program, or one of the step's inputs."""

    id: int


_TOKENS = Value(-1)
_LOGIT_ROWS = Value(-2)


class _Inputs:
    tokens = _TOKENS
    logit_rows = _LOGIT_ROWS


def record(
    forward: Forward, weights: Mapping[str, CpuWeight], native: _native.Weights, isa: str, *, fuse: bool = True
) -> _native.Program:
    """The program of a forward. Raises ValueError when it does something that the native instructions do not have.

    Without `fuse` every operation keeps a phase of its own kind; the results are the same bits.
    """
    program = _native.Program(native, isa)
    logits = forward(Recorder(program), weights, _Inputs())
    program.finish(logits.id, fuse=fuse)
    return program


class Recorder:
    """`Ops` of symbolic values."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._angles: dict[Rope, int] = {}

    def embed(self, table: Weight, tokens: Value) -> Value:
        """Rows of a matrix by token id."""
        _require_input(tokens, _TOKENS, "embed reads the step's tokens")
        return Value(self._program.embed(_matrix(table)))

    def norm(self, x: Value, weight: Weight, eps: float) -> Value:
        """RMSNorm."""
        return Value(self._program.norm(x.id, _vector(weight), eps))

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        """Matrix product; the input is quantized or rounded first as the matrix's format asks."""
        return Value(self._program.linear(x.id, _matrix(weight), -1 if bias is None else _vector(bias)))

    def rope(self, x: Value, rope: Rope) -> Value:
        """Rotary embedding. All layers share one table of angles."""
        if rope not in self._angles:
            self._angles[rope] = self._program.angles(list(rope.inverse_frequencies), rope.magnitude)
        interleaved = rope.style is RopeStyle.INTERLEAVED
        return Value(self._program.rope(x.id, self._angles[rope], rope.head_dim, interleaved))

    def kv_write(self, attention: Attention, k: Value, v: Value) -> None:
        """Stores K and V."""
        self._program.kv_write(attention.layer, attention.num_kv_heads, k.id, v.id)

    def attention(self, attention: Attention, q: Value) -> Value:
        """Attention over the cache."""
        return Value(
            self._program.attention(
                attention.layer,
                attention.num_heads,
                attention.num_kv_heads,
                attention.scale,
                attention.window or 0,
                q.id,
            )
        )

    def activate(self, kind: Activation, gate: Value, up: Value) -> Value:
        """Gated activation."""
        match kind:
            case Activation.SILU:
                return Value(self._program.silu_mul(gate.id, up.id))
            case _ as unreachable:
                assert_never(unreachable)

    def add(self, x: Value, y: Value) -> Value:
        """Sum."""
        return Value(self._program.add(x.id, y.id))

    def select(self, x: Value, rows: Value) -> Value:
        """Rows whose logits are wanted."""
        _require_input(rows, _LOGIT_ROWS, "select reads the step's logit rows")
        return Value(self._program.select(x.id))

    def head(self, x: Value, weight: Weight) -> Value:
        """Logits."""
        return self.linear(x, weight)


def _require_input(value: Any, expected: Value, message: str) -> None:
    if value != expected:
        raise ValueError(message)


def _matrix(weight: Weight) -> int:
    return _index(weight, 2)


def _vector(weight: Weight) -> int:
    return _index(weight, 1)


def _index(weight: Weight, dimensions: int) -> int:
    if not isinstance(weight, CpuWeight) or len(weight.shape) != dimensions:
        raise ValueError(f"expected a weight of {dimensions} dimensions, got one of shape {list(weight.shape)}")
    return weight.index
