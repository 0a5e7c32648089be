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

    def record(self, forward: Any, *, fuse: bool = True) -> _native.Program:
        return record(forward, self.weights, self.native, "portable", fuse=fuse)


def layer(ops: Any, weights: Any, inputs: Any) -> Any:
    x = ops.embed(weights["embed"], inputs.tokens)
    normed = ops.norm(x, weights["norm"], 1e-5)
    q, k, v = (ops.linear(normed, weights[name]) for name in "qkv")
    q, k = ops.rope(q, ROPE), ops.rope(k, ROPE)
    ops.kv_write(ATTENTION, k, v)
    x = ops.add(x, ops.linear(ops.attention(ATTENTION, q), weights["o"]))
    return ops.head(ops.activate(Activation.SILU, *[ops.select(x, inputs.logit_rows)] * 2), weights["embed"])


def test_instructions_and_phases() -> None:
    model = Model()
    plain, fused = model.record(layer, fuse=False), model.record(layer)
    for program in (plain, fused):
        assert program.num_instructions == 19
        assert program.vocab == 50
        assert program.isa == "portable"
    assert phases(plain) == [
        "embed norm quantize",
        "linear linear",
        "quantize",
        "linear",
        "angles rope rope kv_write",
        "attention",
        "quantize",
        "linear",
        "add",
        "select silu_mul quantize",
        "linear",
    ]
    # The norm stays where it is, because v needs it in another form.
    assert phases(fused) == [
        "embed norm",
        "quantize linear linear",
        "quantize linear",
        "angles rope rope kv_write",
        "attention quantize",
        "linear add",
        "select silu_mul",
        "quantize linear",
    ]


def test_a_layer_has_six_phases() -> None:
    model = Model()
    for name, n, k in (("v", 32, 64), ("gate", 96, 64), ("up", 96, 64), ("down", 64, 96)):
        model.weights[name] = model.matrix("q4_1", n, k)

    def forward(ops: Any, weights: Any, inputs: Any) -> Any:
        x = ops.embed(weights["embed"], inputs.tokens)
        for _ in range(2):
            normed = ops.norm(x, weights["norm"], 1e-5)
            q, k, v = (ops.linear(normed, weights[name]) for name in "qkv")
            q, k = ops.rope(q, ROPE), ops.rope(k, ROPE)
            ops.kv_write(ATTENTION, k, v)
            x = ops.add(x, ops.linear(ops.attention(ATTENTION, q), weights["o"]))
            normed = ops.norm(x, weights["norm"], 1e-5)
            gate, up = ops.linear(normed, weights["gate"]), ops.linear(normed, weights["up"])
            x = ops.add(x, ops.linear(ops.activate(Activation.SILU, gate, up), weights["down"]))
        return ops.head(ops.norm(ops.select(x, inputs.logit_rows), weights["norm"], 1e-5), weights["embed"])

    rows = iter(["angles rope rope kv_write", "rope rope kv_write"])
    layers = [
        [
            "norm quantize linear linear linear",
            next(rows),
            "attention quantize",
            "linear add",
            "norm quantize linear linear silu_mul quantize",
            "linear add",
        ]
        for _ in range(2)
    ]
    assert phases(model.record(forward)) == [
        "embed",
        *layers[0],
        *layers[1],
        "select norm quantize linear",
    ]


def phases(program: _native.Program) -> list[str]:
    return [" ".join(ops) for ops, _ in _native.bench_phase_facts(program)]


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
