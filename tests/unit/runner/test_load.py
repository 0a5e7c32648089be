"""Loading: what a checkpoint lacks or holds too much of is refused by name before a backend sees it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.numpy import NumpyBackend
from octavo.errors import ConfigError, ModelFileError, UnsupportedModelError
from octavo.loaders.checkpoint import open_folder, open_gguf
from octavo.loaders.gguf_writer import write_gguf
from octavo.quant import Format
from octavo.runner.load import canonical_tensors, content_digest, load_model, read_spec
from support.tiny_models import TINY, raw_tensor, tiny_folder, write_tiny_gguf


class UnreachableBackend(NumpyBackend):
    """Fails the test when a refusal comes too late."""

    def load(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        pytest.fail("the backend was asked to load a model that should have been refused")


@pytest.mark.parametrize("name", TINY)
def test_canonical_tensors_cover_the_spec(name: str) -> None:
    checkpoint = open_folder(tiny_folder(name), name=name)
    spec = read_spec(checkpoint)
    tensors = canonical_tensors(checkpoint, spec)
    assert {key: tensor.shape for key, tensor in tensors.items()} == spec.weight_shapes()


def test_gguf_and_folder_agree_on_the_spec(tmp_path: Path) -> None:
    folder = read_spec(open_folder(tiny_folder("tiny-llama"), name="x"))
    file = read_spec(open_gguf(write_tiny_gguf(tmp_path / "x.gguf", "tiny-llama"), name="x"))
    assert (folder.hidden, folder.num_layers, folder.tied_head) == (file.hidden, file.num_layers, file.tied_head)
    assert folder.rope.inverse_frequencies == pytest.approx(file.rope.inverse_frequencies, rel=1e-6)


def rewritten(tmp_path: Path, change: str) -> Path:
    """tiny-llama as GGUF with one thing wrong."""
    source = open_gguf(write_tiny_gguf(tmp_path / "good.gguf", "tiny-llama"), name="x")
    tensors = dict(source.tensors)
    name = "blk.1.ffn_down.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = raw_tensor(name, np.zeros((64, 64)), Format.F32)
    elif change == "norm":
        name = "blk.0.attn_norm.weight"
        tensors[name] = raw_tensor(name, np.zeros(64), Format.Q8_0)
    path = tmp_path / "bad.gguf"
    write_gguf(path, source.metadata, list(tensors.values()))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"blk\.1\.ffn_down\.weight is missing"),
        ("shape", r"blk\.1\.ffn_down\.weight has shape \[64, 64\]; .* \[64, 96\]"),
        ("norm", r"blk\.0\.attn_norm\.weight is a vector of type Q8_0"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: str, message: str) -> None:
    checkpoint = open_gguf(rewritten(tmp_path, change), name="x")
    with pytest.raises(ModelFileError, match=message):
        load_model(checkpoint, UnreachableBackend())


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", "tiny-llama")
    data = path.read_bytes()
    key = b"blk.1.ffn_down.weight"
    at = data.index(key) + len(key) + 4 + 16  # after the name: number of dimensions, two dimensions, type
    path.write_bytes(data[:at] + (6).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_down\.weight. has type Q5_0"):
        load_model(open_gguf(path, name="x"), UnreachableBackend())


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("tiny-llama"), folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "FalconForCausalLM"))
    with pytest.raises(UnsupportedModelError, match="FalconForCausalLM"):
        load_model(open_folder(folder, name="x"), UnreachableBackend())


def test_numpy_has_no_float16() -> None:
    with pytest.raises(ConfigError, match="float16"):
        load_model(open_folder(tiny_folder("tiny-llama"), name="x"), NumpyBackend(), dtype="float16")


def test_progress_ends_at_the_total() -> None:
    calls: list[tuple[int, int]] = []
    checkpoint = open_folder(tiny_folder("tiny-llama"), name="x")
    loaded = load_model(checkpoint, NumpyBackend(), progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0
    assert loaded.model.weight_bytes == 2 * calls[-1][1]  # bfloat16 in the file, float32 in memory


def test_the_content_digest_tells_weights_apart_and_nothing_else(tmp_path: Path) -> None:
    """O-29: other weights of the same name, size and time are others; the same ones elsewhere, at another time, are the same."""

    def digest(folder: Path) -> bytes:
        checkpoint = open_folder(folder, name="x")
        return content_digest(checkpoint, read_spec(checkpoint))

    original = shutil.copytree(tiny_folder("tiny-llama"), tmp_path / "a" / "model")
    moved = shutil.copytree(original, tmp_path / "b" / "model")
    weights = moved / "model.safetensors"
    os.utime(weights, (1, 1))
    assert digest(original) == digest(moved)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, (1, 1))
    changed = digest(moved)
    assert changed != digest(original)
    config = (original / "config.json").read_text()
    (original / "config.json").write_text(config.replace('"rms_norm_eps": 1e-0', '"rms_norm_eps": 2e-0'))
    assert (original / "config.json").read_text() != config
    assert digest(original) not in (changed, digest(tiny_folder("tiny-llama")))
