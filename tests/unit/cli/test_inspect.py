"""`octavo inspect`."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.cli import inspect
from octavo.loaders.gguf_writer import write_gguf
from octavo.quant import Format
from support.model_files import gguf_metadata, gguf_tensors, hf_config, raw_tensor, write_hf_folder, write_tiny_gguf


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["inspect", *words])
    status: int = arguments.run(arguments)
    return status


def facts(capsys: pytest.CaptureFixture[str], model: Path | str, *, status: int = 0) -> dict[str, Any]:
    assert run(str(model), "--json") == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def retype(path: Path, tensor: str, type_id: int) -> None:
    """Makes a file say that a matrix of it is stored in another, smaller type."""
    content = path.read_bytes()
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    at = content.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(content[:at] + struct.pack("<I", type_id) + content[at + 4 :])


def test_the_default_model(smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    free = 98_000_000 + 1000 * 23_040
    monkeypatch.setattr("octavo.obs.machine.free_memory_bytes", lambda: free)
    known = facts(capsys, "smollm2-135m")
    weights = sum(known["bytes_by_format"].values())
    assert known["path"] == str(smollm2)
    assert known["parameters"] == 134_515_008
    assert known["bytes_by_format"] == {"Q4_1": 66_355_200, "Q8_0": 30_081_024, "F32": 140_544}
    assert (known["architecture"], known["layers"], known["heads"], known["kv_heads"]) == ("llama", 30, 9, 3)
    assert (known["context"], known["vocabulary"], known["tied_head"]) == (8192, 49_152, True)
    assert known["kv_bytes_per_token"] == 2 * 2 * 30 * 3 * 64
    assert run(str(smollm2), "--json", "--kv-cache-dtype", "int8") == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_per_token"] == 2 * 30 * 3 * (64 + 4)
    assert known["kv_tokens_that_fit"] == (free - weights) // 23_040
    assert known["full_contexts_that_fit"] == 0
    assert known["weights_fit"] is True
    assert (known["tokenizer"], known["chat_template"], known["problem"]) == ("gpt2 (smollm)", True, None)


def test_text_is_for_people(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(smollm2)) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "fit" not in line)
    assert lines["parameters"] == "134,515,008"
    assert lines["architecture"] == "llama"
    assert lines["file"] == "93.8 MiB"


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = facts(capsys, write_hf_folder(tmp_path / "m", shards=2))
    assert (known["architecture"], known["layers"], known["tokenizer"]) == ("LlamaForCausalLM", 2, "tokenizer.json")
    assert known["kv_bytes_per_token"] == 2 * 2 * 2 * 2 * 16


def test_an_unsupported_architecture_is_still_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = facts(
        capsys, write_tiny_gguf(tmp_path / "x.gguf", gguf_metadata() | {"general.architecture": "mamba9"}), status=1
    )
    assert known["supported"] is False
    assert "architecture 'mamba9' is not supported" in known["problem"]
    assert known["architecture"] == "mamba9"
    assert known["parameters"] > 0
    assert "layers" not in known
    folder = write_hf_folder(tmp_path / "m", hf_config() | {"architectures": ["Odd"], "auto_map": {"AutoModel": "x.Y"}})
    assert "architecture 'Odd' is not supported" in facts(capsys, folder, status=1)["problem"]


def test_a_tensor_of_an_unsupported_type_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf")
    retype(path, "blk.1.attn_v.weight", 6)
    known = facts(capsys, path, status=1)
    assert known["unsupported_tensors"] == {"Q5_0": 1}
    assert "tensor 'blk.1.attn_v.weight' has type Q5_0, which is not supported" in known["problem"]
    assert known["layers"] == 2


def test_a_missing_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, gguf_metadata(), [tensor for tensor in gguf_tensors() if tensor.name != "blk.1.ffn_up.weight"])
    assert facts(capsys, path, status=1)["problem"] == "tensor blk.1.ffn_up.weight is missing"


def test_an_unsupported_output_matrix_is_not_taken_for_a_tied_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.gguf"
    head = raw_tensor("output.weight", np.ones((50, 64), np.float32), Format.F16)
    write_gguf(path, gguf_metadata(), [*gguf_tensors(), head])
    assert facts(capsys, path)["tied_head"] is False
    retype(path, "output.weight", 20)
    known = facts(capsys, path, status=1)
    assert known["tied_head"] is False
    assert "tensor 'output.weight' has type IQ4_NL, which is not supported" in known["problem"]
