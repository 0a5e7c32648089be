"""What stored blocks mean: reference dequantizers and quantizers of every format, in numpy, written to be read.

The layouts are those of ggml-common.h: byte i of a 4-bit block holds weight i in its low nibble and weight i + 16 in the
high one. The quantizers round as ggml's reference does and serve tests and file writers; serving never uses them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.quant.formats import Format, RawTensor

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
_Blocks = npt.NDArray[np.void]
"""Array of block records."""

Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])
"""weight = scale * quant."""
Q4_0_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
"""weight = scale * (nibble - 8)."""
Q4_1_BLOCK = np.dtype([("scale", "<f2"), ("min", "<f2"), ("nibbles", "u1", 16)])
"""weight = scale * nibble + min."""


def dequantize(tensor: RawTensor) -> F32:
    """The tensor's weights as float32 of `tensor.shape`, a new array.

    Products and sums are single float32 operations in the order of the formulas above: defined to the bit.
    """
    data: U8 = np.asarray(tensor.data, dtype=np.uint8)
    weights: F32
    match tensor.format:
        case Format.F32:
            weights = data.view("<f4").astype(np.float32)
        case Format.F16:
            weights = data.view("<f2").astype(np.float32)
        case Format.BF16:
            weights = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        case Format.Q8_0:
            blocks = data.view(Q8_0_BLOCK)
            weights = _column(blocks["scale"]) * blocks["quants"].astype(np.float32)
        case Format.Q4_0:
            blocks = data.view(Q4_0_BLOCK)
            weights = _column(blocks["scale"]) * (_unpack(blocks["nibbles"]) - np.float32(8))
        case Format.Q4_1:
            blocks = data.view(Q4_1_BLOCK)
            weights = _column(blocks["scale"]) * _unpack(blocks["nibbles"]) + _column(blocks["min"])
    return weights.reshape(tensor.shape)


def quantize(array: npt.ArrayLike, form: Format) -> U8:
    """The bytes of finite weights [..., k] in a format, one-dimensional; k must be a multiple of `form.block`."""
    weights = np.ascontiguousarray(array, dtype=np.float32)
    if form.quantized and weights.shape[-1] % form.block:
        raise ValueError(f"rows of {weights.shape[-1]} weights do not divide into {form} blocks of {form.block}")
    match form:
        case Format.F32:
            return weights.astype("<f4").reshape(-1).view(np.uint8)
        case Format.F16:
            return weights.astype("<f2").reshape(-1).view(np.uint8)
        case Format.BF16:
            return _to_bf16(weights).reshape(-1).view(np.uint8)
        case Format.Q8_0:
            return _to_q8_0(weights.reshape(-1, form.block)).view(np.uint8)
        case Format.Q4_0:
            return _to_q4_0(weights.reshape(-1, form.block)).view(np.uint8)
        case Format.Q4_1:
            return _to_q4_1(weights.reshape(-1, form.block)).view(np.uint8)


def _column(halves: npt.NDArray[Any]) -> F32:
    return halves.astype(np.float32)[:, np.newaxis]


def _unpack(nibbles: U8) -> F32:
    """[blocks, 16] bytes -> [blocks, 32] values 0..15."""
    return np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=1).astype(np.float32)


def _pack(values: F32) -> U8:
    """[blocks, 32] values, truncated and kept within 0..15 -> [blocks, 16] bytes."""
    quants = np.clip(values, 0, 15).astype(np.uint8)
    return quants[:, :16] | (quants[:, 16:] << np.uint8(4))


def _inverse(scale: F32) -> F32:
    """1 / scale, and 0 where that is not a finite number: a block of (nearly) equal weights."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _to_bf16(weights: F32) -> npt.NDArray[np.uint16]:
    """Round to nearest even; NaN stays NaN."""
    bits = weights.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(weights), quiet, rounded).astype("<u2")


def _to_q8_0(weights: F32) -> _Blocks:
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    scaled = weights * _inverse(scale)
    # Halves round away from zero, as C's roundf does. Not floor(x + 0.5): for 0.49999997 that sum is 1.
    whole = np.trunc(scaled)
    blocks = np.empty(len(weights), Q8_0_BLOCK)
    blocks["scale"] = scale[:, 0]
    blocks["quants"] = whole + np.trunc(2 * (scaled - whole))
    return blocks


def _to_q4_0(weights: F32) -> _Blocks:
    """The weight of largest magnitude becomes exactly -8 * scale, so its sign decides the scale's."""
    largest = np.abs(weights).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(weights, largest, axis=1) / np.float32(-8)
    blocks = np.empty(len(weights), Q4_0_BLOCK)
    blocks["scale"] = scale[:, 0]
    blocks["nibbles"] = _pack(weights * _inverse(scale) + np.float32(8.5))
    return blocks


def _to_q4_1(weights: F32) -> _Blocks:
    low = weights.min(axis=1, keepdims=True)
    scale = (weights.max(axis=1, keepdims=True) - low) / np.float32(15)
    blocks = np.empty(len(weights), Q4_1_BLOCK)
    blocks["scale"] = scale[:, 0]
    blocks["min"] = low[:, 0]
    blocks["nibbles"] = _pack((weights - low) * _inverse(scale) + np.float32(0.5))
    return blocks
