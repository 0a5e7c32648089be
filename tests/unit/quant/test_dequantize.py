"""Formats against the gguf package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.quant import Format, RawTensor, dequantize, quantize

GGML = {form: GGMLQuantizationType[form.name] for form in Format}


def raw(form: Format, shape: tuple[int, ...], data: np.ndarray) -> RawTensor:
    return RawTensor(name="t", shape=shape, format=form, data=data)


def random_blocks(form: Format, rows: int, columns: int, seed: int) -> np.ndarray:
    """Any bit pattern a file could hold, NaN and infinite scales included."""
    return np.random.default_rng(seed).integers(0, 256, rows * form.num_bytes(columns), dtype=np.uint8)


@pytest.mark.parametrize("form", list(Format))
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_dequantize_equals_gguf(form: Format, rows: int, blocks: int, seed: int) -> None:
    data = random_blocks(form, rows, 32 * blocks, seed)
    with np.errstate(invalid="ignore"):
        ours = dequantize(raw(form, (rows, 32 * blocks), data))
        theirs = quants.dequantize(data.reshape(rows, -1), GGML[form])
    assert ours.dtype == np.float32
    assert ours.shape == (rows, 32 * blocks)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("form", list(Format))
@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-4, 0.02, 1.0, 300.0]),
    kind=st.sampled_from(["normal", "ties", "zero", "constant"]),
)
def test_quantize_equals_gguf(form: Format, rows: int, seed: int, scale: float, kind: str) -> None:
    random = np.random.default_rng(seed)
    weights = random.normal(0, scale, (rows, 64)).astype(np.float32)
    if kind == "ties":
        weights = random.integers(-254, 255, (rows, 64)).astype(np.float32) / np.float32(2)
    elif kind == "zero":
        weights[:, :32] = 0
    elif kind == "constant":
        weights[:] = weights[0, 0]
    theirs = np.ascontiguousarray(quants.quantize(weights, GGML[form])).reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(quantize(weights, form), theirs)


@pytest.mark.parametrize(("form", "bound"), [("f32", 0), ("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 5e-3), ("q4_0", 0.13)])
def test_round_trip_error_is_within_half_a_step(form: str, bound: float) -> None:
    weights = np.random.default_rng(0).uniform(-1, 1, (8, 96)).astype(np.float32)
    back = dequantize(raw(Format(form), (8, 96), quantize(weights, Format(form))))
    assert np.abs(back - weights).max() <= bound


def test_q4_1_spans_minimum_to_maximum() -> None:
    weights = np.linspace(5, 20, 32, dtype=np.float32)[np.newaxis]
    back = dequantize(raw(Format.Q4_1, (1, 32), quantize(weights, Format.Q4_1)))
    assert (back.min(), back.max()) == (5, 20)
    assert np.abs(back - weights).max() <= 0.5


def test_nan_survives_bfloat16() -> None:
    signalling = np.array([0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(dequantize(raw(Format.BF16, (2,), quantize(signalling, Format.BF16)))).all()


def test_nearly_equal_weights_do_not_overflow() -> None:
    tiny = np.full((1, 32), 1e-44, dtype=np.float32)
    for form in (Format.Q8_0, Format.Q4_0, Format.Q4_1):
        assert np.abs(dequantize(raw(form, (1, 32), quantize(tiny, form)))).max() < 1e-6


def test_dequantize_reads_unaligned_views() -> None:
    stored = quantize(np.arange(32, dtype=np.float32), Format.F32)
    shifted = np.concatenate([np.zeros(1, np.uint8), stored])[1:]
    np.testing.assert_array_equal(dequantize(raw(Format.F32, (32,), shifted)), np.arange(32))


def test_rows_must_divide_into_blocks() -> None:
    with pytest.raises(ValueError, match="rows of 33 weights do not divide into q8_0 blocks of 32"):
        quantize(np.zeros((2, 33)), Format.Q8_0)
