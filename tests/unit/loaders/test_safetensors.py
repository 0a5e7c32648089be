"""The Hugging Face folder reader: against the safetensors package, and against folders that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import ModelFileError, ModelUnavailableError, UnsupportedModelError
from octavo.loaders.safetensors import read_folder, read_safetensors
from octavo.quant import Format, dequantize
from support.model_files import hf_config, hf_tensors, safetensors_bytes, write_hf_folder


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weights = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    save_file(
        {
            "f32": weights,
            "f16": weights.astype(np.float16),
            "bf16": weights.astype(ml_dtypes.bfloat16),
            "scalar": np.array(2.5, np.float32),
            "empty": np.zeros((0, 4), np.float32),
            "ids": np.arange(7),
            "mask": np.ones(3, bool),
        },
        path,
        metadata={"format": "pt"},
    )
    tensors = read_safetensors(path).tensors
    assert tensors.unsupported == {"ids": "I64", "mask": "BOOL"}
    assert tensors["bf16"].format is Format.BF16
    np.testing.assert_array_equal(dequantize(tensors["f32"]), weights)
    np.testing.assert_array_equal(dequantize(tensors["f16"]), weights.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(dequantize(tensors["bf16"]), weights.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert dequantize(tensors["scalar"]) == np.float32(2.5)
    assert tensors["empty"].shape == (0, 4)
    assert tensors.shapes["ids"] == (7,)
    with pytest.raises(UnsupportedModelError, match="tensor 'ids' has type I64"):
        tensors["ids"]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder(tmp_path: Path, shards: int) -> None:
    folder = read_folder(write_hf_folder(tmp_path / "m", shards=shards))
    assert folder.config == hf_config()
    assert folder.tokenizer_json == b'{"version": "1.0"}'
    assert folder.chat_template == "{{ messages }}"
    assert folder.generation_config == {"temperature": 0.6, "eos_token_id": [2]}
    assert len(folder.weight_files) == shards
    assert folder.file_bytes == sum(path.stat().st_size for path in folder.weight_files)
    assert folder.tensors.keys() == hf_tensors().keys()
    for name, weights in hf_tensors().items():
        np.testing.assert_array_equal(dequantize(folder.tensors[name]), weights)


def test_only_tensors_of_the_index_are_seen(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path / "m", shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    dropped, _ = index["weight_map"].popitem()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert dropped not in read_folder(path).tensors


def test_what_may_be_absent(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).unlink()
    folder = read_folder(path)
    assert (folder.tokenizer_json, folder.tokenizer_config, folder.chat_template) == (None, {}, None)
    assert folder.generation_config == {}


@pytest.mark.parametrize(
    ("in_config", "file", "expected"),
    [
        ("a", None, "a"),
        ("a", "b", "b"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "tool_use", "template": "t"}, {"name": ["x"]}], None, None),
        (None, None, None),
    ],
)
def test_chat_template(tmp_path: Path, in_config: Any, file: str | None, expected: str | None) -> None:
    path = write_hf_folder(tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": in_config}))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    assert read_folder(path).chat_template == expected


def test_o39_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path / "m", hf_config() | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    read_folder(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../m2/x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "..", ""])
def test_shards_must_be_files_of_the_folder(tmp_path: Path, name: str) -> None:
    path = write_hf_folder(tmp_path / "m", shards=2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(ModelFileError, match="is not the name of a safetensors file in this folder"):
        read_folder(path)


def test_index_must_agree_with_the_shards(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path / "m", shards=2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shard = next(iter(good["weight_map"].values()))
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"lm_head.weight": shard}}))
    with pytest.raises(ModelFileError, match=r"tensor 'lm_head.weight' is not in 'model-00001-of-00002.safetensors'"):
        read_folder(path)
    for broken in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        index.write_text(broken)
        with pytest.raises(ModelFileError, match=r"model.safetensors.index.json: "):
            read_folder(path)
    index.write_text(json.dumps(good))
    (path / shard).unlink()
    with pytest.raises(ModelUnavailableError, match="No such file"):
        read_folder(path)


def test_quantized_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    path = write_hf_folder(tmp_path / "m", hf_config() | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(UnsupportedModelError, match=r"quantized checkpoints .*'gptq'.* are not supported"):
        read_folder(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "not a model folder: expected config.json with model.safetensors"),
        ({"model.gguf": ""}, "the folder holds GGUF files; name one of them: model.gguf"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "pickled weights are not read"),
        ({"config.json": "{}"}, "expected config.json with model.safetensors"),
        ({"config.json": "{", "model.safetensors": ""}, "config.json: not JSON"),
        ({"config.json": "[" * 100_000, "model.safetensors": ""}, "config.json: not JSON"),
        ({"config.json": "3", "model.safetensors": ""}, "config.json: expected a JSON object"),
        ({"config.json": "{}", "model.safetensors": ""}, "model.safetensors: the file is empty"),
    ],
)
def test_folders_that_are_no_model(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelFileError, match=message):
        read_folder(tmp_path)


def entry(begin: int, end: int, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "short": (b"\1\2", "header of"),
    "header past end": (b"\xff" * 8 + b"{}", "its header of 18446744073709551615 bytes is longer"),
    "no JSON": (safetensors_bytes(b"nonsense"), "its header is not what the format asks for"),
    "deep JSON": (safetensors_bytes(b'{"t": ' + b"[" * 100_000), "its header is not what the format asks for"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "its header is not what the format asks for"),
    "no object": (safetensors_bytes([]), "its header is not what the format asks for"),
    "unknown field": (safetensors_bytes({"t": entry(0, 8) | {"x": 1}}, bytes(8)), "unknown field `x`"),
    "missing field": (safetensors_bytes({"t": {"dtype": "F32"}}), "missing required field `shape`"),
    "negative size": (safetensors_bytes({"t": entry(0, 8, [-2])}, bytes(8)), "its header is not"),
    "huge size": (safetensors_bytes({"t": entry(0, 8, [2**62])}, bytes(8)), "its header is not"),
    "very huge size": (safetensors_bytes(b'{"t":{"shape":[' + b"9" * 9000 + b"]}}"), "its header is not"),
    "many dimensions": (safetensors_bytes({"t": entry(0, 8, [1] * 9)}, bytes(8)), "its header is not"),
    "product overflows": (
        safetensors_bytes({"t": entry(0, 8, [2**61] * 8)}, bytes(8)),
        "does not fit its shape and type",
    ),
    "negative offset": (safetensors_bytes({"t": entry(-8, 0)}, bytes(8)), "its header is not"),
    "backwards": (safetensors_bytes({"a": entry(0, 8), "t": entry(8, 0)}, bytes(8)), "does not fit its shape and type"),
    "wrong size": (safetensors_bytes({"t": entry(0, 4)}, bytes(4)), "takes 4 bytes, which does not fit"),
    "gap": (safetensors_bytes({"a": entry(0, 8), "t": entry(12, 20)}, bytes(20)), "'t' begins at 12, expected 8"),
    "overlap": (safetensors_bytes({"a": entry(0, 8), "t": entry(4, 12)}, bytes(12)), "'t' begins at 4, expected 8"),
    "data missing": (
        safetensors_bytes({"t": entry(0, 8)}, bytes(4)),
        "take 8 bytes, but 4 follow the header; is it complete",
    ),
    "data left": (safetensors_bytes({"t": entry(0, 8)}, bytes(9)), "take 8 bytes, but 9 follow"),
    "unknown type": (safetensors_bytes({"t": entry(0, 8, [2], "F128")}, bytes(4)), "take 8 bytes, but 4 follow"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_what_is_wrong(tmp_path: Path, case: str) -> None:
    content, message = DAMAGED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith("bad.safetensors: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
