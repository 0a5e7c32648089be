"""Mutated model files: refused or accepted, never a crash, a hang or a swallowed machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.loaders.gguf import read_gguf
from octavo.loaders.gguf_writer import write_gguf
from octavo.loaders.safetensors import read_folder, read_safetensors
from octavo.loaders.tensors import Tensors
from octavo.quant import Format
from support.fuzz_files import fuzz_reader
from support.model_files import raw_tensor, write_hf_folder, write_tiny_gguf

EXAMPLES = 400


def touch(tensors: Tensors) -> None:
    """What a backend would do: an accepted tensor is as long as its shape says, and every byte can be read."""
    for tensor in tensors.supported.values():
        assert len(tensor.data) == tensor.format.num_bytes(math.prod(tensor.shape))
        np.bitwise_xor.reduce(tensor.data)


def read_and_touch_gguf(path: Path) -> None:
    touch(read_gguf(path).tensors)


def read_and_touch_safetensors(path: Path) -> None:
    touch(read_safetensors(path).tensors)


def check_both(counts: dict[str, int]) -> None:
    """A fuzzer that only ever sees one outcome does not reach the code behind it."""
    assert counts["refused"] > EXAMPLES // 4
    assert counts["accepted"] > 3


def test_gguf_with_metadata(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    original = path.read_bytes()
    header_bytes = len(read_gguf(path).header)
    check_both(fuzz_reader(read_and_touch_gguf, original, path, header_bytes=header_bytes, examples=EXAMPLES))


def test_gguf_tensor_table(tmp_path: Path) -> None:
    """Hardly any metadata, so that mutations hit counts, names, dimensions, types and offsets."""
    path = tmp_path / "table.gguf"
    metadata: dict[str, Any] = {"general.alignment": 32}
    tensors = [raw_tensor(f"t{i}", np.ones((2, 32), np.float32), form) for i, form in enumerate(Format)]
    write_gguf(path, metadata, tensors)
    header_bytes = len(read_gguf(path).header)
    check_both(fuzz_reader(read_and_touch_gguf, path.read_bytes(), path, header_bytes=header_bytes, examples=EXAMPLES))


def test_safetensors(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path / "m") / "model.safetensors"
    header_bytes = 8 + len(read_safetensors(path).header)
    check_both(
        fuzz_reader(read_and_touch_safetensors, path.read_bytes(), path, header_bytes=header_bytes, examples=EXAMPLES)
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
def test_json_files_of_a_folder(tmp_path: Path, name: str) -> None:
    path = write_hf_folder(tmp_path / "m", shards=2) / name
    original = path.read_bytes()

    def read(path: Path) -> None:
        read_folder(path.parent)

    fuzz_reader(read, original, path, header_bytes=len(original), examples=EXAMPLES // 4)
