"""What a forward records: instructions and phases, shared inputs, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.recorder import CpuWeight, record
from octavo.ops import Activation, Attention, Rope, RopeStyle

ROPE = Rope(head_dim=32, style=RopeStyle.HALVES, inverse_frequencies=(1.0, 0.1))
ATTENTION = Attention(layer=0, num_heads=2, num_kv_heads=1, head_dim=32, scale=0.2)


class Model:
    """Declared weights of one layer, in formats that quantize (q8_0) or round (f16) their input."""

    def __init__(self) -> None:
        self.native = _native.Weights()
        self.weights = {
            "embed": self.matrix("q8_0", 50, 64),
            "q": self.matrix("q8_0", 64, 64),
            "k": self.matrix("q4_1", 32, 64),
            "v": self.matrix("f16", 32, 64),
            "o": self.matrix("q8_0", 64, 64),
            "norm": CpuWeight((64,), self.native.declare_vector(64)),
        }

    def matrix(self, form: str, n: int, k: int) -> CpuWeight:
        return CpuWeight((n, k), self.native.declare_matrix(form, False, n, k))

    def record(self, forward: Any) -> _native.Program:
        return record(forward, self.weights, self.native, "portable")


def layer(ops: Any, weights: Any, inputs: Any) -> Any:
    x = ops.embed(weights["embed"], inputs.tokens)
    normed = ops.norm(x, weights["norm"], 1e-5)
    q, k, v = (ops.linear(normed, weights[name]) for name in "qkv")
    q, k = ops.rope(q, ROPE), ops.rope(k, ROPE)
    ops.kv_write(ATTENTION, k, v)
    x = ops.add(x, ops.linear(ops.attention(ATTENTION, q), weights["o"]))
    return ops.head(ops.activate(Activation.SILU, *[ops.select(x, inputs.logit_rows)] * 2), weights["embed"])


def test_instructions_and_phases() -> None:
    program = Model().record(layer)
    # The phases: embed, norm, quantize | q, k | round | v | angles, 2 ropes, write | attention | quantize | o | add |
    # select, gate, quantize | head.
    assert program.num_instructions == 19
    assert program.num_phases == 11
    assert program.vocab == 50
    assert program.isa == "portable"


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda ops, w, i: ops.head(ops.embed(w["embed"], i.tokens), w["embed"]), "one row per wanted logit"),
        (lambda ops, w, i: ops.embed(w["embed"], i.logit_rows), "tokens"),
        (lambda ops, w, i: ops.select(ops.embed(w["embed"], i.tokens), i.tokens), "logit rows"),
        (lambda ops, w, i: ops.norm(ops.embed(w["embed"], i.tokens), w["q"], 1e-5), "1 dimensions"),
        (lambda ops, w, i: ops.linear(ops.embed(w["embed"], i.tokens), w["norm"]), "2 dimensions"),
        (lambda ops, w, i: ops.linear(ops.embed(w["embed"], i.tokens), w["q"], w["k"]), "1 dimensions"),
        (
            lambda ops, w, i: ops.attention(
                Attention(layer=0, num_heads=4, num_kv_heads=4, head_dim=16, scale=1.0),
                ops.embed(w["embed"], i.tokens),
            ),
            "heads of 16 dimensions",
        ),
    ],
)
def test_what_no_instruction_does_is_refused(forward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model().record(forward)
