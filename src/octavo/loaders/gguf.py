"""Reads GGUF files, versions 2 and 3, from a memory map. A file is untrusted: nothing in it is believed unchecked.

Source: docs/gguf.md of ggml-org/ggml. Every count, length, type, alignment and offset is checked before it is used,
and all that parsing may allocate is bounded by the constants below. Knows nothing of what keys or tensors mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.loaders.tensors import Tensors, map_file, shown
from octavo.quant import Format, RawTensor

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# Bounds of what a header may ask of us. The largest real ones (vocabularies of 262,144 tokens with their merges) stay
# under a quarter of each.
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_METADATA_KEYS = 65_536
MAX_ARRAY_ITEMS = 4 * 1024 * 1024
"""Over all arrays of a file."""
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 65_536

SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Value type -> layout."""
BOOL, STRING, ARRAY = 7, 8, 9

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""ggml type -> its name, weights per block, bytes per block."""

_FORMATS = {form.name: form for form in Format}


class GGUFFile(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed GGUF file. Tensor data are views of the mapped file, which stays open as long as any of them lives.

    metadata: str, int, float, bool, or a list of one of these. header: the bytes before the tensor data.
    """

    metadata: Mapping[str, Any]
    tensors: Tensors
    header: memoryview
    file_bytes: int


def read_gguf(path: Path) -> GGUFFile:
    """Maps and checks a GGUF file.

    Raises ModelFileError for a damaged or malicious file, UnsupportedModelError for a variant of GGUF that octavo does
    not read, ModelUnavailableError when the file cannot be opened. Tensors of unsupported types are listed, not
    refused: only those that a model needs matter.
    """
    data = map_file(path)
    header = _Header(path.name, data)
    num_tensors, num_keys = header.begin()
    metadata = header.metadata(num_keys)
    _refuse_split(path.name, metadata)
    alignment = _alignment(path.name, metadata)
    infos = header.tensor_infos(num_tensors)
    start = -(-header.position // alignment) * alignment
    _check_placement(path.name, infos, alignment, len(data) - start)

    content = np.frombuffer(data, dtype=np.uint8)
    tensors: dict[str, RawTensor] = {}
    unsupported: dict[str, str] = {}
    for info in infos:
        form = _FORMATS.get(info.type_name)
        if form is None or info.num_bytes is None:
            unsupported[info.name] = info.type_name
        else:
            begin = start + info.offset
            tensors[info.name] = RawTensor(info.name, info.shape, form, content[begin : begin + info.num_bytes])
    return GGUFFile(
        metadata=metadata,
        tensors=Tensors(tensors, unsupported, {info.name: info.shape for info in infos}),
        header=memoryview(data)[: header.position],
        file_bytes=len(data),
    )


class _TensorInfo(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int | None
    """None when the type, and so its size, is unknown."""


class _Header:
    """A cursor over the part of the file before the tensor data. No read goes beyond the file or the header bound."""

    def __init__(self, file_name: str, data: mmap.mmap) -> None:
        self._file_name = file_name
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._items_left = MAX_ARRAY_ITEMS
        self.position = 0

    def begin(self) -> tuple[int, int]:
        """Numbers of tensors and metadata keys."""
        if self._data[:4] != MAGIC:
            self.fail("not a GGUF file: it must begin with 'GGUF'")
        self.position = 4
        version = self._scalar(SCALARS[4], "the version")
        if version not in (2, 3):
            shown = "big-endian GGUF" if int(version) & 0xFFFF == 0 and version else f"GGUF version {version}"
            raise UnsupportedModelError(
                f"{self._file_name}: {shown} is not supported, only versions 2 and 3 (little-endian)"
            )
        num_tensors = int(self._scalar(SCALARS[10], "the number of tensors"))
        num_keys = int(self._scalar(SCALARS[10], "the number of metadata keys"))
        if num_tensors > MAX_TENSORS:
            self.fail(f"{num_tensors} tensors, more than {MAX_TENSORS}")
        if num_keys > MAX_METADATA_KEYS:
            self.fail(f"{num_keys} metadata keys, more than {MAX_METADATA_KEYS}")
        return num_tensors, num_keys

    def metadata(self, num_keys: int) -> dict[str, Any]:
        """The key-value pairs."""
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                self.fail(f"metadata key {shown(key)} occurs twice")
            metadata[key] = self._value(f"the value of {shown(key)}")
        return metadata

    def tensor_infos(self, num_tensors: int) -> list[_TensorInfo]:
        """Names, shapes, types and offsets; each checked on its own."""
        infos: list[_TensorInfo] = []
        names: set[str] = set()
        for _ in range(num_tensors):
            info = self._tensor_info()
            if info.name in names:
                self.fail(f"tensor {shown(info.name)} occurs twice")
            names.add(info.name)
            infos.append(info)
        return infos

    def fail(self, message: str) -> NoReturn:
        """Refuses the file."""
        raise ModelFileError(f"{self._file_name}: {message}", param=self._file_name)

    def _tensor_info(self) -> _TensorInfo:
        name = self._string("a tensor name", MAX_TENSOR_NAME_BYTES)
        what = f"tensor {shown(name)}"
        num_dimensions = int(self._scalar(SCALARS[4], what))
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"{what} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        # Fastest dimension first in the file.
        dimensions = [int(self._scalar(SCALARS[10], what)) for _ in range(num_dimensions)]
        type_id = int(self._scalar(SCALARS[4], what))
        offset = int(self._scalar(SCALARS[10], what))
        num_elements = math.prod(dimensions)
        if not 0 < num_elements < 2**63:
            self.fail(f"{what} has the impossible shape {dimensions[::-1]}")
        type_name, block, block_bytes = GGML_TYPES.get(type_id, (f"type {type_id}", 0, 0))
        if block and dimensions[0] % block:
            self.fail(f"{what} has rows of {dimensions[0]}, not a multiple of {type_name}'s block of {block}")
        num_bytes = num_elements // block * block_bytes if block else None
        return _TensorInfo(name, tuple(dimensions[::-1]), type_name, offset, num_bytes)

    def _value(self, what: str) -> Any:
        type_id = int(self._scalar(SCALARS[4], what))
        if type_id == STRING:
            return self._string(what, MAX_HEADER_BYTES)
        if type_id == ARRAY:
            return self._array(what)
        if type_id == BOOL:
            return self._bool(self._scalar(SCALARS[BOOL], what), what)
        if type_id not in SCALARS:
            self.fail(f"{what} has the unknown type {type_id}")
        return self._scalar(SCALARS[type_id], what)

    def _array(self, what: str) -> list[Any]:
        type_id = int(self._scalar(SCALARS[4], what))
        count = int(self._scalar(SCALARS[10], what))
        if type_id == ARRAY:
            self.fail(f"{what} is an array of arrays, which no model uses")
        if type_id != STRING and type_id not in SCALARS:
            self.fail(f"{what} is an array of the unknown type {type_id}")
        if count > self._items_left:
            self.fail(f"{what} has {count} items; at most {MAX_ARRAY_ITEMS} are read from all arrays of a file")
        self._items_left -= count
        if type_id == STRING:
            return self._strings(count, what)
        layout = SCALARS[type_id]
        begin = self._advance(count * layout.size, what)
        items = np.frombuffer(self._data, dtype=layout.format, count=count, offset=begin).tolist()
        return [self._bool(item, what) for item in items] if type_id == BOOL else items

    def _strings(self, count: int, what: str) -> list[str]:
        """The hot loop: vocabularies and merge tables have hundreds of thousands of strings."""
        data, position, end = self._data, self.position, self._end
        length_of = SCALARS[10].unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + length_of(data, position)[0]
                if position > end:
                    self._fail_truncated(what)
                strings.append(data[begin:position].decode())
        except struct.error:
            self._fail_truncated(what)
        except UnicodeDecodeError:
            self.fail(f"item {len(strings)} of {what} is not UTF-8")
        self.position = position
        return strings

    def _string(self, what: str, most_bytes: int) -> str:
        length = int(self._scalar(SCALARS[10], f"the length of {what}"))
        if length > most_bytes:
            self.fail(f"{what} is {length} bytes long, at most {most_bytes} are allowed")
        begin = self._advance(length, what)
        try:
            return self._data[begin : begin + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def _scalar(self, layout: struct.Struct, what: str) -> int | float:
        begin = self._advance(layout.size, what)
        value: int | float = layout.unpack_from(self._data, begin)[0]
        return value

    def _bool(self, value: int | float, what: str) -> bool:
        if value not in (0, 1):
            self.fail(f"{what} has the boolean {value}, expected 0 or 1")
        return value == 1

    def _advance(self, num_bytes: int, what: str) -> int:
        """Steps over `num_bytes` and returns where they begin."""
        begin = self.position
        if num_bytes > self._end - begin:
            self._fail_truncated(what)
        self.position = begin + num_bytes
        return begin

    def _fail_truncated(self, what: str) -> NoReturn:
        if self._end < len(self._data):
            self.fail(f"{what} ends beyond the first {MAX_HEADER_BYTES} bytes, the most that are read as header")
        self.fail(f"{what} ends beyond the end of the file; is it complete?")


def _refuse_split(file_name: str, metadata: Mapping[str, Any]) -> None:
    count = metadata.get("split.count", 0)
    if not isinstance(count, int) or count > 1:
        raise UnsupportedModelError(
            f"{file_name}: one part of a model split into {shown(str(count))} files; join them first (llama-gguf-split --merge)",
            param=file_name,
        )


def _alignment(file_name: str, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # bool is an int, and True would be an alignment of 1.
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError(
            f"{file_name}: general.alignment is {shown(str(alignment))}, not a power of two from 8 to {MAX_ALIGNMENT}",
            param=file_name,
        )
    return alignment


def _check_placement(file_name: str, infos: list[_TensorInfo], alignment: int, data_bytes: int) -> None:
    """Every tensor is aligned and within the data section, and no two overlap."""
    end, before = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        what = f"{file_name}: tensor {shown(info.name)}"
        if info.offset % alignment:
            raise ModelFileError(f"{what} begins at {info.offset}, not a multiple of {alignment}", param=file_name)
        if info.offset < end:
            raise ModelFileError(f"{what} overlaps {shown(before)}", param=file_name)
        # Of an unknown type only the first byte is sure.
        end, before = info.offset + (info.num_bytes or 1), info.name
        if end > data_bytes:
            raise ModelFileError(
                f"{what} ends {end - data_bytes} bytes beyond the end of the file; is it complete?", param=file_name
            )
