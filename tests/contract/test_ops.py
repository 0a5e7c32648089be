"""Every op of every backend and instruction set against its definition in float64, within a stated bound.

An op runs alone: its input rows are embedded from an F32 table, its result is read through an identity head, both exact in
float32. Instruction sets must agree with the portable build to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.backends.base import BackendModel, Batch, DType, KVDType
from octavo.backends.numpy.backend import round_to_bf16, round_to_int8
from octavo.contracts import KVGroup, KVLayout, Retention
from octavo.ops import Activation, Attention, Ops, RopeStyle, Weight
from octavo.quant import Format, RawTensor, dequantize
from support.backends import BACKENDS, ISAS, make
from support.driver import run
from support.tiny_models import plain_rope, raw_tensor

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Body = Callable[[Ops[Any], Mapping[str, Weight], Any], Any]

ONE_LAYER = KVLayout(
    block_size=16, groups=(KVGroup(layers=(0,), bytes_per_token=128, num_kv_heads=1, head_dim=32),), num_blocks=(600,)
)
EPSILON = 2.0**-23
"""Spacing of float32 around 1."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def bit_equal(backend: str) -> tuple[str, ...]:
    """The backend, and the portable build where its bits must be the same."""
    portable = f"cpu-{ISAS[0]}"
    return (backend, portable) if backend.startswith("cpu-") and backend != portable else (backend,)


def one_op(
    backend: str,
    body: Body,
    x: F32,
    columns: int,
    weights: Mapping[str, RawTensor],
    *,
    dtype: DType = "float32",
    kv_dtype: KVDType = "auto",
) -> BackendModel:
    """A model that computes `body(ops, weights, x)`; token t stands for row t of x."""

    def forward(ops: Ops[Any], handles: Mapping[str, Weight], inputs: Any) -> Any:
        y = body(ops, handles, ops.embed(handles["embed"], inputs.tokens))
        return ops.head(ops.select(y, inputs.logit_rows), handles["head"])

    identity = raw_tensor("head", np.eye(columns), Format.F32)
    tensors = {"embed": raw_tensor("embed", x, Format.F32), "head": identity, **weights}
    return make(backend).load(forward, tensors, dtype=dtype, kv_dtype=kv_dtype)


def compute(
    backend: str, body: Body, x: F32, columns: int, weights: Mapping[str, RawTensor], *, dtype: DType = "float32"
) -> F32:
    """`body` on all rows of x. Instruction sets are compared with the portable build on the way."""
    results = []
    for name in bit_equal(backend):
        model = one_op(name, body, x, columns, weights, dtype=dtype)
        model.allocate_kv(ONE_LAYER)
        results.append(run(model, ONE_LAYER, [range(len(x))])[0])
        model.close()
    assert all(np.array_equal(results[0], other) for other in results), "instruction sets differ in bits"
    return results[0]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_within(got: F32, expected: F64, bound: F64 | float) -> None:
    error = np.abs(got.astype(np.float64) - expected)
    assert (error <= bound).all(), f"largest error over its bound: {(error / bound).max():.3g}"


# --- elementwise ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [16, 80, 576])
def test_norm(backend: str, columns: int) -> None:
    x = normal(7, columns) * np.float32([[1], [100], [1e-3], [1], [0], [1e4], [3]])
    weight = raw_tensor("w", 1 + 0.3 * normal(columns, seed=1), Format.F32)
    got = compute(backend, lambda ops, w, h: ops.norm(h, w["w"], 1e-5), x, columns, {"w": weight})
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * dequantize(weight)
    assert_within(got, expected, 16 * EPSILON * np.abs(expected) + 1e-30)


def test_activate(backend: str) -> None:
    half = 48
    gate = np.concatenate(
        [normal(6, half) * 8, np.float32([[0, -0.0, 1e-30, -1e-30, 40, -40, 90, -90, 200, -200] + [1] * 38])]
    )
    x = np.concatenate([gate, normal(7, half, seed=1)], axis=1)
    eye = np.eye(2 * half)
    weights = {"g": raw_tensor("g", eye[:half], Format.F32), "u": raw_tensor("u", eye[half:], Format.F32)}
    body: Body = lambda ops, w, h: ops.activate(Activation.SILU, ops.linear(h, w["g"]), ops.linear(h, w["u"]))  # noqa: E731
    got = compute(backend, body, x, half, weights)
    exact_gate, exact_up = x[:, :half].astype(np.float64), x[:, half:].astype(np.float64)
    expected = exact_gate / (1 + np.exp(-exact_gate)) * exact_up
    assert_within(got, expected, 8 * EPSILON * np.abs(expected) + 1e-30)


def test_add(backend: str) -> None:
    x = normal(5, 48) * 100
    order = np.random.default_rng(0).permutation(48)
    weights = {"p": raw_tensor("p", np.eye(48)[order], Format.F32)}
    got = compute(backend, lambda ops, w, h: ops.add(h, ops.linear(h, w["p"])), x, 48, weights)
    assert np.array_equal(got, x + x[:, order])


@pytest.mark.parametrize("rotated", [32, 20])
@pytest.mark.parametrize("style", RopeStyle)
def test_rope(backend: str, style: RopeStyle, rotated: int) -> None:
    """Three heads of 32; positions that a float32 angle would get wrong."""
    x = normal(8, 96)
    rope = plain_rope(32, style, rotated=rotated)
    positions = np.array([0, 1, 2, 3, 9000, 9001, 9002, 9003], np.int32)
    results = []
    for name in bit_equal(backend):
        model = one_op(name, lambda ops, w, h: ops.rope(h, rope), x, 96, {})
        model.allocate_kv(ONE_LAYER)
        table = np.zeros((2, 9004 // 16 + 1), np.int32) + np.arange(9004 // 16 + 1, dtype=np.int32)
        tokens = np.arange(8, dtype=np.int32)
        batch = Batch(
            tokens=tokens,
            positions=positions,
            row_starts=np.array([0, 4, 8], np.int32),
            tables=(table,),
            logit_rows=tokens,
        )
        results.append(np.array(model.forward(batch)))
        model.close()
    assert all(np.array_equal(results[0], other) for other in results), "instruction sets differ in bits"

    angles = positions[:, np.newaxis].astype(np.float64) * rope.inverse_frequencies
    expected = x.astype(np.float64).reshape(8, 3, 32).copy()
    for pair in range(rotated // 2):
        a, b = (pair, pair + rotated // 2) if style is RopeStyle.HALVES else (2 * pair, 2 * pair + 1)
        cos, sin = np.cos(angles[:, pair, np.newaxis]), np.sin(angles[:, pair, np.newaxis])
        first, second = expected[:, :, a].copy(), expected[:, :, b].copy()
        expected[:, :, a], expected[:, :, b] = first * cos - second * sin, second * cos + first * sin
    assert_within(results[0], expected.reshape(8, 96), 4 * EPSILON * np.abs(x).max())


# --- matrices -------------------------------------------------------------------------------------------------------


def linear_bound(backend: str, x: F32, weights: F32, *, quantized: bool) -> F64:
    """Error bound [rows, n] of a product.

    Rounding of float32 sums: a few units of the sum of magnitudes. The native backend rounds the inputs of quantized weights to 8
    bits per block of 32, by at most half a step of absmax / 127, and multiplies that with the weights exactly.
    """
    magnitude = np.abs(weights).astype(np.float64)
    bound: F64 = 8 * EPSILON * (np.abs(x).astype(np.float64) @ magnitude.T)
    if quantized and backend != "numpy":
        blocks = np.abs(x.reshape(len(x), -1, 32)).max(axis=2).astype(np.float64)
        half_step = np.repeat(blocks / 127 / 2, 32, axis=1) * (1 + 1e-5)
        bound += half_step @ magnitude.T
    return bound


@pytest.mark.parametrize(("n", "k"), [(16, 32), (131, 96), (48, 576)])
@pytest.mark.parametrize("form", Format)
def test_linear(backend: str, form: Format, n: int, k: int) -> None:
    x = normal(9, k)
    x[3] = 0
    weight, bias = raw_tensor("w", normal(n, k, seed=1), form), raw_tensor("b", normal(n, seed=2), Format.F32)
    body: Body = lambda ops, w, h: ops.linear(h, w["w"], w["b"])  # noqa: E731
    got = compute(backend, body, x, n, {"w": weight, "b": bias})
    values = dequantize(weight)
    expected = x.astype(np.float64) @ values.astype(np.float64).T + dequantize(bias)
    bound = linear_bound(backend, x, values, quantized=form.quantized)
    assert_within(got, expected, bound + 2 * EPSILON * np.abs(expected))


@pytest.mark.parametrize("form", Format)
def test_head_has_no_bias_and_takes_selected_rows(backend: str, form: Format) -> None:
    x = normal(6, 64)
    weight = raw_tensor("w", normal(77, 64, seed=1), form)

    def forward(ops: Ops[Any], handles: Mapping[str, Weight], inputs: Any) -> Any:
        h = ops.embed(handles["embed"], inputs.tokens)
        return ops.head(ops.select(h, inputs.logit_rows), handles["w"])

    model = make(backend).load(forward, {"embed": raw_tensor("embed", x, Format.F32), "w": weight}, dtype="float32")
    model.allocate_kv(ONE_LAYER)
    rows = np.array([1, 2, 5], np.int32)
    tokens = np.arange(6, dtype=np.int32)
    batch = Batch(
        tokens=tokens,
        positions=tokens,
        row_starts=np.array([0, 6], np.int32),
        tables=(np.zeros((1, 1), np.int32),),
        logit_rows=rows,
    )
    got = np.array(model.forward(batch))
    model.close()
    values = dequantize(weight)
    expected = x[rows].astype(np.float64) @ values.astype(np.float64).T
    assert got.shape == (3, 77) and got.dtype == np.float32
    assert_within(got, expected, linear_bound(backend, x[rows], values, quantized=form.quantized))


@pytest.mark.parametrize("form", [Format.F32, Format.F16, Format.BF16])
def test_linear_in_bfloat16(backend: str, form: Format) -> None:
    """Inputs and weights rounded to bfloat16, sums in float32. The result passes a bfloat16 identity head: one more rounding."""
    x = normal(9, 96)
    weight = raw_tensor("w", normal(131, 96, seed=1), form)
    got = compute(backend, lambda ops, w, h: ops.linear(h, w["w"]), x, 131, {"w": weight}, dtype="bfloat16")
    inputs, values = round_to_bf16(round_to_bf16(x)), round_to_bf16(dequantize(weight))
    expected = inputs.astype(np.float64) @ values.astype(np.float64).T
    bound = linear_bound(backend, inputs, values, quantized=False) + 2.0**-8 * np.abs(expected)
    assert_within(got, expected, bound)


@pytest.mark.parametrize("form", Format)
def test_embed(backend: str, form: Format) -> None:
    table = raw_tensor("embed", normal(37, 64), form)
    body: Body = lambda ops, w, h: h  # noqa: E731
    got = compute(backend, body, normal(37, 64), 64, {"embed": table})
    expected = dequantize(table)
    assert_within(got, expected.astype(np.float64), 2 * EPSILON * np.abs(expected).max())


# --- attention ------------------------------------------------------------------------------------------------------


def attention_model(
    backend: str, attention: Attention, x: F32, dtype: DType, kv_dtype: KVDType = "auto"
) -> BackendModel:
    """x holds q, k and v side by side."""
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    eye = np.eye(q + 2 * kv)
    parts = {"q": eye[:q], "k": eye[q : q + kv], "v": eye[q + kv :]}

    def body(ops: Ops[Any], w: Mapping[str, Weight], h: Any) -> Any:
        queries, keys, values = (ops.linear(h, w[name]) for name in ("q", "k", "v"))
        ops.kv_write(attention, keys, values)
        return ops.attention(attention, queries)

    weights = {name: raw_tensor(name, matrix, Format.F32) for name, matrix in parts.items()}
    return one_op(backend, body, x, q, weights, dtype=dtype, kv_dtype=kv_dtype)


def attention_layout(attention: Attention, block_size: int, num_tokens: int) -> KVLayout:
    group = KVGroup(
        layers=(0,),
        retention=Retention.FULL if attention.window is None else Retention.WINDOW,
        window=attention.window,
        bytes_per_token=8 * attention.num_kv_heads * attention.head_dim,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
    )
    return KVLayout(block_size=block_size, groups=(group,), num_blocks=(-(-num_tokens // block_size) + 4,))


def expected_attention(attention: Attention, x: F32, tokens: Sequence[int]) -> F64:
    """[len, heads * head_dim] of one sequence, head by head in float64."""
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    rows = x[list(tokens)].astype(np.float64)
    q, k, v = np.split(rows, [heads * dim, (heads + kv_heads) * dim], axis=1)
    at = np.arange(len(rows))
    distance = at[:, np.newaxis] - at
    visible = (distance >= 0) & (distance < (attention.window or len(rows)))
    out = np.empty_like(q)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        query = q[:, head * dim : (head + 1) * dim]
        key, value = (part[:, kv_head * dim : (kv_head + 1) * dim] for part in (k, v))
        scores = np.where(visible, attention.scale * (query @ key.T), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head * dim : (head + 1) * dim] = (weights / weights.sum(axis=1, keepdims=True)) @ value
    return out


def as_read(backend: str, attention: Attention, x: F32, kv_dtype: KVDType) -> F32:
    """x with K and V as a cache returns them, and Q as they are multiplied with bfloat16 K in the native backend."""
    queries = attention.num_heads * attention.head_dim
    read = x.copy()
    if kv_dtype == "bfloat16":
        read[:, queries:] = round_to_bf16(x[:, queries:])
        if backend != "numpy":
            read[:, :queries] = round_to_bf16(x[:, :queries])
    elif kv_dtype == "int8":
        read[:, queries:] = round_to_int8(x[:, queries:], attention.head_dim)
    return read


def attention_bound(backend: str, kv_dtype: KVDType) -> float:
    """What a sum of values of about 1 may be off by. With bfloat16 the native backend rounds weights to bfloat16, with int8 queries and
    weights to 16-bit integers.
    """
    if backend == "numpy" or kv_dtype == "auto":
        return 1e-5
    return 6e-3 if kv_dtype == "bfloat16" else 1.5e-3


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "int8"])
@pytest.mark.parametrize("chunk", [None, 1, 37])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(9, 3, 64, None), (4, 4, 48, None), (4, 1, 32, 50), (6, 2, 80, 300)]
)
def test_attention(
    backend: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    block_size: int,
    chunk: int | None,
    kv_dtype: KVDType,
) -> None:
    """Rows of one token and of many, beyond the split at 256 tokens, in one batch."""
    attention = Attention(
        layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window
    )
    lengths = (1, 70, 330) if chunk != 1 else (1, 70)
    total = sum(lengths)
    x = normal(total, (heads + 2 * kv_heads) * head_dim) * np.float32(1.5)
    ends = np.cumsum(lengths)
    sequences = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    layout = attention_layout(attention, block_size, total + 3 * block_size)
    results = []
    for name in bit_equal(backend):
        model = attention_model(name, attention, x, "float32", kv_dtype)
        model.allocate_kv(layout)
        results.append(run(model, layout, sequences, chunk=chunk))
        model.close()
    for got, tokens in zip(results[0], sequences, strict=True):
        expected = expected_attention(attention, as_read(backend, attention, x, kv_dtype), tokens)
        assert_within(got, expected, attention_bound(backend, kv_dtype))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True)), "instruction sets differ"


def test_attention_reads_the_cache_format(backend: str) -> None:
    """With bfloat16, K and V count as rounded, also those of the same step. The result passes a bfloat16 identity head."""
    attention = Attention(layer=0, num_heads=6, num_kv_heads=2, head_dim=32, scale=32**-0.5)
    x = round_to_bf16(normal(90, 10 * 32))
    # Scaled down after rounding, Q keeps its bits in bfloat16; K and V are exact, so that only sums differ.
    layout = attention_layout(attention, 16, 200)
    model = attention_model(backend, attention, x, "bfloat16")
    model.allocate_kv(layout)
    (got,) = run(model, layout, [range(90)])
    model.close()
    expected = expected_attention(attention, x, range(90))
    assert_within(got, expected, 2.0**-8 * np.abs(expected) + 2e-3)


def test_large_scores_do_not_overflow(backend: str) -> None:
    attention = Attention(layer=0, num_heads=1, num_kv_heads=1, head_dim=32, scale=1.0)
    x = normal(300, 96) * np.float32([20] * 64 + [1] * 32)
    layout = attention_layout(attention, 16, 400)
    model = attention_model(backend, attention, x, "float32")
    model.allocate_kv(layout)
    (got,) = run(model, layout, [range(300)])
    model.close()
    expected = expected_attention(attention, x, range(300))
    # Scores reach some thousands, where float32 products are off by 1e-3: weights are off by that share.
    assert np.isfinite(got).all()
    assert_within(got, expected, 5e-3)


def test_an_int8_cache_takes_any_scale(backend: str) -> None:
    """Heads of very different sizes in one sequence, some of them zero: each has a scale of its own."""
    attention = Attention(layer=0, num_heads=2, num_kv_heads=1, head_dim=32, scale=32**-0.5)
    x = normal(60, 4 * 32)
    x[:, 64:96] *= np.float32(10) ** (np.arange(60, dtype=np.float32)[:, np.newaxis] % 5 / 3)
    x[::7, 64:] = 0
    x[3::7, 96:] *= np.float32(1e-35)
    layout = attention_layout(attention, 16, 100)
    model = attention_model(backend, attention, x, "float32", "int8")
    model.allocate_kv(layout)
    (got,) = run(model, layout, [range(60)])
    model.close()
    expected = expected_attention(attention, as_read(backend, attention, x, "int8"), range(60))
    assert np.abs(expected).max() > 0.5
    assert_within(got, expected, 4 * attention_bound(backend, "int8"))
