"""Writes GGUF version 3 files: for tests, fixtures and synthesized models."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.loaders.gguf import ARRAY, BOOL, DEFAULT_ALIGNMENT, GGML_TYPES, MAGIC, SCALARS, STRING
from octavo.quant import Format, RawTensor

_TYPE_IDS = {name.lower(): type_id for type_id, (name, _, _) in GGML_TYPES.items()}
_NUMPY_TYPES = {np.dtype(layout.format): type_id for type_id, layout in SCALARS.items() if type_id != BOOL}
_U32, _I32, _F32, _U64, _I64 = 4, 5, 6, 10, 11


class TensorShape(NamedTuple):
    """A tensor to be written, without its data."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return self.format.num_bytes(math.prod(self.shape))


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[RawTensor]) -> None:
    """Writes a file whose tensor data is aligned to `general.alignment` (default 32).

    Values are str, bool, int (uint32 where it fits, else int32, uint64, int64), float (float32), numpy scalars (their
    own type), numpy arrays, or non-empty sequences of one of these kinds. Shapes are C order and are stored reversed.
    """
    shapes = [TensorShape(tensor.name, tensor.shape, tensor.format) for tensor in tensors]
    stream_gguf(path, metadata, shapes, lambda index: [np.ascontiguousarray(tensors[index].data)])


def stream_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorShape],
    chunks: Callable[[int], Iterable[npt.NDArray[np.uint8]]],
) -> None:
    """The same, one chunk at a time: `chunks(i)` gives the bytes of tensor i, in order. Raises ValueError when they are too few or
    too many.
    """
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _typed(value))
        offset = 0
        for tensor in tensors:
            dimensions = tensor.shape[::-1]
            file.write(_string(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
            file.write(struct.pack("<IQ", _TYPE_IDS[tensor.format], offset))
            offset += -(-tensor.num_bytes // alignment) * alignment
        _pad(file, alignment)
        for index, tensor in enumerate(tensors):
            written = sum(file.write(chunk.data) for chunk in chunks(index))
            if written != tensor.num_bytes:
                raise ValueError(f"tensor {tensor.name} has {tensor.num_bytes} bytes, but {written} were given")
            _pad(file, alignment)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Any) -> bytes:
    """Type and value, as in a key-value pair."""
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        return struct.pack("<IIQ", ARRAY, _NUMPY_TYPES[little.dtype], len(little)) + little.tobytes()
    if isinstance(value, list | tuple):
        type_id = _common_type(value)
        items = b"".join(_plain(item, type_id) for item in value)
        return struct.pack("<IIQ", ARRAY, type_id, len(value)) + items
    type_id = _common_type([value])
    return struct.pack("<I", type_id) + _plain(value, type_id)


def _common_type(values: Sequence[Any]) -> int:
    """The value type that holds all of `values`."""
    first = values[0]
    if isinstance(first, str):
        return STRING
    if isinstance(first, bool | np.bool_):
        return BOOL
    if isinstance(first, np.generic):
        return _NUMPY_TYPES[first.dtype]
    if any(isinstance(value, float) for value in values):
        return _F32
    low, high = min(values), max(values)
    if low >= 0:
        return _U32 if high < 2**32 else _U64
    return _I32 if low >= -(2**31) and high < 2**31 else _I64


def _plain(value: Any, type_id: int) -> bytes:
    return _string(value) if type_id == STRING else SCALARS[type_id].pack(value)
