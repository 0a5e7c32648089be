"""Formats of stored tensors. A format is a block of `block` consecutive weights along the last axis in `block_bytes` bytes.

Source: the GGUF document (ggml-org/ggml docs/gguf.md) and the block structs of ggml-common.h. Knows nothing of files or kernels.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Format(StrEnum):
    """Element formats that octavo computes with. Names are those of GGUF, in lower case."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"

    @property
    def block(self) -> int:
        """Weights per block."""
        return _SIZES[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _SIZES[self][1]

    @property
    def quantized(self) -> bool:
        """True for integer block formats."""
        return self.block > 1

    def num_bytes(self, num_elements: int) -> int:
        """Stored size of `num_elements` elements, a multiple of `block`."""
        return num_elements // self.block * self.block_bytes


_SIZES: dict[Format, tuple[int, int]] = {
    Format.F32: (1, 4),
    Format.F16: (1, 2),
    Format.BF16: (1, 2),
    Format.Q8_0: (32, 34),
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
}


class RawTensor(msgspec.Struct, frozen=True):
    """A tensor as stored: C-order logical `shape` ([out, in] for matrices) and its bytes, usually a view of a mapped file.

    `data` is uint8, one-dimensional, read-only, and exactly `format.num_bytes(prod(shape))` long.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    data: npt.NDArray[np.uint8] | Any
