"""The native linear kernels: one arithmetic on every instruction set, for every number of rows, and close to numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from octavo.backends.cpu import _native
from octavo.quant import Format, RawTensor, dequantize, quantize

ISAS: list[str] = _native.available_isas()
VARIANTS = [(Format.Q4_1, False), (Format.Q4_0, False), (Format.Q8_0, False), (Format.BF16, False), (Format.F32, True)]
ALL_VARIANTS = [*VARIANTS, (Format.F16, False), (Format.F16, True), (Format.F32, False), (Format.BF16, True)]
MOST_ROWS = 33
ROW_COUNTS = [*range(1, 19), MOST_ROWS]
NAMES = [f"{form.value}-f32" if float32 else form.value for form, float32 in VARIANTS]
ALL_NAMES = [f"{form.value}-f32" if float32 else form.value for form, float32 in ALL_VARIANTS]


def weights(form: Format, n: int, k: int, seed: int = 0) -> np.ndarray:
    return quantize(np.random.default_rng([seed, n, k]).standard_normal((n, k)), form)


def inputs(rows: int, k: int, seed: int = 1) -> np.ndarray:
    """Rows of different magnitudes, with a column of outliers, as activations have them."""
    rng = np.random.default_rng([seed, rows, k])
    x = rng.standard_normal((rows, k)) * np.exp(rng.uniform(-3, 3, (rows, 1)))
    x[:, k // 3] *= 20
    return x.astype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of float32 values, with all NaN the same."""
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def dense(form: Format, raw: np.ndarray, n: int, k: int, float32: bool) -> np.ndarray:
    """The weights that the packed matrix stands for, float32."""
    stored = dequantize(RawTensor(name="w", shape=(n, k), format=form, data=raw))
    if form.quantized or float32:
        return stored
    return dequantize(RawTensor(name="w", shape=(n, k), format=Format.BF16, data=quantize(stored, Format.BF16)))


def as_multiplied(x: np.ndarray, form: Format, float32: bool) -> np.ndarray:
    """The inputs after rounding to what the kernel multiplies, float64."""
    if form.quantized:
        values, scales, _ = _native.quantize_rows("portable", x)
        return values.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    if float32:
        return x.astype(np.float64)
    rounded = quantize(x, Format.BF16)
    return dequantize(RawTensor(name="x", shape=x.shape, format=Format.BF16, data=rounded)).astype(np.float64)


@pytest.mark.parametrize("k", [32, 64, 576])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 192])
@pytest.mark.parametrize(("form", "float32"), VARIANTS, ids=NAMES)
def test_every_instruction_set_and_row_count_gives_the_same_bits(form: Format, float32: bool, n: int, k: int) -> None:
    raw, x = weights(form, n, k), inputs(MOST_ROWS, k)
    expected = _native.linear("portable", form, raw, n, k, x, float32=float32)
    for isa in ISAS:
        row_counts = ROW_COUNTS if n * k <= 17 * 576 else [1, 3, 7, 16, MOST_ROWS]
        for rows in row_counts:
            if isa == "portable" and rows > 9:
                continue
            first = MOST_ROWS - rows  # another place in the tile than in the whole
            out = _native.linear(isa, form, raw, n, k, x[first:], float32=float32)
            np.testing.assert_array_equal(bits(out), bits(expected[first:]), err_msg=f"{isa}, {rows} rows")


@pytest.mark.parametrize(("form", "float32"), VARIANTS, ids=NAMES)
def test_a_model_sized_matrix_gives_the_same_bits(form: Format, float32: bool) -> None:
    n, k = 576, 1536
    raw, x = weights(form, n, k), inputs(8, k)
    expected = _native.linear("portable", form, raw, n, k, x, float32=float32)
    for isa in ISAS:
        out = _native.linear(isa, form, raw, n, k, x, float32=float32)
        np.testing.assert_array_equal(bits(out), bits(expected), err_msg=isa)


@pytest.mark.parametrize("k", [1, 2, 3, 63, 65, 577])
@pytest.mark.parametrize("n", [1, 16, 17, 49])
@pytest.mark.parametrize(("form", "float32"), [(Format.BF16, False), (Format.F32, True)], ids=["bf16", "f32-f32"])
def test_unquantized_formats_take_any_k(form: Format, float32: bool, n: int, k: int) -> None:
    raw, x = weights(form, n, k), inputs(7, k)
    expected = _native.linear("portable", form, raw, n, k, x, float32=float32)
    reference = as_multiplied(x, form, float32) @ dense(form, raw, n, k, float32).astype(np.float64).T
    np.testing.assert_allclose(expected, reference, rtol=0, atol=1e-5 * np.abs(x).max() * k)
    for isa in ISAS:
        for row in range(7):
            out = _native.linear(isa, form, raw, n, k, x[row : row + 1], float32=float32)
            np.testing.assert_array_equal(bits(out[0]), bits(expected[row]), err_msg=isa)


@pytest.mark.parametrize("k", [64, 1536])
@pytest.mark.parametrize(("form", "float32"), ALL_VARIANTS, ids=ALL_NAMES)
def test_the_product_is_that_of_the_rounded_inputs(form: Format, float32: bool, k: int) -> None:
    """Against float64 over the same rounded inputs: only the float32 sums differ, by 1e-5 of the sum of magnitudes at most."""
    n = 48
    raw, x = weights(form, n, k), inputs(5, k)
    dense_weights = dense(form, raw, n, k, float32).astype(np.float64)
    rounded = as_multiplied(x, form, float32)
    bound = 1e-5 * (np.abs(rounded) @ np.abs(dense_weights).T)
    for isa in ISAS:
        out = _native.linear(isa, form, raw, n, k, x, float32=float32)
        assert (np.abs(out - rounded @ dense_weights.T) <= bound).all(), isa


@pytest.mark.parametrize(
    ("form", "float32", "bound"),
    [(*variant, bound) for variant, bound in zip(VARIANTS, [0.01, 0.01, 0.01, 0.003, 1e-6], strict=True)],
    ids=NAMES,
)
def test_rounding_the_inputs_costs_at_most_the_stated_share(form: Format, float32: bool, bound: float) -> None:
    """Relative norm of the error against the dequantized product in float64, for normal inputs."""
    n, k = 192, 576
    raw = weights(form, n, k)
    x = np.random.default_rng(5).standard_normal((16, k)).astype(np.float32)
    exact = x.astype(np.float64) @ dense(form, raw, n, k, float32).astype(np.float64).T
    out = _native.linear(ISAS[-1], form, raw, n, k, x, float32=float32)
    assert np.linalg.norm(out - exact) <= bound * np.linalg.norm(exact)


@pytest.mark.parametrize("n", [5, 32, 40])
@pytest.mark.parametrize(("form", "float32"), VARIANTS, ids=NAMES)
def test_the_bias_is_added_last(form: Format, float32: bool, n: int) -> None:
    raw, x = weights(form, n, 64), inputs(3, 64)
    bias = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    for isa in ISAS:
        plain = _native.linear(isa, form, raw, n, 64, x, float32=float32)
        biased = _native.linear(isa, form, raw, n, 64, x, float32=float32, bias=bias)
        np.testing.assert_array_equal(bits(biased), bits(plain + bias))


@pytest.mark.parametrize(("form", "float32"), VARIANTS, ids=NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_harms_no_other(form: Format, float32: bool, bad: float) -> None:
    n, k = 33, 96
    raw, x = weights(form, n, k), inputs(9, k)
    clean = _native.linear("portable", form, raw, n, k, x, float32=float32)
    x[4, 40] = bad
    for isa in ISAS:
        out = _native.linear(isa, form, raw, n, k, x, float32=float32)
        others = np.arange(9) != 4
        np.testing.assert_array_equal(bits(out[others]), bits(clean[others]))
        assert not np.isfinite(out[4]).any()
        if form.quantized:
            assert np.isnan(out[4]).all()


ANY_FLOAT = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 1.7763568e-15, 3.4028235e38, -3.4028235e38, 7.888609e-31, 7.88e-31, 0.5, 127.0]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data(), variant=st.sampled_from(VARIANTS), rows=st.integers(1, 9), n=st.sampled_from([1, 16, 35]))
def test_any_floats_give_the_same_bits_everywhere(
    data: st.DataObject, variant: tuple[Format, bool], rows: int, n: int
) -> None:
    form, float32 = variant
    k = 64 if form.quantized else data.draw(st.sampled_from([31, 64]), "k")
    x = data.draw(hnp.arrays(np.float32, (rows, k), elements=ANY_FLOAT, fill=st.just(np.float32(0.75))), "x")
    raw = weights(form, n, k)
    if not form.quantized:
        values = data.draw(hnp.arrays(np.float32, (n, k), elements=ANY_FLOAT, fill=st.just(np.float32(-1.5))), "w")
        raw = quantize(values, form)
    expected = _native.linear("portable", form, raw, n, k, x, float32=float32)
    for isa in ISAS:
        out = _native.linear(isa, form, raw, n, k, x, float32=float32)
        np.testing.assert_array_equal(bits(out), bits(expected), err_msg=isa)


def quantized_by_definition(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`QuantBlock` of kernels.h, in numpy."""
    blocks = x.reshape(len(x), -1, 32)
    with np.errstate(all="ignore"):
        absmax = np.abs(blocks).max(axis=2)
        finite = np.isfinite(blocks).all(axis=2)
        used = finite & (absmax >= np.float32(2**-100))
        scales = np.where(used, absmax / np.float32(127), np.float32(0))
        inverse = np.where(used, np.float32(127) / absmax, np.float32(0))
        values = np.where(used[..., None], np.rint(blocks * inverse[..., None]), np.float32(0))
        sums = scales * values.sum(axis=2)
    scales[~finite] = np.nan
    sums[~finite] = np.nan
    return values.astype(np.int8).reshape(x.shape), scales, sums


@settings(max_examples=100, deadline=None)
@given(x=hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 96])), elements=ANY_FLOAT))
def test_rows_are_quantized_as_defined(x: np.ndarray) -> None:
    values, scales, sums = quantized_by_definition(x)
    for isa in ISAS:
        got_values, got_scales, got_sums = _native.quantize_rows(isa, x)
        np.testing.assert_array_equal(got_values, values)
        np.testing.assert_array_equal(bits(got_scales), bits(scales))
        np.testing.assert_array_equal(bits(got_sums), bits(sums))


def test_ties_round_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    for isa in ISAS:
        values, scales, sums = _native.quantize_rows(isa, x)
        assert values[0, :6].tolist() == [127, 0, 2, 2, 0, -2]
        assert scales.tolist() == [[1.0]]
        assert sums.tolist() == [[129.0]]


@pytest.mark.parametrize("k", [32, 96, 576])
@pytest.mark.parametrize("n", [1, 16, 23])
@pytest.mark.parametrize(("form", "float32"), ALL_VARIANTS, ids=ALL_NAMES)
def test_unpacked_rows_equal_the_reference_dequantizer(form: Format, float32: bool, n: int, k: int) -> None:
    raw = weights(form, n, k)
    unpacked = _native.unpack(form, raw, n, k, float32=float32)
    np.testing.assert_array_equal(bits(unpacked), bits(dense(form, raw, n, k, float32)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), variant=st.sampled_from(ALL_VARIANTS), n=st.integers(1, 18), blocks=st.integers(1, 3))
def test_any_stored_bytes_unpack_as_the_reference_does(
    data: st.DataObject, variant: tuple[Format, bool], n: int, blocks: int
) -> None:
    form, float32 = variant
    k = blocks * form.block
    raw = np.frombuffer(data.draw(st.binary(min_size=form.num_bytes(n * k), max_size=form.num_bytes(n * k))), np.uint8)
    with np.errstate(all="ignore"):
        expected = dense(form, raw, n, k, float32)
    np.testing.assert_array_equal(bits(_native.unpack(form, raw, n, k, float32=float32)), bits(expected))


def test_no_rows_give_no_rows() -> None:
    out = _native.linear(ISAS[-1], Format.Q8_0, weights(Format.Q8_0, 4, 32), 4, 32, np.empty((0, 32), np.float32))
    assert out.shape == (0, 4)


def test_wrong_sizes_are_refused() -> None:
    raw, x = weights(Format.Q4_0, 4, 64), inputs(2, 64)
    with pytest.raises(ValueError, match="mmx"):
        _native.linear("mmx", Format.Q4_0, raw, 4, 64, x)
    with pytest.raises(ValueError, match="unknown tensor format 'q9_9'"):
        _native.linear("portable", "q9_9", raw, 4, 64, x)
    with pytest.raises(ValueError, match="needs 36 bytes per row, got 143"):
        _native.linear("portable", Format.Q4_0, raw[:-1], 4, 64, x)
    with pytest.raises(ValueError, match="multiple of 32"):
        _native.unpack(Format.Q4_0, raw, 4, 65)
    with pytest.raises(ValueError, match=r"n \* k at most"):
        _native.unpack(Format.F32, raw, 2**62, 2**62)
    with pytest.raises(ValueError, match="x has 32 columns, expected k = 64"):
        _native.linear("portable", Format.Q4_0, raw, 4, 64, np.ascontiguousarray(x[:, :32]))
    with pytest.raises(ValueError, match="bias has 3 entries, expected n = 4"):
        _native.linear("portable", Format.Q4_0, raw, 4, 64, x, bias=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="rows of 33 values"):
        _native.quantize_rows("portable", np.zeros((1, 33), np.float32))
    with pytest.raises(TypeError):
        _native.linear("portable", Format.Q4_0, raw, 4, 64, x.astype(np.float64))
