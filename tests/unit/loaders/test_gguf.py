"""The GGUF reader and writer: against the gguf package, and against files that lie."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import ModelFileError, ModelUnavailableError, UnsupportedModelError
from octavo.loaders.gguf import GGML_TYPES, MAX_HEADER_BYTES, read_gguf
from octavo.loaders.gguf_writer import write_gguf
from octavo.quant import Format, dequantize
from support.model_files import gguf_metadata, gguf_tensors, raw_tensor, write_tiny_gguf

# --- files that are right ---------------------------------------------------------------------------------------------


def test_reads_what_it_writes(tmp_path: Path) -> None:
    file = read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    expected = gguf_metadata()
    assert file.metadata.keys() == expected.keys()
    for key, value in expected.items():
        assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert list(file.tensors) == [tensor.name for tensor in gguf_tensors()]
    for tensor in gguf_tensors():
        read = file.tensors[tensor.name]
        assert (read.shape, read.format) == (tensor.shape, tensor.format)
        np.testing.assert_array_equal(read.data, tensor.data)
        assert not read.data.flags.writeable


def test_gguf_package_reads_what_we_write(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", gguf_metadata() | {"general.alignment": 64})
    reader = gguf.GGUFReader(path)
    assert {key for key in reader.fields if not key.startswith("GGUF.")} == gguf_metadata().keys() | {
        "general.alignment"
    }
    for key, value in gguf_metadata().items():
        assert reader.fields[key].contents() == (pytest.approx(value) if isinstance(value, float) else value), key
    for ours, theirs in zip(gguf_tensors(), reader.tensors, strict=True):
        assert (ours.name, ours.shape[::-1]) == (theirs.name, tuple(theirs.shape))
        assert theirs.data_offset % 64 == 0
        np.testing.assert_array_equal(ours.data, theirs.data.reshape(-1).view(np.uint8))


def test_we_read_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_int32("a.i32", -7)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.strings", ["", "é", "\U0001f600"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    weights = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    writer.add_tensor("plain", weights)
    writer.add_tensor("small", gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q5_0), raw_dtype=_theirs("Q5_0"))
    writer.add_tensor("quant", gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0), raw_dtype=_theirs("Q8_0"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    values = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert values == {
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.i32": -7,
        "a.u64": 2**63,
        "a.i64": -(2**62),
        "a.f64": 0.1,
        "a.bool": True,
        "a.strings": ["", "é", "\U0001f600"],
        "a.ints": [1, -2, 3],
        "a.bools": [True, False],
    }
    assert values["a.bool"] is True
    np.testing.assert_array_equal(dequantize(file.tensors["plain"]), weights)
    assert np.abs(dequantize(file.tensors["quant"]) - weights).max() < 0.02
    assert file.tensors.shapes["small"] == (3, 64)


def _theirs(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def test_type_table_is_that_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = GGML_TYPES.keys() & theirs.keys()
    assert len(shared) >= 32
    assert {type_id: GGML_TYPES[type_id] for type_id in shared} == {type_id: theirs[type_id] for type_id in shared}


def test_all_writer_types(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "big": 2**40,
        "negative": -5,
        "very_negative": -(2**40),
        "half": np.float64(0.1),
        "small": np.uint8(7),
        "array": np.arange(3, dtype=np.int16),
        "mixed": [1, 2.5],
        "flags": [True, False],
    }
    write_gguf(tmp_path / "x.gguf", metadata, [])
    read = read_gguf(tmp_path / "x.gguf").metadata
    assert read == {**metadata, "half": 0.1, "small": 7, "array": [0, 1, 2]}


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)
    assert len(read_gguf(path).tensors) == len(gguf_tensors())


def test_the_default_model_parses_in_a_blink(smollm2: Path) -> None:
    read_gguf(smollm2)
    best = min(_timed(smollm2) for _ in range(5))
    file = read_gguf(smollm2)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48_900
    assert len(file.tensors) == 272
    assert file.tensors["blk.0.attn_k.weight"].shape == (192, 576)
    assert file.tensors["token_embd.weight"].format is Format.Q8_0
    assert best < 0.1


def _timed(path: Path) -> float:
    start = time.perf_counter()
    read_gguf(path)
    return time.perf_counter() - start


# --- files that lie -----------------------------------------------------------------------------------------------------


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key_value(key: bytes, type_id: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value


def array(type_id: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, count) + items


def tensor_info(name: bytes, dimensions: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_id, offset)


def gguf_bytes(
    pairs: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_pairs: int | None = None,
    num_infos: int | None = None,
) -> bytes:
    counts = (len(infos) if num_infos is None else num_infos, len(pairs) if num_pairs is None else num_pairs)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data


HUGE = 2**64 - 1
DAMAGED: dict[str, tuple[bytes, str]] = {
    "other file": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "four bytes": (b"GGUF", "the version ends beyond the end of the file"),
    "many keys": (gguf_bytes(num_pairs=HUGE), "metadata keys, more than"),
    "many tensors": (gguf_bytes(num_infos=HUGE), "tensors, more than"),
    "missing keys": (gguf_bytes(num_pairs=5), "ends beyond the end of the file|is not UTF-8|unknown type|occurs twice"),
    "long key": (gguf_bytes((struct.pack("<Q", HUGE),)), "a metadata key is 18446744073709551615 bytes long"),
    "long string": (
        gguf_bytes((key_value(b"k", 8, struct.pack("<Q", 2**40)),)),
        "the value of 'k' is 1099511627776 bytes",
    ),
    "string past end": (gguf_bytes((key_value(b"k", 8, struct.pack("<Q", 5000)),)), "the value of 'k' ends beyond"),
    "not UTF-8": (gguf_bytes((key_value(b"k", 8, string(b"\xff\xfe")),)), "the value of 'k' is not UTF-8"),
    "key not UTF-8": (gguf_bytes((key_value(b"\xff", 0, b"\1"),)), "a metadata key is not UTF-8"),
    "unknown value type": (gguf_bytes((key_value(b"k", 13, bytes(8)),)), "the value of 'k' has the unknown type 13"),
    "unknown item type": (gguf_bytes((key_value(b"k", 9, array(77, 1)),)), "array of the unknown type 77"),
    "array of arrays": (gguf_bytes((key_value(b"k", 9, array(9, 1, array(0, 0))),)), "array of arrays"),
    "huge array": (gguf_bytes((key_value(b"k", 9, array(0, HUGE)),)), "has 18446744073709551615 items"),
    "array past end": (gguf_bytes((key_value(b"k", 9, array(12, 1000)),)), "the value of 'k' ends beyond"),
    "strings past end": (gguf_bytes((key_value(b"k", 9, array(8, 1000)),)), "the value of 'k' ends beyond"),
    "long item": (
        gguf_bytes((key_value(b"k", 9, array(8, 2, string(b"a") + struct.pack("<Q", HUGE))),)),
        "the value of 'k' ends beyond",
    ),
    "item not UTF-8": (
        gguf_bytes((key_value(b"k", 9, array(8, 2, string(b"a") + string(b"\xc3"))),)),
        "item 1 of the value of 'k' is not UTF-8",
    ),
    "boolean 2": (gguf_bytes((key_value(b"k", 7, b"\2"),)), "has the boolean 2"),
    "booleans": (gguf_bytes((key_value(b"k", 9, array(7, 2, b"\1\3")),)), "has the boolean 3"),
    "key twice": (gguf_bytes((key_value(b"k", 0, b"\1"),) * 2), "metadata key 'k' occurs twice"),
    "alignment 0": (gguf_bytes((key_value(b"general.alignment", 4, bytes(4)),)), "general.alignment is '0'"),
    "alignment 48": (
        gguf_bytes((key_value(b"general.alignment", 4, struct.pack("<I", 48)),)),
        "'48', not a power of two",
    ),
    "alignment text": (
        gguf_bytes((key_value(b"general.alignment", 8, string(b"32\n")),)),
        r"general.alignment is '32\\n'",
    ),
    "tensor twice": (
        gguf_bytes((), (tensor_info(b"t", (8,)), tensor_info(b"t", (8,), 0, 32)), bytes(64)),
        "tensor 't' occurs twice",
    ),
    "long tensor name": (gguf_bytes((), (tensor_info(b"t" * 65, (8,)),), bytes(32)), "a tensor name is 65 bytes long"),
    "no dimensions": (gguf_bytes((), (tensor_info(b"t", ()),), bytes(32)), "0 dimensions"),
    "five dimensions": (gguf_bytes((), (tensor_info(b"t", (1,) * 5),), bytes(32)), "5 dimensions"),
    "zero dimension": (gguf_bytes((), (tensor_info(b"t", (8, 0)),), bytes(32)), r"impossible shape \[0, 8\]"),
    "product overflows": (gguf_bytes((), (tensor_info(b"t", (2**33, 2**33)),), bytes(32)), "impossible shape"),
    "odd rows": (
        gguf_bytes((), (tensor_info(b"t", (33, 2), 8),), bytes(96)),
        "rows of 33, not a multiple of Q8_0's block",
    ),
    "unaligned": (gguf_bytes((), (tensor_info(b"t", (8,), 0, 4),), bytes(64)), "begins at 4, not a multiple of 32"),
    "data missing": (gguf_bytes((), (tensor_info(b"t", (9,)),), bytes(32)), "ends 4 bytes beyond the end of the file"),
    "offset past end": (gguf_bytes((), (tensor_info(b"t", (8,), 0, 2**63),), bytes(32)), "beyond the end of the file"),
    "overlap": (
        gguf_bytes((), (tensor_info(b"a", (16,)), tensor_info(b"b", (8,), 0, 32)), bytes(64)),
        "tensor 'b' overlaps 'a'",
    ),
    "unknown type past end": (
        gguf_bytes((), (tensor_info(b"t", (8,), 99, 64),), bytes(64)),
        "beyond the end of the file",
    ),
    "control characters": (
        gguf_bytes((), (tensor_info(b"t\n\x1b[31m", (0,)),)),
        r"tensor 't\\n\\x1b\[31m' has the impossible shape",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_what_is_wrong(tmp_path: Path, case: str) -> None:
    content, message = DAMAGED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith("bad.gguf: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_bytes(version=1), "GGUF version 1 is not supported"),
        (gguf_bytes(version=3 << 24), "big-endian GGUF is not supported"),
        (
            gguf_bytes((key_value(b"split.count", 2, struct.pack("<H", 3)),)),
            "one part of a model split into '3' files; join them first",
        ),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "variant.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(path)


def test_unsupported_types_are_named_when_taken(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    infos = (tensor_info(b"plain", (8,)), tensor_info(b"k", (256,), 14, 32), tensor_info(b"new", (5,), 99, 256))
    path.write_bytes(gguf_bytes((), infos, bytes(512)))
    tensors = read_gguf(path).tensors
    assert tensors.unsupported == {"k": "Q6_K", "new": "type 99"}
    assert "k" in tensors
    assert tensors["plain"].shape == (8,)
    with pytest.raises(
        UnsupportedModelError, match="tensor 'k' has type Q6_K, which is not supported; octavo has F32, F16"
    ):
        tensors.get("k")
    with pytest.raises(KeyError):
        tensors["absent"]
    assert tensors.get("absent") is None


def test_header_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    head = gguf_bytes((key_value(b"k", 8, struct.pack("<Q", MAX_HEADER_BYTES)),), num_pairs=1)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(2 * MAX_HEADER_BYTES)  # sparse
    with pytest.raises(ModelFileError, match="beyond the first 67108864 bytes"):
        read_gguf(path)


def test_items_of_all_arrays_are_bounded_together(tmp_path: Path) -> None:
    path = tmp_path / "arrays.gguf"
    million = array(0, 1_100_000, bytes(1_100_000))
    path.write_bytes(gguf_bytes(tuple(key_value(b"k%d" % i, 9, million) for i in range(4))))
    with pytest.raises(ModelFileError, match="the value of 'k3' has 1100000 items"):
        read_gguf(path)


def test_things_that_are_not_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ModelFileError, match="the file is empty"):
        read_gguf(empty)
    with pytest.raises(ModelUnavailableError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_gguf(tmp_path)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_gguf(pipe)


def test_every_truncation_of_a_small_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(
        path, {"general.architecture": "llama", "list": ["a", "b"]}, [raw_tensor("t", np.zeros((2, 4), np.float32))]
    )
    content = path.read_bytes()
    for length in range(1, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            read_gguf(path)
