"""Random weights straight in their stored form, made at the speed of the disk: no float array is quantized on the way.

Levels are uniform. Each matrix has weights of mean 0 and, but for rounding to what its format can say, a standard deviation of
1/sqrt(k), so that a normalized input gives an output of about the same size and nothing grows without bound over the layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.quant import Format
from octavo.quant.dequantize import Q4_0_BLOCK, Q4_1_BLOCK, Q8_0_BLOCK

U8 = npt.NDArray[np.uint8]
_CHUNK_BYTES = 8 << 20
_DEVIATION_OF_LEVELS = {4: math.sqrt((16**2 - 1) / 12), 8: math.sqrt((255**2 - 1) / 12)}
"""Of uniform integers 0..15 and -127..127."""


def embedding_format(form: Format) -> Format:
    """Format of embedding and head beside matrices of `form`: 8 bits beside 4, as in published files; else the same."""
    return Format.Q8_0 if form in (Format.Q4_0, Format.Q4_1) else form


def random_rows(form: Format, rows: int, k: int, seed: tuple[int, ...]) -> Iterator[U8]:
    """The bytes of a matrix [rows, k], in chunks of some megabytes. Equal seeds give equal bytes; k is a multiple of the block."""
    bits = np.random.SFC64(np.random.SeedSequence(seed))
    row_blocks = k // form.block
    chunk_rows = max(1, _CHUNK_BYTES // (row_blocks * form.block_bytes))
    for begin in range(0, rows, chunk_rows):
        yield _blocks(form, min(chunk_rows, rows - begin) * row_blocks, k, bits)


def random_matrix(form: Format, rows: int, k: int, seed: tuple[int, ...]) -> U8:
    """The same in one array."""
    return np.concatenate(list(random_rows(form, rows, k, seed)))


def _bytes(bits: np.random.SFC64, count: int) -> U8:
    words: npt.NDArray[np.uint64] = bits.random_raw(-(-count // 8))
    return words.view(np.uint8)[:count]


def _blocks(form: Format, count: int, k: int, bits: np.random.SFC64) -> U8:
    deviation = 1 / math.sqrt(k)
    match form:
        case Format.Q4_0:
            # Levels -8..7 have mean -1/2: half of the scales are negative, so that the weights have none.
            q4_0 = np.empty(count, Q4_0_BLOCK)
            scale = deviation / _DEVIATION_OF_LEVELS[4]
            q4_0["scale"] = np.where(_bytes(bits, count) & 1, scale, -scale)
            q4_0["nibbles"] = _bytes(bits, 16 * count).reshape(count, 16)
            return q4_0.view(np.uint8)
        case Format.Q4_1:
            q4_1 = np.empty(count, Q4_1_BLOCK)
            q4_1["scale"] = deviation / _DEVIATION_OF_LEVELS[4]
            q4_1["min"] = -7.5 * deviation / _DEVIATION_OF_LEVELS[4]
            q4_1["nibbles"] = _bytes(bits, 16 * count).reshape(count, 16)
            return q4_1.view(np.uint8)
        case Format.Q8_0:
            q8_0 = np.empty(count, Q8_0_BLOCK)
            q8_0["scale"] = deviation / _DEVIATION_OF_LEVELS[8]
            q8_0["quants"] = np.maximum(_bytes(bits, 32 * count).view(np.int8), -127).reshape(count, 32)
            return q8_0.view(np.uint8)
        case Format.BF16 | Format.F16 | Format.F32:
            # Sign and mantissa are random, the exponent is fixed: magnitudes uniform in [2^e, 2^(e+1)).
            mantissa, exponent_bias = {Format.BF16: (7, 127), Format.F16: (10, 15), Format.F32: (23, 127)}[form]
            exponent = round(math.log2(deviation / math.sqrt(7 / 3))) + exponent_bias
            word = np.uint32 if form is Format.F32 else np.uint16
            sign = 1 << (8 * np.dtype(word).itemsize - 1)
            words: npt.NDArray[Any] = _bytes(bits, count * np.dtype(word).itemsize).view(word)
            words &= sign | ((1 << mantissa) - 1)
            words |= max(exponent, 1) << mantissa
            return words.view(np.uint8)
